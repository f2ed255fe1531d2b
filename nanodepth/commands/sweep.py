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

from nanodepth.commands.evaluate import print_tables, rows_of
from nanodepth.common.errors import Refused
from nanodepth.train import read
from nanodepth.scoring.lm_eval_scores import SHARES
from nanodepth.scoring.scores import Asked, Subject, compared, notes_beside
from nanodepth.scoring.way import Way, Ways, depth_in, layers_and_order, read_ways
from nanodepth.loop import repeat_block
from nanodepth.looping.layers import pick_window
from nanodepth.models.checkpoint import named_models
from nanodepth.report.tables import (error_of, mean, named_after, number, over_seeds, where,
                                     write_csv)


@dataclass(kw_only=True)
class Options(Ways, Asked):
    models: list[str]           # folders that train.py wrote, or Hugging Face checkpoints
    blocks: tuple[int, ...] = ()    # instead of other ways: every block of so many layers ...
    times: tuple[int, ...] = (2,)   # ... run so many times
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


def ways_of(options, model):
    _, order = layers_and_order(model)
    depth = len(order)
    if options.blocks:
        if max(options.blocks) > depth:
            raise Refused(f'--blocks={max(options.blocks)}: the model is {depth} layers deep')
        return [Way(loop=repeat_block(order, start, size, times)) for size in options.blocks
                for start in range(depth - size + 1) for times in options.times]
    if options.loop or options.r:
        return read_ways(options)
    return read_ways(replace(options, window=windows_of(options.window or ('all4',), depth),
                             method=options.method or ('rk',), K=options.K or (2, 3)))


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
    first), without tasks the loss. Tasks go first, because the authors found that held-out loss and
    accuracy go against each other."""
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


PARTS = 'screen', 'judge'


def half(scores, part):
    """The same scores by every other answer, from the first or the second on. What has no answers
    to halve, as a perplexity, is neither screened nor judged."""
    halves = {}
    for measure, score in scores.items():
        known = all(isinstance(answer, (int, float)) for answer in score.answers)
        some = score.answers[part::2] if known else []
        if some:
            halves[measure] = score._replace(mean=mean(some), error=error_of(some), answers=some)
    return halves


def search(name, path, options, notes):
    """Screen all ways, judge the best and the recipe, print both: the rows of what was measured.
    The search is that of "Training-Free Looped Transformers", appendix P. Its appendices G.5 and
    J.1 have windows that win the screen and lose on held-out data."""
    subject = Subject(path, options)
    ways = {str(way): way for way in ways_of(options, subject.model)}
    recipe = Way(window='{}-{}'.format(*pick_window(None, depth_in(subject.model))), method='rk',
                 K=3)
    tried = {str(Way()): Way()} | ways
    if not (options.blocks or options.loop or options.r):
        tried.setdefault(str(recipe), recipe)
    subject.check(tried.values())
    found = subject.noted(tried.values(), notes)
    halves = [{way: half(scores, part) for way, scores in found.items()} for part in (0, 1)]
    for part, scores in zip(PARTS, halves):
        if not scores[str(Way())]:
            raise Refused(f'{path}: what is asked has too few answers to {part} by: give more '
                          'questions or more data')
    screened = rows_of(name, name, subject, [*tried.values()], halves[0])
    ranked = ranked_by(subject, screened)
    gains = {way: mean([gain(row) for row in where(screened, way=way) if row['measure'] in ranked])
             for way in ways}
    best = sorted(gains, key=lambda way: (math.isnan(gains[way]), -gains[way]))[:options.best]
    chosen = [way for way in tried if way not in ways or way in best or way == str(recipe)]
    judged = rows_of(name, name, subject, [tried[way] for way in chosen], halves[1])
    print(f'\n{name}: {len(ways)} ways searched, {sum(v > 0 for v in gains.values())} with a gain '
          f'in {" and ".join(ranked)}')
    plain = halves[0][str(Way())]
    print(luck([[gains_of(m, plain[m], halves[0][way][m]) for m in ranked] for way in ways],
               all(plain[m].kind == 'share' for m in ranked)), end='')
    for part, rows in zip(PARTS, (screened, judged)):
        print(f'\n{part}:')
        print_tables(over_seeds([row for row in rows if row['way'] in chosen],
                                ['way', 'measure'], ['mean', 'change']))
    return [dict(part=part) | row for part, of_part in zip(PARTS, (screened, judged))
            for row in of_part]


def main(argv=None):
    options = read(Options, argv, ['models'])
    options.out = options.out or Path('out/sweeps') / f'{named_after(options, "best")}.csv'
    paths = named_models(options.models)
    notes = notes_beside(options.out)
    rows = [row for name, path in paths.items()
            for row in search(name, path, options, notes)]
    write_csv(rows, options.out)


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
