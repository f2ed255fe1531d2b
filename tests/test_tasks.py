"""Tasks of others: each answer by a slow second form that reads the text, examples by hand, and
what can be guessed from the letters before an answer."""
import collections
import random
import runpy

import numpy as np
import pytest
from conftest import ROOT

from common.errors import Refused
from data import tasks
from data.tasks import TASKS, Options, hops
from data.tokens import Dataset, Loader


def by_definition(v, p, i):
    "find_p(v, i), places from 0: the latest j <= i with v[j - 1] = v[i], p times."
    for _ in range(p):
        found = [j for j in range(1, i + 1) if v[j - 1] == v[i]]
        if not found:
            return None
        i = found[-1]
    return i


def read_phop(text, options):
    v = text[::2]
    for i, said in enumerate(text[1::2]):
        place = by_definition(v, options.p, i)
        assert said == ('-' if place is None else v[place])


def read_addition(text, options):
    numbers, total = text.split('=')
    assert sum(map(int, numbers.split('+'))) == int(total) and len(numbers) == 4 * options.n - 1


def read_igsm(text, options):
    lines, asked = text.split('?')
    rules = dict(line.strip().split(':=') for line in lines.split(';'))
    assert len(rules) == options.n

    def value(name):
        if rules[name].isdigit():
            return int(rules[name])
        parts = [part.split('*') for part in rules[name].split('+')]
        return sum(int(factor) * value(other) for factor, other in parts) % 7
    name, said = asked.split('=')
    assert value(name) == int(said) and not rules[name].isdigit()


def read_depo(text, options):
    pairs = text[:3 * options.n - 1]
    questions = text[3 * options.n - 1:]
    after = dict(pairs.split('.'))
    assert len(after) == options.n and len(questions) == 3 * 2 * options.n
    for k, name, said in zip(questions[::3], questions[1::3], questions[2::3]):
        for _ in range('ABCDEFGHIJKLMNOPQRSTUVWXYZ'.index(k) + 1):
            name = after[name]
        assert name == said


@pytest.mark.parametrize('task', TASKS)
def test_answers_are_what_a_slow_reader_finds(task):
    options, rng, lengths = Options(task, p=3, length=30, n=6), random.Random(0), set()
    for _ in range(200):
        pieces = list(TASKS[task](rng, options))
        text = ''.join(piece for piece, _ in pieces)
        globals()[f'read_{task}'](text, options)
        lengths.add(len(text))
        assert {kind for _, kind in pieces} <= {None, *tasks.kinds_of(options)}
    assert len(lengths) == 1


def test_hops_by_hand():
    # places   0123456: from the last a, the latest b behind an a, the latest c behind a b, ...
    letters = 'abcabca'
    assert hops(letters, 1) == [None, None, None, 1, 2, 3, 4]
    assert hops(letters, 2) == [None, None, None, None, None, 1, 2]
    assert hops('aab', 1) == [None, 1, None]         # a place may hop to itself
    assert hops(letters, 0) == [*range(7)]


@pytest.mark.parametrize('task, least, most', [('phop', 0.5, 0.6), ('igsm', 0, 0.22),
                                               ('depo', 0, 0.12)])
def test_what_a_guess_from_the_last_letters_is_worth(task, least, most):
    """Of p-hop more than a quarter, as in the published task: a letter after its like hops to
    itself, and four hops among four letters often come back."""
    rng, options = random.Random(1), Options(task, p=4, length=64, n=6)
    counts = collections.defaultdict(collections.Counter)
    for _ in range(2000):
        before = ''
        for text, kind in TASKS[task](rng, options):
            if kind:
                counts[kind, before[-2] if task == 'igsm' else before[-1]][text] += 1
            before = (before + text)[-4:]
    best = sum(max(counter.values()) for counter in counts.values())
    assert least <= best / sum(sum(counter.values()) for counter in counts.values()) < most


def test_a_dataset_has_its_answers_marked_and_no_example_twice(tmp_path, capsys):
    tasks.main(['depo', '--p=3', '--n=6', '--rows=300', f'--out={tmp_path}'])
    assert 'val: 1,000 examples' in capsys.readouterr().out
    val, train = (Dataset(tmp_path, split, None) for split in ('val', 'train'))
    assert val.kinds == ['1 later', '2 later', '3 later'] and len(train) == 300
    tokens, targets, marks = val.window(0)
    text = bytes(tokens[1:].tolist()).decode()
    answers = targets[targets >= 0]
    assert ''.join(map(chr, answers)) == (text + chr(targets[-1]))[17 + 2::3]
    assert np.array_equal(marks > 128, targets >= 0)
    rows = [{tuple(data.window(i)[0].tolist()) for i in range(len(data))} for data in (val, train)]
    assert not rows[0] & rows[1]
    assert Loader(tmp_path, 4, val.row - 1).batch(0)[0].shape == (4, val.row - 1)


@pytest.mark.parametrize('task', TASKS)
def test_each_task_is_written_with_its_own_sizes(task, tmp_path):
    tasks.main([task, '--rows=20', f'--out={tmp_path}'])
    assert len(Dataset(tmp_path, 'train', None)) == 20


def test_sizes_that_cannot_be(tmp_path):
    with pytest.raises(Refused, match='leads round a cycle of --n=4'):
        tasks.main(['depo', '--p=4', '--n=4', f'--out={tmp_path}'])
    with pytest.raises(Refused, match='too few different examples'):
        tasks.main(['phop', '--p=1', '--length=2', f'--out={tmp_path}'])
    assert not list(tmp_path.iterdir())         # nothing was written
    with pytest.raises(Refused, match='--n=5 has no effect on phop, whose sizes are --p'):
        tasks.main(['phop', '--n=5', f'--out={tmp_path}'])
    with pytest.raises(Refused, match="did you mean 'phop'"):
        tasks.main(['hop', f'--out={tmp_path}'])
    assert 'main' in runpy.run_path(str(ROOT / 'data/tasks.py'))
