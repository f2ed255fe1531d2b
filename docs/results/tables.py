"""Fill the tables of README.md and of docs/*.md with our numbers: `python -m docs.results.tables`.

tables.md has each table, with a hole for each number. {depth: text of lidas / ordinary} is filled
with the mean over seeds of the rows of depth.csv that begin with these words. If `minus baseline /
ordinary` follows, it is the mean difference, seed by seed: ± half of a 95% interval (Student's t),
its p, and in square brackets the number of seeds.
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
    "Return what replaces a hole of tables.md."
    name, terms = hole[1].split(': ', 1)
    rows, columns, measure = read_rows(HERE / f'{name}.csv'), [], ''
    for factor, term in zip((1, -1), terms.split(' minus ')):
        named, _, side = term.rpartition(' of ')
        measure, side = named or measure, [value_of(word) for word in side.split(' / ')]
        keys = [key for key in rows[0] if key != 'seed'][:len(side)]
        found = [row for row in rows
                 if [row[key] for key in keys] == side and row[measure] is not None]
        columns.append({row['seed']: factor * row[measure] for row in found})
        assert 0 < len(found) == len(columns[-1]), f'{term}: {len(found)} rows'
    scale, digits = dict(right=(100, 1), followed=(1, 0)).get(measure.split()[-1], (1, 3))
    seeds = sorted(set.intersection(*map(set, columns)))
    values = [scale * sum(column[seed] for column in columns) for seed in seeds]
    is_difference = len(columns) == 2
    sign, n = ('+', f' [{len(seeds)}]') if is_difference else ('', '')
    if not any(values):                             # every seed's difference is 0
        return f'{0:.{digits}f}{n}'
    if len(values) < 3:                             # no interval
        return ', '.join(f'{value:{sign}.{digits}f}' for value in values) + n
    text = f'{mean(values):{sign}.{digits}f}±{interval(values):.{digits}f}'
    if is_difference:
        p = p_of(values)
        text += (f' (p={p:.2g})' if p >= 0.001 else ' (p<0.001)') + n
    return text


def bold(table):
    """Set resolved differences in bold: their p is below 0.05 / (the number of p in the table). A
    line under the table names this limit."""
    difference = re.compile(r'(\S+)( \(p[=<]([\d.e-]+)\))')
    n = len(difference.findall(table))
    if not n:
        return table
    limit = f'*({n} p values: a difference is resolved if its p is below {0.05 / n:.4f}.)*'
    table = difference.sub(
        lambda at: f'**{at[1]}**{at[2]}' if float(at[3]) * n < 0.05 else at[0], table)
    return table.replace('<!-- end -->', f'{limit}\n\n<!-- end -->')


def made(page):
    "Return the text of a page, with its tables filled."
    tables = {at[1]: at[0] for at in TABLE.finditer((HERE / 'tables.md').read_text('utf-8'))}
    return TABLE.sub(lambda at: bold(re.sub(r'\{(.+?)\}', fill, tables[at[1]])),
                     page.read_text('utf-8'))


if __name__ == '__main__':
    for page in PAGES:
        page.write_text(made(page), encoding='utf-8')
