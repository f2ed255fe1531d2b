"A few seconds of torture.py, in one process: nonsense on the command line, damaged files."
import random
import time

import pytest
import torture


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    return torture.World(tmp_path_factory.mktemp('world'))


@pytest.mark.parametrize('part, least', [('lines', 3), ('flips', 20)])
def test_nothing_but_a_line_or_something_sensible(world, part, least, monkeypatch):
    monkeypatch.chdir(world.folder)
    monkeypatch.setattr(torture, 'SECONDS', 100)        # a busy machine is no finding
    until, found = time.monotonic() + 4, []
    for about, what, words in torture.PARTS[part](random.Random(f'quick {part}'), world, until):
        assert what in ('done', 'refused'), f'{about}: {what}\n{words}'
        found.append(what)
    assert len(found) >= least and len(set(found)) == 2


def test_a_disk_that_is_full_is_one_line_and_the_next_time_it_goes_on(world, monkeypatch):
    monkeypatch.chdir(world.folder)
    seen = []
    for about, what, words in torture.disks(random.Random(3), world, time.monotonic() + 2):
        assert what in ('done', 'refused'), f'{about}: {what}\n{words}'
        seen.append(what)
    assert 'refused' in seen
