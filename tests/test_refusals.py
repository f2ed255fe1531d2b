"""What an honest user gets wrong: each is one line, with status 2 and without a traceback.

A row is a command with its arguments, and words that the line must hold. `nowhere` is no folder, so
what a row of it says is said before a model is opened.
"""
from pathlib import Path

import pytest
from helpers import bpe, refused, ROOT, save_run

from nanodepth.retrofit import surgery
from nanodepth.scoring import harness
from nanodepth.text.tokens import write_dataset

lm_eval = pytest.importorskip('lm_eval')
TRAIN = ['train', '--data={data}', '--out_dir={out}', '--device=cpu']
COMPARE = ['compare', 'config/baseline.py', 'config/lidas.py', '--more=--data={data}',
           '--out={out}']
REFUSALS = [
    ([*TRAIN, '--data=data/toi'], 'no data in data/toi: see its config or prepare.py'),
    ([*TRAIN, '--dry_run', '--data=data/toi'], 'vocab_size is unknown'),
    ([*TRAIN, '--dry_run', '--recurrence=4'], 'recurrence is for a core'),
    ([*TRAIN, '--data={data},{words}'], 'a model has one tokenizer, and these data'),
    ([*TRAIN, '--data={words}', '--init_from={run}'], 'a model has one tokenizer'),
    ([*TRAIN, '--dry_run', '--init_from={run}', '--context=999'], '999 tokens are more than the'),
    (['cut', '{run}', '1-1', '--out={out}'], 'the shape 1-1 is not three numbers'),
    (['cut', '{run}', '1-1-1', '--out={out}', '--layers=0/9/1'], 'of the layers 0 to 3'),
    (['cut', '{run}', '--untie', '--out={out}'], 'is no loop: its layers have their own weights'),
    (['evaluate', '{run}'], 'does not say what it was trained on'),
    (['evaluate', '{run}', '--data=nowhere'], 'data/text/prepare.py FILES --out=nowhere'),
    (['evaluate', '{run}', '--data={root}/data/smollm/none'], 'data/smollm/prepare.py (--help'),
    (['evaluate', 'nowhere', '--tasks=f1_triviaq'], "did you mean 'f1_triviaqa'?"),
    (['evaluate', 'nowhere', '--tasks=wrapped,knowledge'], 'stands in two of wrapped, knowledge'),
    (['evaluate', 'nowhere', '--tasks=toy_assign/3-1'], 'several as toy_assign/0-3'),
    (['evaluate', 'nowhere', '--measures=log_probs'], "did you mean 'log_prob'?"),
    (['evaluate', '{run}', '--tasks=toy_copy', '--shots=-1'], 'shots=-1 must not be negative'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--n=0'], 'n=0 at least 1'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--window=1-2', '--K=0'], 'K=0: how often'),
    (['evaluate', '{core}', '--tasks=toy_copy', '--r=0'], 'r=0 is too small'),
    (['evaluate', 'out/nowhere', '--tasks=toy_copy'], 'there is no checkpoint at out/nowhere'),
    (['evaluate', '{run}', '{run}/ckpt.pt', '--tasks=toy_copy', '--measures=', '--n=2', '--r=2'],
     'none of these models has a recurrent core'),
    (['evaluate', '{run}', '--measures=log_prob', '--tasks=arc_easy', '--shots=0,1', '--x=shots'],
     'tasks take one number'),
    (['evaluate', '{run}', '--tasks=arc_easy'], "Couldn't reach 'allenai/ai2_arc'"),
    (['evaluate', '{run}', '--tasks=toy_copy', '--shots=9'], 'but the context'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--against=other'], "--against='other' is not one"),
    (['evaluate', 'nowhere', '--out={run}/ckpt.pt/scores.csv'], 'ckpt.pt'),
    (['sweep', '{run}', '--tasks=toy_copy', '--window=all9', '--K=2'], 'window='),
    (['sweep', '{run}', '--tasks=toy_copy', '--blocks=1', '--window=1-2'],
     'stands instead of other ways'),
    (['evaluate', 'HuggingFaceTB/SmolLM-135M', '--tasks=toy_copy'], 'hub did not give it'),
    (['evaluate', '{run}', 'nowhere', '--tasks=toy_copy'], 'there is no checkpoint at nowhere'),
    (['probe', '{run}', '--data={data}', '--count=10000'], 'but the validation data have'),
    (['sweep', '{run}', '--tasks=toy_copy', '--blocks=1,9'], '--blocks is for a model that'),
    (['probe', '{mistral}', '--data=x'], 'evaluate and sweep take any decoder'),
    (['sample', '{run}', '--loop=2x2', '--r=2'], 'has no recurrent core to run r times'),
    (['sweep', '{core}', '--tasks=toy_copy'], 'of a recurrent model, give --r or --window'),
    (['sweep', '{run}', '--tasks=toy_copy', '--r=2'], 'has no recurrent core to run r times'),
    (['evaluate', '{run}', '--tasks=toy_assign/6'], 'letters for depth 5, not 6'),
    ([*COMPARE, '--seed=3'], 'settings of a run: write them into an arm, in quotes'),
    ([*COMPARE[:3], '--more=--seed 1'], 'which seeds are trained is --seeds'),
    ([*COMPARE, '--steps=9'], 'settings of a run'),
    (COMPARE[:2], 'no file of arms (out_dir is no setting'),
    (['compare', 'config/baseline.py --lr="1', 'config/lidas.py'], 'No closing quotation'),
    ([*COMPARE[:3], '--more=--data={data},nowhere'], 'no data in nowhere'),
    ([*COMPARE[:3], '--more=--data={data} --grad_accum=3'], 'no multiple of 1 processes x'),
    ([*COMPARE, '--seeds=3-1'], 'must be how many'),
    ([*COMPARE, '--seeds=1,2'], 'must be how many'),
    ([*COMPARE, '--tasks=toy_assign/x'], 'a depth is written toy_assign/3'),
    ([*COMPARE, '--measures=log_prob'], 'nothing is asked'),
    ([*COMPARE[:2], *COMPARE[1:], '--seeds=1'], 'two arms have one name'),
    (['compare', 'config/baseline.py', 'config/lidas.py', '--more=--data={data}', '--out={out}',
      'other/baseline.py --steps=482', '--seeds=1'], 'baseline --steps=482 is other/baseline.py'),
]


@pytest.fixture
def places(data, tmp_path, tiny, monkeypatch):
    """What a row calls {data}, {out}, {run}, {core}, {words}, data of another tokenizer, {mistral},
    which has no weights, and {root}, the clone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'config').symlink_to(ROOT / 'config')
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other/baseline.py').write_text('lr = 1e-9\n')
    # all of lm-eval's tasks are read in ten seconds
    stock = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[
        str(Path(lm_eval.__file__).parent / 'tasks/arc'), str(ROOT / 'data/evals')])
    monkeypatch.setattr(harness, 'TaskManager', lambda **_: stock)
    harness.find.cache_clear()
    (tmp_path / 'mistral').mkdir()
    (tmp_path / 'mistral/config.json').write_text('{"model_type": "mistral"}')
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=96))
    core = save_run(tmp_path / 'core', surgery(tiny(n_layer=4), '1-2-1'))
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'words', split, bpe(tmp_path / 'bpe'), [97] * 500)
    return dict(run=run, core=core, words=tmp_path / 'words', mistral=tmp_path / 'mistral',
                data=data, out=tmp_path / 'out', root=ROOT)


@pytest.mark.parametrize('line, words', REFUSALS, ids=str)
def test_command_refuses_a_mistake_in_one_line(line, words, places, capsys):
    assert words in refused(capsys, *(word.format(**places) for word in line))
    assert not [*places['out'].rglob('log.jsonl'), *places['out'].rglob('ckpt.pt')]
