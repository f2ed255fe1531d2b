"""Verdicts on the papers' claims, by rules that were set before the runs. A claim is a contrast
(report/contrasts.py) with a direction. It *holds* or *does not hold* where the difference is
significant after Holm's correction, and else there is *no difference* or it is *not resolved*.
Usage: verdicts([contrast, other], margins=[0.02, 5], directions=[-1, 1])
"""
from nanodepth.report.contrasts import ALPHA, unresolved


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
    within = contrast.within(margin)
    if direction == 0:
        return ('holds' if within else 'does not hold' if p < ALPHA
                else unresolved(contrast))
    if p < ALPHA:
        return 'holds' if contrast.mean * direction > 0 else 'does not hold'
    return 'no difference' if within else unresolved(contrast)
