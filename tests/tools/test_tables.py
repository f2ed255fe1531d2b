"Test that the tables of the pages are what docs/results/tables.py makes from the rows."
import re

import pytest

from docs.results import tables

# Does a row with this status need a resolved (bold) difference? A claim that nothing changes is
# reproduced if the difference is not resolved.
NEEDS_BOLD = {'reproduced': True, 'shown': True, 'not reproduced': True,
              'reproduced: no change found': False, 'open': False, 'not tested': False}


def rows_of_claims():
    "Yield the cells of each row of RESULTS in a table that ends in a column `status`."
    text = (tables.HERE.parent / 'RESULTS.md').read_text('utf-8')
    for table in tables.TABLE.finditer(text):
        rows = [[cell.strip() for cell in line.strip('|').split('|')]
                for line in table[0].splitlines() if line.startswith('|')]
        if rows[0][-1] == 'status':
            yield from rows[2:]


@pytest.mark.parametrize('page', tables.PAGES, ids=lambda page: page.name)
def test_filling_the_tables_again_changes_nothing(page):
    assert tables.made(page) == page.read_text('utf-8'), 'type python -m docs.results.tables'


def test_status_says_whether_the_difference_is_resolved():
    rows = list(rows_of_claims())
    assert len(rows) > 80
    for *_, ours, status in rows:
        names = [name for name in NEEDS_BOLD if status.startswith(name)]
        assert names, f'RESULTS does not explain the status {status!r}'
        name = max(names, key=len)
        assert NEEDS_BOLD[name] == ('**' in ours), f'{ours} is not {status}'
        assert (name == 'not tested') == (ours == ''), f'{ours} is not {status}'
        if 'no change found' in name:
            interval = re.search(r'([\d.]+)±([\d.]+)', ours)
            assert ours.startswith('0.0 ') or float(interval[1]) <= float(interval[2]) <= 0.01


def test_each_p_has_its_number_of_seeds():
    for *_, ours, _ in rows_of_claims():
        assert not re.search(r'\(p[=<]', ours) or re.search(r'\(p[=<][\d.e-]+\) \[\d+\]', ours)


def test_a_difference_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, 'HERE', tmp_path)     # sd sqrt(.001), t of 4 degrees is 2.776
    rows = ''.join(f'{seed},a,{1.5 + seed / 50}\n{seed},b,1\n' for seed in range(5))
    (tmp_path / 'x.csv').write_text(f'seed,run,loss\n{rows}5,a,9\n')      # b has no seed 5
    assert tables.fill([..., 'x: loss of a minus b']) == '+0.540±0.039 (p<0.001) [5]'
