"""Which of many ways of running a model is best, and is it more than luck? Of a hundred ways some
are better by chance. So all of them are screened by one half of the questions, and the best are
judged by the other half. With --blocks, the ways are every block of the model, run several times.
    nanodepth sweep out/baseline --window=all4 --K=2,3      # every window of four layers
"""
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.loop import repeat_block
from nanodepth.model import spans_in
from nanodepth.models.checkpoint import named_models
from nanodepth.report.printed import print_tables
from nanodepth.report.tables import UNITS, mean, named_after, number, where, write_csv
from nanodepth.retrofit import core_of
from nanodepth.scoring.rows import Asked, Subject, notes_beside
from nanodepth.scoring.way import ALONE, Way, Ways, read_ways
from nanodepth.wrapper import pick_window
from nanodepth.wrapping.others import layers_of


@dataclass(kw_only=True)
class Options(Ways, Asked):
    models: list[str]           # folders that train.py wrote, or Hugging Face checkpoints
    blocks: tuple[int, ...] = ()    # instead of other ways: every block of so many layers ...
    times: tuple[int, ...] = ()     # ... run so many times; (): twice
    best: int = 3               # how many are judged
    # the rows; beside them .jsonl with all that was measured; None: out/sweeps/ASKED.csv
    out: Path | None = None


# ------------------------------------------------------------------------------------ the many ways

def windows_of(parts, depth):
    "('all4', 'mid2', '3-5') to ['0-3', '1-4', ...]."
    chosen = []
    for part in parts:
        every = re.fullmatch(r'all([1-9]\d*)', part)
        if every and (n := int(every[1])) <= depth:
            chosen += [f'{a}-{a + n - 1}' for a in range(depth - n + 1)]
        else:
            chosen.append('{}-{}'.format(*pick_window(part, depth)))
    return tuple(dict.fromkeys(chosen))


def order_of(model):
    return getattr(model, 'order', [*range(len(layers_of(model)))])


def ways_of(options, model):
    order = order_of(model)
    depth = len(order)
    if options.blocks:
        if others := read_ways(options):
            raise Refused(f'--blocks and {others[0]} are different ways of running a model')
        if spans_in(order_of(model)):
            raise Refused('--blocks repeats layers, and this model has Spans in its order: give '
                          '--window or --loop')
        if max(options.blocks) > depth:
            raise Refused(f'--blocks={max(options.blocks)}: the model is {depth} layers deep')
        return [Way(loop=repeat_block(order, start, size, times)) for size in options.blocks
                for start in range(depth - size + 1) for times in options.times or (2,)]
    if options.times:
        raise Refused('--times is for --blocks: give them, too')
    if any(getattr(options, name) for name in ALONE):
        return read_ways(options)
    if core_of(model) and not options.window:
        raise Refused('of a model with a recurrent core, name the ways: --r=1,2,4 or --window=0-1')
    every = options.window or (f'all{min(4, depth)}',)
    return read_ways(replace(options, window=windows_of(every, depth),
                             solver=options.solver or ('rk',), K=options.K or (2, 3)))


# ---------------------------------------------------------------------------- screening and judging

PARTS = 'screen', 'judge'


def gain(row, change):
    "A change for the better: of a loss, less is better."
    return -change if UNITS[row['kind']].less_is_better else change


def ranked_by(rows):
    """What the ways are ranked by: a share of right answers for each task (of a benchmark its
    first), without tasks the loss. Tasks go first, because the authors found that held-out loss and
    accuracy go against each other."""
    of_tasks = [row for row in rows if not row['data']]
    first = {}
    task_of = lambda row: re.split('(?<!,) ', row['measure'])[0]    # 'arc_easy' of its 'acc_norm'
    for row in of_tasks:
        if row['kind'] == 'share':
            first.setdefault(task_of(row), row['measure'])
    for row in of_tasks:
        if row['kind'] not in ('share', 'log_prob') and task_of(row) not in first:
            raise Refused(f'{row["measure"]} is no share of right answers, and nothing can be '
                          'ranked by it: leave its task out')
    return list(first.values()) or [rows[0]['measure']]


def search(name, subject, options, notes):
    """Screen all ways, judge the best and the recipe, print both: the rows of what was measured.
    The search is that of "Training-Free Looped Transformers", appendix P. Its appendices G.5 and
    J.1 have windows that win the screen and lose on held-out data."""
    ways = {str(way): way for way in ways_of(options, subject.model)}
    middle = pick_window(None, len(order_of(subject.model)))
    recipe = Way(window='{}-{}'.format(*middle), solver='rk', K=3)
    tried = {str(Way()): Way()} | ways
    if not (options.blocks or any(getattr(options, name) for name in ALONE)
            or spans_in(order_of(subject.model))):
        tried.setdefault(str(recipe), recipe)
    parts = {part: subject.rows([*tried.values()], notes, offset, part=part, run=name, group=name)
             for offset, part in enumerate(PARTS)}
    ranked = ranked_by(parts['screen']) if parts['screen'] else []
    known = {row['measure'] for row in where(parts['judge'], way=str(Way()))}
    if not ranked or not known.issuperset(ranked):
        raise Refused(f'{subject.path}: what is asked has too few answers to screen by some and '
                      'judge by others: give more questions or more data')
    by_way = {way: [row for row in where(parts['screen'], way=way) if row['measure'] in ranked]
              for way in ways}
    tries = {way: its for way, its in by_way.items() if len(its) == len(ranked)}    # none diverged
    gains = {way: mean([gain(row, row['change']) for row in its]) for way, its in tries.items()}
    best = sorted(gains, key=lambda way: (math.isnan(gains[way]), -gains[way]))[:options.best]
    shown = [way for way in tried if way not in ways or way in best or way == str(recipe)]
    parts['judge'] = [row for row in parts['judge'] if row['way'] in shown]
    print(f'\n{name}: {len(ways)} ways searched, {sum(v > 0 for v in gains.values())} with a gain '
          f'in {" and ".join(ranked)}')
    kind = where(parts['screen'], measure=ranked[0])[0]['kind']
    print(luck([[[gain(row, change) for change in row['changes']] for row in its]
                for its in tries.values()], kind), end='')
    for part, rows in parts.items():
        print(f'\n{part}:')
        print_tables([row for row in rows if row['way'] in shown])
    return sum(parts.values(), [])


def main(argv=None):
    options = read(Options, argv, ['models'])
    options.out = options.out or Path('out/sweeps') / f'{named_after(options, "best")}.csv'
    paths = named_models(options.models)
    notes = notes_beside(options.out)
    rows, first = [], None
    for name, path in paths.items():
        subject = Subject(path, options, like=first)
        first = first or subject
        rows += search(name, subject, options, notes)
    write_csv(rows, options.out)


def luck(changes, kind, draws=1000):
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
    return (f'the best of {len(changes)} gains {number(best, kind=kind)}; with shuffled answers it '
            f'would gain {number(np.mean(by_chance), kind=kind)}, and as much or more in '
            f'{np.mean(np.array(by_chance) >= best - 1e-9):.1%} of {draws} draws\n')
