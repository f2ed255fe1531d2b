"""Fixtures for all tests. Each process uses one thread, because two workers share two cores."""
import gc
import os
import shutil
import signal
from multiprocessing import forkserver

os.environ.setdefault('OMP_NUM_THREADS', '1')

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from helpers import SMALL, save_run, write_dataset, write_noise  # noqa: E402

import train  # noqa: E402
from model import LM, ModelConfig  # noqa: E402
from retrofit import core_of, surgery  # noqa: E402
from training.plan import Config  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_finish():
    "Tell the garbage collector not to look at imported modules again, because they stay."
    gc.freeze()
    if 'PYTEST_XDIST_WORKER' in os.environ:     # imports while the first tests run
        forkserver.ensure_running()


@pytest.fixture
def undrawn(monkeypatch):
    "A training draws no picture, which would take a second."
    monkeypatch.setattr(train, 'draw', lambda *_: None)


@pytest.fixture
def no_gradients():
    "Gradients are off."
    with torch.no_grad():
        yield


@pytest.fixture
def backward(monkeypatch):
    "What `at_step` changes ends with the test. Then, too, a signal ends a process."
    monkeypatch.setattr(train, 'backward', train.backward)
    yield
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) == signal.SIG_DFL


@pytest.fixture
def tiny():
    "tiny(**fields) returns an LM with weights so large that every layer matters."
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
def six(tiny):
    "An LM of six layers."
    return tiny(n_layer=6, n_kv_head=2)


@pytest.fixture(params=[False, True], ids=['plain', 'ln_scaling'])
def plain_or_scaled(tiny, request):
    "An LM of six layers. With LN-scaling, what a layer computes depends on its depth."
    return tiny(n_layer=6, ln_scaling=request.param)


@pytest.fixture
def data(tmp_path):
    "A small dataset of bytes with a pattern that can be learned, with both splits."
    rng = np.random.default_rng(0)
    for split, n in (('train', 6000), ('val', 800)):
        tokens = np.cumsum(rng.integers(1, 4, n)) % 97
        marks = np.array([129, 1, 0, 0, 0])[np.arange(n) % 5]       # answers of two tokens
        write_dataset(tmp_path / 'data', split, tokens, marks=marks, kinds=['fifth'])
    return tmp_path / 'data'


@pytest.fixture
def config(data, tmp_path, undrawn):
    "config(**fields) returns the Config of a small run on `data`."
    def make(out='run', **fields):
        return Config(**SMALL | dict(data=str(data), out_dir=str(tmp_path / out)) | fields)
    return make


@pytest.fixture
def recurrent(tiny, tmp_path):
    "The settings of a run that begins with a small recurrent model, whose mean r is 3."
    core = surgery(tiny(vocab_size=257, n_layer=6, context=16), '2-2-1', r=3, backprop_depth=2)
    torch.nn.init.normal_(core_of(core).adapter.weight, std=0.1)
    return dict(init_from=save_run(tmp_path / 'cut', core, flops=5, inherited_flops=2))


@pytest.fixture
def placed(data, recurrent, tiny, tmp_path):
    """placed(settings) returns the settings with folders in place of {data}, {mixture}, {other}
    (which has another tokenizer), {cut}, {looped} and {scaled}."""
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
