"""Verdicts on the papers' claims: from rows of seeds to a sentence, by rules set before the runs.

The idea: a claim is a contrast, one number of one run minus the same of another, with a direction.
Its verdict follows from Student's t over the seeds alone: *holds* or *does not hold* where the
difference is significant after Holm's correction for all primary claims of its section, *no
difference* where the 90% interval lies within a margin that would not matter, else *not resolved*,
with the difference that so many seeds would have shown in four cases of five. Beside it stands a
test that assumes no shape: how often the signs of the differences, drawn again, make a mean as far
from zero.

Usage:
    contrast = Contrast([0.70, 0.69, 0.72], [0.71, 0.73, 0.74])    # seed by seed
    contrast.mean, contrast.interval(0.95), contrast.p, contrast.p_signs
    verdicts([contrast, other], margins=[0.02, 5], directions=[-1, 1])
"""
import math

import numpy as np
from scipy import stats

from nanodepth.report.tables import mean, standard_error

ALPHA = 0.05
POWER = 0.8
# what would not matter, by unit
MARGINS = dict(text=0.02, answers=0.05, points=5.0, layers=0.25, exponent=0.1)


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
        if not self.known:
            return math.inf
        return float(stats.t.ppf((1 + share) / 2, self.n - 1)) * self.error

    def interval(self, share):
        return self.mean - self.half(share), self.mean + self.half(share)

    @property
    def p(self):
        if not self.known:
            return 1.0
        if self.error == 0:
            return float(self.mean == 0)
        return float(2 * stats.t.sf(abs(self.mean / self.error), self.n - 1))

    @property
    def p_signs(self):
        """Of all ways to set the signs of the differences (of many differences, ten thousand drawn
        ways), the share whose sum is as far from zero."""
        test = stats.permutation_test((self.changes,), np.mean, permutation_type='samples', rng=0,
                                      n_resamples=np.inf if self.n <= 16 else 9_999)
        return float(test.pvalue)

    def smallest(self):
        "The difference that so many seeds, this noisy, would have shown in four cases of five."
        return (self.half(1 - ALPHA) + self.half(2 * POWER - 1)) if self.known else math.inf


def holm(ps):
    "The p values, corrected for being many: the smallest times n, the next times n - 1, ..."
    adjusted = [None] * len(ps)
    above = 0.0
    for k, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        above = adjusted[i] = min(1.0, max(above, ps[i] * (len(ps) - k)))
    return adjusted


def verdicts(contrasts, margins, directions):
    """[(verdict, corrected p)] of the primary claims of a section. direction: +1 where the claim is
    that a is above b, -1 below, 0 that they are equal."""
    corrected = holm([c.p for c in contrasts])
    return [(verdict(c, p, margin, direction), p)
            for c, p, margin, direction in zip(contrasts, corrected, margins, directions)]


def verdict(contrast, p, margin, direction):
    low, high = contrast.interval(0.9)
    within = -margin < low and high < margin
    if direction == 0:
        return ('holds' if within else 'does not hold' if p < ALPHA
                else unresolved(contrast))
    if p < ALPHA:
        return 'holds' if contrast.mean * direction > 0 else 'does not hold'
    return 'no difference' if within else unresolved(contrast)


def unresolved(contrast):
    if not contrast.n:
        return 'not measured yet'
    if not contrast.known:
        return f'not resolved ({contrast.n} seed{"s" * (contrast.n != 1)})'
    return f'not resolved ({contrast.smallest():.2g} would have shown)'
