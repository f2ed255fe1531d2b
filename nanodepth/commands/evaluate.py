"""Score models as they are and in other ways of running, and write a table, a CSV file and, with
--x, a picture. Each way is compared with the model as it is, question by question. Next to a change
are its standard error and p: how likely so large a change is if changes up and down are equally
likely.
    nanodepth evaluate out/lidas out/baseline --tasks=toy_assign/0-4 --window=mid4 --K=2,3
    nanodepth evaluate out/lidas-* out/baseline-* --against=baseline        # seed by seed
"""
import re
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from nanodepth.common.errors import check_choice, say
from nanodepth.common.options import read
from nanodepth.model import require, spans_in
from nanodepth.models.checkpoint import named_models
from nanodepth.report.plot import draw_curves, show
from nanodepth.report.tables import UNITS, names_of, print_table, write_csv
from nanodepth.retrofit import core_of
from nanodepth.scoring.data import described
from nanodepth.scoring.rows import ScoreOptions, Subject, score_ways
from nanodepth.scoring.ways import Ways, in_words, ways_of


@dataclass(kw_only=True)
class Options(Ways, ScoreOptions):
    # folders that train.py wrote, or Hugging Face checkpoints; NAME-0, NAME-1, ... are averaged
    models: list[str]
    # draw a picture over r, K, T, beta, tol, shots, or over NAME, if --span=NAME:0.1,NAME:0.2
    x: str | None = None
    against: tuple[str, ...] = ()   # groups of seeds, with which every other one is compared
    out: Path | None = None         # the rows as CSV; None: out/evals/MODEL.csv


def draw(rows, x, out):
    "Draw curves over x: a setting of a way, or the number of examples before a question."
    points, values = [], {}
    for row in rows:
        settings, measure, unit = dict(row.settings), row.measure, UNITS[row.kind]
        at = settings.pop(x, None)
        name, _, value = settings.get('span', '').partition(':')
        if name == x:
            at = value
            del settings['span']
        if x == 'shots':
            match = re.fullmatch(r'(.*), (\d+) shots(.*)', measure)
            if not match:           # the loss has no shots
                continue
            measure, at = match[1] + match[3], match[2]
        if unit.word:
            measure += f' ({unit.word})'
        name = f'{row.group} {in_words(settings)}' if settings else row.group
        values[measure] = None
        points.append({'run': row.run, 'group': name, 'x': None if at is None else float(at),
                       measure: unit.factor * row.mean})
    show(out, draw_curves, points, 'x', None, [*values], '', x)


def ways_for(subject, options):
    """Return the ways in which a model is scored. Without a recurrent core --r is left out, and
    without a Span --span is, so that ordinary models may be named next to others."""
    parts = dict(r=core_of(subject.model), span=spans_in(getattr(subject.model, 'order', ())))
    for name, part in parts.items():
        if getattr(options, name) and not part:
            say(f'{subject.path} has no {"recurrent core" if name == "r" else "Span"}, so it is '
                f'scored without --{name}')
            options = replace(options, **{name: ()})
    return ways_of(options)


def measures_to_show(rows):
    """Return the measures in the table: all of them or, in a long table, all but the kinds of
    answers that the data mark."""
    measures = dict.fromkeys(row.measure for row in rows)
    kinds = {row.measure for row in rows if row.data and row.kind == 'share'}
    lines = {(row.measure, row.group, row.way) for row in rows}
    if len(lines) <= 40:
        return [*measures]
    if kinds:
        print(f'not in this long table, but among the numbers: {", ".join(sorted(kinds))}')
    return [name for name in measures if name not in kinds]


def main(argv=None):
    options = read(Options, argv, ['models'])
    paths = named_models(options.models)
    ways_of(options)            # refuse a mistake before anything is scored
    if options.x:
        drawn = ['r', 'K', 'T', 'beta', 'tol', 'shots']
        names = [text.partition(':')[0] for text in options.span]
        check_choice('--x', options.x, [*drawn, *names])
        values, example = options.span, f'--span={options.x}:0.1,{options.x}:0.2'
        if options.x in drawn:
            values, example = getattr(options, options.x) or (), f'--{options.x}=1,2,4'
        require(len(values) > 1, f'--x={options.x} draws over several values: give {example}')
    require(options.x != 'shots' or options.tasks, '--x=shots is for --tasks')
    groups = [names_of(name)['group'] for name in paths]
    for name in options.against:
        check_choice('--against', name, groups)
    out = options.out or Path('out/evals') / f'{[*paths][0].replace("/", "-")}.csv'
    rows, first = [], None
    for name, path in tqdm(paths.items(), 'models', unit='model', disable=len(paths) == 1):
        subject = Subject(path, options, like=first)
        first = first or subject
        data = [described(one.val, one.batches) if one.val else 'no data'
                for one in (first, subject)]
        require(data[0] == data[1], f'{first.path} is measured on {data[0]}, and {path} on '
                f'{data[1]}: give --data, so that both answer the same, or name the models in '
                'the other order, or measure no loss, with an empty --measures=')
        for new_rows in score_ways(subject, ways_for(subject, options), **names_of(name)):
            rows += new_rows
            write_csv(rows, out)        # what was measured is kept if the next way is stopped
    bases = {group: options.against for group in groups if group not in options.against}
    print_table(rows, bases, measures_to_show(rows))
    print(f'numbers: {write_csv(rows, out)}')
    if options.x:
        draw(rows, options.x, out)
