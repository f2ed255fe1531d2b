"""What so many seeds say of a difference, and so many questions of a change. Two models of one seed
saw the same data in the same order, and two ways answer the same questions. So their differences
are one sample, which says more than two means.
Usage: verdict([-0.01, -0.04, -0.02])           # 'lower', 'higher' or 'not resolved'
"""
import functools
import math

ALPHA = 0.05


def mean(values):
    return sum(values) / len(values) if values else math.nan


def error_of(values):
    "The standard error of a mean; None of one value."
    n, middle = len(values), mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n) if n > 1 else None


def is_known(values):
    "Is there an error to divide by? Equal differences say nothing of how far the next would be."
    return len(values) > 1 and error_of(values) > 1e-9 * max(map(abs, values))


def interval(values, share=0.95):
    "Half the width of the confidence interval of a mean; None where nothing is known."
    return t_around(share, len(values) - 1) * error_of(values) if is_known(values) else None


def p_of(values):
    "How likely a mean so far from 0 would be if that of all were 0; None where nothing is known."
    known = is_known(values)
    return p_beyond(abs(mean(values) / error_of(values)), len(values) - 1) if known else None


def verdict(differences):
    p, n = p_of(differences), len(differences)
    if p is not None and p < ALPHA:
        return 'lower' if mean(differences) < 0 else 'higher'
    return f'not resolved ({n} seed{"s" * (n != 1)})'


def p_value(changes):
    """p_of the changes between two scores of the same questions. Of right and wrong, McNemar's: how
    likely is so uneven a split, if up were as likely as down?"""
    changed = [c for c in changes if c]
    if not changes or any(abs(c) != 1 for c in changed):
        return p_of(changes)
    n, fewer = len(changed), min(changed.count(1), changed.count(-1))
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2 ** n)


def p_beyond(t, degrees):
    """How much of Student's t with so many degrees of freedom lies beyond -t and t. At t =
    sqrt(degrees) / tan(u) its density is in proportion to sin(u) to the power degrees - 1, which
    Simpson's rule adds up from u = 0, where t is infinite."""
    n = 2 * round(500 + 50 * math.sqrt(degrees))        # (the more degrees, the narrower it is)

    def area(end):
        heights = [math.sin(end * i / n) ** (degrees - 1) for i in range(n + 1)]
        inner = 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
        return end / n / 3 * (heights[0] + inner + heights[-1])
    return area(math.atan2(math.sqrt(degrees), t)) / area(math.pi / 2)


@functools.cache
def t_around(share, degrees):
    "The t for which this share of Student's t lies between -t and t, by bisection."
    low, high = 0.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - p_beyond(middle, degrees) < share else (low, middle)
    return high
