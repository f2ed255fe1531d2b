"""Rows of numbers, each a dict: averaged over seeds, as tables on the screen, or as a CSV file.
lidas-0, lidas-1 and lidas-2 are one group, lidas, over three seeds.
Usage: over_seeds(rows, ['r'], ['loss'])    # [{'run': 'lidas', 'r': 2, 'loss': 0.7, ...}]
"""
import csv
import io
import math
import re
from pathlib import Path
from typing import NamedTuple

from nanodepth.common.files import replace
from nanodepth.model import require
from nanodepth.report.contrasts import error_of, interval, mean, p_of, verdict

PLAIN = 'as it is'          # the way of a model that nothing changes


class Unit(NamedTuple):
    "How scores of one kind are written."
    word: str
    factor: int             # from a score to what is written
    digits: str
    less_is_better: bool


UNITS = dict(
    nats=Unit('nats', 1, '.3f', True), log_prob=Unit('nats', 1, '.3f', False),
    share=Unit('%', 100, '.1f', False), score=Unit('', 1, '.3g', False),
    less=Unit('less is better', 1, '.3g', True))


class Score(NamedTuple):
    "How good a model is at something."
    kind: str               # of UNITS
    mean: float
    error: float | None     # its standard error, where there is one
    answers: list           # what each question, document or row of data gave; [] if not known
    chance: float | None = None


def where(rows, **values):
    return [row for row in rows if all(row.get(key) == value for key, value in values.items())]


def run_names(paths):
    "{name: path}: the last part of each path, where that tells them apart."
    names = [Path(path).absolute().name for path in paths]
    return dict(zip(names if len(set(names)) == len(names) else map(str, paths), paths))


def names_of(run):
    """lidas-1 is the seed 1 of the group lidas, also as a kept checkpoint, lidas-1/step_9.pt. The
    last number of cut_2-4-2 is no seed."""
    match = re.fullmatch(r'(.*)-(\d+)(/[^/]*\.pt)?', run)
    if not match or re.search(r'_\d+-\d+$', match[1]):
        return dict(run=run, group=run)
    return dict(run=run, group=match[1] + (match[3] or ''), seed=int(match[2]))


def grouped(rows):
    "{group of seeds: its rows}: a row says its group, or it is a run by itself."
    names = dict.fromkeys(row.get('group', row['run']) for row in rows)
    return {name: [row for row in rows if row.get('group', row['run']) == name] for name in names}


def over_seeds(rows, settings, kinds):
    """A row for each group of seeds and each setting: the mean of every number, and the standard
    error of every kind under 'KIND se'."""
    averaged = []
    for group, group_rows in grouped(rows).items():
        for at in dict.fromkeys(tuple(row[key] for key in settings) for row in group_rows):
            seeds = where(group_rows, **dict(zip(settings, at)))
            errors = {f'{kind} se': error_of([row[kind] for row in seeds]) for kind in kinds}
            averaged.append(seeds[0] | errors | dict(run=group, seeds=len(seeds)))
            for key in seeds[0].keys() - {*settings}:
                values = [row.get(key) for row in seeds]
                if all(isinstance(value, (int, float)) for value in values):
                    averaged[-1][key] = mean(values)
    return averaged


# ---------------------------------------------------------------------------------- on the screen

def columns(lines):
    "A table, for a screen or a Markdown file, of lines of cells, a heading first."
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines = [lines[0], ['-' * width for width in widths], *lines[1:]]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, cells, widths)) + ' |' for cells in lines)


def number(value, error=None, kind='nats', sign=''):
    "A mean and, where there is one, its standard error: 0.694 (0.002), or of a share 97.3 (0.6)."
    unit = UNITS[kind]
    after = '' if error is None else f' ({unit.factor * error:{unit.digits}})'
    return f'{unit.factor * value:{sign}{unit.digits}}{after}'


def cell(row):
    "A score with its error over the seeds, or else over the questions; of a way, the change too."
    one = row['seeds'] == 1
    text = number(row['mean'], row['error'] if one else row['mean se'], row['kind'])
    if row['way'] == PLAIN or math.isnan(row['change']):
        return text
    p = '' if not one or row['p'] is None else f', p {row["p"]:.3f}'.replace('p 0.000', 'p < 0.001')
    error = row['change_error'] if one else row['change se']
    return f'{text} [{number(row["change"], error, row["kind"], "+")}{p}]'


def print_tables(rows):
    "Averaged over seeds: what runs in each way, where that differs, and the scores."
    rows = over_seeds(rows, ['way', 'measure'], ['mean', 'change'])
    heads, lines = {}, {}
    for row in rows:
        unit = UNITS[row['kind']]
        of = f' of {row["n"]:.0f}' if row['kind'] == 'share' and row['n'] else ''
        chance = f' (chance {row["chance"]:.0%})' if row['chance'] else ''
        heads.setdefault(row['measure'], row['measure'] +
                         f', {unit.word}{of}{chance}' * bool(unit.word))
        about = {'model': row['run'], 'way': row['way'], 'layers run': f'{row["layers"]:.0f}',
                 'parameters': f'{row["params"]:,.0f}',
                 'training FLOPs': f'{row["training_flops"]:.2e}'.replace('nan', 'unknown')}
        lines.setdefault((row['run'], row['way']), (about, {}))[1][row['measure']] = cell(row)
    differ = [key for key in about if len({about[key] for about, _ in lines.values()}) > 1]
    table = [[*differ, *heads.values()], *(
        [*(about[key] for key in differ), *(cells.get(measure, '') for measure in heads)]
        for about, cells in lines.values())]
    print(columns(list(zip(*table)) if len(heads) > len(table) + 2 else table))
    changes = '; in []: the change from the model as it is' * (len({way for _, way in lines}) > 1)
    print(f'in (): one standard error{changes}')
    for data in dict.fromkeys(row['data'] for row in rows if row['measure'] == 'loss'):
        print(f'the loss is measured on {data}')


def spelled(values, kind, sign=''):
    "A mean over seeds and half of its 95% interval."
    unit, half = UNITS[kind], interval(values)
    after = '' if half is None else f' ± {unit.factor * half:{unit.digits}}'
    return f'{unit.factor * mean(values):{sign}{unit.digits}}{after}'


def difference(rows, others):
    "[how far rows are from others, seed by seed; its p; what the seeds say]"
    same = lambda row: tuple(row.get(key) for key in ('seed', 'data', 'dtype'))
    theirs = {same(row): row['mean'] for row in others}
    changes = [row['mean'] - theirs[same(row)] for row in rows if same(row) in theirs]
    p = p_of(changes)
    return [spelled(changes, rows[0]['kind'], '+'), '' if p is None else f'{p:.2g}',
            verdict(changes)] if changes else ['', '', 'no seed with equal data and dtype']


def print_differences(rows, bases, measures=()):
    """For each measure a table: the means over seeds, and how they differ seed by seed. bases:
    {group: the groups it is compared with}. A way is compared with the model as it is."""
    made, groups, is_plain = 0, grouped(rows), {row['way'] for row in rows} == {PLAIN}
    base = next((name for name in groups if name not in bases), '')
    cost = lambda group: mean([row['training_flops'] for row in groups.get(group, ())])
    for measure in measures or dict.fromkeys(row['measure'] for row in rows):
        lines = [['model', 'way', 'FLOPs', 'seeds', measure, 'compared with', 'difference', 'p',
                  'so many seeds say']]
        here = where(rows, measure=measure)
        for group, way in dict.fromkeys((row['group'], row['way']) for row in here):
            its = where(here, group=group, way=way)
            share = f'{cost(group) / (cost(base) or math.nan):.0%}'.replace('nan%', '')
            first = [group, way, share, f'{len(its)}',
                     spelled([row['mean'] for row in its], its[0]['kind'])]
            others = {name: where(here, group=name, way=PLAIN) for name in bases.get(group, ())}
            if way != PLAIN:
                others = {PLAIN: where(here, group=group, way=PLAIN)}
            cells = [[name, *difference(its, other)] for name, other in others.items() if other]
            for after in cells or [[''] * 4]:
                lines.append(first + after)
                first = [''] * len(first)
            made += len(cells)
        print(columns([line[:1] + line[2:] for line in lines] if is_plain else lines), end='\n\n')
    print('± is half of a 95% interval over the seeds, p is of the differences seed by seed. FLOPs '
          f'are those\nof training, as a share of those of {base}. Comparisons made here: {made}. '
          'p is not corrected for their\nnumber: of twenty without any difference, one has a p '
          'below 0.05 by chance.')


# ----------------------------------------------------------------------------------------- as files

def beside(path, ending):
    "A picture's path with another ending. T1.0 and T1.5 are two names that have none yet."
    known = path.suffix in ('.png', '.pdf', '.svg', '.csv', '.html')
    return path.with_suffix(ending) if known else path.with_name(path.name + ending)


def write_csv(rows, picture):
    "Write rows, but for what is a list or a dict in them, beside their picture: the path."
    path, text = beside(picture, '.csv'), io.StringIO(newline='')
    writer = csv.DictWriter(text, [*dict.fromkeys(
        key for row in rows for key, value in row.items() if not isinstance(value, (list, dict)))],
        extrasaction='ignore')
    writer.writeheader()
    writer.writerows(rows)
    refuse_others(path)
    replace(path, text.getvalue().encode())
    return path


def refuse_others(path):
    "Rows are written over older rows, and over nothing else."
    if path.exists():
        with open(path, encoding='utf-8', errors='replace') as file:
            require('run' in file.readline().strip().split(','), f'{path} is there, and it holds '
                    'no rows of ours: choose another --out')


def value_of(text):
    "Return the number that a text is, or the text."
    return float(text) if re.fullmatch(r'-?\d*\.?\d+(e[+-]?\d+)?|-?inf|nan', text) else text


def read_rows(path):
    "Return the rows of a CSV file, in which whatever reads as a number is one."
    with open(path, newline='', encoding='utf-8') as file:
        return [{key: value_of(text) for key, text in row.items()} for row in csv.DictReader(file)]
