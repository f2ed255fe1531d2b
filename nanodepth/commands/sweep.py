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
import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nanodepth.commands.evaluate import measured, print_tables
from nanodepth.common.errors import Refused
from nanodepth.common.files import Notes
from nanodepth.common.options import read
from nanodepth.scoring.lm_eval_scores import SHARES
from nanodepth.scoring.scores import PARTS, Asked, Subject, compared
from nanodepth.scoring.way import Way, Ways, depth_in, layers_and_order, read_ways
from nanodepth.loop import repeat_block
from nanodepth.looping.layers import pick_window
from nanodepth.report.plot import draw_sweep, show
from nanodepth.report.tables import (beside, mean, named_after, number, over_seeds, pick_shown,
                                     run_names, where, write_csv)


@dataclass(kw_only=True)
class Options(Ways, Asked):
    WORDS = ['models']
    models: list[str]           # folders that train.py wrote, or Hugging Face checkpoints
    blocks: tuple[int, ...] = ()    # instead of other ways: every block of so many layers ...
    times: tuple[int, ...] = (2,)   # ... run so many times
    best: int = 3               # how many are judged
    show: tuple[str, ...] = ()  # what the picture shows; (): all
    # beside the picture: .csv, and .jsonl with all that was measured; None: out/sweeps/ASKED.png
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


def ways_of(options, model):
    "[(a way, its window in the picture, its row there)]."
    _, order = layers_and_order(model)
    depth = len(order)
    if options.blocks:
        if max(options.blocks) > depth:
            raise Refused(f'--blocks={max(options.blocks)}: the model is {depth} layers deep')
        return [(Way(loop=repeat_block(order, start, size, times)), f'{start}-{start + size - 1}',
                 f'{times} times') for size in options.blocks for start in range(depth - size + 1)
                for times in options.times]
    if options.loop or options.r:
        return [(way, str(way), '') for way in read_ways(options)]
    ways = read_ways(replace(options, window=windows_of(options.window or ('all4',), depth),
                             method=options.method or ('rk',), K=options.K or (2, 3)))
    parts = [str(way).partition(' ') for way in ways]
    return [(way, window.partition('=')[2], rest) for way, (window, _, rest) in zip(ways, parts)]


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


def ranked_by(subject, rows):
    """What the ways are ranked by: a share of right answers for each task (of a benchmark its
    first), without tasks the loss."""
    of_data = ['loss', *(subject.val.kinds if subject.val else ())]
    first = {}
    for row in rows:
        task, _, metric = row['measure'].rpartition(' ')
        if row['kind'] == 'share' and row['measure'] not in of_data:
            first.setdefault(task if metric in SHARES else row['measure'], row['measure'])
    for row in rows:
        if row['kind'] == 'score' and row['measure'].partition(' ')[0] not in first:
            raise Refused(f'{row["measure"]} is no share of right answers, and nothing can be '
                          'ranked by it: leave its task out')
    return list(first.values()) or [rows[0]['measure']]


def search(name, path, options, notes):
    """Screen all ways, judge the best and the recipe, print both: (the rows of what was measured,
    those of the picture)."""
    subject = Subject(path, options, parts=2)
    places = ways_of(options, subject.model)
    ways = {str(way): way for way, _, _ in places}
    subject.check(ways.values())
    screened = measured(name, name, subject, [Way(), *ways.values()], notes)
    ranked = ranked_by(subject, screened)
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
    drawn = [dict(run=name, window=window, setting=row) | {
        each['measure']: gain(each) for each in where(screened, way=str(way))}
        for way, window, row in places]
    rows = [dict(part=part) | row for part, of_part in zip(PARTS, (screened, judged))
            for row in of_part]
    return rows, drawn


def main(argv=None):
    options = read(Options, argv, __doc__)
    options.out = options.out or Path('out/sweeps') / f'{named_after(options, "best")}.png'
    notes = Notes(beside(options.out, '.jsonl'))
    each = [search(name, path, options, notes) for name, path in run_names(options.models).items()]
    rows, drawn = (list(itertools.chain(*parts)) for parts in zip(*each))
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
