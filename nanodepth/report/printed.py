"""Rows as tables on the terminal: the scores of models in ways, and what seeds say of differences.
Usage: print_tables(rows)
"""
import math

from nanodepth.report.contrasts import beside, difference, flops_of, paired, spelled
from nanodepth.report.tables import (PLAIN, UNITS, change_in_words, columns, grouped, number,
                                     over_seeds, where)

# {a column of the table of models: what of a row stands there, and how it is written}
OF_MODEL = {'loop': ('loop', ''), 'unique': ('unique', '.0f'), 'deep': ('depth', '.0f'),
            'params': ('params', ',.0f'), 'FLOPs/token': ('inference_flops', '.2e'),
            'training FLOPs': ('training_flops', '.2e')}
FEW = 8             # answers or rows: fewer decide nothing


def cell(row):
    "A score with its error and, of a way, how it differs from the model as it is."
    seeds = row['seeds'] > 1        # the error over the seeds, or else over the questions
    error = row['mean se'] if seeds else row['error']
    text = number(row['mean'], math.nan if error is None else error, row['kind'])
    if row['way'] == PLAIN or math.isnan(row['change']):
        return text
    change = change_in_words(row['change'], row['change se'] if seeds else row['change_error'],
                             None if seeds else row['p'], row['kind'])
    return f'{text} [{change}]'


def print_tables(rows):
    "Averaged over seeds: what the models are, where there are several; then the scores."
    rows = over_seeds(rows, ['way', 'measure'], ['mean', 'change'])
    models = {row['run']: row for row in reversed(rows) if row['way'] == PLAIN}
    if len(models) > 1:
        print(columns([['run', *OF_MODEL], *(
            [name, *(f'{row[key]:{form}}'.replace('nan', 'unknown')
                     for key, form in OF_MODEL.values())]
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
    ways = len({row['way'] for row in rows}) > 1
    if ways or any(row['error'] is not None or row['seeds'] > 1 for row in rows):
        print('in (): one standard error' + '; in []: the change from the model as it is' * ways)
    for data in dict.fromkeys(row['data'] for row in rows if row['measure'] == 'loss'):
        print(f'the loss is measured on {data}')
    say_few(rows)


def say_few(rows):
    few = min((row['n'] for row in rows if row['n']), default=FEW)
    if few < FEW:
        print(f'{few:.0f} answers or rows decide nothing: ask more, by --n, --batches or --limit')


def print_differences(rows, bases, measures=(), margins={}):
    """For each measure a table: the means over seeds, and how they differ from others, seed by
    seed. bases: {group: the groups it is compared with}."""
    compared_here = 0
    groups = grouped(rows)
    base = next(iter(bases.values()), [''])[0]
    for measure in measures or dict.fromkeys(row['measure'] for row in rows):
        lines = [['model', 'way', 'FLOPs', 'seeds', measure, 'compared with', 'difference', 'p',
                  'so many seeds say']]
        here = where(rows, measure=measure)
        for group, way in dict.fromkeys((row['group'], row['way']) for row in here):
            its = where(here, group=group, way=way)
            others = {other: where(here, group=other, way=PLAIN) for other in bases.get(group, ())}
            pairs = beside(its, others)
            if way != PLAIN:
                plain = where(here, group=group, way=PLAIN)
                pairs = [(PLAIN, plain)] * bool(plain)
            cost, whole = flops_of(groups[group], groups.get(base, ()))
            share = cost / (whole or math.nan)
            first = [group, way, '' if math.isnan(share) else f'{share:.0%}', f'{len(its)}',
                     spelled([row['mean'] for row in its], its[0]['kind'])]
            is_apart = way == PLAIN and any(others.values())
            nothing = 'no seed in common on equal data' * is_apart
            for words, other in pairs or [(nothing, [])]:
                common = len(paired(its, other))
                if 0 < common < max(len(its), len(other)):      # the means are of more
                    words = f'{words}, seeds in common: {common}'
                cells = difference(its, other, margins)
                lines.append(first + [words, *cells])
                compared_here += any(cells)
                first = [''] * len(first)
        if {line[1] for line in lines[1:]} <= {PLAIN, ''}:
            lines = [line[:1] + line[2:] for line in lines]
        print(columns(lines), end='\n\n')
    of = f', as a share of those of {base}' if base in groups else ''
    print('± is half of a 95% interval over the seeds, p is of the differences seed by seed.\n'
          f'FLOPs are those of training{of}.\nComparisons made here: {compared_here}. p is not '
          'corrected for their number: of twenty\nwithout any difference, one has a p below 0.05 '
          'by chance.')
    if len({row['seed'] for row in rows}) < 2:
        print('One seed decides nothing: two runs of one config may differ by as much.')
    say_few([row for row in rows if not measures or row['measure'] in measures])
