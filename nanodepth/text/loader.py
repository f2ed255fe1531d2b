"""Datasets on disk, written: a folder with train.json and val.json, which train.py's Loader reads.
Usage:
    tokens, targets, kinds = Rows('data/toy', batch_size=16, context=256).batch(0)
"""
import hashlib
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from nanodepth import ROOT
from nanodepth.common.errors import Refused
from nanodepth.common.files import claim, read_json, reading, replace, write_json
from nanodepth.report.tables import TAKEN
from nanodepth.train import Loader, find

ENDINGS = {'.bin', '.mask', '.marks'}


# --------------------------------------------------------------------------------- datasets on disk

def write_dataset(folder, split, tokenizer, tokens, *, mask=None, marks=None, kinds=None,
                  origin=None):
    """Write one split as a single shard. The JSON comes last, and an old one goes first: a folder
    that has it is complete. `tokenizer` is the name that get_tokenizer takes; `kinds` names the
    marks 1, 2, ..."""
    folder = Path(folder)
    path = folder / f'{split}.json'
    if taken := TAKEN.intersection(kinds or ()):
        raise Refused(f'{path}: a kind of answer cannot be called {min(taken)!r}: tables and '
                      'pictures have a column of that name')
    from nanodepth.text.tokenizer import copy_tokenizer, fingerprint, get_tokenizer, token_type
    encoding = get_tokenizer(tokenizer)
    n_vocab = encoding.n_vocab
    dtype = token_type(n_vocab)
    arrays = {'.bin': tokens, '.mask': mask, '.marks': marks}
    raw = {ending: np.asarray(array, dtype if ending == '.bin' else 'uint8').tobytes()
           for ending, array in arrays.items() if array is not None}
    sums = {ending: hashlib.sha256(data).hexdigest() for ending, data in raw.items()}
    shard = dict(file=f'{split}_000.bin', sha256=sums, tokens=len(tokens))
    description = dict(tokenizer=tokenizer, fingerprint=fingerprint(encoding), n_vocab=n_vocab,
                       dtype=dtype, tokens=len(tokens), kinds=kinds or [],
                       shards=[shard], origin=origin or {})
    with claim(folder):
        copy_tokenizer(tokenizer, folder)       # a run takes its tokenizer from its data
        path.unlink(missing_ok=True)            # else it would vouch for half of the new files
        for ending, data in raw.items():
            replace(folder / f'{split}_000{ending}', data)
        write_json(path, description)


def begin_dataset(folder, plan):
    """Before write_dataset: the dataset's own older one goes first, both splits of it. So whoever
    is stopped between them leaves no validation rows of the old beside the new."""
    with claim(folder):
        refuse_others(folder, plan)
        for path in [*files_of(folder, 'train'), *files_of(folder, 'val')]:
            path.unlink(missing_ok=True)


def files_of(folder, split):
    "What write_dataset writes of a split; last its JSON, which says whose the others are."
    names = [*(f'{split}_000{ending}' for ending in ENDINGS), f'{split}.json']
    return [Path(folder) / name for name in names]


def refuse_others(folder, plan):
    """A dataset's folder is new, or its own: the JSON of each split has the names and values of
    `plan` in its `origin`, as the new one's will have."""
    for name, what in (('ckpt.pt', 'a run'), ('mixture.json', 'a mixture of datasets')):
        if (Path(folder) / name).exists():      # a mixture would be read instead
            raise Refused(f'{folder} holds {what}: choose another folder for a dataset')
    for files in (files_of(folder, 'train'), files_of(folder, 'val')):
        there = [path.name for path in files if path.exists()]
        is_own = not there
        if files[-1].exists():
            with reading(files[-1]):
                is_own = plan.items() <= read_json(files[-1])['origin'].items()
        if not is_own:
            raise Refused(f'{folder} holds {there[-1]} of another dataset: choose another folder, '
                          'or remove that dataset from it')


def make_toy_data(folders, say=print):
    "Toy data takes seconds to make, so it is made. Other data is the user's own decision."
    for name in folders:
        for folder in [name] if isinstance(name, str) else name or []:
            if folder == 'data/toy' and not (find(folder) / 'train.json').exists():
                script = ROOT / folder / 'prepare.py'
                say(f'{folder} has no data yet: running {script}')
                subprocess.run([sys.executable, str(script)], check=True)


def how_to_prepare(folder):
    "The command that makes a dataset: the prepare.py beside it or above it."
    if (Path(folder).parent / 'mixture.json').exists():
        return f'repeat the command that made {Path(folder).parent}, which mends it'
    for path in (Path(folder) / 'prepare.py').parents:
        if (path / 'prepare.py').exists():
            return f'run: python {path / "prepare.py"} (--help says how)'
    return (f'its config may say in its first lines how it is made; of your own text: python '
            f'{find("data/text/prepare.py")} FILES --out={folder}')


def mixture(folder):
    "[(folder, weight)]: those that a folder's mixture.json names, with their shares; else itself."
    folder = find(folder)
    path = folder / 'mixture.json'
    if not path.exists():
        return [(folder, 1.0)]
    parts = read_json(path)
    with reading(path):
        if not parts or not all(math.isfinite(n) and n >= 0 for n in parts.values()):
            raise ValueError(f'shares must be numbers from 0 on, not {parts}')
        total = sum(parts.values())
        if not math.isfinite(total):
            raise ValueError(f'the shares add up to {total}')
        return [(folder / name, share / total) for name, share in parts.items()]


def shares(weights, total):
    """Whole numbers in proportion to the weights that add up to total: rounded down, the rest to
    the largest remainders."""
    exact = [w * total / sum(weights) for w in weights]
    parts = [math.floor(e) for e in exact]
    for i in sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])[:total - sum(parts)]:
        parts[i] += 1
    return parts


class Rows(Loader):
    """Validation rows for any checkpoint. `starts` are tokens that are put before each row, which
    is a window out of the middle of a text, and count in no loss."""

    def __init__(self, data, batch_size, context, split='val', seed=0, starts=()):
        super().__init__(SimpleNamespace(batch_size=batch_size, context=context), data, split, seed)
        self.starts = list(starts)

    def batch(self, step, again=True):
        parts = super().batch(step, again)
        n = len(self.starts)
        if not n:
            return parts
        # a row that begins a text by itself stays as it is, and is padded to the same length
        own = (parts[0][:, :n] == torch.tensor(self.starts)).all(1)[:, None]
        begun = []
        for part, value in zip(parts, (0, -1, 0)):
            behind, before = F.pad(part, (0, n), value=value), F.pad(part, (n, 0), value=value)
            begun.append(torch.where(own, behind, before))
        begun[0][:, :n] = torch.tensor(self.starts)
        return begun


def check_dataset(folder, split, progress=iter):
    "What a split's JSON says of it. A shard that is not what was written is refused."
    about = read_json(Path(folder) / f'{split}.json')
    for shard in progress(about['shards']):
        for ending, want in shard['sha256'].items():
            path = (Path(folder) / shard['file']).with_suffix(ending)
            with open(path, 'rb') as file:
                if hashlib.file_digest(file, 'sha256').hexdigest() != want:
                    raise Refused(f'{path} is not what was written (wrong checksum); '
                                  f'{how_to_prepare(folder)}')
    return about
