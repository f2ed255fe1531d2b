"Functions that several files of tests use: saved runs, processes, what a command prints."
import contextlib
import copy
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanodepth import train
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import train as train_command
from nanodepth.model import Span
from nanodepth.report.tables import PLAIN, Row
from nanodepth.scoring.rows import scores_now
from nanodepth.scoring.ways import in_way
from nanodepth.text.tokens import write_dataset
from nanodepth.training.checkpoint import save
from nanodepth.training.plan import Config

ROOT = Path(__file__).resolve().parents[1]
SMALL = dict(n_layer=2, n_embd=32, n_head=2, context=16, batch_size=4, steps=12, warmup_steps=2,
             decay_steps=4, eval_every=5, eval_batches=2, log_every=1, save_every=4, device='cpu',
             lr=3e-3)

# Where processes are begun that have imported everything already: a fork of it takes milliseconds,
# a new Python seconds.
BEGUN = multiprocessing.get_context('forkserver')
BEGUN.set_forkserver_preload(['nanodepth.train', 'torch._dynamo'])


class Times(Span):
    "A Span of one's own: its items several times, one run after the other."
    times = 2


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


def write_noise(folder, kinds, length=8000):
    "Letters without anything to learn: every fifth is an answer of the last kind."
    rng, n = np.random.default_rng(0), np.arange(length)
    rest = len(kinds) - 1               # the others, if there are two kinds, are of the first
    for split in ('train', 'val'):
        marks = np.where(n % 5 == 0, 128 + len(kinds), 128 + rest if rest else 0)
        write_dataset(folder, split, 'bytes', rng.integers(97, 123, length), kinds=kinds,
                      marks=marks if kinds else None)


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


def asked_of(subject, way={}):
    "{name: Score} of a Subject's model, run in a way."
    with in_way(subject.model, way):
        return {name: score for name, (score, _) in scores_now(subject).items()}


def rank_of(rank, ranks, port, said, config, before):
    """What torchrun tells a process, and then `nanodepth train` with these settings. `before` may
    change something first."""
    os.chdir(ROOT)
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1',
                      MASTER_PORT=str(port))
    os.environ['LOCAL_RANK'] = str(rank)
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


def state_of(path):
    "All that a checkpoint's file holds; path: the file, its folder or a run's config."
    path = Path(getattr(path, 'out_dir', path))
    return torch.load(path if path.suffix == '.pt' else path / 'ckpt.pt', weights_only=True)


def weights_of(config):
    return state_of(config)['model']


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


def by_layer(model, c):
    "An optimizer: a group for each layer, which learns the slower the deeper it is, and an SGD."
    of_layers = [dict(params=[*layer.parameters()], lr=c.lr / (1 + depth))
                 for depth, layer in enumerate(model.layers)]
    rest = [p for name, p in model.named_parameters() if not name.startswith('layers.')]
    return [torch.optim.AdamW(of_layers), torch.optim.SGD(rest, c.lr, momentum=0.9)]


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


def table_of(said, measure):
    """Return the lines of a printed table that are about a measure, as {heading: cell}. A cell that
    repeats the line above is empty, and is filled in here."""
    lines = []
    for table in re.findall(r'(?:^\|.*\n)+', said, flags=re.M):
        heads, _, *rest = [[cell.strip() for cell in line.strip('|\n').split('|')]
                           for line in table.splitlines()]
        above = rest[0]
        for cells in rest:
            given = next(i for i, cell in enumerate(cells) if cell)
            above = above[:given] + cells[given:]
            lines.append(dict(zip(heads, above)))
    return [line for line in lines if line['measure'].partition(',')[0] == measure]


def row_of(**values):
    "Return a Row of a model's loss."
    row = dict(run='a-0', group='a', seed=0, steps=9, layers=4, params=7, inference_flops=1.0,
               dtype='float32', training_flops=1.0, tokens=1.0, way=PLAIN, measure='loss',
               kind='nats', mean=1.0, error=None, n=None, chance=None, change=0.0,
               change_error=None, p=None, data='x')
    return Row(**row | values)


def logits(model, tokens):
    "Ours or transformers'."
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, 'logits', out)


def same(a, b):
    "Are two state dicts equal, bit by bit?"
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


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
