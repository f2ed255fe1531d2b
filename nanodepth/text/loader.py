"""Datasets on disk, read: their rows, and what is said of them. (tokens.py writes them.)
Usage:
    tokens, targets, kinds = Rows('data/toy', batch_size=16, context=256).batch(0)
"""
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from nanodepth.common.errors import Refused
from nanodepth.common.files import hash_of, read_json
from nanodepth.train import Loader, find


def how_to_prepare(folder):
    "The command that makes a dataset: the prepare.py beside it or above it."
    if (Path(folder).parent / 'mixture.json').exists():
        return f'remove it, and repeat the command that made {Path(folder).parent}'
    for path in (Path(folder) / 'prepare.py').parents:
        if (path / 'prepare.py').exists():
            return f'run: python {path / "prepare.py"} (--help says how)'
    return (f'its config may say in its first lines how it is made; of your own text: python '
            f'{find("data/text/prepare.py")} FILES --out={folder}')


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
            if hash_of(path) != want:
                raise Refused(f'{path} is not what was written (wrong checksum); '
                              f'{how_to_prepare(folder)}')
    return about
