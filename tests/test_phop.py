"""p-hop: each answer by a slow second form that reads the text, examples by hand, and what can be
guessed from the letter before an answer."""
import collections
import random
import runpy

import numpy as np
import pytest
from conftest import ROOT

from nanodepth.common.errors import Refused
from nanodepth.data.tokens import Dataset, Loader

prepare = runpy.run_path(str(ROOT / 'data/phop/prepare.py'))
hops, phop = prepare['hops'], prepare['phop']


def by_definition(v, p, i):
    "find_p(v, i), places from 0: the latest j <= i with v[j - 1] = v[i], p times."
    for _ in range(p):
        places = [j for j in range(1, i + 1) if v[j - 1] == v[i]]
        if not places:
            return None
        i = places[-1]
    return i


def test_answers_are_what_a_slow_reader_finds():
    rng = random.Random(0)
    for _ in range(200):
        pieces = list(phop(rng, 3, 30))
        text = ''.join(piece for piece, _, _ in pieces)
        assert len(text) == 60 and {kind for _, _, kind in pieces} <= {None, '3 hops'}
        v = text[::2]
        for i, answer in enumerate(text[1::2]):
            place = by_definition(v, 3, i)
            assert answer == ('-' if place is None else v[place])


def test_hops_by_hand():
    # places   0123456: from the last a, the latest b behind an a, the latest c behind a b, ...
    letters = 'abcabca'
    assert hops(letters, 1) == [None, None, None, 1, 2, 3, 4]
    assert hops(letters, 2) == [None, None, None, None, None, 1, 2]
    assert hops('aab', 1) == [None, 1, None]         # a place may hop to itself
    assert hops(letters, 0) == [*range(7)]


def test_what_a_guess_from_the_last_letter_is_worth():
    """More than a quarter, as in the published task: a letter after its like hops to itself, and
    four hops among four letters often come back."""
    rng = random.Random(1)
    counts = collections.defaultdict(collections.Counter)
    for _ in range(2000):
        before = ''
        for text, _, kind in phop(rng, 4, 64):
            if kind:
                counts[before][text] += 1
            before = text
    best = sum(max(counter.values()) for counter in counts.values())
    assert 0.5 <= best / sum(sum(counter.values()) for counter in counts.values()) < 0.6


def test_a_dataset_has_its_answers_marked_and_no_example_twice(tmp_path, capsys):
    prepare['main'](['--p=2', '--length=20', '--rows=300', f'--out={tmp_path}'])
    assert 'val: 1,000 examples' in capsys.readouterr().out
    val, train = (Dataset(tmp_path, split, None) for split in ('val', 'train'))
    assert val.kinds == ['2 hops'] and len(train) == 300
    tokens, targets, marks = val.window(0)
    text = bytes(tokens[1:].tolist()).decode()
    answers = ''.join(map(chr, targets[:-1][targets[:-1] >= 0]))    # the last has no token here
    assert answers == text[1::2].replace('-', '')
    assert np.array_equal(marks > 128, targets >= 0)
    rows = [{tuple(data.window(i)[0].tolist()) for i in range(len(data))} for data in (val, train)]
    assert not rows[0] & rows[1]
    assert Loader(tmp_path, 4, val.row - 1).batch(0)[0].shape == (4, val.row - 1)
