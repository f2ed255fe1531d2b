"Fixtures for the tests of the package."
import json
import os
import random
import tempfile
from pathlib import Path

os.environ['HF_HUB_OFFLINE'] = '1'
MODULES = tempfile.TemporaryDirectory()         # where transformers puts the code of folders
os.environ['HF_MODULES_CACHE'] = MODULES.name

import pytest  # noqa: E402
from families import tiny as family  # noqa: E402
from helpers import ROOT  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from nanodepth.text.tokenizer import write_tokenizer  # noqa: E402


@pytest.fixture
def undrawn(undrawn, monkeypatch):
    "No picture is drawn, which would take a second. Its file is empty."
    monkeypatch.setattr(Figure, 'savefig', lambda self, file, **_: Path(file).touch())


@pytest.fixture(scope='session')
def gemma(tmp_path_factory):
    "(folder, model) of a small Gemma 3 with windows of 8 tokens, which begins texts with a token."
    folder = tmp_path_factory.mktemp('gemma')
    model = family('gemma3_text', vocab_size=257, max_position_embeddings=512, sliding_window=8)
    model.save_pretrained(folder)
    write_tokenizer('bytes', folder, 512)
    return str(folder), model


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """lm-eval's TaskManager, with a task of multiple choice, one of generation and one of
    perplexity, over a local file."""
    import lm_eval.evaluator    # it asks pip and the compilers for their versions: a second each
    monkeypatch.setattr(lm_eval.evaluator, 'add_env_info', lambda results: None)
    folder = tmp_path / 'tasks'
    folder.mkdir()
    for path in (ROOT / 'tests/stored').glob('*.yaml'):
        (folder / path.name).write_text(path.read_text().replace('FOLDER', str(folder)))
    rng = random.Random(0)
    docs = [dict(q=''.join(rng.choice('abc d') for _ in range(rng.randint(1, 110))) + 'x',
                 options=[' red', ' green and blue', 'c'], same=['r', 'g', 'b'],
                 gold=rng.randrange(3))
            for _ in range(12)]
    (folder / 'd.jsonl').write_text('\n'.join(map(json.dumps, docs)))
    from lm_eval.tasks import TaskManager
    return TaskManager(include_path=[str(folder), str(ROOT / 'data/evals')], include_defaults=False)
