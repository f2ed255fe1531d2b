"""Score models as they are and in other ways of running: a table, a CSV file and a picture. Each
way is compared with the model as it is, question by question. Beside a change stand its error and
p, which is the probability of so uneven a split of the questions if up were as likely as down.
    nanodepth evaluate out/lidas out/baseline --tasks=toy_assign/0-4 --window=mid4 --K=2,3
    nanodepth evaluate out/lidas-* out/baseline-* --against=baseline        # seed by seed
"""
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.options import read
from nanodepth.models.checkpoint import named_models
from nanodepth.report.plot import PICTURES, draw_curves, show
from nanodepth.report.printed import print_differences, print_tables
from nanodepth.report.tables import MADE, UNITS, groups_of, named_after, of_one_kind, write_csv
from nanodepth.retrofit import core_of
from nanodepth.scoring.rows import Asked, Subject, files_of, notes_beside
from nanodepth.scoring.scores import parse_tasks
from nanodepth.scoring.way import Way, Ways, as_typed, read_ways


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
    # the numbers as CSV; .png is drawn, with the CSV beside it; None: out/evals/ASKED.csv, or with
    # --x .png
    out: Path | None = None


# --------------------------------------------------------------------------------------- the tables

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
        elif not plain:
            at = way.settings[x]
            line = as_typed({name: value for name, value in way.settings.items() if name != x})
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
    if options.x == 'shots' and not parse_tasks(options.tasks)[0]:
        raise Refused('--x=shots draws what is asked with examples: give --tasks=toy_assign/3')
    paths = named_models(options.models)
    files = {path: files_of(path) for path in paths.values()}       # a run may go on and save
    groups = groups_of(paths, MADE)
    ending = 'png' if options.x else 'csv'
    out = options.out or Path('out/evals') / f'{named_after(options, "x")}.{ending}'
    for name in options.against:
        check_choice('--against', name, dict.fromkeys(groups.values()))
    notes = notes_beside(out)
    rows, first = [], None
    for name, path in tqdm(paths.items(), 'models', unit='model', leave=False):
        subject = Subject(path, options, like=first)
        if subject.files != files[path]:
            raise Refused(f'{path} was saved after this command had begun: start it again')
        first = first or subject
        # beside a recurrent model, an ordinary one is a row to compare with
        recurs = core_of(subject.model)
        its_ways = ways[:1] if options.r and len(paths) > 1 and not recurs else ways
        if subject.data() != first.data():      # the same questions, or there is no comparing
            raise Refused(f'{first.path} is measured on {first.data()}, and {path} on '
                          f'{subject.data()}: give --data, so that both answer the same, or leave '
                          'the loss out by --measures=')
        rows += subject.rows(its_ways, notes, run=name, group=groups[name])
    if options.r and not any('--r=' in row['way'] for row in rows):
        raise Refused('--r is for models with a recurrent core, and none of these has one')
    print_tables(of_one_kind(rows))
    if options.against:
        print()
        print_differences(rows, {group: options.against for group in groups.values()
                                 if group not in options.against})
    write_csv(rows, out)
    if options.x or out.suffix in PICTURES:
        draw(rows, {str(way): way for way in ways}, options.x, out)
