"""Compute how certain a mean or a difference is. Two models of one seed have read the same data in
the same order, and two ways of running answer the same questions. So differences are taken pair by
pair. They are a single sample, which is more certain than the difference of two means.
Usage: p_of([-0.01, -0.04, -0.02])      # of differences, seed by seed
"""
import functools
import math

from nanodepth.common.errors import say

ALPHA = 0.05


def mean(values):
    return sum(values) / len(values) if values else math.nan


def error_of(values):
    "Return the standard error of a mean, or None for fewer than two values."
    n, middle = len(values), mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n) if n > 1 else None


@functools.cache
def students_t():
    "Return scipy's Student's t. Without scipy, say what is missing and return None."
    try:
        from scipy.stats import t
    except ModuleNotFoundError:
        say('without scipy there is no p and no interval (pip install scipy)')
        return None
    return t


def is_known(values):
    "Return whether a t-test is possible. (Equal values have an error of 0.)"
    has_error = len(values) > 1 and error_of(values) > 1e-9 * max(map(abs, values))
    return has_error and students_t() is not None


def interval(values, share=0.95):
    "Return half the width of the confidence interval of a mean, or None if it is not known."
    if not is_known(values):
        return None
    return float(students_t().ppf((1 + share) / 2, len(values) - 1)) * error_of(values)


def p_of(values):
    "Return the p of a t-test that the mean is 0, or None if it is not known."
    if not is_known(values):
        return None
    return 2 * float(students_t().sf(abs(mean(values) / error_of(values)), len(values) - 1))


def verdict(change, p):
    "Return 'lower' or 'higher' if p is below 0.05, and 'not resolved' otherwise."
    if p is None or p >= ALPHA:
        return 'not resolved'
    return 'lower' if change < 0 else 'higher'


def p_value(changes):
    """Return the p of the changes between two scores of the same questions. If answers are right or
    wrong, this is McNemar's exact test: how likely is so uneven a split if up were as likely as
    down? Otherwise it is a t-test."""
    changed = [c for c in changes if c]
    if not changes or any(abs(c) != 1 for c in changed):
        return p_of(changes)
    n, fewer = len(changed), min(changed.count(1), changed.count(-1))
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2 ** n)
