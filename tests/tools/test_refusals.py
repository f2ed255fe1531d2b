"""Test that an honest user's mistake is refused in one line, with status 2 and without a traceback.

A row is a command with its arguments, and words that the line must have. `nowhere` is not a folder,
so a row with it is refused before any model is opened.
"""
from pathlib import Path

import pytest
from helpers import refused, ROOT, save_run

from nanodepth.retrofit import surgery
from nanodepth.scoring import harness

lm_eval = pytest.importorskip('lm_eval')
COMPARE = ['compare', 'config/baseline.py', 'config/lidas.py', '--more=--data={data}',
           '--out={out}']
REFUSALS = [
    (['evaluate', '{run}'], 'does not record what it was trained on'),
    (['evaluate', '{run}', '--data=nowhere'], 'data/text/prepare.py FILES --out=nowhere'),
    (['evaluate', 'nowhere', '--tasks=f1_triviaq'], "did you mean 'f1_triviaqa'?"),
    (['evaluate', 'nowhere', '--tasks=wrapped,knowledge'], 'is in two of wrapped, knowledge'),
    (['evaluate', 'nowhere', '--tasks=toy_assign/3-1'], 'several as toy_assign/0-3'),
    (['evaluate', 'nowhere', '--measures=log_probs'], "did you mean 'log_prob'?"),
    (['evaluate', '{core}', '--tasks=toy_copy', '--r=0'], 'r=0 is too small'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--also=--r=2'], 'has no recurrent core to run'),
    (['evaluate', '{run}', '--tasks=arc_easy'], "Couldn't reach 'allenai/ai2_arc'"),
    (['evaluate', '{run}', 'nowhere', '--tasks=toy_copy', '--shots=9'], 'no checkpoint at nowhere'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--x=K', '--K=2'], 'draws over several values'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--shots=9'], 'but the context'),
    (['evaluate', 'nowhere', '--shots=0,2', '--x=shots'], '--x=shots is for --tasks'),
    (['cut', '{run}', '--untie', '--dense'], 'or --untie alone'),
    (['evaluate', '{run}', '--tasks=toy_copy', '--against=other'], "--against='other' is not one"),
    (['evaluate', 'HuggingFaceTB/SmolLM-135M', '--tasks=toy_copy'], 'hub did not give it'),
    ([*COMPARE, '--seed=3'], 'a setting of a run belongs in an arm, in quotes'),
    ([*COMPARE[:3], '--more=--seed 1'], 'compare has --seeds and --out'),
    ([*COMPARE[:3], '--more=--data={data},nowhere'], 'no data in nowhere'),
    ([*COMPARE[:2], *COMPARE[1:], '--seeds=1'], 'two arms would have one name'),
    ([*COMPARE, 'other/baseline.py --steps=482'],
     'two different arms would be called baseline --steps=482')]


@pytest.fixture
def places(data, tmp_path, tiny, monkeypatch):
    "What a row calls {data}, {out}, {run} and {core}."
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'config').symlink_to(ROOT / 'config')
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other/baseline.py').write_text('lr = 1e-9\n')
    # all of lm-eval's tasks are read in ten seconds
    stock = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[
        str(Path(lm_eval.__file__).parent / 'tasks/arc'), str(ROOT / 'data/evals')])
    monkeypatch.setattr(harness, 'TaskManager', lambda **_: stock)
    harness.find.cache_clear()
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=96))
    core = save_run(tmp_path / 'core', surgery(tiny(n_layer=4), '1-2-1'))
    return dict(run=run, core=core, data=data, out=tmp_path / 'out')


@pytest.mark.parametrize('line, words', REFUSALS, ids=str)
def test_command_refuses_a_mistake_in_one_line(line, words, places, capsys):
    assert words in refused(capsys, *(word.format(**places) for word in line))
    assert not [*places['out'].rglob('log.jsonl'), *places['out'].rglob('ckpt.pt')]
