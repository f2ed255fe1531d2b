"""Which of many ways of running a model is best, and is it more than luck?

The idea: of a hundred ways some are better than none by chance. So all are *screened* on one part
of the data (every other document of lm-eval's, the first batches and questions of ours), and the
best are *judged* on another part, which had no say. Beside the best gain stands what the best of
as many tries finds where there is nothing to find: the same answers with plain and changed
exchanged at random, question by question. Of the wrapper the paper's recipe is judged, too.

The ways are those that the options name (`--window=all4`: each window of four layers), or with
--blocks every block of the model, run several times. What was measured is on disk and is not
measured again.

Paper: "Training-Free Looped Transformers", section 3 and appendices M (which windows help), E
(methods), G.5 and J.1 (windows that win the screen and lose on held-out data), P (the search);
"From Growing to Looping", section 4 (blocks). Here: the best are chosen by tasks where there are
any, because the authors found that held-out loss and accuracy go against each other.

Usage:
    nanodepth sweep out/toys/baseline-* --window=all2,all4 --method=naive,rk --K=2,3
    nanodepth sweep out/lidas out/baseline --blocks=1,2,4 --times=2
    nanodepth sweep SmolLM-360M --K=2,3 --tasks=arc_easy --limit=200
"""
import functools
import inspect
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import Notes
from nanodepth.common.options import read
from nanodepth.engine.lm_eval_scores import SHARES
from nanodepth.engine.scoring import Asked, Subject, compared, parse_tasks
from nanodepth.engine.way import Way, Ways, depth_in, layers_and_order, read_ways
from nanodepth.loop import repeat_block
from nanodepth.looping.layers import pick_window
from nanodepth.report.plot import draw_sweep, show
from nanodepth.report.tables import (Score, beside, by_seed, change_in_words, columns, mean, number,
                                     pick_shown, run_names, standard_error, write_csv)
from nanodepth.wrapper import SOLVERS


@dataclass(kw_only=True)
class Options(Ways, Asked):
    WORDS = ['models']
    # folders that train.py wrote, or Hugging Face checkpoints; runs NAME-SEED, trained with that
    # seed, are averaged
    models: list[str]
    blocks: tuple[int, ...] = ()    # instead of other ways: every block of so many layers ...
    times: tuple[int, ...] = (2,)   # ... run so many times
    judge_tasks: str | None = None  # tasks to judge by; None: questions that were not screened
    # what the best are chosen by; (): the mean share of right answers over the tasks, or the loss
    score: tuple[str, ...] = ()
    best: int = 3               # how many are judged
    show: tuple[str, ...] = ()  # what the picture shows; (): all
    # beside the picture: .csv, and .jsonl with all that was measured
    out: Path = Path('out/sweep.png')


# ------------------------------------------------------------------------------------ the many ways

def windows_of(parts, depth):
    "('all4', 'mid2', '3-5') to ['0-3', '1-4', ...]; 'all': of every size."
    sizes = {f'all{n}': [n] for n in range(1, depth + 1)} | {'all': range(1, depth + 1)}
    chosen = []
    for part in parts:
        if part in sizes:
            chosen += [f'{a}-{a + n - 1}' for n in sizes[part] for a in range(depth - n + 1)]
        elif part.startswith('all'):
            raise Refused(f'--window={part}: write all1 to all{depth}, every window of so many '
                          'layers, or all')
        else:
            chosen.append('{}-{}'.format(*pick_window(part, depth)))
    return list(dict.fromkeys(chosen))


def ways_of(options, model):
    "([(a way, its window in the picture, its row there)], [those that cannot run])."
    _, order = layers_and_order(model)
    depth = len(order)
    if options.blocks:
        if max(options.blocks) > depth:
            raise Refused(f'--blocks={max(options.blocks)}: the model is {depth} layers deep')
        windows = windows_of([f'all{size}' for size in options.blocks], depth)
        blocks = itertools.product(windows, options.times)
        return [(Way(loop=repeat_block(order, *start_and_length(window), times)), window,
                 f'{times} times') for window, times in blocks], []
    if options.loop or options.r:
        return [(way, str(way), '') for way in read_ways(options)], []
    windows = windows_of(options.window or ('all4',), depth)
    dials = vars(options) | dict(window=tuple(windows), method=options.method or ('rk',),
                                 K=options.K or (2, 3))
    possible, impossible = {}, {}
    for way in read_ways(Ways(**{name: dials[name] for name in vars(Ways())})):
        way = without_others_options(way, options.method)
        try:
            way.cost(model)
        except Refused as error:
            if way.dials['method'] not in SOLVERS:
                raise
            impossible[f'{way.dials["method"]} with K = {way.dials["K"]} ({error})'] = True
            continue
        window, _, rest = str(way).partition(' ')
        possible.setdefault(str(way), (way, window.partition('=')[2], rest))
    return list(possible.values()), list(impossible)


def without_others_options(way, methods):
    "Of several methods, each takes the options that it has."
    method = way.dials['method']
    if len(methods) < 2 or method not in SOLVERS:
        return way
    takes = inspect.signature(SOLVERS[method]).parameters
    return Way(**{name: value for name, value in way.dials.items()
                  if name not in ('beta', 'T') or name in takes})


def start_and_length(window):
    a, b = map(int, window.split('-'))
    return a, b - a + 1


# ---------------------------------------------------------------------------- screening and judging

PARTS = 'screen', 'judge'


class Gain(NamedTuple):
    "A change for the better."
    kind: str               # of the Score
    mean: float
    error: float | None
    p: float | None
    changes: list           # of each question; [] where they are no mean


def gain(measure, plain, score):
    sign = -1 if score.kind == 'nats' or measure.endswith('(less is better)') else 1
    change = compared(plain, score)
    changes = [sign * (b - a) for a, b in zip(plain.answers, score.answers)] \
        if change.error is not None else []
    return Gain(score.kind, sign * change.mean, change.error, change.p, changes)


class Search:
    "The models of a sweep. `of(name, part, ways)` measures what is not on disk."

    def __init__(self, options):
        self.options = options
        self.paths = run_names(options.models)
        self.notes = Notes(beside(options.out, '.jsonl'))
        self.opened = {}            # one at a time

    def open(self, name):
        if name not in self.opened:
            self.opened.clear()         # free the last one before the next comes
            tasks = [self.options.tasks, self.options.judge_tasks or self.options.tasks]
            self.opened[name] = Subject(self.paths[name], self.options, tasks)
        return self.opened[name]

    @functools.cache
    def about(self, name):
        "The Grid of a model: with it, what is noted can be read without opening the model again."
        subject = self.open(name)
        model = subject.model
        depth = depth_in(model)
        ways, impossible = ways_of(self.options, model)
        if not ways:
            raise Refused(f'nothing can be run: {"; ".join(impossible)}')
        places = {str(way): (window, row) for way, window, row in ways}
        ways = {str(way): way for way, _, _ in ways}
        subject.check(ways.values())
        recipe = None
        if not (self.options.blocks or self.options.loop or self.options.r):
            recipe = Way(window='{}-{}'.format(*pick_window(None, depth)), method='rk', K=3)
        layers = {str(way): way.cost(model) for way in (*ways.values(), recipe) if way}
        return Grid(subject.mark(), depth, ways, places, layers, recipe, impossible)

    def of(self, name, part, ways):
        "{way: {measure: Gain}}"
        plain = self.scores(name, part, Way())
        bar = tqdm(ways, f'{PARTS[part]} {name}', unit='way', leave=False)
        return {str(way): {measure: gain(measure, plain[measure], score) for measure, score
                           in self.scores(name, part, way).items()} for way in bar}

    def scores(self, name, part, way):
        "{measure: Score}: as noted, or measured now."
        note = dict(model=self.about(name).mark, part=PARTS[part], way=str(way))
        found = self.notes.get(note, lambda: self.open(name).scores(way, part))
        return {kind: Score(*values) for kind, values in found.items()}


class Grid(NamedTuple):
    mark: str               # of the model and all that it is asked
    depth: int
    ways: dict              # {as a user types it: the way}
    places: dict            # {the same: (its window in the picture, its row)}
    layers: dict            # {the same: how many run for each token}, the recipe's too
    recipe: Way | None
    impossible: list


def main(argv=None):
    options = read(Options, argv, __doc__)
    if options.judge_tasks and not options.tasks:
        raise Refused('--judge_tasks is what the best are judged by: give --tasks, too, to screen '
                      'by')
    search = Search(options)
    groups = by_seed(search.paths)
    for names in groups.values():
        depths = {name: search.about(name).depth for name in names}
        if len({*depths.values()}) > 1:
            raise Refused(f'these are not seeds of one run, their depths differ: {depths}')
    screened = {name: search.of(name, 0, search.about(name).ways.values())
                for name in search.paths}
    for name, gains in screened.items():
        for kind in options.score:
            check_choice(f'{name}: --score', kind, kinds_in([gains]))
    units = kinds_in(screened.values())
    shown = pick_shown('show', options.show, units)
    rows = []
    for group, names in groups.items():
        rows += judge(search, group, {name: screened[name] for name in names})
    grids = {name: search.about(name) for name in search.paths}
    for what in dict.fromkeys(what for grid in grids.values() for what in grid.impossible):
        print(f'left out: {what}')
    write_csv(rows, options.out)
    show(options.out, draw_sweep, [
        row | dict(zip(('window', 'setting'), grids[row['run']].places[row['way']])) for row in rows
        if row['part'] == 'screen' and row['way'] in grids[row['run']].places],
        {measure: units[measure] for measure in shown})


def kinds_in(runs):
    "{measure: its unit} of several {way: {measure: Gain}}."
    return {measure: gain.kind for ways in runs for gains in ways.values()
            for measure, gain in gains.items()}


def main_kinds(kinds, tasks):
    """What the ways are ranked by if nothing else is asked for: the shares of right answers of the
    tasks asked for (of a benchmark its first), or else the loss."""
    ours, theirs = parse_tasks(tasks)
    chosen = [kind for kind in kinds if kind.partition(', ')[0] in ours]
    benchmarks = [kind for kind in kinds if theirs and ' ' in kind and kind not in chosen
                  and not kind.startswith(('loss', 'depth '))]
    first = {}
    for metric in SHARES:
        for kind in benchmarks:
            if kind.partition(' (')[0].rpartition(' ')[2] == metric:
                first.setdefault(kind.partition(' ')[0], kind)
    if {kind.partition(' ')[0] for kind in benchmarks} - first.keys():
        raise Refused('these metrics cannot be averaged: choose one of them by --score: '
                      f'{", ".join(kinds)}')
    return chosen + list(first.values()) or [kind for kind in kinds if kind == 'loss'] or kinds[:1]


def judge(search, group, screened):
    """Judge the best ways, by the mean gain of one model's seeds, and the recipe. Prints a table;
    returns the rows of all that was measured."""
    options = search.options
    names = list(screened)
    grid = search.about(names[0])
    units = kinds_in(screened.values())
    ranked = options.score or main_kinds(units, options.tasks)
    gains = {way: [mean([screened[name][way][kind].mean for kind in ranked]) for name in names]
             for way in grid.ways}
    # what diverged comes last
    best = sorted(gains, key=lambda way: (math.isnan(mean(gains[way])), -mean(gains[way])))
    chosen = {way: grid.ways[way] for way in best[:options.best]}
    if grid.recipe:
        chosen.setdefault(str(grid.recipe), grid.recipe)
    parts = [{}, {}]
    for name in names:          # each model is opened once
        for part in (0, 1):
            parts[part][name] = search.of(name, part, chosen.values())
    shown = []
    for part in (0, 1):
        there = kinds_in(parts[part].values())
        wanted = {*ranked, *(kind for kind, unit in there.items() if unit == 'nats')}
        if part and options.judge_tasks:
            wanted |= {*main_kinds(there, options.judge_tasks)}
        shown += [(part, kind) for kind in there if kind in wanted or not wanted & {*there}]
    lines = [['way', 'layers run', *(f'{PARTS[part]}: gain in {kind}' for part, kind in shown)]]
    for way in chosen:
        is_recipe = way == str(grid.recipe)
        lines.append([way + (' (the recipe)' if is_recipe else ''), str(grid.layers[way])])
        for part, kind in shown:
            lines[-1].append(over_runs([parts[part][name][way][kind] for name in names]))
    print(summary(group, gains, ' and '.join(ranked)))
    changes = [[screened[name][way][kind].changes for name in names for kind in ranked]
               for way in gains]
    percent = all(units[kind] == 'share' for kind in ranked)
    print(luck(changes, percent, len(ranked)) + columns(lines))
    parts[0] = {name: screened[name] | parts[0][name] for name in names}
    return [dict(run=name, group=group, part=PARTS[part], way=way,
                 **{kind: each.mean for kind, each in measures.items()})
            for part in (0, 1) for name in names for way, measures in parts[part][name].items()]


def over_runs(gains):
    "The mean gain of some seeds with its error; of one, with the error of its questions, and p."
    percent = gains[0].kind == 'share'
    if len(gains) == 1:
        return change_in_words(*gains[0][1:4], percent)
    means = [each.mean for each in gains]
    return change_in_words(mean(means), standard_error(means), None, percent)


def summary(group, gains, score):
    "How many were searched, and how many gained."
    positive = [values for values in gains.values() if mean(values) > 0]
    text = f'\n{group}: {len(gains)} ways searched, {len(positive)} with a gain in {score}'
    seeds = len(next(iter(gains.values())))
    if seeds > 1:
        sure = sum(mean(values) > 2 * standard_error(values) for values in positive)
        text += f', {sure} of them by more than two standard errors over {seeds} seeds'
    return text


def luck(changes, percent, measures=1, draws=1000):
    """What the best of as many tries gains where there is nothing to find: in each draw, plain and
    changed are exchanged for half of the questions, the same ones in every way and in every model,
    because what is hard about a question is so for all of them. `changes`: of each way, a list for
    each model, and in it for each of the measures."""
    changes = [lists for lists in changes if np.isfinite(np.concatenate(lists)).all()]
    if not changes or not all(map(all, changes)):       # a perplexity is no mean of questions
        return ''
    rng = np.random.default_rng(0)
    totals = np.zeros((1 + draws, len(changes)))        # the first draw exchanges nothing
    signs = {}
    for i, lists in enumerate(map(np.array, zip(*changes))):            # (ways, questions)
        asked = i % measures, lists.shape[1]
        if asked not in signs:
            signs[asked] = rng.choice((-1, 1), (1 + draws, lists.shape[1]))
            signs[asked][0] = 1
        totals += signs[asked] @ lists.T / lists.shape[1] / len(changes[0])
    best, *by_chance = totals.max(1)
    say = lambda value: number(value, percent=percent)
    return (f'the best of {len(changes)} gains {say(best)}; with shuffled answers it would gain '
            f'{say(np.mean(by_chance))}, and as much or more in '
            f'{np.mean(np.array(by_chance) >= best - 1e-9):.1%} of {draws} draws\n')
