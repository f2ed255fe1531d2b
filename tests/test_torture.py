"A few seconds of torture.py, in one process: nonsense on the command line, damaged files."
import itertools
import random
import time

import pytest
import torture


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    return torture.World(tmp_path_factory.mktemp('world'))


def some(world, part, n, seed):
    "What becomes of the first n attacks of a part."
    rng, found = random.Random(seed), []
    attacks = torture.PARTS[part](rng, world, time.monotonic() + 1000)
    for about, what, words in itertools.islice(attacks, n):
        assert what in ('done', 'refused'), f'{about}: {what}\n{words}'
        found.append(what)
    return found


@pytest.mark.parametrize('part, n', [('lines', 5), ('flips', 40), ('disks', 1)])
def test_nothing_but_a_line_or_something_sensible(world, part, n, monkeypatch):
    monkeypatch.chdir(world.folder)
    monkeypatch.setattr(torture, 'SECONDS', 100)        # a busy machine is no finding
    assert 'refused' in some(world, part, n, f'quick {part}')
