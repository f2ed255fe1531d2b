"Test docs/results/tables.py: the tables on the pages are those that the rows give."
import pytest

from docs.results import tables


@pytest.mark.parametrize('page', tables.PAGES, ids=lambda page: page.name)
def test_the_pages_have_the_tables_of_the_rows(page):
    assert tables.made(page) == page.read_text('utf-8'), 'type python -m docs.results.tables'


def test_a_difference_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, 'HERE', tmp_path)     # sd sqrt(.001), t of 4 degrees is 2.776
    rows = ''.join(f'{seed},a,{1.5 + seed / 50}\n{seed},b,1\n' for seed in range(5))
    (tmp_path / 'x.csv').write_text(f'seed,run,loss\n{rows}5,a,9\n')      # b has no seed 5
    assert tables.fill([..., 'x: loss of a minus b']) == '+0.540±0.039 (p<0.001)'
