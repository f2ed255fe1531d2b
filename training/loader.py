"""Read rows of data. A row follows from the seed and the row's number, so no position is ever
saved.

A *dataset* is a folder whose train.json and val.json list its shards. train_00000.bin holds tokens.
Next to it there may be a .mask, with a 1 for each token that counts in the loss, and a .marks: it
has 0 for most tokens, and the number of an answer's kind for each token of the answer. The first
token of an answer has this number plus 128. Several datasets are a *mixture*: they are typed with
their shares, such as data/text@0.9,data/toy@0.1, or without them, in equal parts.

A *window* is `context` tokens of a dataset, and one more, which is only a target. *Rows* are
numbered through the whole run, and each row holds one window. An *epoch* of a dataset ends when
each of its windows was read once. Each epoch has its own order, which is drawn. Validation reads
one epoch. For a mixture it stops when the first of the datasets is used up. (Its order is drawn,
too, because the toy's text is at the end of its files.)
"""
import bisect
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from model import Refused, require
from training.machine import process
from training.plan import seed_for
from training.settings import find

ANSWER_START = 128        # what is added to the mark of an answer's first token
PERIOD = 1000       # in each 1,000 rows, each dataset of a mixture has exactly its share


def parts_of(data):
    "Return the (folder, share) of each dataset in a setting of data, such as 'a@0.9,b@0.1'."
    text = ','.join(map(str, data)) if isinstance(data, list) else str(data)
    parts = [part.partition('@') for part in text.split(',')]
    try:
        return [(folder, float(share or 1)) for folder, _, share in parts]
    except ValueError:
        raise Refused(f'data={text}: a share is a number, as in a@0.9,b@0.1') from None


def make_toy_data(c):
    "Make the toy's data if it is missing, which takes half a minute. No other data is made."
    folders = [folder for folder, _ in parts_of(c.data) + parts_of(c.cooldown_data or [])]
    if 'data/toy' in folders and not (find('data/toy') / 'train.json').exists():
        script = Path(__file__).resolve().parents[1] / 'data/toy/prepare.py'    # and no other one
        subprocess.run([sys.executable, script], check=True)


def open_data(c):
    "Return the Loaders of a run by their names: data, val, and cooldown_data if there is one."
    rank, n_processes = process()
    if rank == 0:
        make_toy_data(c)
    if n_processes > 1:
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
        self.folder, self.context = find(folder), context
        file = self.folder / f'{split}.json'
        if (self.folder / 'mixture.json').exists():
            raise Refused(f'{folder}/mixture.json is not read any more: type the mixture, as in '
                          f'--data={as_typed(self.folder)}')
        require(file.exists(), f'there is no data in {folder}: see its config or prepare.py')
        self.about = json.loads(file.read_text())
        self.first_windows, self.n_windows = [], 0      # the number of each shard's first window
        for shard in self.about['shards']:
            self.first_windows.append(self.n_windows)
            self.n_windows += max(0, shard['tokens'] - 1) // context
        self.arrays = functools.lru_cache(100)(self.arrays)     # a process may open 1,000 files

    def window(self, i):
        "Return the tokens of window i, their mask and their marks: context + 1 numbers each."
        shard = bisect.bisect(self.first_windows, i) - 1
        start = (int(i) - self.first_windows[shard]) * self.context
        return [array[start:start + self.context + 1] for array in self.arrays(shard)]

    def arrays(self, shard):
        """Return the tokens of a shard, their mask and their marks. The files are mapped, not read.
        Without a .mask all tokens count, and without .marks none is of an answer."""
        about, arrays = self.about['shards'][shard], []
        for ending, without in ('.bin', None), ('.mask', 1), ('.marks', 0):
            path = self.folder / Path(about['file']).with_suffix(ending).name
            dtype = np.dtype(self.about['dtype'] if ending == '.bin' else 'uint8')
            require(dtype.kind == 'u', f'{path} holds {dtype}, which cannot be tokens')
            if ending in about['sha256']:
                array = np.asarray(np.memmap(path, dtype, 'r', shape=(about['tokens'],)))
            else:
                array = np.broadcast_to(dtype.type(without), about['tokens'])
            arrays.append(array)
        return arrays


def as_typed(folder):
    "Return what to type for a folder with a mixture.json, which named its shares."
    shares = json.loads((folder / 'mixture.json').read_text())
    return ','.join(f'{folder / name}@{share}' for name, share in shares.items())


class Place(NamedTuple):
    "Where a row comes from."
    dataset: int        # its number in the mixture
    epoch: int          # how often the dataset was read to its end before
    index: int          # which window of that epoch's order


class Loader:
    "Makes batches of batch_size rows. Each process gets its own part of each batch."

    def __init__(self, data, batch_size, context, split='train', seed=0):
        self.batch_size, self.context, self.split, self.seed = batch_size, context, split, seed
        parts = parts_of(data)
        self.datasets = [Dataset(folder, split, context) for folder, _ in parts]
        ends = np.cumsum([share for _, share in parts])
        # for each of 1,000 rows the number of its dataset, in rising order: 0, 0, ..., 1, 1, ...
        in_turn = (ends * PERIOD / ends[-1]).searchsorted(np.arange(PERIOD) + 0.5)
        self.quota = np.bincount(in_turn, minlength=len(parts)).tolist()    # rows of each in 1,000
        require(min([*self.quota, *(dataset.n_windows for dataset in self.datasets)]) > 0,
                f'{data} has a dataset that is shorter than a context of {context} tokens, or '
                f'whose share is below 1 in {PERIOD}')
        # Which dataset each of 1,000 rows reads, and how many rows before it read the same.
        if split == 'val':
            self.dataset_of_row = spread(self.quota)
        else:
            order = draws(seed_for(seed, 'mixture')).permutation(in_turn)
            self.dataset_of_row = order.tolist()
        counts = [0] * len(parts)
        self.same_before = []
        for d in self.dataset_of_row:
            self.same_before.append(counts[d])
            counts[d] += 1
        kinds = [kind for dataset in self.datasets for kind in dataset.about['kinds']]
        self.kinds = [*dict.fromkeys(kinds)]    # of answers in all datasets; the first is number 1
        self.new_marks = [self.marks_of(dataset) for dataset in self.datasets]
        self.windows_of_epoch = functools.lru_cache(1 + len(parts))(self.windows_of_epoch)

    @functools.cached_property
    def n_rows(self):
        "How many rows come before a window is read for the second time."
        return next(row for row in itertools.count() if self.place(row).epoch > 0)

    @property
    def n_batches(self):
        return -(-self.n_rows // self.batch_size)

    def marks_of(self, dataset):
        """Return our mark for each of the 256 marks in a dataset's files. Two datasets may give one
        kind of answer different numbers, and self.kinds numbers all kinds."""
        numbers = np.zeros(ANSWER_START, np.uint8)
        for i, kind in enumerate(dataset.about['kinds'], 1):
            numbers[i] = 1 + self.kinds.index(kind)
        first_tokens = numbers + ANSWER_START
        return np.concatenate((numbers, first_tokens))

    def place(self, row):
        """Return the Place of a row. Say that 866 rows before it read the same dataset, which has
        500 windows: then the row is in that dataset's epoch 1, at index 366."""
        period, i = divmod(row, PERIOD)
        d = self.dataset_of_row[i]
        number = period * self.quota[d] + self.same_before[i]
        return Place(d, *divmod(number, self.datasets[d].n_windows))

    def windows_of_epoch(self, d, epoch):
        "Return dataset d's windows as an epoch reads them. (10^8 windows take 400 MB, and time.)"
        windows = np.arange(self.datasets[d].n_windows, dtype=np.uint32)
        draws(seed_for(self.seed, f'epoch of dataset {d}', epoch)).shuffle(windows)
        return windows

    def batch(self, step):
        """Return (tokens, targets, marks of the targets), (B, T) each. A target of -1 does not
        count, and has the mark 0. The last batch of validation may have fewer rows."""
        rank, n_processes = process()
        n = self.batch_size // n_processes
        first = step * self.batch_size + rank * n           # rows count through the whole run
        end = min(first + n, self.n_rows) if self.split == 'val' else first + n
        read = np.zeros((3, max(0, end - first), self.context + 1), np.int64)
        for i, row in enumerate(range(first, end)):
            d, epoch, index = self.place(row)
            tokens, mask, marks = self.datasets[d].window(self.windows_of_epoch(d, epoch)[index])
            read[0, i], read[1, i], read[2, i] = tokens, mask, self.new_marks[d][marks]
        tokens, mask, marks = torch.from_numpy(read)
        targets = tokens[:, 1:].where(mask[:, 1:] > 0, -1)
        marks = marks[:, 1:].where(targets >= 0, 0)
        return tokens[:, :-1].contiguous(), targets, marks

    def passes(self, batches):
        "Return how often the dataset that is read most has been read after this many batches."
        rows = batches * self.batch_size / PERIOD
        return max(rows * quota / dataset.n_windows
                   for quota, dataset in zip(self.quota, self.datasets))

    def description(self):
        "Return what a checkpoint stores of the data, so that a resume recognizes them."
        return [dataset.about | dict(rows_of_1000=quota)
                for dataset, quota in zip(self.datasets, self.quota)]


def spread(quota):
    """Return the number of the dataset that each of 1,000 rows reads. Each row goes to the dataset
    that is furthest behind its share, so the first n rows have nearly the shares, for any n."""
    counts, order = [0] * len(quota), []
    for row in range(1, PERIOD + 1):
        behind = [quota[d] * row / PERIOD - counts[d] if counts[d] < quota[d] else -PERIOD
                  for d in range(len(quota))]
        order.append(behind.index(max(behind)))
        counts[order[-1]] += 1
    return order


def draws(seed):
    """Return numpy's RandomState, which draws the same numbers in all versions. (It takes a seed in
    pieces of 32 bits.)"""
    return np.random.RandomState([seed >> 32, seed & 0xffff_ffff])
