"The evidence: verdicts and tables by hand, and the pages are what docs/results says."
import re
import runpy
from types import SimpleNamespace

import pytest
from conftest import ROOT

from nanodepth.report.tables import write_csv

check = SimpleNamespace(**runpy.run_path(str(ROOT / 'docs/results/check.py')))


def test_holm_by_hand():
    assert check.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert check.holm([0.5, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize('changes, direction, said', [
    ([1.0, 1.1, 0.9, 1.0], 1, 'holds'), ([1.0, 1.1, 0.9, 1.0], -1, 'does not hold'),
    ([0.001, -0.002, 0.001, 0.0], 1, 'no difference'),
    ([0.001, -0.002, 0.001, 0.0], 0, 'holds'), ([1.0, 1.1, 0.9, 1.0], 0, 'does not hold'),
    ([1.0, -1.0, 2.0, 0.0], 1, 'not resolved'), ([0.3], 1, 'not resolved (1 seed)'),
    ([], 1, 'not measured yet')])
def test_verdict_of_changes(changes, direction, said):
    contrast = check.Contrast(changes, [0.0] * len(changes))
    assert check.verdict(contrast, contrast.p, 0.02, direction).startswith(said)


def test_verdict_is_corrected():
    "One that is not primary has no verdict, and makes the others no harder to show."
    values = dict(weak=[1.0, 2.0, 3.0, 1.0, 2.5], noise=[1.0, -1.0, 0.5, -0.4, 0.1])
    tables = {name: [dict(run=run, seed=seed, x=value * (run == 'a')) for run in 'ab'
                     for seed, value in enumerate(its)] for name, its in values.items()}

    def verdicts(*names, other=()):
        claims = [dict(table=name, measure='x', unit='answers', a=dict(run='a'), b=dict(run='b'),
                       direction=1, primary=name not in other) for name in names]
        return [(said, p) for _, _, said, p in check.judged(claims, tables)]
    p = check.Contrast(values['weak'], [0.0] * 5).p           # 0.009 alone
    assert verdicts('weak', 'noise', other=('noise',)) == [('holds', pytest.approx(p)), ('', '')]
    first, *_ = verdicts('weak', *['noise'] * 3)
    assert first == ('holds', pytest.approx(4 * p))
    first, *_ = verdicts('weak', *['noise'] * 12)
    assert first[0].startswith('not resolved')


CLAIM = '''
[[claim]]
section = 'growing'
claim = 'a is above b'
paper = 'x'
table = 'depth'
measure = 'aliases 4'
beside = 'aliases 4 right'
unit = 'answers'
a = {run = 'lidas', way = 'ordinary'}
b = {run = 'baseline', way = 'ordinary'}
direction = 1
primary = true

[[written]]
name = 'words'
table = 'depth'
head = ['idea', 'seen']
lines = [['looping', "{run = 'lidas', way = 'looped', measure = 'aliases 4 right'}%"],
    ['cells', """{run = 'lidas', way = 'ordinary', measure = 'aliases 4 right', round = true}, \\
      {run = 'lidas', way = 'looped', measure = 'aliases 4', less = {way = 'ordinary'}}, \\
      {run = 'lidas', way = 'ordinary', measure = 'text', share_of = {run = 'baseline'}}"""]]
'''
FRAME = ('Before\n<!-- table growing -->\nstale\n<!-- end -->\n'
         'between\n<!-- table words --><!-- end -->\n')


@pytest.fixture
def folder(tmp_path):
    rows = [dict(seed=seed, run=run, way=way, added=0,
                 text=(2.0 + seed / 100) * (2 if run == 'baseline' else 1),
                 **{'aliases 4': value + seed * 0.1 + (way == 'looped'), 'aliases 4 right': 0.5})
            for seed in range(5) for run, value in (('lidas', -0.5), ('baseline', -1.0 - seed / 50))
            for way in ('ordinary', 'looped')]
    rows.append(rows[0] | dict(seed=5))         # of a sixth seed there is no other row
    write_csv(rows, tmp_path / 'depth.csv')
    (tmp_path / 'claims.toml').write_text(CLAIM)
    (tmp_path / 'R.md').write_text(FRAME)
    return tmp_path


def test_tables_by_hand(folder):
    tables = check.all_tables(folder)
    text = check.made((folder / 'R.md').read_text(), tables)
    # lidas minus baseline: 0.5 + seed / 50, mean 0.54, sd sqrt(.001), t of 4 degrees 2.776
    assert '**+0.540** ± 0.039 (right: 50% against 50%) (5) | holds, 2.8e-06 |' in text
    assert '| looping | 50.0 ± 0.0% |' in text
    assert '| cells | 50, +1.000 ± 0.000, 50% |' in text
    assert text.startswith('Before\n<!-- table growing -->') and 'stale' not in text
    assert check.made(text, tables) == text             # made again, it is the same


def test_contrast_of_differences(folder):
    rows = check.read_rows(folder / 'depth.csv')
    claim = dict(measure='aliases 4', unit='answers', a=dict(run='lidas', way='looped'),
                 less_a=dict(run='lidas', way='ordinary'), b=dict(run='baseline', way='looped'),
                 less_b=dict(run='baseline', way='ordinary'), part_b=0.5, shift_b=-0.25)
    found = check.contrast(claim, rows)         # part and shift: a margin
    assert found.n == 5
    assert (found.a, found.b) == (pytest.approx([1] * 5), pytest.approx([0.25] * 5))
    with pytest.raises(AssertionError, match='several rows of one seed'):
        check.values_of(rows, dict(run='lidas'), 'aliases 4')
    # of rows that a side describes, those in which the measure has a number, and 0 is one
    rows = [dict(seed=seed, added=float(seed == 3), loss=loss)
            for seed, loss in enumerate((1.5, '', 0.0, 2.0))]
    assert check.values_of(rows, dict(added=0), 'loss') == {0: 1.5, 2: 0.0}


def test_pages_say_what_the_rows_say():
    "The pages are what docs/results/check.py makes of its rows."
    tables = check.all_tables()
    for name in check.TEXTS:
        text = (ROOT / name).read_text()
        assert check.made(text, tables) == text, f'{name}: python -m docs.results.check says where'
