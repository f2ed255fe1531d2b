"""What the tests share: tiny random models, small runs, processes that are begun in milliseconds.

One thread each, because two workers share two cores.
"""
import contextlib
import copy
import gc
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ['HF_HUB_OFFLINE'] = '1'
MODULES = tempfile.TemporaryDirectory()         # where transformers puts the code of folders
os.environ['HF_MODULES_CACHE'] = MODULES.name
ROOT = Path(__file__).resolve().parents[1]

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from families import tiny as family  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from nanodepth.__main__ import main as nanodepth  # noqa: E402
from nanodepth.text.tokens import write_dataset  # noqa: E402
from nanodepth.text.tokenizer import write_tokenizer  # noqa: E402
from nanodepth.commands.train import planned  # noqa: E402
from nanodepth.model import LM, ModelConfig, Span  # noqa: E402
from nanodepth import train  # noqa: E402
from nanodepth.commands import train as train_command  # noqa: E402
from nanodepth.common.options import read  # noqa: E402
from nanodepth.models.authors import authors_surgery  # noqa: E402
from nanodepth.retrofit import Core  # noqa: E402
from nanodepth.scoring.rows import measured  # noqa: E402
from nanodepth.scoring.way import in_way  # noqa: E402
from nanodepth.training.checkpoint import save  # noqa: E402
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


# Where processes are begun that have imported everything already: a fork of it takes milliseconds,
# a new Python seconds.
BEGUN = multiprocessing.get_context('forkserver')
BEGUN.set_forkserver_preload(['nanodepth.train', 'torch._dynamo'])


def rank_of(rank, ranks, port, said, config, before):
    """What torchrun tells a process, and then `nanodepth train` with these settings. `before` may
    change something first."""
    os.chdir(ROOT)
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1',
                      MASTER_PORT=str(port))
    for name, module in [*sys.modules.items()]:     # they were imported where there was one process
        for key, number in dict(RANK=rank, SIZE=ranks, LOCAL_RANK=rank).items():
            if name.startswith('nanodepth.') and hasattr(module, key):
                setattr(module, key, number)
    torch.set_num_threads(1)
    train.draw = lambda *_: None
    train_command.read = lambda *_: train_command.Options(**vars(config))
    if before:
        before()
    nanodepth('train', ['config'])


def ranks(config, n=2, before=None):
    """A run of n processes: their exit statuses (returncode: one that is not 0, if any) and what
    they wrote to stderr."""
    with tempfile.NamedTemporaryFile() as said, socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
        free.close()
        processes = [BEGUN.Process(target=rank_of, args=(rank, n, port, said.name, config, before))
                     for rank in range(n)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            process.kill()
        codes = [process.exitcode for process in processes]
        return SimpleNamespace(codes=codes, returncode=next(filter(None, codes), 0),
                               stderr=Path(said.name).read_text())


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
        marks = np.where(np.arange(n) % 5 == 0, 129, 0)
        write_dataset(tmp_path / 'data', split, 'bytes', tokens, marks=marks, kinds=['fifth'])
    return tmp_path / 'data'


def byte_level_bpe(texts, size, specials, digits=True):
    "A tokenizer with some merges: SmolLM's kind, which splits digits off, or GPT-2's."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers as pre, trainers
    made, words = Tokenizer(models.BPE()), pre.ByteLevel(add_prefix_space=False)
    single = pre.Digits(individual_digits=True)
    made.pre_tokenizer = pre.Sequence([single, words]) if digits else words
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, show_progress=False,
        initial_alphabet=pre.ByteLevel.alphabet()))
    return made


def bpe(folder, swapped=''):
    "A tokenizer with as many tokens as there are bytes and a mark; some letters change places."
    folder.mkdir(exist_ok=True)
    made = json.loads(byte_level_bpe(['abc'] * 3, 257, ['<|endoftext|>']).to_str())
    vocab = made['model']['vocab']
    for a, b in zip(swapped[::2], swapped[1::2]):
        vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / 'tokenizer.json').write_text(json.dumps(made))
    return str(folder)


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


def asked_of(subject, way={}):
    "{name: Score} of a Subject's model, run in a way."
    with in_way(subject.model, way):
        return {name: score for name, (score, _) in measured(subject, way).items()}


def write_noise(folder, kinds, length=8000, mask=None):
    "Letters without anything to learn: every fifth is an answer of the last kind."
    rng, n = np.random.default_rng(0), np.arange(length)
    rest = len(kinds) - 1               # the others, if there are two kinds, are of the first
    for split in ('train', 'val'):
        marks = np.where(n % 5 == 0, 128 + len(kinds), 128 + rest if rest else 0)
        write_dataset(folder, split, 'bytes', rng.integers(97, 123, length), kinds=kinds,
                      marks=marks if kinds else None, mask=mask)


def planned_flops(*argv):
    "The training FLOPs a token that a run's plan adds up to, over its steps."
    c = read(Config, list(map(str, argv)))
    return planned(c) // (c.batch_size * c.context)


# ------------------------------------------------------------------------------- runs and commands

SMALL = dict(n_layer=2, n_embd=32, n_head=2, context=16, batch_size=4, steps=12, warmup_steps=2,
             decay_steps=4, eval_every=5, eval_batches=2, log_every=1, save_every=4, device='cpu',
             lr=3e-3)


@pytest.fixture
def config(data, tmp_path, undrawn):
    "config(**fields) -> a small run on the test data."
    def make(out='run', **fields):
        return Config(**SMALL | dict(data=str(data), out_dir=str(tmp_path / out)) | fields)
    return make


def by_layer(model, c):
    "An optimizer: a group for each layer, which learns the slower the deeper it is, and an SGD."
    of_layers = [dict(params=[*layer.parameters()], lr=c.lr / (1 + depth))
                 for depth, layer in enumerate(model.layers)]
    rest = [p for name, p in model.named_parameters() if not name.startswith('layers.')]
    return [torch.optim.AdamW(of_layers), torch.optim.SGD(rest, c.lr, momentum=0.9)]


@pytest.fixture
def recurrent(tiny, tmp_path):
    "The settings of a run that goes on from a small cut of mean 3."
    core = authors_surgery(tiny(vocab_size=257, n_layer=6, context=16), '2-2-1', 'linear', Core,
                           r=3, backprop_depth=2)
    return dict(init_from=save_run(tmp_path / 'cut', core, flops=5, inherited_flops=2))


@pytest.fixture
def placed(data, recurrent, tiny, tmp_path):
    """placed(settings): those in which {data}, {mixture}, {other} (of another tokenizer), {cut} and
    {looped} are folders."""
    for name, n in (('a', 2000), ('b', 900)):
        write_noise(tmp_path / 'mixture' / name, [name], n)
    (tmp_path / 'mixture/mixture.json').write_text('{"a": 0.7, "b": 0.3}')
    shutil.copytree(data, tmp_path / 'other')
    for path in (tmp_path / 'other').glob('*.json'):
        path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "other'))
    looped = tiny(vocab_size=257, n_layer=2, order=[0, 1, 0, 1])
    places = {name: tmp_path / name for name in ('data', 'mixture', 'other')} | dict(
        cut=recurrent['init_from'], looped=save_run(tmp_path / 'looped', looped))

    def fill(value):
        if isinstance(value, list):
            return [*map(fill, value)]
        return value.format(**places) if isinstance(value, str) else value
    return lambda settings: {name: fill(value) for name, value in settings.items()}


def save_run(folder, model, data=None, **more):
    "A folder as train.py leaves it, with a model that reads bytes; NAME-3 was trained with seed 3."
    config = dict(data=[str(data)], batch_size=4, context=16) if data else {}
    name, _, seed = folder.name.rpartition('-')
    if name and seed.isdecimal():
        config['seed'] = int(seed)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, model, [], **dict(config=config, step=3, flops=0) | more)
    (folder / 'run.json').write_text(json.dumps(dict(tokenizer='bytes')))
    return str(folder)


def at_step(step, act):
    "The loss of a step, which counts from 1 and from now on, becomes act(loss)."
    backward, calls = train.backward, []

    def changed(*args):
        calls.append(1)
        loss = backward(*args)
        return act(loss) if len(calls) == step else loss
    train.backward = changed


def stop_at(step, number=signal.SIGTERM):
    "A signal for this process in the middle of a step."
    def stop(loss):
        os.kill(os.getpid(), number)
        return loss
    at_step(step, stop)


def log_of(config):
    return [json.loads(line)
            for line in (Path(config.out_dir) / 'log.jsonl').read_text().splitlines()]


def table_of(said, measure):
    "The cells of a table's lines, by its heads."
    table = next(table for table in re.findall(r'(?:^\|.*\n)+', said, flags=re.M)
                 if f' {measure} ' in table.partition('\n')[0])
    heads, _, *lines = [[cell.strip() for cell in line.strip('|').split('|')]
                        for line in table.splitlines()]
    return [dict(zip(heads, line)) for line in lines]


def state_of(path):
    "All that a checkpoint's file holds; path: the file, its folder or a run's config."
    path = Path(getattr(path, 'out_dir', path))
    return torch.load(path if path.suffix == '.pt' else path / 'ckpt.pt', weights_only=True)


def weights_of(config):
    return state_of(config)['model']


def logits(model, tokens):
    "Ours or transformers'."
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, 'logits', out)


def same(a, b):
    "Are two state dicts equal, bit by bit?"
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Times(Span):
    "A Span of one's own: its items several times, one run after the other."
    times = 2


def attributes(model):
    "What each module of a model has: children, weights, hooks, and all else, an order too."
    copied = lambda value: value.copy() if isinstance(value, (dict, list)) else value
    return {name: {key: copied(value) for key, value in vars(module).items()}
            for name, module in model.named_modules()}


@contextlib.contextmanager
def restored(model):
    "Whatever is done to a model inside this `with` is undone at its end, also after an error."
    before, weights = attributes(model), copy.deepcopy(model.state_dict())
    try:
        yield
    finally:
        assert attributes(model) == before
        assert same(model.state_dict(), weights)


def left_by(config):
    """All that a run leaves: of each checkpoint the numbers, bit by bit, of the log each line, and
    run.json. Clocks and the folder's name differ from run to run."""
    clocks = dict(tokens_per_s=0, seconds=0, out_dir='', config={})
    left = dict(log=[line | clocks for line in log_of(config)])
    for path in Path(config.out_dir).iterdir():
        if path.suffix == '.pt':
            left[path.name] = json.dumps(state_of(path) | clocks, default=torch.Tensor.tolist)
        elif path.name == 'run.json':
            left[path.name] = json.loads(path.read_text())
            left[path.name]['config'] |= clocks
    return left


def flags(config):
    "The command line of a run."
    return [f'--{k}={v}' for k, v in vars(config).items() if v != getattr(Config, k)]


def refused(capsys, name, *argv):
    "The one line by which a command refuses, with status 2."
    with pytest.raises(SystemExit) as end:
        nanodepth(name, [str(a) for a in argv])
    said = [line for line in capsys.readouterr().err.replace('\r', '\n').splitlines()
            if line.startswith(f'{name}: ') and '%|' not in line]
    assert end.value.code == 2 and len(said) == 1
    return said[0]
