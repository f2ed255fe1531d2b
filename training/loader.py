"""Which row is read: it follows from the seed and the row's number, so no position is ever saved.

A dataset is a folder, whose train.json and val.json say what is in its shards. train_*.bin are
tokens. Beside one may be a .mask, 1 where a token counts in the loss, and a .marks, in which each
token of an answer has the number of its kind, and the first token that number plus 128. A folder
may also be a mixture: its mixture.json is {a folder in it: its share of the rows}.

A *window* is `context` tokens of a dataset. *Rows* are numbered through the whole run, and each
holds a window. An *epoch* of a dataset is over when each of its windows came once, in an order that
is drawn for each epoch. Validation reads one epoch, of a mixture until one of its datasets ends.
(In an order that is drawn, too, because the toy's text stands at the end of its files.)
"""
import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.lib.stride_tricks import sliding_window_view

from model import require
from training.plan import seed_for
from training.machine import RANK, SIZE
from training.settings import find

BEGINS = 128
PERIOD = 1000       # rows, in each of which a mixture's shares are exact


def folders_of(data):
    "The folders that a setting of data names."
    return data if isinstance(data, list) else str(data).split(',')


def parts_of(folder):
    "{a dataset's folder: its share} of a mixture. A dataset is made of itself."
    file = find(folder) / 'mixture.json'
    shares = json.loads(file.read_text()) if file.exists() else {'.': 1}
    return {find(folder) / name: share for name, share in shares.items()}


def make_toy_data(c):
    "The toy's data takes half a minute to make. Other data is the user's own decision."
    is_used = 'data/toy' in folders_of(c.data) + folders_of(c.cooldown_data or [])
    if is_used and not (find('data/toy') / 'train.json').exists():
        script = Path(__file__).resolve().parents[1] / 'data/toy/prepare.py'    # and no other one
        subprocess.run([sys.executable, script], check=True)


def open_data(c):
    "The Loaders of a run."
    if RANK == 0:
        make_toy_data(c)
    if SIZE > 1:
        dist.barrier()              # the others wait for it
    size = c.batch_size, c.context
    loaders = dict(data=Loader(c.data, *size, seed=c.seed),
                   val=Loader(c.data, *size, 'val'))        # the same rows whatever the seed
    if c.cooldown_data:
        loaders['cooldown_data'] = Loader(c.cooldown_data, *size, seed=c.seed)
    return loaders


class Dataset:
    "A dataset's windows. Window i always holds the same tokens."

    def __init__(self, folder, split, context):
        self.folder, self.context = folder, context
        self.about = json.loads((folder / f'{split}.json').read_text())
        windows = [max(0, shard['tokens'] - 1) // context for shard in self.about['shards']]
        self.ends = np.cumsum(windows)          # how many there are, each shard's own included
        self.begins = self.ends - windows
        self.drawn = None                       # (a seed, the order that it gives)

    def order(self, seed):
        "The windows as an epoch has them. (10^8 of them are 400 MB, and take some seconds.)"
        if not self.drawn or self.drawn[0] != seed:
            windows = np.arange(self.ends[-1], dtype=np.uint32)
            draws(seed).shuffle(windows)
            self.drawn = seed, windows
        return self.drawn[1]

    def read(self, windows, kinds):
        """(3, n, T) of n windows: tokens, targets (-1: none), and the targets' marks (0: none,
        as without a target), in which kinds[i] has the number i + 1."""
        T = self.context
        rows = np.zeros((3, len(windows), T), np.int64)
        new_marks = np.arange(2 * BEGINS)       # our mark for each of the files' marks
        for i, kind in enumerate(self.about['kinds'], 1):
            new_marks[i] = 1 + kinds.index(kind)
            new_marks[i + BEGINS] = new_marks[i] + BEGINS
        of_shard = self.ends.searchsorted(windows, side='right')
        first = (windows - self.begins[of_shard]) * T           # its first token's place
        for s in np.unique(of_shard).tolist():
            shard = self.about['shards'][s]
            here = of_shard == s
            arrays = {}
            for ending in shard['sha256']:      # .bin and, if there are, .mask and .marks
                path = self.folder / Path(shard['file']).with_suffix(ending).name
                dtype = self.about['dtype'] if ending == '.bin' else 'uint8'
                arrays[ending] = open_file(path, dtype, shard['tokens'])
            # sliding_window_view(a, n)[i] is a[i:i + n]; a target stands one place after its token
            tokens = sliding_window_view(arrays['.bin'], T + 1)[first[here]]
            rows[0, here] = tokens[:, :-1]
            rows[1, here] = tokens[:, 1:]
            if '.mask' in arrays:
                counts = sliding_window_view(arrays['.mask'], T)[first[here] + 1] > 0
                rows[1, here] = np.where(counts, rows[1, here], -1)
            if '.marks' in arrays:
                marks = sliding_window_view(arrays['.marks'], T)[first[here] + 1]
                rows[2, here] = np.where(rows[1, here] < 0, 0, new_marks[marks])
        return rows


@functools.lru_cache(300)       # a process may have some 1,000 files open
def open_file(path, dtype, n):
    "A shard's n tokens, or their mask or marks: mapped, not read."
    require(dtype in ('uint8', 'uint16', 'uint32'),     # (of objects, bytes would be addresses)
            f'{path} holds {dtype}, which are no tokens')
    return np.asarray(np.memmap(path, dtype, 'r', shape=(n,)))      # (a memmap is slow to index)


class Loader:
    "Batches of batch_size rows, of which each process gets its part."

    def __init__(self, data, batch_size, context, split='train', seed=0):
        self.batch_size, self.context, self.split, self.seed = batch_size, context, split, seed
        open_file.cache_clear()         # files that were open may be others by now
        self.datasets, shares = [], []
        for folder in folders_of(data):
            parts = parts_of(folder)
            require(all((part / f'{split}.json').exists() for part in parts),
                    f'there is no data in {find(folder)}: see its config or prepare.py')
            self.datasets += [Dataset(part, split, context) for part in parts]
            shares += [share / sum(parts.values()) for share in parts.values()]
        self.n_windows = np.array([each.ends[-1] for each in self.datasets])    # of each dataset
        # A period: whose its rows are, and how many of the same dataset come before each.
        ends = np.cumsum(shares) * PERIOD / sum(shares)
        whose = ends.searchsorted(np.arange(PERIOD) + 0.5)          # [0, 0, .., 1, 1, ..]
        self.quota = np.bincount(whose, minlength=len(shares))      # rows of each dataset
        require(min(*self.n_windows, *self.quota) > 0, f'{data} has a dataset that is shorter than '
                f'a context of {context} tokens, or whose share is below 1 in {PERIOD}')
        self.whose = draws(seed_for(seed, 'mixture')).permutation(whose)
        self.before = np.empty(PERIOD, int)
        for d, n in enumerate(self.quota):
            self.before[self.whose == d] = np.arange(n)
        self.n_rows = min(map(self.first_row_again, range(len(shares))))
        self.n_batches = -(-self.n_rows // batch_size)      # of validation: each row once
        kinds = [kind for each in self.datasets for kind in each.about['kinds']]
        self.kinds = [*dict.fromkeys(kinds)]    # of answers, numbered through all datasets

    def first_row_again(self, d):
        "The first row that reads dataset d a second time."
        periods, rest = divmod(self.n_windows[d], self.quota[d])
        return (periods * PERIOD + np.flatnonzero(self.whose == d)[rest]).item()

    def description(self):
        "What a checkpoint keeps of the data, to know it again."
        quota = self.quota.tolist()
        return [each.about | dict(rows_of_1000=n) for each, n in zip(self.datasets, quota)]

    def passes(self, batches):
        "How often the dataset that is read most has been read after so many batches."
        return max(batches * self.batch_size * self.quota / PERIOD / self.n_windows).item()

    def batch(self, step):
        """(tokens, targets, marks of the targets), (B, T) each; -1 is no target. The last batch of
        validation may have fewer rows."""
        n = self.batch_size // SIZE
        first = step * self.batch_size + RANK * n           # rows count through the whole run
        end = min(first + n, self.n_rows) if self.split == 'val' else first + n
        period, place = np.divmod(np.arange(first, end), PERIOD)
        dataset = self.whose[place]
        # Say a row is a dataset's 866th. If that has 500 windows, the row is in its epoch 1, and
        # holds the window that comes 366th in that epoch's order.
        number = period * self.quota[dataset] + self.before[place]
        epoch, number = np.divmod(number, self.n_windows[dataset])
        rows = np.empty((3, len(number), self.context), np.int64)
        for d, e in sorted({*zip(dataset.tolist(), epoch.tolist())}):
            here = (dataset == d) & (epoch == e)
            order = self.datasets[d].order(seed_for(self.seed, f'epoch of dataset {d}', e))
            rows[:, here] = self.datasets[d].read(order[number[here]], self.kinds)
        return torch.from_numpy(rows).unbind()


def draws(seed):
    "numpy's RandomState, whose draws stay the same in all its versions. It takes 32 bits at once."
    return np.random.RandomState([seed >> 32, seed & 0xffff_ffff])
