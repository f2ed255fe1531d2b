"""How good are these models, run in these ways? A table, its numbers as CSV, and a picture.

The idea: a row is a model in a way of running, a column is a measure. The first row of each model
is the model as it is. The others show how they differ from it, on the same questions. After a
change stands its error, with each question against itself, and p: the probability of so uneven a
split if up were as likely as down. Runs called NAME-SEED that were trained with that seed are
averaged, and then the errors are those over seeds. Below a looped model stands how it differs from
the ordinary ones with as many parameters, or with as much compute.

Papers: "Training-Free Looped Transformers", section 3, "From Growing to Looping",
section 3, "Retrofitted Recurrence", section 4 (--r). The papers print no errors of differences;
some of their gains of one or two points would lie within them.

Usage:
    nanodepth evaluate out/lidas out/baseline --tasks=toy_assign/0-4
    nanodepth evaluate out/lidas --window=mid4 --K=2,3,6 --out=out/steps.png
    nanodepth evaluate out/retrofit --r=1,2,4,8 --out=out/r.png
    nanodepth evaluate out/smollm2 --tasks=questions_piqa --loop=8-4x2-18
"""
import math
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from nanodepth.common.errors import Refused
from nanodepth.common.files import Notes
from nanodepth.common.options import read
from nanodepth.asking.scoring import Asked, Subject, compared, interval, parse_tasks
from nanodepth.asking.way import Way, Ways, layers_and_order, read_ways
from nanodepth.loop import name_of
from nanodepth.report.plot import PICTURES, draw_scores, show
from nanodepth.report.tables import (beside, change_in_words, columns, groups_of, number,
                                     over_seeds, pick_shown, run_names, where, write_csv)


@dataclass(kw_only=True)
class Options(Ways, Asked):
    WORDS = ['models']
    # folders that train.py wrote, or Hugging Face checkpoints; runs NAME-SEED, trained with that
    # seed, are averaged
    models: list[str]
    show: tuple[str, ...] = ()  # what the picture shows, such as loss,toy_assign/3; (): all
    # the numbers as CSV; .png is drawn, with the CSV beside it; None: out/evals/NAME.csv
    out: Path | None = None


def facts(state, model):
    "What a checkpoint is and what it cost. A forward pass costs a third of a training step."
    ours = hasattr(model, 'recurs')
    layers, order = layers_and_order(model)
    how = dict(backprop_depth=model.mean) if getattr(model, 'recurs', False) else {}
    return dict(loop=name_of(order), unique=len(layers), depth=len(order),
                params=sum(p.numel() for p in model.parameters()),
                inference_flops=model.flops_per_token(**how) // 3 if ours else math.nan,
                training_flops=state.get('flops', math.nan) + state.get('inherited_flops', 0))


def effective_params(model, way):
    "The parameters of the layers, counted as often as they run. Others' layers may differ."
    if not hasattr(model, 'recurs'):
        return math.nan
    return way.cost(model) * sum(p.numel() for p in model.layers[0].parameters())


def measured(name, group, subject, ways, notes, part=0):
    "[a row for each way and measure]; the first way is the plain one."
    about = facts(subject.state, subject.model)
    seed = (subject.state.get('config') or {}).get('seed', 0)
    found = subject.noted(ways, notes, part)
    rows = []
    for way in ways:
        scores, plain = found[str(way)], found[str(ways[0])]
        effective = effective_params(subject.model, way)
        for measure, score in scores.items():
            change = compared(plain[measure], score)
            row = dict(run=name, group=group, seed=seed, way=str(way),
                       layers=way.cost(subject.model), effective_params=effective,
                       measure=measure, kind=score.kind, mean=score.mean, error=score.error,
                       n=len(score.answers) or None, chance=score.chance, change=change.mean,
                       change_error=change.error, p=change.p) | about
            if score.kind == 'share' and score.answers and {*score.answers} <= {0, 1}:
                row['low'], row['high'] = interval(sum(score.answers), len(score.answers))
            rows.append(row)
    return rows


# --------------------------------------------------------------------------------------- the tables

def cell(row):
    "A score with its error and, of a way, how it differs from the model as it is."
    percent = row['kind'] == 'share'
    text = number(row['mean'], error_in(row), percent)
    if row['way'] == str(Way()):
        return text
    seeds = row['seeds'] > 1
    change = change_in_words(row['change'], row['change se'] if seeds else row['change_error'],
                             None if seeds else row['p'], percent)
    return f'{text} ({change})'


def error_in(row):
    "The standard error over the seeds, or else over the questions."
    error = row['mean se'] if row['seeds'] > 1 else row['error']
    return math.nan if error is None else error


def partners(row, rows):
    """Of a looped model: ('equal parameters', an ordinary model), ('equal compute', one that costs
    as much to run)."""
    ordinary = [other for other in rows if other['unique'] == other['depth']]
    return [(kind, other) for kind, key in (('equal parameters', 'params'),
                                            ('equal compute', 'inference_flops'))
            for other in ordinary if row['unique'] < row['depth'] and other[key] == row[key]]


def minus(row, other):
    "How a score differs from a partner's, and how many of its standard errors that is."
    change = row['mean'] - other['mean']
    error = math.hypot(error_in(row), error_in(other))
    return change_in_words(change, error, None, row['kind'] == 'share') + (
        f' ({change / error:+.1f} se)' if error > 0 else '')


def print_tables(rows):
    "What the models are, where there are several; then the scores."
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
        unit = dict(share=', %', nats=', nats', score='')[row['kind']]
        of = f' of {row["n"]:.0f}' if row['kind'] == 'share' and row['n'] else ''
        chance = f' (chance {row["chance"]:.0%})' if row['chance'] else ''
        heads.setdefault(row['measure'], f'{row["measure"]}{unit}{of}{chance}')
    table = [['model', 'way', 'layers run', *heads.values()]]
    for name, way in dict.fromkeys((row['run'], row['way']) for row in rows):
        of_way = {row['measure']: row for row in where(rows, run=name, way=way)}
        layers = next(iter(of_way.values()))['layers']
        table.append([name, way, f'{layers:.0f}',
                      *(cell(of_way[m]) if m in of_way else '' for m in heads)])
        if way == str(Way()):
            for kind, other in partners(models[name], models.values()):
                theirs = {row['measure']: row for row in where(rows, run=other['run'], way=way)}
                table.append([f'  minus {other["run"]}', kind, '',
                              *(minus(of_way[m], theirs[m]) if m in of_way and m in theirs else ''
                                for m in heads)])
    if len(heads) > len(table) + 3:
        table = list(zip(*table))
    print(columns(table))


def draw(rows, ways, options, out):
    "The picture: curves over what the ways differ in, or the ways beside each other."
    kinds = pick_shown('show', options.show, dict.fromkeys(row['measure'] for row in rows))
    rows = [row for row in rows if row['measure'] in kinds]
    x = next((name for name in ('shots', 'r', 'K', 'T', 'beta')
              if len(getattr(options, name)) > 1), None)
    by_shots = {f'{task}, {n} shots': (task, n) for task in parse_tasks(options.tasks)[0]
                for n in options.shots}
    for row in rows:
        way = ways[row['way']]
        plain = row['way'] == str(Way())
        row |= dict(line='' if plain else row['way'], x=None)
        if x is None:
            row |= dict(line='', x=list(ways).index(row['way']))
        elif x == 'shots':
            row['measure'], row['x'] = by_shots[row['measure']]
        elif x == 'r' and not plain:
            row |= dict(line='', x=way.r)
        elif not plain:
            others = {name: value for name, value in way.dials.items() if name != x}
            row |= dict(line=str(Way(**others)), x=way.dials[x])
    show(out, draw_scores, rows, x)


def main(argv=None):
    options = read(Options, argv, __doc__)
    ways = [Way(), *read_ways(options)]
    paths = run_names(options.models)
    groups = groups_of(paths)
    out = options.out or Path('out/evals') / f'{Path(options.models[0]).name}.csv'
    notes = Notes(beside(out, '.jsonl'))
    rows = []
    first = None
    for name, path in tqdm(paths.items(), 'models', unit='model', leave=False):
        subject = Subject(path, options, like=first)
        first = first or subject
        # beside a recurrent model, an ordinary one is a row to compare with
        recurs = getattr(subject.model, 'recurs', False)
        its_ways = ways[:1] if options.r and len(paths) > 1 and not recurs else ways
        subject.check(its_ways)
        if subject.data() != first.data():      # the same questions, or there is no comparing
            raise Refused(f'{first.path} is measured on {first.data()}, and {path} on '
                          f'{subject.data()}: give --data, so that both answer the same, or leave '
                          'the loss out by --measures=')
        rows += measured(name, groups[name], subject, its_ways, notes)
    if options.r and not any('--r=' in row['way'] for row in rows):
        raise Refused(f'--r={options.r} is for models with a recurrent core, and none of these has '
                      'one')
    print_tables(over_seeds(rows, ['way', 'measure'], ['mean', 'change']))
    write_csv(rows, out)
    if out.suffix in PICTURES:
        draw(rows, {str(way): way for way in ways}, options, out)


