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
    nanodepth sweep out/baseline --window=all2,all4 --method=naive,rk --K=2,3
    nanodepth sweep out/lidas out/baseline --blocks=1,2,4 --times=2
    nanodepth sweep out/smollm2 --K=2,3 --tasks=questions_piqa --limit=200
"""
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import Notes, replace
from nanodepth.common.options import read
from nanodepth.engine.lm_eval_scores import SHARES
from nanodepth.engine.scoring import PARTS, Asked, Subject, compared, parse_tasks
from nanodepth.engine.way import Way, Ways, depth_in, layers_and_order, read_ways
from nanodepth.loop import repeat_block
from nanodepth.looping.layers import pick_window
from nanodepth.report.plot import draw_sweep, show
from nanodepth.report.tables import (answer_rows, as_csv, beside, change_in_words, columns, mean,
                                     number, pick_shown, run_names, write_csv)
from nanodepth.wrapper import SOLVERS


@dataclass(kw_only=True)
class Options(Ways, Asked):
    WORDS = ['models']
    models: list[str]           # folders that train.py wrote, or Hugging Face checkpoints
    blocks: tuple[int, ...] = ()    # instead of other ways: every block of so many layers ...
    times: tuple[int, ...] = (2,)   # ... run so many times
    judge_tasks: str | None = None  # tasks to judge by; None: questions that were not screened
    # what the best are chosen by; (): the mean share of right answers over the tasks, or the loss
    score: tuple[str, ...] = ()
    best: int = 3               # how many are judged
    show: tuple[str, ...] = ()  # what the picture shows; (): all
    # beside the picture: .csv, and .jsonl with all that was measured
    out: Path = Path('out/sweep.png')
    answers: Path | None = None     # CSV: what each judged question gave, plainly and in the best


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
        return [(Way(loop=repeat_block(order, start, size, times)), f'{start}-{start + size - 1}',
                 f'{times} times') for size in options.blocks for start in range(depth - size + 1)
                for times in options.times], []
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


# ---------------------------------------------------------------------------- screening and judging

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


def gains_of(subject, notes, part, ways):
    "{way: {measure: Gain}} in a part of the questions. What is noted is not measured again."
    plain, *found = subject.noted([Way(), *ways], notes, part).items()
    return {way: {measure: gain(measure, plain[1][measure], score)
                  for measure, score in scores.items()} for way, scores in found}


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


def kinds_in(gains):
    "{measure: its unit} of {way: {measure: Gain}}."
    return {measure: gain.kind for measures in gains.values() for measure, gain in measures.items()}


def search(name, path, options, notes):
    """Screen all ways, judge the best and the recipe, print a table. (The rows of what was
    measured, {measure: its unit}, the rows of --answers)."""
    subject = Subject(path, options, [options.tasks, options.judge_tasks or options.tasks])
    ways, impossible = ways_of(options, subject.model)
    if not ways:
        raise Refused(f'nothing can be run: {"; ".join(impossible)}')
    for left_out in impossible:
        print(f'left out: {left_out}')
    of = {str(way): way for way, _, _ in ways}
    subject.check(of.values())
    screened = gains_of(subject, notes, 0, of.values())
    units = kinds_in(screened)
    for kind in options.score:
        check_choice(f'{name}: --score', kind, units)
    ranked = options.score or main_kinds(units, options.tasks)
    totals = {way: mean([gains[kind].mean for kind in ranked]) for way, gains in screened.items()}
    best = sorted(totals, key=lambda way: (math.isnan(totals[way]), -totals[way]))
    chosen = {way: of[way] for way in best[:options.best]}      # what diverged is not among them
    recipe = Way(window='{}-{}'.format(*pick_window(None, depth_in(subject.model))), method='rk',
                 K=3)
    if not (options.blocks or options.loop or options.r):
        chosen.setdefault(str(recipe), recipe)
    screened |= gains_of(subject, notes, 0, chosen.values())
    judged = gains_of(subject, notes, 1, chosen.values())
    answers = []
    if options.answers:
        named = {'as it is': Way(), 'the best': of[best[0]]} | (
            {'the recipe': recipe} if str(recipe) in chosen else {})
        found = subject.noted(named.values(), notes, 1)
        answers = answer_rows(name, {said: found[str(way)] for said, way in named.items()})

    print(f'\n{name}: {len(ways)} ways searched, {sum(v > 0 for v in totals.values())} with a gain '
          f'in {" and ".join(ranked)}')
    changes = [[screened[way][kind].changes for kind in ranked] for way in of]
    print(luck(changes, all(units[kind] == 'share' for kind in ranked)), end='')
    wanted = {*ranked}
    if options.judge_tasks:
        wanted |= {*main_kinds(kinds_in(judged), options.judge_tasks)}
    shown = [(part, gains, kind) for part, gains in zip(PARTS, (screened, judged))
             for kind, unit in kinds_in(gains).items() if kind in wanted or unit == 'nats']
    lines = [['way', 'layers run', *(f'{part}: gain in {kind}' for part, _, kind in shown)]]
    for way in chosen:
        cells = [change_in_words(*gains[way][kind][1:4], gains[way][kind].kind == 'share')
                 for _, gains, kind in shown]
        lines.append([way + (' (the recipe)' if way == str(recipe) else ''),
                      str(chosen[way].cost(subject.model)), *cells])
    print(columns(lines))
    places = {str(way): dict(window=window, setting=row) for way, window, row in ways}
    rows = [dict(run=name, part=part, way=way, **places.get(way, {}),
                 **{kind: each.mean for kind, each in gains.items()})
            for part, of_part in zip(PARTS, (screened, judged)) for way, gains in of_part.items()]
    return rows, units, answers


def main(argv=None):
    options = read(Options, argv, __doc__)
    if options.judge_tasks and not options.tasks:
        raise Refused('--judge_tasks is what the best are judged by: give --tasks, too, to screen '
                      'by')
    notes = Notes(beside(options.out, '.jsonl'))
    rows, units, answers = [], {}, []
    for name, path in run_names(options.models).items():
        of_model, its_units, its_answers = search(name, path, options, notes)
        rows += of_model
        units |= its_units
        answers += its_answers
    if options.answers:
        replace(options.answers, as_csv(answers, lineterminator='\n'))
    write_csv(rows, options.out)
    drawn = [row for row in rows if row['part'] == 'screen' and 'window' in row]
    show(options.out, draw_sweep, drawn,
         {measure: units[measure] for measure in pick_shown('show', options.show, units)})


def luck(changes, percent, draws=1000):
    """What the best of as many tries gains where there is nothing to find: in each draw, plain and
    changed are exchanged for half of the questions, the same ones in every way, because what is
    hard about a question is so for all of them. `changes`: of each way, a list for each measure."""
    changes = [lists for lists in changes if np.isfinite(np.concatenate(lists)).all()]
    if not changes or not all(map(all, changes)):       # a perplexity is no mean of questions
        return ''
    rng = np.random.default_rng(0)
    totals = np.zeros((1 + draws, len(changes)))        # the first draw exchanges nothing
    for lists in map(np.array, zip(*changes)):                              # (ways, questions)
        signs = rng.choice((-1, 1), (1 + draws, lists.shape[1]))
        signs[0] = 1
        totals += signs @ lists.T / lists.shape[1] / len(changes[0])
    best, *by_chance = totals.max(1)
    say = lambda value: number(value, percent=percent)
    return (f'the best of {len(changes)} gains {say(best)}; with shuffled answers it would gain '
            f'{say(np.mean(by_chance))}, and as much or more in '
            f'{np.mean(np.array(by_chance) >= best - 1e-9):.1%} of {draws} draws\n')
