"""Which of many ways of running a model is best? Of a hundred ways some are better by chance. So
every other question chooses the best, and the rest of the questions judge them. With --blocks, the
ways are every block of the model, run several times. ("Training-Free Looped Transformers", appendix
P; its G.5 and J.1 have windows that win a screen and lose on held-out data.)
    nanodepth sweep out/baseline --window=all4 --K=2,3      # every window of four layers
"""
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from nanodepth.common.options import read
from nanodepth.model import require
from nanodepth.report.contrasts import error_of, mean, p_value
from nanodepth.report.tables import PLAIN, UNITS, print_table, write_csv
from nanodepth.retrofit import core_of
from nanodepth.scoring.rows import ScoreOptions, Subject, score_ways
from nanodepth.scoring.ways import Ways, ways_of
from nanodepth.wrapper import pick_window
from nanodepth.wrapping.others import layers_of


@dataclass(kw_only=True)
class Options(Ways, ScoreOptions):
    model: str                  # a folder that train.py wrote, or a Hugging Face checkpoint
    blocks: tuple[int, ...] = ()    # instead of other ways: every block of so many layers ...
    times: tuple[int, ...] = (2,)   # ... run so many times
    best: int = 3               # how many are judged
    out: Path | None = None     # the rows as CSV; None: out/sweeps/MODEL.csv


def many_ways(options, model):
    "All ways to try: --window=all4 is every window of four layers."
    order, windows = getattr(model, 'order', [*range(len(layers_of(model)))]), []
    n = len(order)
    if options.blocks:
        require(len(ways_of(options)) == 1, '--blocks stands instead of other ways')
        require(order == [*range(n)] and max(options.blocks) <= n, f'--blocks is for a model that '
                f'runs each layer once, and this one runs {order}')
        loops = [f'{start}-{size}x{times}-{n - start - size}' for size in options.blocks
                 for start in range(n - size + 1) for times in options.times]
        return [{}, *(dict(loop=loop.removeprefix('0-').removesuffix('-0')) for loop in loops)]
    if options.loop or options.r or options.span:
        return ways_of(options)
    require(options.window or not core_of(model), 'for a recurrent model, give --r, --span or '
            '--window')
    for part in options.window or (f'all{min(4, n)}',):
        every = re.fullmatch(r'all([1-9]\d*)', part)
        a, b = pick_window(f'0-{int(every[1]) - 1}' if every else part, n)
        windows += [f'{a + i}-{b + i}' for i in range(n - b if every else 1)]
    return ways_of(replace(options, window=tuple(windows), solver=options.solver or ('anchored',),
                           K=options.K or (2, 3)))


def half(rows, offset):
    "Return the rows, each with every other answer, from the first or from the second one on."
    halves = []
    for row in rows:
        answers, changes = row.answers[offset::2], row.changes[offset::2]
        if answers and changes:             # a perplexity has none
            halves.append(replace(
                row, mean=mean(answers), error=error_of(answers), n=len(answers),
                change=mean(changes), change_error=error_of(changes), p=p_value(changes)))
    return halves


def ranked_by(rows):
    """Return the measures that choose: for each task its first share of right answers, or without
    tasks the loss. (In the authors' notes, held-out loss and accuracy on AIME disagree.)"""
    shares = {}
    for row in rows:
        if not row.data and row.kind == 'share':
            shares.setdefault(re.split('(?<!,) ', row.measure)[0], row.measure)
    return [*shares.values()] or ['loss']


def gains_of(rows, ranked):
    "Return {way: its mean gain in the measures that choose}."
    gains = {}
    for row in rows:
        if row.measure in ranked and row.way != PLAIN and not math.isnan(row.change):
            sign = -1 if UNITS[row.kind].less_is_better else 1
            gains.setdefault(row.way, []).append(sign * row.change)
    return {way: mean(each) for way, each in gains.items() if len(each) == len(ranked)}


def main(argv=None):
    options = read(Options, argv, ['model'])
    name, screen, judge = Path(options.model).absolute().name, [], []
    out = options.out or Path('out/sweeps') / f'{name}.csv'
    subject = Subject(options.model, options)
    for of_way in score_ways(subject, many_ways(options, subject.model), run=name, group=name):
        screen += half(of_way, 0)
        judge += half(of_way, 1)
        write_csv([vars(row) | dict(part=part) for part, rows in
                   dict(screen=screen, judge=judge).items() for row in rows], out)
    ranked = ranked_by(screen)
    gains = gains_of(screen, ranked)
    require(gains and {row.measure for row in judge} >= {*ranked},
            'too few answers to choose with some and to judge with others')
    best = sorted(gains, key=gains.get, reverse=True)[:options.best]
    print(f'{name}: {len(gains)} ways, {sum(v > 0 for v in gains.values())} with a gain in '
          f'{" and ".join(ranked)}')
    for title, rows in (('chosen with one', screen), ('judged with the other', judge)):
        print(f'\n{title} half of the answers:')
        print_table([row for row in rows if row.way in (PLAIN, *best)])
    print(f'numbers: {out}')
