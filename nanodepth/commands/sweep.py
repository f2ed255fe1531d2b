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
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanodepth.commands.evaluate import measured, print_tables
from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import Notes, replace
from nanodepth.common.options import read
from nanodepth.asking.lm_eval_scores import SHARES
from nanodepth.asking.scoring import PARTS, Asked, Subject, compared, parse_tasks
from nanodepth.asking.way import Way, Ways, depth_in, layers_and_order, read_ways
from nanodepth.loop import repeat_block
from nanodepth.looping.layers import pick_window
from nanodepth.report.plot import draw_sweep, show
from nanodepth.report.tables import (answer_rows, as_csv, beside, mean, named_after, number,
                                     over_seeds, pick_shown, run_names, where, write_csv)
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
    # beside the picture: .csv, and .jsonl with all that was measured; None: out/sweeps/ASKED.png
    out: Path | None = None
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

def better(measure, kind):
    "-1 where less is better."
    return -1 if kind == 'nats' or measure.endswith('(less is better)') else 1


def gain(row):
    "A change for the better, of a row of evaluate's."
    return better(row['measure'], row['kind']) * row['change']


def gains_of(measure, plain, score):
    "The same of each question; [] where a score is no mean over them, as a perplexity."
    if compared(plain, score).error is None:
        return []
    sign = better(measure, score.kind)
    return [sign * (b - a) for a, b in zip(plain.answers, score.answers)]


def ranked_by(options, rows):
    """What the ways are ranked by: --score; else one share of right answers for each task (of a
    benchmark the first that SHARES names); without tasks the loss."""
    units = {row['measure']: row['kind'] for row in rows}
    for measure in options.score:
        check_choice(f'{rows[0]["run"]}: --score', measure, units)
    if options.score:
        return list(options.score)
    ours, theirs = parse_tasks(options.tasks)
    if not ours and not theirs:
        return [*units][:1]
    ranked = [measure for measure in units if measure.partition(', ')[0] in ours]
    first = {}
    for metric in SHARES if theirs else ():
        for measure in units:
            task, _, name = measure.partition(' (')[0].rpartition(' ')
            if name == metric:
                first.setdefault(task, measure)
    for measure, kind in units.items():
        if theirs and kind == 'score' and measure.partition(' ')[0] not in first:
            raise Refused(f'{measure} is no share of right answers: choose what to rank by with '
                          f'--score: {", ".join(units)}')
    return ranked + list(first.values())


def search(name, path, options, notes):
    """Screen all ways, judge the best and the recipe, print both: (the rows of what was measured,
    those of the picture, those of --answers)."""
    subject = Subject(path, options, [options.tasks, options.judge_tasks or options.tasks])
    places, impossible = ways_of(options, subject.model)
    if not places:
        raise Refused(f'nothing can be run: {"; ".join(impossible)}')
    for left_out in impossible:
        print(f'left out: {left_out}')
    ways = {str(way): way for way, _, _ in places}
    subject.check(ways.values())
    screened = measured(name, name, subject, [Way(), *ways.values()], notes)
    ranked = ranked_by(options, screened)
    gains = {way: mean([gain(row) for row in where(screened, way=way) if row['measure'] in ranked])
             for way in ways}
    best = sorted(gains, key=lambda way: (math.isnan(gains[way]), -gains[way]))[:options.best]
    chosen = {way: ways[way] for way in best}       # what diverged is not among them
    recipe = Way(window='{}-{}'.format(*pick_window(None, depth_in(subject.model))), method='rk',
                 K=3)
    if not (options.blocks or options.loop or options.r):
        chosen.setdefault(str(recipe), recipe)
    judged = measured(name, name, subject, [Way(), *chosen.values()], notes, part=1)
    print(f'\n{name}: {len(ways)} ways searched, {sum(v > 0 for v in gains.values())} with a gain '
          f'in {" and ".join(ranked)}')
    plain, *found = subject.noted([Way(), *ways.values()], notes).values()
    print(luck([[gains_of(m, plain[m], scores[m]) for m in ranked] for scores in found],
               all(plain[m].kind == 'share' for m in ranked)), end='')
    for part, rows in zip(PARTS, (screened, judged)):
        print(f'\n{part}:')
        print_tables(over_seeds([row for row in rows if row['way'] in (str(Way()), *chosen)],
                                ['way', 'measure'], ['mean', 'change']))
    answers = []
    if options.answers:
        named = {'as it is': Way(), 'the best': ways[best[0]]} | (
            {'the recipe': recipe} if str(recipe) in chosen else {})
        found = subject.noted(named.values(), notes, 1)
        answers = answer_rows(name, {said: found[str(way)] for said, way in named.items()})
    drawn = [dict(run=name, window=window, setting=row) | {
        each['measure']: gain(each) for each in where(screened, way=str(way))}
        for way, window, row in places]
    rows = [dict(part=part) | row for part, of_part in zip(PARTS, (screened, judged))
            for row in of_part]
    return rows, drawn, answers


def main(argv=None):
    options = read(Options, argv, __doc__)
    if options.judge_tasks and not options.tasks:
        raise Refused('--judge_tasks is what the best are judged by: give --tasks, too, to screen '
                      'by')
    options.out = options.out or (
        Path('out/sweeps') / f'{named_after(options, "answers", "best", "score")}.png')
    notes = Notes(beside(options.out, '.jsonl'))
    each = [search(name, path, options, notes) for name, path in run_names(options.models).items()]
    rows, drawn, answers = (list(itertools.chain(*parts)) for parts in zip(*each))
    if options.answers:
        replace(options.answers, as_csv(answers, lineterminator='\n'))
    write_csv(rows, options.out)
    units = {row['measure']: row['kind'] for row in rows if row['part'] == 'screen'}
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
    # several measures may be of the same questions, so they share their exchanges
    signs = rng.choice((-1, 1), (1 + draws, max(map(len, changes[0]))))
    signs[0] = 1                                        # the first draw exchanges nothing
    totals = np.zeros((1 + draws, len(changes)))
    for lists in map(np.array, zip(*changes)):                              # (ways, questions)
        n = lists.shape[1]
        totals += signs[:, :n] @ lists.T / n / len(changes[0])
    best, *by_chance = totals.max(1)
    say = lambda value: number(value, percent=percent)
    return (f'the best of {len(changes)} gains {say(best)}; with shuffled answers it would gain '
            f'{say(np.mean(by_chance))}, and as much or more in '
            f'{np.mean(np.array(by_chance) >= best - 1e-9):.1%} of {draws} draws\n')
