"""The difference of two models over seeds: its interval, its p, and what so many seeds can show.
Two models of one seed saw the same data in the same order. So their differences seed by seed are
one sample, which says more than the two means.
Usage: in_words(Contrast([0.70, 0.69, 0.72], [0.71, 0.73, 0.74]), margin=0.02)      # seed by seed
"""
import functools
import math

from nanodepth.report.tables import UNITS, mean, standard_error

ALPHA = 0.05
POWER = 0.8
SAME = 0.02                 # of a cost. Steps are whole, so two costs are never quite equal


def p_beyond(t, degrees):
    """How much of Student's t with so many degrees of freedom lies beyond -t and t. At t =
    sqrt(degrees) / tan(u) its density is in proportion to sin(u) to the power degrees - 1, which
    Simpson's rule adds up from u = 0, where t is infinite. (As 1 minus the rest, a small p would be
    lost.)"""
    def area(end, n=1000):
        heights = [math.sin(end * i / n) ** (degrees - 1) for i in range(n + 1)]
        inner = 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        return end / n / 3 * (heights[0] + inner + heights[-1])
    return area(math.atan2(math.sqrt(degrees), t)) / area(math.pi / 2)


@functools.cache
def t_around(share, degrees):
    "The t for which this share of Student's t lies between -t and t, by bisection."
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if 1 - p_beyond(middle, degrees) < share:
            low = middle
        else:
            high = middle
    return high


class Contrast:
    "The mean of a minus b over seeds: both in the same order, so their differences are one sample."

    def __init__(self, a, b):
        self.a = list(a)
        self.b = list(b)
        self.changes = [x - y for x, y in zip(self.a, self.b, strict=True)]
        self.n = len(self.changes)
        self.mean = mean(self.a) - mean(self.b)
        self.error = standard_error(self.changes)
        self.known = self.n > 1 and math.isfinite(self.error)
        # Shares of 200 questions move in half points, so two seeds often differ by as much. That
        # says nothing of how far a third one would be.
        self.all_equal = self.known and self.error <= 1e-9 * max(map(abs, self.a + self.b))

    def half(self, share):
        "Half the width of the confidence interval for this share."
        return t_around(share, self.n - 1) * self.error if self.known else math.inf

    @property
    def p(self):
        if not self.known or self.all_equal:
            return 1.0
        return p_beyond(abs(self.mean / self.error), self.n - 1)

    def smallest(self):
        "The difference that so many seeds, this noisy, would have shown in four cases of five."
        return (self.half(1 - ALPHA) + self.half(2 * POWER - 1)) if self.known else math.inf

    def within(self, margin):
        "Does the 90% interval lie within a margin that would not matter?"
        return abs(self.mean) + self.half(0.9) < margin


def in_words(contrast, margin=None):
    """What the seeds say of a difference of which nothing was claimed beforehand. Without a margin,
    nothing is too small to matter."""
    if contrast.all_equal:
        return f'not resolved (the same in all {contrast.n} seeds)'
    if contrast.known and contrast.p < ALPHA:
        return 'lower' if contrast.mean < 0 else 'higher'
    is_small = margin is not None and contrast.within(margin)
    return 'no difference' if is_small else unresolved(contrast)


def unresolved(contrast):
    if not contrast.n:
        return 'not measured yet'
    if not contrast.known:
        return f'not resolved ({contrast.n} seed{"s" * (contrast.n != 1)})'
    return f'not resolved ({contrast.smallest():.2g} would have shown)'


# ----------------------------------------------------------------------- rows, beside other rows

def spelled(values, kind, sign=''):
    "A mean over seeds and half of its 95% interval."
    unit = UNITS[kind]
    c = Contrast([unit.factor * value for value in values], [0.0] * len(values))
    half = '' if not c.known or c.all_equal else f' ± {c.half(0.95):{unit.digits}}'
    return f'{c.mean:{sign}{unit.digits}}{half}'


def margin_of(row, margins):
    "The difference in a row's measure that would not matter; None where nobody has named one."
    return margins.get(row['measure'], UNITS[row['kind']].margin)


def paired(rows, others):
    "[(a row, the others' row)] of the seeds that both have, measured on the same data."
    measured = lambda row: (row['seed'], row.get('data'))
    theirs = {measured(row): row for row in others}
    return [(row, theirs[measured(row)]) for row in rows if measured(row) in theirs]


def difference(rows, others, margins={}):
    "[how far rows are from others seed by seed, its p, what so many seeds say of it]"
    pairs = [(row['mean'], other['mean']) for row, other in paired(rows, others)]
    if not pairs or not all(math.isfinite(a - b) for a, b in pairs):
        return ['', '', '']
    factor = UNITS[rows[0]['kind']].factor
    c = Contrast(*zip(*((factor * a, factor * b) for a, b in pairs)))
    p = f'{c.p:.2g}' if c.known and not c.all_equal else ''
    return [spelled([a - b for a, b in pairs], rows[0]['kind'], '+'), p,
            in_words(c, margin_of(rows[0], margins))]


def is_same(cost, other):
    return abs(cost - other) <= SAME * other


def mean_of(rows, column):
    return mean([row[column] for row in rows])


def flops_of(rows, others):
    """(the training FLOPs of rows, those of others). Where both began from published models, whose
    cost is not known, it is the training since, which compare's rows have."""
    costs = [mean_of(each, 'training_flops') for each in (rows, others)]
    if all(map(math.isnan, costs)):
        costs = [mean([row.get('flops', math.nan) for row in each]) for each in (rows, others)]
    return costs


def beside(rows, bases):
    """[(in words, other rows)] that the rows of one group, way and measure are compared with. A way
    is compared with the model as it is. The model is compared with the first of `bases`, its rows
    of that measure, and with each later one that had as many training FLOPs. What no seed of both
    was measured on is no comparison."""
    pairs = []
    for name, others in bases.items():
        if not (common := paired(rows, others)):
            continue
        ours, theirs = zip(*common)
        tokens = is_same(mean_of(ours, 'tokens'), mean_of(theirs, 'tokens'))
        flops = is_same(*flops_of(ours, theirs))
        equal = ['equal tokens'] * tokens + ['equal training FLOPs'] * flops
        if not pairs or flops:
            pairs.append((', '.join([name, ' and '.join(equal)]).removesuffix(', '), others))
    return pairs
