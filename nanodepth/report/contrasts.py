"""The difference of two models over seeds: its interval, its p, and what so many seeds can show.
Two models of one seed saw the same data in the same order. So their differences seed by seed are
one sample, which says more than the two means.
Usage: in_words(Contrast([0.70, 0.69, 0.72], [0.71, 0.73, 0.74]), margin=0.02)      # seed by seed
"""
import functools
import math

from nanodepth.report.tables import mean, standard_error

ALPHA = 0.05
POWER = 0.8
# what would not matter, by unit
MARGINS = dict(text=0.02, answers=0.05, points=5.0, layers=0.25, exponent=0.1)


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

    def half(self, share):
        "Half the width of the confidence interval for this share."
        return t_around(share, self.n - 1) * self.error if self.known else math.inf

    def interval(self, share):
        return self.mean - self.half(share), self.mean + self.half(share)

    @property
    def p(self):
        if not self.known:
            return 1.0
        if self.error == 0:
            return float(self.mean == 0)
        return p_beyond(abs(self.mean / self.error), self.n - 1)

    @property
    def p_signs(self):
        """Of all ways to set the signs of the differences (of many differences, ten thousand drawn
        ways), the share whose sum is as far from zero. It needs scipy."""
        import numpy as np
        from scipy import stats
        test = stats.permutation_test((self.changes,), np.mean, permutation_type='samples', rng=0,
                                      n_resamples=np.inf if self.n <= 16 else 9_999)
        return float(test.pvalue)

    def smallest(self):
        "The difference that so many seeds, this noisy, would have shown in four cases of five."
        return (self.half(1 - ALPHA) + self.half(2 * POWER - 1)) if self.known else math.inf

    def within(self, margin):
        "Does the 90% interval lie within a margin that would not matter?"
        low, high = self.interval(0.9)
        return -margin < low and high < margin


def in_words(contrast, margin):
    "What the seeds say of a difference of which nothing was claimed beforehand."
    if contrast.known and contrast.p < ALPHA:
        return 'lower' if contrast.mean < 0 else 'higher'
    return 'no difference' if contrast.within(margin) else unresolved(contrast)


def unresolved(contrast):
    if not contrast.n:
        return 'not measured yet'
    if not contrast.known:
        return f'not resolved ({contrast.n} seed{"s" * (contrast.n != 1)})'
    return f'not resolved ({contrast.smallest():.2g} would have shown)'
