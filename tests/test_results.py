"""The evidence: verdicts by hand, and the tables.

Promised: Student's t, Holm's correction and each verdict as in any textbook; tables that are made
from rows and from nothing else; and that the pages are what docs/results says.
"""
import math
import re
import runpy
import tomllib
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import ROOT

from nanodepth.report.contrasts import Contrast
from nanodepth.report.tables import as_csv, read_rows

check = SimpleNamespace(**runpy.run_path(str(ROOT / 'docs/results/check.py')))


def test_a_contrast_by_hand():
    contrast = Contrast([3.0, 5.0, 7.0, 5.0], [1.0, 4.0, 4.0, 3.0])        # 2, 1, 3, 2
    assert contrast.mean == 2 and contrast.error == pytest.approx(math.sqrt(2 / 3 / 4))
    assert contrast.interval(0.95) == pytest.approx((2 - 3.182 * 0.40825, 2 + 3.182 * 0.40825),
                                                 abs=1e-3)
    assert contrast.p == pytest.approx(0.0163, abs=2e-4)
    assert Contrast([1.0, 2.0], [1.0, 2.0]).p == 1


def test_holm_by_hand():
    assert check.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert check.holm([0.5, 0.9]) == [1.0, 1.0]


def test_no_section_has_more_than_five_primary_claims():
    "Holm's correction is over them, so each one makes the others harder to show."
    claims = tomllib.loads((ROOT / 'docs/results/claims.toml').read_text())['claim']
    assert max(Counter(c['section'] for c in claims if c.get('primary')).values()) <= 5


TABLES = {}


def claim_of(contrast, direction):
    "A claim about rows of which that contrast is the difference."
    name = f'table {len(TABLES)}'
    TABLES[name] = [dict(run=run, seed=seed, x=value) for run, values in (
        ('a', contrast.a), ('b', contrast.b)) for seed, value in enumerate(values)]
    return dict(table=name, measure='x', unit='answers', a=dict(run='a'), b=dict(run='b'),
                direction=direction, primary=True)


@pytest.mark.parametrize('changes, direction, said', [
    ([1.0, 1.1, 0.9, 1.0], 1, 'holds'), ([1.0, 1.1, 0.9, 1.0], -1, 'does not hold'),
    ([0.001, -0.002, 0.001, 0.0], 1, 'no difference'),
    ([0.001, -0.002, 0.001, 0.0], 0, 'holds'), ([1.0, 1.1, 0.9, 1.0], 0, 'does not hold'),
    ([1.0, -1.0, 2.0, 0.0], 1, 'not resolved'), ([0.3], 1, r'not resolved \(1 seed\)'),
    ([], 1, 'not measured yet')])
def test_every_verdict(changes, direction, said):
    contrast = Contrast(changes, [0.0] * len(changes))
    [(*_, text, p)] = check.judged([claim_of(contrast, direction)], TABLES)
    assert re.match(said, text) and p == contrast.p


def test_a_verdict_is_corrected_for_its_section():
    weak = Contrast([1.0, 2.0, 3.0, 1.0, 2.5], [0.0] * 5)       # p = .009 alone
    noise = [Contrast([1.0, -1.0, 0.5 * k, -0.4, 0.1], [0.0] * 5) for k in range(6)]
    assert check.verdict(weak, weak.p, 0.05, 1) == 'holds'
    several = [claim_of(each, 1) for each in (weak, *noise, *noise)]
    first, *_ = check.judged([*several[:4], several[5] | dict(primary=False)], TABLES)
    assert first[3] == pytest.approx(4 * weak.p) and first[2] == 'holds'
    first, *_, last = check.judged(several, TABLES)
    assert first[2].startswith('not resolved')


CLAIM = '''
[[claim]]
section = 'growing'
claim = 'a is above b'
paper = 'x'
table = 'depth'
measure = 'depth 4'
beside = 'depth 4 right'
unit = 'answers'
a = {run = 'lidas', way = 'ordinary'}
b = {run = 'baseline', way = 'ordinary'}
direction = 1
primary = true

[[written]]
name = 'words'
table = 'depth'
head = ['idea', 'seen']
lines = [['looping', "{run = 'lidas', way = 'looped', measure = 'depth 4 right'}%"],
    ['cells', """{run = 'lidas', way = 'ordinary', measure = 'depth 4 right', round = true}, \\
      {run = 'lidas', way = 'looped', measure = 'depth 4', less = {way = 'ordinary'}}, \\
      {run = 'lidas', way = 'ordinary', measure = 'text', share_of = {run = 'baseline'}}"""]]
'''
FRAME = '''Before
<!-- table growing -->
stale
<!-- end -->
between
<!-- table words --><!-- end -->
'''


@pytest.fixture
def folder(tmp_path):
    rows = [dict(seed=seed, run=run, way=way, added=0,
                 text=(2.0 + seed / 100) * (2 if run == 'baseline' else 1),
                 **{'depth 4': value + seed * 0.1 + (way == 'looped'), 'depth 4 right': 0.5})
            for seed in range(5) for run, value in (('lidas', -0.5), ('baseline', -1.0 - seed / 50))
            for way in ('ordinary', 'looped')]
    rows.append(rows[0] | dict(seed=5))         # of a sixth seed there is no other row
    (tmp_path / 'depth.csv').write_bytes(as_csv(rows))
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


def test_a_difference_of_differences(folder):
    rows = read_rows(folder / 'depth.csv')
    claim = dict(measure='depth 4', unit='answers', a=dict(run='lidas', way='looped'),
                 less_a=dict(run='lidas', way='ordinary'), b=dict(run='baseline', way='looped'),
                 less_b=dict(run='baseline', way='ordinary'))
    found = check.contrast(claim, rows)
    assert found.n == 5 and found.mean == pytest.approx(0, abs=1e-6)
    assert found.a == pytest.approx([1] * 5)
    found = check.contrast(claim | dict(part_b=0.5, shift_b=-0.25), rows)     # a margin
    assert found.b == pytest.approx([0.25] * 5)
    with pytest.raises(AssertionError, match='several rows of one seed'):
        check.values_of(rows, dict(run='lidas'), 'depth 4')
    # of rows that a side describes, those in which the measure has a number, and 0 is one
    rows = [dict(seed=seed, added=float(seed == 3), loss=loss)
            for seed, loss in enumerate((1.5, '', 0.0, 2.0))]
    assert check.values_of(rows, dict(added=0), 'loss') == {0: 1.5, 2: 0.0}


# what tells the rows of a table apart, or where they were made


def test_the_papers_of_this_repo_say_what_its_rows_say():
    "The pages are what docs/results/check.py makes of its rows."
    tables = check.all_tables()
    for name in check.TEXTS:
        text = (ROOT / name).read_text()
        assert check.made(text, tables) == text, f'{name}: python -m docs.results.check says where'


def test_the_front_page_says_how_long_the_seven_are():
    said = re.findall(r'\| \[`(\w+\.py)`\]\(\1\) \| (\d+) \|', (ROOT / 'README.md').read_text())
    assert len(said) == 7 and {name: (ROOT / name).read_text().count('\n') for name, _ in said} == {
        name: int(lines) for name, lines in said}
