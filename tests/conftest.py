"""Fixtures for all tests. Each process uses one thread, because two workers share two cores."""
import gc
import json
import os
import random
import shutil
import signal
import tempfile
from multiprocessing import forkserver
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ['HF_HUB_OFFLINE'] = '1'
MODULES = tempfile.TemporaryDirectory()         # where transformers puts the code of folders
os.environ['HF_MODULES_CACHE'] = MODULES.name

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from families import tiny as family  # noqa: E402
from helpers import ROOT, SMALL, save_run, write_noise  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from nanodepth import train  # noqa: E402
from nanodepth.model import LM, ModelConfig  # noqa: E402
from nanodepth.retrofit import core_of, surgery  # noqa: E402
from nanodepth.text.tokenizer import write_tokenizer  # noqa: E402
from nanodepth.text.tokens import write_dataset  # noqa: E402
from nanodepth.training.plan import Config  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_finish():
    "What has been imported stays: no collection of garbage needs to look at it again."
    gc.freeze()
    if 'PYTEST_XDIST_WORKER' in os.environ:     # imports while the first tests run
        forkserver.ensure_running()


@pytest.fixture
def undrawn(monkeypatch):
    "Pictures are files without anything in them, which saves a second each."
    monkeypatch.setattr(train, 'draw', lambda *_: None)
    monkeypatch.setattr(Figure, 'savefig', lambda self, file, **_: Path(file).touch())


@pytest.fixture
def backward(monkeypatch):
    "What `at_step` changes ends with the test. After it, too, a signal ends a process."
    monkeypatch.setattr(train, 'backward', train.backward)
    yield
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) == signal.SIG_DFL


@pytest.fixture
def tiny():
    "tiny(**fields) -> an LM with weights large enough that every layer matters."
    def make(seed=0, std=0.2, order=None, **fields):
        torch.manual_seed(seed)
        fields = dict(vocab_size=50, n_layer=4, n_embd=32, n_head=4, context=32) | fields
        model = LM(ModelConfig(**fields))
        model.order = order or model.order
        for p in model.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=std)
            else:
                torch.nn.init.uniform_(p, 0.5, 1.5)
        return model.eval()
    return make


@pytest.fixture
def data(tmp_path):
    "A small dataset of bytes with a pattern that can be learned: train and val in one folder."
    rng = np.random.default_rng(0)
    for split, n in (('train', 6000), ('val', 800)):
        tokens = np.cumsum(rng.integers(1, 4, n)) % 97
        marks = np.array([129, 1, 0, 0, 0])[np.arange(n) % 5]       # answers of two tokens
        write_dataset(tmp_path / 'data', split, 'bytes', tokens, marks=marks, kinds=['fifth'])
    return tmp_path / 'data'


@pytest.fixture(scope='session')
def gemma(tmp_path_factory):
    "(its folder, the model): a small Gemma 3 with windows of 8 tokens, which begins a text."
    folder = tmp_path_factory.mktemp('gemma')
    model = family('gemma3_text', vocab_size=257, max_position_embeddings=512, sliding_window=8)
    model.save_pretrained(folder)
    write_tokenizer('bytes', folder, 512)
    return str(folder), model


@pytest.fixture
def manager(tmp_path, monkeypatch):
    "lm-eval's, with a multiple choice, a generation and a perplexity task over a local file."
    import lm_eval.evaluator    # which asks pip and the compilers what they are: a second each
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


@pytest.fixture
def config(data, tmp_path, undrawn):
    "config(**fields) -> a small run on the test data."
    def make(out='run', **fields):
        return Config(**SMALL | dict(data=str(data), out_dir=str(tmp_path / out)) | fields)
    return make


@pytest.fixture
def recurrent(tiny, tmp_path):
    "The settings of a run that goes on from a small cut of mean 3."
    core = surgery(tiny(vocab_size=257, n_layer=6, context=16), '2-2-1', r=3, backprop_depth=2)
    torch.nn.init.normal_(core_of(core).adapter.weight, std=0.1)
    return dict(init_from=save_run(tmp_path / 'cut', core, flops=5, inherited_flops=2))


@pytest.fixture
def placed(data, recurrent, tiny, tmp_path):
    """placed(settings): those in which {data}, {mixture}, {other} (of another tokenizer), {cut},
    {looped} and {scaled} are folders."""
    for name, n in (('a', 2000), ('b', 900)):
        write_noise(tmp_path / 'mixture' / name, [name], n)
    shutil.copytree(data, tmp_path / 'other')
    for path in (tmp_path / 'other').glob('*.json'):
        path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "other'))
    looped = tiny(vocab_size=257, n_layer=2, order=[0, 1, 0, 1])
    mixture = f'{tmp_path}/mixture/a@0.7,{tmp_path}/mixture/b@0.3'
    places = dict(data=tmp_path / 'data', mixture=mixture, other=tmp_path / 'other') | dict(
        cut=recurrent['init_from'], looped=save_run(tmp_path / 'looped', looped),
        scaled=save_run(tmp_path / 'scaled', tiny(vocab_size=257, ln_scaling=True)))

    def fill(value):
        if isinstance(value, list):
            return [*map(fill, value)]
        return value.format(**places) if isinstance(value, str) else value
    return lambda settings: {name: fill(value) for name, value in settings.items()}
