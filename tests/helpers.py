"""Functions that several files of tests use: datasets, saved runs, processes, what a run leaves.
They need the book alone. What needs the package is in tests/tools/tool_helpers.py."""
import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import train
from model import Refused, Span
from training.checkpoint import save
from training.loader import Loader
from training.machine import leave_processes
from training.plan import Config

ROOT = Path(__file__).resolve().parents[1]
SMALL = dict(n_layer=2, n_embd=32, n_head=2, context=16, batch_size=4, steps=12, warmup_steps=2,
             decay_steps=4, eval_every=5, eval_batches=2, log_every=1, save_every=4, device='cpu',
             lr=3e-3)

# New processes are forks of one that has imported everything. A fork takes milliseconds, and a new
# Python takes seconds.
FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['train', 'torch._dynamo'])


class Times(Span):
    "A Span that runs its items several times, one run after the other."
    times = 2


def write_dataset(folder, split, tokens, mask=None, marks=None, kinds=None):
    """Write a split of a dataset of bytes as one shard. (nanodepth/text/tokens.py writes the same
    files, which a test in tests/tools shows.)"""
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = {}
    arrays = {'.bin': (tokens, 'uint16'), '.mask': (mask, 'uint8'), '.marks': (marks, 'uint8')}
    for ending, (array, dtype) in arrays.items():
        if array is not None:
            raw = np.asarray(array, dtype).tobytes()
            (folder / f'{split}_000{ending}').write_bytes(raw)
            sha256[ending] = hashlib.sha256(raw).hexdigest()
    shard = dict(file=f'{split}_000.bin', tokens=len(tokens), sha256=sha256)
    (folder / f'{split}.json').write_text(json.dumps(dict(
        tokenizer='bytes', fingerprint='76286bf1999d54d6', n_vocab=257, dtype='uint16',
        tokens=len(tokens), shards=[shard], kinds=kinds or [], origin={})))


def write_noise(folder, kinds, length=8000):
    """Write a dataset of random letters, in which nothing can be learned. Every fifth token is an
    answer of the last kind. If there are two kinds, the other tokens are of the first one."""
    rng, n = np.random.default_rng(0), np.arange(length)
    of_others = 127 + len(kinds) if len(kinds) > 1 else 0
    for split in ('train', 'val'):
        marks = np.where(n % 5 == 0, 128 + len(kinds), of_others) if kinds else None
        write_dataset(folder, split, rng.integers(97, 123, length), marks=marks, kinds=kinds)


def save_run(folder, model, data=None, **more):
    """Write a folder as train.py leaves it, with a model that reads bytes. A folder NAME-3 is of a
    run with seed 3."""
    config = dict(data=[str(data)], batch_size=4, context=16) if data else {}
    name, _, seed = folder.name.rpartition('-')
    if name and seed.isdecimal():
        config['seed'] = int(seed)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, model, [], **dict(config=config, step=3, flops=0) | more)
    (folder / 'run.json').write_text(json.dumps(dict(tokenizer='bytes')))
    return str(folder)


def train_as_a_script(config):
    "Train as `python train.py` does, and end the process."
    try:
        stopped_by = train.train(config)
    except Refused as error:
        sys.exit(f'train, process {os.environ["RANK"]}: {error}')
    leave_processes()
    sys.exit(128 + stopped_by if stopped_by else 0)


def one_rank(rank, n_ranks, port, stderr, config, before, main):
    """Call main(config) with the environment that torchrun gives a process. `before` may change
    something first."""
    os.chdir(ROOT)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n_ranks),
                      MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.set_num_threads(1)
    train.draw = lambda *_: None
    if before:
        before()
    main(config)


def ranks(config, n=2, before=None, main=train_as_a_script):
    """Train with n processes. Return their exit statuses, the first one that is not 0, and what the
    processes wrote to stderr."""
    with tempfile.NamedTemporaryFile() as stderr, socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
        free.close()
        processes = [FORKS.Process(target=one_rank,
                                   args=(rank, n, port, stderr.name, config, before, main))
                     for rank in range(n)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            process.kill()
        codes = [process.exitcode for process in processes]
        return SimpleNamespace(codes=codes, returncode=next(filter(None, codes), 0),
                               stderr=Path(stderr.name).read_text())


def at_step(step, act):
    "From now on, the loss of a step becomes act(loss). The next step has the number 1."
    backward, calls = train.backward, []

    def changed(*args):
        calls.append(1)
        loss = backward(*args)
        return act(loss) if len(calls) == step else loss
    train.backward = changed


def stop_at(step, number=signal.SIGTERM):
    "Send this process a signal in the middle of a step."
    def stop(loss):
        os.kill(os.getpid(), number)
        return loss
    at_step(step, stop)


def log_of(config):
    "Return the lines of a run's log."
    return [json.loads(line)
            for line in (Path(config.out_dir) / 'log.jsonl').read_text().splitlines()]


def state_of(path):
    "Return everything in a checkpoint. `path` is its file, its folder or the config of a run."
    path = Path(getattr(path, 'out_dir', path))
    return torch.load(path if path.suffix == '.pt' else path / 'ckpt.pt', weights_only=True)


def weights_of(config):
    "Return the weights that a run has saved."
    return state_of(config)['model']


def left_by(config):
    """Return everything that a run leaves: each number of its checkpoints, bit by bit, each line of
    its log, and run.json. Times and the name of the folder are left out, because they differ."""
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
    """Return an AdamW with a group for each layer, which learns more slowly the deeper it is, and
    an SGD for everything else."""
    groups = [dict(params=[*layer.parameters()], lr=c.lr / (1 + depth))
              for depth, layer in enumerate(model.layers)]
    rest = [p for name, p in model.named_parameters() if not name.startswith('layers.')]
    return [torch.optim.AdamW(groups), torch.optim.SGD(rest, c.lr, momentum=0.9)]


def flags(config):
    "Return the command line of a run."
    return [f'--{name}={value}' for name, value in vars(config).items()
            if value != getattr(Config, name)]


def logits(model, tokens):
    "Return the logits of a model of ours or of transformers."
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, 'logits', out)


def same(a, b):
    "Return whether two state dicts are equal, bit by bit."
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def attributes(model):
    "Return the attributes of each module of a model, such as children, weights, hooks and orders."
    copied = lambda value: value.copy() if isinstance(value, (dict, list)) else value
    return {name: {key: copied(value) for key, value in vars(module).items()}
            for name, module in model.named_modules()}


@contextlib.contextmanager
def restored(model):
    "Check at the end of this `with`, even after an error, that the model is as it was before."
    before, weights = attributes(model), copy.deepcopy(model.state_dict())
    try:
        yield
    finally:
        assert attributes(model) == before
        assert same(model.state_dict(), weights)


def shard_of(dataset, number=0):
    "Return {'.bin': the tokens of a shard}, and its '.mask' and '.marks' if it has them."
    shard, dtypes = dataset.about['shards'][number], {'.bin': dataset.about['dtype']}
    return {ending: np.fromfile((dataset.folder / shard['file']).with_suffix(ending),
                                dtypes.get(ending, 'uint8')) for ending in shard['sha256']}


def contents(out):
    """Return {file: bytes} of the JSON files of datasets and of all shards that they name. (There
    may be other shards, because parts are begun in parallel.)"""
    found = {}
    for about in [*out.rglob('train.json'), *out.rglob('val.json')]:
        found[str(about.relative_to(out))] = about.read_bytes()
        for shard in json.loads(about.read_text()).get('shards', ()):
            for ending in shard['sha256']:
                path = (about.parent / shard['file']).with_suffix(ending)
                found[str(path.relative_to(out))] = path.read_bytes()
    return found


def measured_slowly(model, c):
    """Return what a run with the settings c would log about a model: its mean validation loss over
    targets, and the share of answers that are right. An answer is right if each of its tokens in
    the row is."""
    model.eval()
    loader, losses, right = Loader(c.data, c.batch_size, c.context, 'val'), [], []
    for number in range(c.eval_batches):
        tokens, targets, marks = loader.batch(number)
        scores = logits(model, tokens)
        each = F.cross_entropy(scores.mT, targets, ignore_index=-1, reduction='none')
        losses.append(each[targets != -1])
        for marks_of_row, wrong in zip(marks.tolist(), (scores.argmax(-1) != targets).tolist()):
            for start, mark in enumerate(marks_of_row):
                if mark > 128:              # the first token of an answer
                    end = start + 1
                    while end < len(wrong) and 0 < marks_of_row[end] < 128:
                        end += 1
                    right.append(not any(wrong[start:end]))
    return torch.cat(losses).mean().item(), sum(right) / len(right)
