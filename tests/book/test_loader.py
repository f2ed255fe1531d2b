"Test training/loader.py: which rows a run reads, in which order."
import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from helpers import ROOT, shard_of, write_dataset

from model import Refused
from training import loader as loader_file
from training.loader import Loader
from training.plan import seed_for


def shuffled(seed, items):
    "Return items in an order drawn by numpy's RandomState, which never changes."
    items = np.array(items)
    np.random.RandomState([*divmod(seed, 2 ** 32)]).shuffle(items)
    return items.tolist()


def rows_slowly(loader):
    "Yield (epoch, (tokens, targets, marks)) of each row, by counting, from the bytes of the files."
    T, quota = loader.context, loader.quota
    shards = [shard_of(dataset) for dataset in loader.datasets]
    turns = shuffled(seed_for(loader.seed, 'mixture'), np.repeat([*range(len(quota))], quota))
    if loader.split == 'val':           # each row goes to the dataset that is furthest behind
        turns = []
        for row in range(1, 1001):
            behind = [q * row / 1000 - turns.count(d) for d, q in enumerate(quota)]
            turns.append(behind.index(max(behind)))
    read = [0] * len(quota)
    for d in itertools.cycle(turns):
        shard, names = shards[d], loader.datasets[d].about['kinds']
        windows = (len(shard['.bin']) - 1) // T
        epoch, i = divmod(read[d], windows)
        read[d] += 1
        i = shuffled(seed_for(loader.seed, f'epoch of dataset {d}', epoch), range(windows))[i]
        tokens, targets, marks = shard['.bin'][i * T:i * T + T].tolist(), [], []
        for place in range(i * T + 1, i * T + T + 1):
            counts = '.mask' not in shard or shard['.mask'][place]
            targets.append(int(shard['.bin'][place]) if counts else -1)
            begins, kind = divmod(int(shard['.marks'][place]), 128) if names else (0, 0)
            marks.append(counts and kind and 128 * begins + 1 + loader.kinds.index(names[kind - 1]))
        yield epoch, (tokens, targets, marks)


@pytest.mark.parametrize('folders', ['b', 'abc', 'cba', 'd'])
def test_rows_are_those_of_the_slow_form(tmp_path, monkeypatch, folders):
    """They do not depend on the size of a batch or the number of processes. Kinds of answers have
    one number in a mixture, even if its datasets number them differently. Validation reads each row
    once, until one dataset ends."""
    rng = np.random.default_rng(0)
    for name, n, kinds in (('a', 5000, ['x', 'y']), ('b', 300, ['y', 'z']), ('c', 9000, None),
                           ('d', 8, None)):         # a single window
        tokens, mask = rng.integers(3, 9, n), rng.integers(0, 2, n) if kinds else None
        marks = rng.choice([0, 1, 129, 2, 130], n) if kinds else None
        for split in ('train', 'val'):
            write_dataset(tmp_path / name, split, tokens, mask=mask, marks=marks, kinds=kinds)
    paths = [tmp_path / name for name in folders]
    slow, slow_val = ([*itertools.islice(rows_slowly(Loader(paths, 1, 7, split, 5)), 1008)]
                      for split in ('train', 'val'))
    once = [epoch for epoch, _ in slow_val].index(1)
    rows, val_rows = ([row for _, row in some] for some in (slow, slow_val))

    def read(loader, n):
        "Return the first n rows, from all processes."
        parts = []
        for step in range(-(-n // loader.batch_size)):
            for rank in range(size):
                monkeypatch.setattr(loader_file, 'process', lambda: (rank, size))
                parts.append(loader.batch(step))
        return [torch.cat(part).tolist() for part in zip(*parts)]

    for batch_size, size in ((1, 1), (12, 1), (12, 3), (999, 3)):
        training, val = (Loader(paths, batch_size, 7, split, 5) for split in ('train', 'val'))
        assert val.n_rows == once
        assert read(val, once) == [[*part] for part in zip(*val_rows[:once])]
        if batch_size == 12:        # 1008 rows are 84 batches, the last of which is in two periods
            assert read(training, 1008) == [[*part] for part in zip(*rows)]


def test_the_order_of_rows_never_changes(tmp_path):
    "With these gold values, another platform or version sees the same data in the same order."
    assert seed_for(0, 'epoch of dataset 0', 3) == 8554754645012042060
    write_dataset(tmp_path, 'train', np.arange(81) % 256)
    row = Loader([tmp_path] * 2, 4, 8, seed=1).batch(3)[0][:, 0]
    assert (row // 8).tolist() == [9, 1, 2, 4]


@pytest.mark.parametrize('changes, error', [
    (dict(dtype='object'), Refused), (dict(dtype='float16'), Refused),
    (dict(shards=[dict(file='x.bin', tokens=0, sha256={'.bin': ''})]), Refused),
    (dict(shards=[dict(file='../x.bin', tokens=50, sha256={'.bin': ''})]), OSError)])
def test_a_false_json_is_refused(data, changes, error):
    "With a dtype of objects, Python would follow a stranger's bytes as pointers."
    path = data / 'train.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (data.parent / 'x.bin').write_bytes(bytes(100))
    with pytest.raises(error):
        Loader(data, 1, 8).batch(0)


def test_a_new_loader_reads_the_files_again(tmp_path):
    "In a notebook, data may be made again."
    for token in (1, 2):
        shutil.rmtree(tmp_path / 'd', ignore_errors=True)
        write_dataset(tmp_path / 'd', 'train', [token] * 340)
        assert Loader(tmp_path / 'd', 1, 8).batch(0)[0].unique().tolist() == [token]


def test_missing_toy_data_is_made(config, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(loader_file, 'find', lambda path: tmp_path / path)
    monkeypatch.setattr(loader_file.subprocess, 'run', lambda argv, check: made.append(argv[1]))
    for data, cooldown_data in (('other', None), ('data/toy', None), ('other', ['data/toy'])):
        loader_file.make_toy_data(config(data=data, cooldown_data=cooldown_data))
    # and no script in the current folder
    assert made == [ROOT / 'data/toy/prepare.py'] * 2
