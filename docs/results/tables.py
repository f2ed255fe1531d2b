"""Make the tables of README.md and of docs/*.md anew: `python -m docs.results.tables`.

tables.md has each table, with a hole for each number of ours. {depth: text of lidas / ordinary} is
the mean over seeds of the rows of depth.csv that begin so, and with `minus baseline / ordinary` a
difference, seed by seed. ± is half of a 95% interval by Student's t.
"""
import re
from pathlib import Path
from statistics import mean

from nanodepth.report.contrasts import interval, p_of
from nanodepth.report.tables import value_of, read_rows

HERE = Path(__file__).resolve().parent
PAGES = [HERE.parents[1] / 'README.md', *sorted(HERE.parent.glob('*.md'))]
TABLE = re.compile(r'<!-- table (.+?) -->.*?<!-- end -->', re.S)


def fill(hole):
    name, asked = hole[1].split(': ', 1)
    rows, columns, measure = read_rows(HERE / f'{name}.csv'), [], ''
    for sign, term in zip((1, -1), asked.split(' minus ')):
        named, _, side = term.rpartition(' of ')
        measure, side = named or measure, [value_of(word) for word in side.split(' / ')]
        keys = [key for key in rows[0] if key != 'seed'][:len(side)]
        its = [row for row in rows
               if [row[key] for key in keys] == side and row[measure] is not None]
        columns.append({row['seed']: sign * row[measure] for row in its})
        assert 0 < len(its) == len(columns[-1]), f'{term}: {len(its)} rows'
    scale, digits = dict(right=(100, 1), followed=(1, 0)).get(measure.split()[-1], (1, 3))
    seeds = sorted(set.intersection(*map(set, columns)))
    values = [scale * sum(column[seed] for column in columns) for seed in seeds]
    values = values if any(values) else [0]         # every seed's difference is 0
    if len(values) < 3:                             # no interval
        return ', '.join(f'{value:.{digits}f}' for value in values)
    p, sign = p_of(values), '+' * (len(columns) > 1)
    said = f' (p={p:.2g})' if p >= 0.001 else ' (p<0.001)'
    return f'{mean(values):{sign}.{digits}f}±{interval(values):.{digits}f}' + said * bool(sign)


def bold(table):
    "Differences that are resolved: p is below 0.05 divided by the number of p in the table."
    each = re.compile(r'(\S+)( \(p[=<]([\d.e-]+)\))')
    n = len(each.findall(table))
    return each.sub(lambda at: f'**{at[1]}**{at[2]}' if float(at[3]) * n < 0.05 else at[0], table)


def made(page):
    tables = {at[1]: at[0] for at in TABLE.finditer((HERE / 'tables.md').read_text('utf-8'))}
    return TABLE.sub(lambda at: bold(re.sub(r'\{(.+?)\}', fill, tables[at[1]])),
                     page.read_text('utf-8'))


if __name__ == '__main__':
    for page in PAGES:
        page.write_text(made(page), encoding='utf-8')
