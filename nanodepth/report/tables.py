"""Rows of scores: one dataclass, one table on the screen and one CSV file. A Row is what a measure
found in one model that ran in one way. evaluate, sweep and compare make Rows and print them.
The runs lidas-0, lidas-1 and lidas-2 are one group, lidas, of three seeds.
Usage: print_table([Row(**line) for line in read_rows('out/evals/lidas.csv')])
"""
import csv
import io
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nanodepth.common.files import replace
from nanodepth.model import require
from nanodepth.report.contrasts import interval, mean, p_of, verdict

PLAIN = 'as it is'          # the way of a model that nothing changes


class Unit(NamedTuple):
    "The way in which scores of one kind are printed."
    word: str
    factor: int             # from a score to the printed number
    digits: str
    less_is_better: bool


UNITS = dict(
    nats=Unit('nats', 1, '.3f', True), log_prob=Unit('nats', 1, '.3f', False),
    share=Unit('%', 100, '.1f', False), score=Unit('', 1, '.3g', False),
    less=Unit('less is better', 1, '.3g', True))


class Score(NamedTuple):
    "What a measure returns."
    kind: str               # a key of UNITS
    mean: float
    error: float | None     # the standard error of the mean, if it is known
    answers: list           # a number for each question, document or data row; [] if not known
    chance: float | None = None     # the score of a guess


@dataclass(kw_only=True)
class Row:
    "A line of the CSV file."
    run: str                # the model's name, such as lidas-0
    group: str              # the name without the seed, such as lidas
    seed: int
    steps: int | None       # how long the model was trained
    layers: int             # how many layers run for each token
    params: int
    inference_flops: float  # of a token
    dtype: str              # of the weights
    training_flops: float   # nan for a published model
    tokens: float           # how many the model was trained on
    way: str                # how the model ran, as typed: --window=mid4 --K=2, or PLAIN
    measure: str            # such as loss or toy_assign/3
    kind: str               # a key of UNITS
    mean: float
    error: float | None     # the standard error of the mean
    n: int | None           # how many answers the mean is over
    chance: float | None    # the score of a guess
    change: float           # the mean minus the mean of the model as it is
    change_error: float | None
    p: float | None         # of the change, paired by question
    data: str | None        # the validation data in words, if the measure reads any
    settings: dict = field(default_factory=dict)        # the way, but as values; not in the CSV
    answers: list = field(default_factory=list)         # as in Score; not in the CSV
    changes: list = field(default_factory=list)         # of each answer; not in the CSV


def where(rows, **values):
    "Return the rows (dicts) that have these values."
    return [row for row in rows if all(row.get(key) == value for key, value in values.items())]


def run_names(paths):
    "Return {name: path}. A name is the last part of its path, if these parts differ."
    names = [Path(path).absolute().name for path in paths]
    return dict(zip(names if len(set(names)) == len(names) else map(str, paths), paths))


def names_of(run):
    """Return a run's name, its group and, if the name has one, its seed. lidas-1 has the seed 1,
    and so has its kept checkpoint lidas-1/step_9.pt. The last number of cut_2-4-2 is not a seed."""
    match = re.fullmatch(r'(.*)-(\d+)(/[^/]*\.pt)?', run)
    if not match or re.search(r'_\d+-\d+$', match[1]):
        return dict(run=run, group=run)
    return dict(run=run, group=match[1] + (match[3] or ''), seed=int(match[2]))


def grouped(rows):
    "Return {group: its rows (dicts)}. A row without a group is in the group of its run's name."
    names = dict.fromkeys(row.get('group', row['run']) for row in rows)
    return {name: [row for row in rows if row.get('group', row['run']) == name] for name in names}


# ---------------------------------------------------------------------------------- on the screen

def columns(lines):
    "Return lines of cells, the first of which is the heading, as a Markdown table."
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines = [lines[0], ['-' * width for width in widths], *lines[1:]]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, cells, widths)) + ' |' for cells in lines)


def printed(values, kind, error=None, sign=''):
    """Return the mean of the values in the unit of their kind. One value has its standard error in
    brackets, if that is known: 97.3 (0.6). Several values, one for each seed, have half of their
    95% interval: 97.3 ± 1.2."""
    unit, half = UNITS[kind], interval(values)
    text = f'{unit.factor * mean(values):{sign}{unit.digits}}'
    if half is not None:
        return f'{text} ± {unit.factor * half:{unit.digits}}'
    if error is not None and len(values) == 1:
        return f'{text} ({unit.factor * error:{unit.digits}})'
    return text


def difference(rows, others):
    """Return how rows differ from other rows, as three cells: the difference seed by seed, its p,
    and the verdict. If one model with one seed ran in two ways, its answers are paired instead."""
    def pair(row):
        return row.seed, row.data, row.dtype
    means = {pair(row): row.mean for row in others}
    changes = [row.mean - means[pair(row)] for row in rows if pair(row) in means]
    if not changes:
        return 'no seed with equal data and dtype', '', ''
    [row, *_], is_one_model = rows, rows[0].run == others[0].run
    by_answers = is_one_model and len(changes) == 1
    p, error = (row.p, row.change_error) if by_answers else (p_of(changes), None)
    text = printed(changes, row.kind, error, '+')
    if by_answers and error is None:        # a number without answers, such as a count of runs
        return text, '', ''
    if not any(changes) and not error:
        return text, '', 'equal'
    if len(changes) == 1 and not by_answers:
        return text, '', 'not resolved (one seed)'
    return text, '' if p is None else f'{p:.2g}', verdict(mean(changes), p)


def measure_cell(row):
    "Return a measure with its unit, such as 'toy_assign/3, % of 200 (chance 25%)'."
    unit = UNITS[row.kind].word
    of = f' of {row.n}' if row.kind == 'share' and row.n else ''
    chance = f' (chance {row.chance:.0%})' if row.chance else ''
    return f'{row.measure}, {unit}{of}{chance}' if unit else row.measure


def lines_of(rows, bases, first):
    """Return the lines of a table for the rows of one measure in one model and one way, over the
    seeds: a line for each comparison, or one line. `first` has the rows of the first model."""
    [row, *_] = rows
    flops = mean([each.training_flops for each in rows])
    share = flops / (mean([each.training_flops for each in first]) or math.nan)
    line = {'measure': measure_cell(row), 'model': row.group, 'way': row.way,
            'layers run': f'{row.layers}', 'parameters': f'{row.params:,}',
            'FLOPs': '' if math.isnan(share) else f'{share:.0%}', 'seeds': f'{len(rows)}',
            'score': printed([each.mean for each in rows], row.kind, row.error)}
    heads = 'compared with', 'difference', 'p', 'verdict'
    compared = [(name, *difference(rows, others)) for name, others in bases.items() if others]
    return [line | dict(zip(heads, cells)) for cells in compared or [[''] * len(heads)]]


def print_table(rows, bases={}, measures=()):
    """Print a table of Rows, averaged over seeds. A way is compared with the model as it is, and a
    group with its bases, {group: [other groups]}. A column whose cells are all equal is left out,
    and so is a cell that repeats the line above."""
    table = []
    known = [row for row in rows if not math.isnan(row.mean)]
    for measure in measures or dict.fromkeys(row.measure for row in known):
        by_way = {}
        for row in known:
            if row.measure == measure:
                by_way.setdefault((row.group, row.way), []).append(row)
        for (group, way), of_way in by_way.items():
            if way == PLAIN:
                others = {base: by_way.get((base, PLAIN), ()) for base in bases.get(group, ())}
            else:
                others = {PLAIN: by_way.get((group, PLAIN), ())}
            table += lines_of(of_way, others, next(iter(by_way.values())))
    unknown = dict.fromkeys(f'{row.measure} of {row.group}' for row in rows if row not in known)
    if table:
        shown = [head for head in table[0] if head in ('measure', 'score')
                 or len({line[head] for line in table}) > 1]
        lines = [[line[head] for head in shown] for line in table]
        print(columns([shown, *map(without_repeats, lines, [[None], *lines])]))
        explain(table, rows)
    if unknown:
        print(f'Not a number, and left out: {", ".join(unknown)}.')


def without_repeats(line, above):
    "Return a line without the first cells that are those of the line above."
    same = next((i for i, cells in enumerate(zip(line, above)) if cells[0] != cells[1]), 0)
    return [''] * same + line[same:]


def explain(table, rows):
    "Print what the columns of a table mean."
    seeds = {line['seeds'] for line in table}
    if '1' in seeds:
        print('In brackets: one standard error.')
    if seeds != {'1'}:
        n = f'{max(seeds)} ' if len(seeds) == 1 else ''
        print(f'±: half of a 95% interval over the {n}seeds.')
    if n := sum(bool(line['p']) for line in table):
        print('p: how often chance alone makes a difference this large, if the two are equal.\n'
              f'Of 20 comparisons one has p < 0.05 by chance. This table has {n}.')
    if len({line['FLOPs'] for line in table}) > 1:
        print(f'FLOPs: of training, as a share of those of {table[0]["model"]}.')
    for data in dict.fromkeys(row.data for row in rows if row.data):
        print(f'The data: {data}.')


# ----------------------------------------------------------------------------------------- as files

def beside(path, ending):
    "Return a picture's path with another ending. (T1.5 is a name that has no ending yet.)"
    known = path.suffix in ('.png', '.pdf', '.svg', '.csv', '.html')
    return path.with_suffix(ending) if known else path.with_name(path.name + ending)


def write_csv(rows, picture):
    """Write Rows, or dicts with a `run`, next to their picture as CSV, without what is a list or a
    dict in them. Return the path."""
    path, text = beside(picture, '.csv'), io.StringIO(newline='')
    lines = [row if isinstance(row, dict) else vars(row) for row in rows]
    writer = csv.DictWriter(text, [*dict.fromkeys(
        name for line in lines for name, value in line.items()
        if not isinstance(value, (list, dict)))], extrasaction='ignore')
    writer.writeheader()
    writer.writerows(lines)
    if path.exists():
        with open(path, encoding='utf-8', errors='replace') as file:
            require('run' in file.readline().strip().split(','), f'{path} exists, and does not '
                    'hold rows of nanodepth: choose another --out')
    replace(path, text.getvalue().encode())
    return path


def value_of(text):
    "Return the number that a text is, None if it is empty, or the text."
    if re.fullmatch(r'-?\d+', text):
        return int(text)
    is_number = re.fullmatch(r'-?\d*\.?\d+(e[+-]?\d+)?|-?inf|nan', text)
    return float(text) if is_number else text or None


def read_rows(path):
    "Return the rows of a CSV file as dicts. Whatever reads as a number is one, but for names."
    with open(path, newline='', encoding='utf-8') as file:
        return [{key: text if key in ('run', 'group') else value_of(text)
                 for key, text in row.items()} for row in csv.DictReader(file)]
