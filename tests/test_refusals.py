"""What an honest user gets wrong: each is one line, with status 2 and without a traceback.

A row is a command with its arguments, and words that the line must hold. `nowhere` is no folder, so
what a row of it says is said before a model is opened.
"""
from pathlib import Path

import lm_eval
import pytest
from conftest import refused, ROOT, save_run

from nanodepth.scoring import lm_eval_scores as harness

REFUSALS = [
    (['evaluate', '{run}'], 'does not say what it was trained on'),
    (['evaluate', 'nowhere', '--tasks=primitive_toy_copi'], "did you mean 'primitive_toy_copy'?"),
    (['evaluate', 'nowhere', '--tasks=looped,knowledge'], 'stands in two of looped, knowledge'),
    (['evaluate', 'nowhere', '--tasks=toy_assign/3-1'], 'toy_assign/1-3'),
    (['evaluate', '{run}', '--tasks=arc_easy'], "Couldn't reach 'allenai/ai2_arc'"),
    (['evaluate', '{run}', '--tasks=toy_copy', '--shots=9'], 'but the context'),
    (['evaluate', 'nowhere', '--tasks=primitive_copy_random', '--shots=1'],
     'five examples inside its question'),
    (['evaluate', 'nowhere', '--tasks=primitives', '--shots=1'],
     'five examples inside its question'),
    (['evaluate', 'nowhere', '--out={run}/ckpt.pt/scores.csv'], 'ckpt.pt'),
    (['sweep', '{run}', '--tasks=toy_copy', '--window=all9', '--K=2'], 'window='),
    (['sweep', '{run}', '--tasks=toy_copy', '--window=1-2', '--method=aitken', '--K=3'],
     'Aitken takes two'),
    (['sweep', '{run}', '--tasks=toy_copy', '--blocks=1,9'], '--blocks=9: the model is'),
    (['probe', '{mistral}', '--data=x'], 'the probes look into'),
]


@pytest.fixture
def places(tmp_path, tiny, monkeypatch):
    "What a row calls {run} and {mistral}, which has a config and no weights."
    monkeypatch.chdir(tmp_path)
    # all of lm-eval's tasks are read in ten seconds
    stock = lm_eval.tasks.TaskManager(include_defaults=False, include_path=[
        str(Path(lm_eval.__file__).parent / 'tasks/arc'), str(ROOT / 'data/evals')])
    monkeypatch.setattr(harness, 'manager', lambda everything: stock)
    (tmp_path / 'mistral').mkdir()
    (tmp_path / 'mistral/config.json').write_text('{"model_type": "mistral"}')
    return dict(run=save_run(tmp_path / 'run', tiny(vocab_size=257, context=96)),
                mistral=tmp_path / 'mistral')


@pytest.mark.parametrize('line, words', REFUSALS, ids=str)
def test_a_mistake_is_one_line(line, words, places, capsys):
    assert words in refused(capsys, *(word.format(**places) for word in line))
