"""Tokens -> batches: shards on disk, and a loader that is a pure function of seed, step and row. So
nothing is saved, and a resumed run sees what an uninterrupted one would have seen.
Usage:
    tokens, targets = Loader('data/toy', batch_size=16, context=256).batch(step=0)
"""
import contextlib
import hashlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from nanodepth import ROOT
from nanodepth.common.errors import Refused
from nanodepth.common.files import claim, find, read_json, reading, replace, write_json
from nanodepth.common.seeds import seed_for
from nanodepth.report.tables import TAKEN

# ------------------------------------------------------------------------------------- an order

def permute(places, n, key):
    """Where an array of places goes in the permutation of range(n) that the key picks. A Feistel
    network shuffles the next power of four; a number that lands past n walks on until it comes back
    inside, so this is a permutation of range(n) too."""
    bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    result = np.array(places, np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for turn in range(4):
            # splitmix64's mixing
            z = right + np.uint64((key + turn * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
            z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ (z ^ z >> np.uint64(31)) & mask
        result[outside] = left << half | right
        outside = result >= n
    return result.astype(np.int64)


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
    from nanodepth.text.tokenizer import fingerprint, get_tokenizer, token_type
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


# Bytes of a split up to which all of it is read for its checksums whenever it is opened. A larger
# one is checked by train.py --dry_run.
CHECKED = 2 ** 28
ENDINGS = {'.bin', '.mask', '.marks'}


class Dataset:
    """One split of one folder, memory-mapped. A window is `context` tokens and the one after them.
    train.json and val.json say what is in the train_*.bin and val_*.bin. Beside a .bin there may be
    a .mask (1 where a token counts in the loss) and a .marks (which kind of answer a token belongs
    to, plus START where an answer begins)."""

    def __init__(self, folder, split, context):
        self.folder = Path(folder)
        self.split = split
        path = self.folder / f'{split}.json'
        if not path.exists():
            raise Refused(f'there is no dataset at {folder} (no {path.name} there); '
                          f'{how_to_prepare(folder)}')
        with reading(path, then=f'; {how_to_prepare(folder)}'):
            description = read_json(path)
            self.tokenizer = description['tokenizer']
            self.fingerprint = description['fingerprint']
            self.n_vocab = description['n_vocab']
            self.dtype = description['dtype']
            self.tokens = description['tokens']
            self.kinds = description['kinds']       # what the marks 1, 2, ... are called
            self.origin = description['origin']     # what made it, of what
            shards = description['shards']
            check_description(description)
        self.checksums = [shard['sha256'] for shard in shards]
        self.files = [Path(shard['file']) for shard in shards]
        context = 1 if context is None else context
        self.context = context
        if len(shards) > 100:
            ask_for_open_files()
        self.shards = [{ending: self._map(shard, ending) for ending in shard['sha256']}
                       for shard in shards]
        if sum(part.nbytes for shard in self.shards for part in shard.values()) <= CHECKED:
            self.check()
        self.ends = np.cumsum([(shard['tokens'] - 1) // context for shard in shards])   # in windows
        if len(self) < 1:
            raise Refused(f'{path}: {self.tokens} tokens are not one window of '
                          f'{context + 1}: it needs more text, or longer documents')

    def _map(self, shard, ending):
        path = (self.folder / shard['file']).with_suffix(ending)
        dtype = np.dtype(self.dtype if ending == '.bin' else 'uint8')
        want = shard['tokens'] * dtype.itemsize
        if not path.exists():
            raise Refused(f'{path} is missing, though {self.split}.json lists it; '
                          f'{how_to_prepare(self.folder)}')
        if (size := path.stat().st_size) != want:
            raise Refused(f'{path} has {size:,} bytes, but {self.split}.json says {want:,}; '
                          f'{how_to_prepare(self.folder)}')
        # mapped; as a plain array, of which a slice takes a tenth of a memmap's time
        return np.asarray(np.memmap(path, dtype, 'r'))

    def check(self, progress=iter):
        "Refuse a shard that is not what was written."
        for shard, file, sums in zip(progress(self.shards), self.files, self.checksums):
            for ending, want in sums.items():
                if hashlib.sha256(shard[ending]).hexdigest() != want:
                    raise Refused(f'{self.folder / file.with_suffix(ending)} is not what was '
                                  f'written (wrong checksum); {how_to_prepare(self.folder)}')

    def __len__(self):
        return int(self.ends[-1])

    def windows(self, numbers):
        "tokens (n, T), targets (n, T), marks of the targets (n, T) of n windows, all int64."
        n, T = len(numbers), self.context
        rows = np.empty((n, T + 1), np.int64)
        counts, marks = np.ones((n, T), bool), np.zeros((n, T), np.int64)
        of_shard = np.searchsorted(self.ends, numbers, side='right')
        begins = np.concatenate(([0], self.ends))[of_shard]         # the shard's first window
        for s in np.unique(of_shard):
            here, shard = np.flatnonzero(of_shard == s), self.shards[s]
            first = (numbers - begins)[here] * T
            rows[here] = sliding_window_view(shard['.bin'], T + 1)[first]
            if '.mask' in shard:
                counts[here] = sliding_window_view(shard['.mask'], T)[first + 1] > 0
            if '.marks' in shard:
                marks[here] = sliding_window_view(shard['.marks'], T)[first + 1]
        return rows[:, :-1], np.where(counts, rows[:, 1:], -1), marks


def ask_for_open_files():
    "A mapped shard keeps a file open, and 1,024 are the usual limit (Windows has none)."
    with contextlib.suppress(ImportError):
        import resource
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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


def check_description(about):
    """What train.json says, before it is believed: a stranger's dtype could have bytes followed as
    pointers, and a stranger's name could lie outside the folder."""
    shards = about['shards']
    is_count = lambda value, least: isinstance(value, int) and value >= least
    for wrong, what in (
            (not is_count(about['n_vocab'], 1), 'n_vocab is no number of tokens'),
            (about['dtype'] not in ('uint16', 'uint32'), f'dtype={about["dtype"]} is no token\'s'),
            (about.get('row') is not None, 'it is of an older form, last read at c326a08'),
            (not all(isinstance(kind, str) for kind in about['kinds']), 'kinds are no names'),
            (not all(isinstance(about[name], str) for name in ('tokenizer', 'fingerprint')),
             'tokenizer or fingerprint is no name'),
            (not is_count(about['tokens'], 0), 'tokens is no number of them'),
            (len(about['kinds']) >= 128, 'there are more kinds than marks'),
            (not shards, 'there are no shards'),
            (not all(is_count(shard['tokens'], 0) and Path(shard['file']).name == shard['file']
                     and '.bin' in shard['sha256'] and shard['sha256'].keys() <= ENDINGS
                     for shard in shards), 'a shard is not what a shard should be')):
        if wrong:
            raise ValueError(what)


# ------------------------------------------------------------------------------------------ batches

START = 128         # what a mark has more where an answer begins
PERIOD = 1000       # a mixture's shares are exact in every thousand rows


class Loader:
    """Batches of `batch_size` rows for all ranks together; this rank gets its equal part of them.
    `data` is a folder or a list of them in equal parts, `starts` the tokens that
    are put before each row, which is a window out of the middle of a text. Datasets have fixed
    shares, as in "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A. (It does not say
    how they are read: here without repeats within an epoch, and the next one in another order.)"""

    def __init__(self, data, batch_size, context, *, split='train', seed=0, rank=0,
                 world_size=1, vocab_size=None, starts=()):
        self.starts = list(starts)
        data = [data] if isinstance(data, (str, Path)) else list(data)
        if not data:
            raise Refused('data names no folder')
        parts = [part for folder in data for part in mixture(folder)]
        data, weights = zip(*parts)
        if batch_size % world_size:
            raise Refused(f'batch_size={batch_size} does not divide among {world_size} ranks')
        self.sets = [Dataset(folder, split, context) for folder in data]
        refuse_mixed(self.sets)
        self.kinds = list(dict.fromkeys(kind for s in self.sets for kind in s.kinds))
        self.marks = [self.own_marks(s.kinds) for s in self.sets]
        self.quota = shares(weights, PERIOD)
        if min(self.quota) == 0:
            raise Refused(f'{data}: a share below 1 in {PERIOD} rows would never be drawn')
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self.vocab_size = self.sets[0].n_vocab if vocab_size is None else vocab_size

    @property
    def tokenizer(self):
        return self.sets[0].tokenizer

    def own_marks(self, kinds):
        "A dataset's marks as ours: its second kind may be the first of all datasets together."
        own = np.arange(256)
        for mark, kind in enumerate(kinds, 1):
            own[mark] = self.kinds.index(kind) + 1
            own[mark + START] = own[mark] + START
        return own

    def __len__(self):
        "Batches until some dataset has been seen once."
        rows = min(len(s) * PERIOD // q for s, q in zip(self.sets, self.quota))
        return max(1, rows // self.batch_size)

    def passes(self, batches):
        "How often the dataset that is read most has been read after so many batches."
        rows = batches * self.batch_size
        return max(rows * quota / PERIOD / len(s) for s, quota in zip(self.sets, self.quota))

    def checksums(self):
        return [sums for dataset in self.sets for sums in dataset.checksums]

    def forms(self):
        "[[dtype, kinds]] of each dataset: how its bytes are read."
        return [[each.dtype, each.kinds] for each in self.sets]

    def shares(self):
        "[[folder, its rows of every thousand]]: with checksums and forms, all that is read."
        return [[dataset.folder.name, quota] for dataset, quota in zip(self.sets, self.quota)]

    def places(self, first, n):
        "Of n rows of the whole run, from `first` on: (which dataset, which epoch, which window)."
        rows = np.arange(first, first + n)
        which, count = np.empty(n, np.int64), np.empty(n, np.int64)
        for period in np.unique(rows // PERIOD).tolist():
            key = seed_for(self.seed, 'mixture', period)
            turns = np.repeat(np.arange(len(self.sets)), self.quota)
            turns = turns[permute(np.arange(PERIOD), PERIOD, key)]
            here = rows // PERIOD == period
            slots = rows[here] % PERIOD
            which[here] = turns[slots]
            for d, quota in enumerate(self.quota):
                before = np.cumsum(turns == d) - 1      # rows of this dataset, in this period
                its = here & (which == d)
                count[its] = period * quota + before[rows[its] % PERIOD]
        epoch, window = np.empty(n, np.int64), np.empty(n, np.int64)
        for d, dataset in enumerate(self.sets):
            its = which == d
            epoch[its], window[its] = np.divmod(count[its], len(dataset))
            for e in np.unique(epoch[its]).tolist():
                key = seed_for(self.seed, f'epoch of dataset {d}', e)
                of_epoch = its & (epoch == e)
                window[of_epoch] = permute(window[of_epoch], len(dataset), key)
        return which, epoch, window

    def batch(self, step):
        "(tokens, targets) of a step: (B, T) each."
        return self.marked_batch(step)[:2]

    def marked_batch(self, step, again=True):
        """The batch, and the kind of each target: (B, T) three times. again=False leaves out rows
        that were there before: small data are gone through several times."""
        share = self.batch_size // self.world_size
        which, epoch, window = self.places(step * self.batch_size + self.rank * share, share)
        if not again:
            which, window = which[epoch == 0], window[epoch == 0]
        T = self.sets[0].context
        parts = [np.empty((len(which), T), np.int64) for _ in range(3)]
        for d in np.unique(which):
            here, dataset = np.flatnonzero(which == d), self.sets[d]
            tokens, targets, marks = dataset.windows(window[here])
            tops = np.maximum(tokens.max(1), targets.max(1))
            if tops.max() >= self.vocab_size:
                wrong = np.argmax(tops >= self.vocab_size)
                raise Refused(f'{dataset.folder}: token id {tops[wrong]} in window '
                              f'{window[here][wrong]} is past the vocabulary of '
                              f'{self.vocab_size}; was it made with another tokenizer than '
                              f'{self.tokenizer!r}?')
            for part, values in zip(parts, (tokens, targets, self.marks[d][marks])):
                part[here] = values
        return tuple(map(torch.from_numpy, self.begun(*parts)))

    def begun(self, *parts):
        """Rows behind the tokens that begin a text, which count in no loss. A row that begins a
        text by itself stays as it is, and is padded to the same length."""
        n = len(self.starts)
        if not n:
            return parts
        own = (parts[0][:, :n] == self.starts).all(1)[:, None]
        parts = [np.where(own, np.pad(part, ((0, 0), (0, n)), constant_values=value),
                          np.pad(part, ((0, 0), (n, 0)), constant_values=value))
                 for part, value in zip(parts, (0, -1, 0))]
        parts[0][:, :n] = self.starts
        return parts


def refuse_mixed(sets):
    "One model reads one tokenizer. Of two tokenizers that are called alike, the fingerprints tell."
    first, *others = sets
    for other in others:
        if other.fingerprint != first.fingerprint:
            raise Refused(f'{first.folder} was made with the tokenizer {first.tokenizer!r}, but '
                          f'{other.folder} with {other.tokenizer!r}, which cuts text otherwise: '
                          'one model reads one tokenizer')


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
