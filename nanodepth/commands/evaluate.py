"""Score models as they are and in other ways of running: a table, a CSV file and a picture. Each
way is compared with the model as it is, question by question. Beside a change stand its error and
p, which is the probability of so uneven a split of the questions if up were as likely as down.
    nanodepth evaluate out/lidas out/baseline --tasks=toy_assign/0-4 --window=mid4 --K=2,3
    nanodepth evaluate out/lidas-* out/baseline-* --against=baseline        # seed by seed
"""
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from nanodepth.common.errors import Refused, check_choice
from nanodepth.models.checkpoint import named_models
from nanodepth.report.contrasts import beside, difference, mean_of, paired, spelled
from nanodepth.report.plot import PICTURES, draw_curves, show
from nanodepth.report.tables import (UNITS, change_in_words, columns, grouped, groups_of,
                                     named_after, number, over_seeds, where, write_csv)
from nanodepth.retrofit import core_of
from nanodepth.scoring.rows import Asked, Subject, group_of, notes_beside
from nanodepth.scoring.way import Way, Ways, read_ways
from nanodepth.train import read


@dataclass(kw_only=True)
class Options(Ways, Asked):
    # folders that train.py wrote, or Hugging Face checkpoints; runs NAME-SEED, trained with that
    # seed, are averaged
    models: list[str]
    # its axis: what the ways differ in; None: they stand beside each other
    x: Literal['r', 'K', 'T', 'beta', 'shots'] | None = None
    # groups of seeds: every other one is compared with the first of these, seed by seed, and with
    # each of the rest that had as many training FLOPs
    against: tuple[str, ...] = ()
    # the numbers as CSV; .png is drawn, with the CSV beside it; None: out/evals/ASKED.csv
    out: Path | None = None


# --------------------------------------------------------------------------------------- the tables

def cell(row):
    "A score with its error and, of a way, how it differs from the model as it is."
    seeds = row['seeds'] > 1        # the error over the seeds, or else over the questions
    error = row['mean se'] if seeds else row['error']
    text = number(row['mean'], math.nan if error is None else error, row['kind'])
    if row['way'] == str(Way()) or math.isnan(row['change']):
        return text
    change = change_in_words(row['change'], row['change se'] if seeds else row['change_error'],
                             None if seeds else row['p'], row['kind'])
    return f'{text} [{change}]'


def print_tables(rows):
    "Averaged over seeds: what the models are, where there are several; then the scores."
    rows = over_seeds(rows, ['way', 'measure'], ['mean', 'change'])
    models = {row['run']: row for row in reversed(rows) if row['way'] == str(Way())}
    if len(models) > 1:
        print(columns([['run', 'loop', 'unique', 'deep', 'params', 'FLOPs/token', 'training FLOPs'],
                       *([name, row['loop'], f'{row["unique"]:.0f}', f'{row["depth"]:.0f}',
                          f'{row["params"]:,.0f}',
                          *(f'{row[key]:.2e}'.replace('nan', 'unknown')
                            for key in ('inference_flops', 'training_flops'))]
                         for name, row in reversed(models.items()))]))
    heads = {}
    for row in rows:
        word = UNITS[row['kind']].word
        of = f' of {row["n"]:.0f}' if row['kind'] == 'share' and row['n'] else ''
        chance = f' (chance {row["chance"]:.0%})' if row['chance'] else ''
        heads.setdefault(row['measure'], f'{row["measure"]}{word and ", "}{word}{of}{chance}')
    table = [['model', 'way', 'layers run', *heads.values()]]
    for name, way in dict.fromkeys((row['run'], row['way']) for row in rows):
        of_way = {row['measure']: row for row in where(rows, run=name, way=way)}
        layers = next(iter(of_way.values()))['layers']
        table.append([name, way, f'{layers:.0f}',
                      *(cell(of_way[m]) if m in of_way else '' for m in heads)])
    same = 0 if len({row['run'] for row in rows}) == 1 else 1       # one model, or one way of all
    if len({line[same] for line in table[1:]}) == 1:
        table = [line[:same] + line[same + 1:] for line in table]
    if len(heads) > len(table) + 2:
        table = list(zip(*table))
    print(columns(table))
    if any(row['error'] is not None for row in rows):
        ways = len({row['way'] for row in rows}) > 1
        print('in (): one standard error' + '; in []: the change from the model as it is' * ways)
    say_few(rows)


def say_few(rows):
    few = min((row['n'] for row in rows if row['n']), default=FEW)
    if few < FEW:
        print(f'{few:.0f} answers or rows decide nothing: ask more, by --n, --batches or --limit')


def print_differences(rows, bases, measures=(), margins={}):
    """For each measure a table: the means over seeds, and how they differ from others, seed by
    seed. bases: {group: the groups it is compared with}."""
    plain, compared_here = str(Way()), 0
    costs = {group: mean_of(its, 'training_flops') for group, its in grouped(rows).items()}
    base = next(iter(bases.values()), [''])[0]
    for measure in measures or dict.fromkeys(row['measure'] for row in rows):
        lines = [['model', 'way', 'FLOPs', 'seeds', measure, 'compared with', 'difference', 'p',
                  'so many seeds say']]
        here = where(rows, measure=measure)
        for group, way in dict.fromkeys((row['group'], row['way']) for row in here):
            its = where(here, group=group, way=way)
            others = {other: where(here, group=other, way=plain, data=its[0]['data'])
                      for other in bases.get(group, ())}
            pairs = beside(its, {other: its for other, its in others.items() if its})
            if way != plain:
                pairs = [(plain, where(here, group=group, way=plain))]
            share = costs[group] / (costs.get(base) or math.nan)
            first = [group, way, '' if math.isnan(share) else f'{share:.0%}', f'{len(its)}',
                     spelled([row['mean'] for row in its], its[0]['kind'])]
            for words, other in pairs or [('', [])]:
                common = len(paired(its, other))
                if 0 < common < max(len(its), len(other)):      # the means are of more
                    words = f'{words}, {common} common seeds'
                cells = difference(its, other, margins)
                lines.append(first + [words, *cells])
                compared_here += any(cells)
                first = [''] * len(first)
        if {line[1] for line in lines[1:]} <= {plain, ''}:
            lines = [line[:1] + line[2:] for line in lines]
        print(columns(lines), end='\n\n')
    of = f', as a share of those of {base}' if base in costs else ''
    print('± is half of a 95% interval over the seeds, p is of the differences seed by seed.\n'
          f'FLOPs are those of training{of}.\nComparisons made here: {compared_here}. p is not '
          'corrected for their number: of twenty\nwithout any difference, one has a p below 0.05 '
          'by chance.')
    if len({row['seed'] for row in rows}) < 2:
        print('One seed decides nothing: two runs of one config may differ by as much.')
    say_few([row for row in rows if not measures or row['measure'] in measures])


FEW = 8             # answers or rows: fewer decide nothing
AXES = dict(r='recurrences', K='steps K', shots='examples before the question')


def draw(rows, ways, x, out):
    "The picture: curves over x, or the ways beside each other. ways: {in words: Way}."
    drawn, measures = {}, {}
    for row in rows:
        way = ways[row['way']]
        plain = row['way'] == str(Way())
        measure, line, at = row['measure'], '', None        # None: a level, not a point
        if x is None:
            at = list(ways).index(row['way'])
        elif x == 'shots':
            match = re.fullmatch(r'(.*), (\d+) shots(.*)', measure)
            if not match:
                continue        # what is measured without any
            line = '' if plain else row['way']
            measure, at = match[1] + match[3], int(match[2])
        elif x == 'r':
            at = way.r
        elif not plain:
            at = way.dials[x]
            line = str(Way(**{name: value for name, value in way.dials.items() if name != x}))
        unit = UNITS[row['kind']]
        measure += f' ({unit.word})' if unit.word else ''
        measures[measure] = None
        name = f'{row["group"]} {line}'.strip()
        point = drawn.setdefault((row['run'], name, at), dict(run=row['run'], group=name, x=at))
        point[measure] = unit.factor * row['mean']
    show(out, draw_curves, list(drawn.values()), 'x', None, list(measures), {}, '',
         AXES.get(x, x or ''), None if x else dict(enumerate(ways)))


def main(argv=None):
    options = read(Options, argv, ['models'])
    ways = [Way(), *read_ways(options)]
    if options.x and len(getattr(options, options.x) or ()) < 2:
        raise Refused(f'--x={options.x} draws over several values: give --{options.x}=1,2,4')
    paths = named_models(options.models)
    groups = groups_of(paths)
    out = options.out or Path('out/evals') / f'{named_after(options, "x")}.csv'
    for name in options.against:
        check_choice('--against', name, [*groups.values()])
    notes = notes_beside(out)
    rows, firsts = [], {}
    first = None
    for name, path in tqdm(paths.items(), 'models', unit='model', leave=False):
        subject = Subject(path, options, like=first)
        first = first or subject
        # beside a recurrent model, an ordinary one is a row to compare with
        recurs = core_of(subject.model)
        its_ways = ways[:1] if options.r and len(paths) > 1 and not recurs else ways
        if subject.data() != first.data():      # the same questions, or there is no comparing
            raise Refused(f'{first.path} is measured on {first.data()}, and {path} on '
                          f'{subject.data()}: give --data, so that both answer the same, or leave '
                          'the loss out by --measures=')
        groups[name] = group_of(name, groups[name], subject.state, firsts)
        rows += subject.rows(its_ways, notes, run=name, group=groups[name])
    if options.r and not any('--r=' in row['way'] for row in rows):
        raise Refused(f'--r={options.r} is for models with a recurrent core, and none of these has '
                      'one')
    print_tables(rows)
    if options.against:
        print()
        print_differences(rows, {group: options.against for group in groups.values()
                                 if group not in options.against})
    write_csv(rows, out)
    if out.suffix in PICTURES:
        draw(rows, {str(way): way for way in ways}, options.x, out)
