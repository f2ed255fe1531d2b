"""The tables of README.md and of the pages in docs/, from the rows of seeds beside this file, where
claims.toml has the contrasts that were named before the runs. A claim *holds* or *does not hold* if
the difference is significant after Holm's correction; else there is *no difference*, or it is *not
resolved*. What stands around `<!-- table NAME -->` and `<!-- end -->` is written by hand.
    python -m docs.results.check        # prints where a page differs; --write makes its tables anew
"""
import csv
import difflib
import math
import re
import sys
import tomllib
from pathlib import Path

from nanodepth.report.contrasts import ALPHA, error_of, mean, p_of, t_around
from nanodepth.report.tables import where

ROOT = Path(__file__).resolve().parents[2]
UNITS = dict(flops=(1e-12, 1), parameters=(1e-6, 2))        # a factor, and digits behind the point
MARGINS = dict(text=0.02, answers=0.05, points=5.0, layers=0.25)
SHARES = 'copy', 'overlap', 'screened', 'change'         # in %, and all that ends with `right`
TEXTS = 'README.md', 'docs/COURSE.md', 'docs/RESULTS.md', 'docs/LOG.md'
SHARED = 'task', 'measure', 'group', 'best'
DIGITS = 3, 1             # behind the point: of nats and layers, of points
HOLE = re.compile(r'\{(?:[^{}]|\{[^{}]*\})*\}')


def read_rows(path):
    "The rows of a CSV file, numbers as numbers; none, if there is no such file yet."
    def value(text):
        try:
            return float(text)
        except ValueError:
            return text
    if not path.exists():
        return []
    with open(path, newline='', encoding='utf-8') as file:
        return [{key: value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def values_of(rows, side, measure):
    "{seed: the number} of the rows that a contrast's side describes."
    assert not rows or measure in rows[0], f'no column {measure}'
    its = [row for row in where(rows, **{key: float(v) if isinstance(v, (int, float)) else v
                                         for key, v in side.items()})
           if isinstance(row.get(measure), float)]
    values = {row['seed']: row[measure] for row in its}
    assert len(values) == len(its), f'{side} describes several rows of one seed'
    return values


def contrast(claim, rows):
    "a against part_b * b + shift_b, seed by seed; `less_a` and `less_b` are taken off them first."
    def values(side):
        its = values_of(rows, claim[side], claim['measure'])
        if f'less_{side}' not in claim:
            return its
        off = values_of(rows, claim[f'less_{side}'], claim['measure'])
        return {seed: its[seed] - off[seed] for seed in its.keys() & off.keys()}
    a, b = values('a'), values('b')
    part, shift = claim.get('part_b', 1), claim.get('shift_b', 0)
    pairs = [(a[seed], part * b[seed] + shift) for seed in sorted(a.keys() & b.keys())]
    factor = 100 if claim['unit'] == 'points' else 1
    return Contrast(*([factor * pair[i] for pair in pairs] for i in (0, 1)))


class Contrast:
    "The mean of a minus b over seeds, in one order: their differences are one sample."

    def __init__(self, a, b):
        self.a, self.b = list(a), list(b)
        self.changes = [x - y for x, y in zip(self.a, self.b, strict=True)]
        self.n, self.error = len(self.changes), error_of(self.changes)
        self.known = self.n > 1 and math.isfinite(self.error)
        self.mean, p = mean(self.a) - mean(self.b), p_of(self.changes)
        self.p = 1.0 if p is None else p        # the same in all seeds, it says nothing

    def half(self, share):
        "Half the width of the confidence interval for this share."
        return t_around(share, self.n - 1) * self.error if self.known else math.inf

    def within(self, margin):
        return abs(self.mean) + self.half(0.9) < margin


def unresolved(contrast):
    if not contrast.n:
        return 'not measured yet'
    if not contrast.known:
        return f'not resolved ({contrast.n} seed{"s" * (contrast.n != 1)})'
    smallest = contrast.half(1 - ALPHA) + contrast.half(0.6)    # shown in four cases of five
    return f'not resolved ({smallest:.2g} would have shown)'


def holm(ps):
    "The p values, corrected for being many: the smallest times n, the next times n - 1, ..."
    adjusted, above = [None] * len(ps), 0.0
    for k, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        above = adjusted[i] = min(1.0, max(above, ps[i] * (len(ps) - k)))
    return adjusted


def verdict(contrast, p, margin, direction):
    "direction: +1 where the claim is that a is above b, -1 below, 0 that they are equal."
    within = contrast.within(margin)
    if within and (direction == 0 or p >= ALPHA):
        return 'no difference' if direction else 'holds'
    if p < ALPHA:
        return 'holds' if contrast.mean * direction > 0 else 'does not hold'
    return unresolved(contrast)


def judged(claims, tables):
    "[(claim, contrast, verdict, p)]: the primary claims, then the others, which have no verdict."
    claims = sorted(claims, key=lambda claim: not claim.get('primary'))
    contrasts = [contrast(claim, tables[claim['table']]) for claim in claims]
    ps = holm([c.p for claim, c in zip(claims, contrasts) if claim.get('primary')])
    verdicts = [verdict(c, p, MARGINS[claim['unit']], claim['direction'])
                for claim, c, p in zip(claims, contrasts, ps)]
    others = [''] * (len(claims) - len(ps))
    return [*zip(claims, contrasts, verdicts + others, ps + others)]


def spelled(c, digits, sign='', mark=''):
    "A mean, between marks, and half of its 95% interval."
    half = f' ± {c.half(0.95):.{digits}f}' if c.known else ''
    return f'{mark}{c.mean:{sign}.{digits}f}{mark}{half}'


def ours(claim, c, rows):
    "What was measured, in words, without the task that both sides share."
    digits, before = DIGITS[claim['unit'] == 'points'], dict(added='+', layer='layer ')
    a, b = (' '.join(f'{before.get(key, "")}{v}' for key, v in claim[side].items()
                     if (key, v) != ('way', 'ordinary')
                     and (key not in SHARED or v != claim[other][key]))
            for side, other in ('ab', 'ba'))
    of, apart = 'gain of ' if 'less_a' in claim else '', spelled(c, digits, '+', '**')
    text = f'{of}{a} {mean(c.a):.{digits}f}, {of}{b} {mean(c.b):.{digits}f}: {apart}'
    if 'beside' in claim:
        a, b = (values_of(rows, claim[side], claim['beside']) for side in 'ab')
        a, b = (100 * mean([side[seed] for seed in a if seed in b]) for side in (a, b))
        text += f' (right: {a:.0f}% against {b:.0f}%)'
    return text


def claims_table(outcomes, tables):
    if not any(c.n for _, c, _, _ in outcomes):
        rows = [f'| {claim["claim"]} | {claim["paper"]} |' for claim, *_ in outcomes]
        return ['| not measured yet | paper |', '|---|---|', *rows]
    lines = ['| claim | paper | ours (seeds) | verdict, p |', '|' + '---|' * 4]
    for claim, c, said, p in outcomes:
        said += f', {p:.2g}' if p != '' and c.known else ''
        text = ours(claim, c, tables[claim['table']])
        lines.append(f'| {claim["claim"]} | {claim["paper"]} | {text} ({c.n}) | {said} |')
    return lines


def number(at, rows):
    """What a hole says: of {measure = 'loss', run = 'lidas', ...} the mean and its interval over
    the rows that these words describe. With `less` they are compared with others, with `share_of` a
    part of them, and with `round` a whole number."""
    measure = at.pop('measure')
    less, whole, rounds = (at.pop(key, None) for key in ('less', 'share_of', 'round'))
    values = values_of(rows, at, measure)
    if less or whole:
        others = values_of(rows, at | (less or whole), measure)
        values = {seed: v / others[seed] if whole else v - others[seed]
                  for seed, v in values.items() if seed in others}
    share = whole or measure in SHARES or measure.endswith('right')
    factor, digits = (100, 1) if share else UNITS.get(measure, (1, 3))
    c = Contrast([factor * values[seed] for seed in sorted(values)], [0.0] * len(values))
    if whole or rounds:
        return f'{c.mean:.0f}' + '%' * bool(whole)
    return spelled(c, digits, '+' if less else '')


def all_tables(folder=ROOT / 'docs/results'):
    "{name: the lines of its table}: of claims, or written in words, in which {...} is a number."
    spec = tomllib.loads((folder / 'claims.toml').read_text(encoding='utf-8'))
    claims, written = spec.get('claim', []), spec.get('written', [])
    rows = {each['table']: read_rows(folder / f'{each["table"]}.csv') for each in claims + written}
    tables = {}
    for section in dict.fromkeys(claim['section'] for claim in claims):
        outcomes = judged([claim for claim in claims if claim['section'] == section], rows)
        tables[section] = claims_table(outcomes, rows)
    for each in written:
        def fill(hole):
            return number(tomllib.loads(f'at = {hole[0]}')['at'], rows[each['table']])
        head, *lines = ('| ' + ' | '.join(line) + ' |' for line in [each['head'], *each['lines']])
        tables[each['name']] = [head, '|' + '---|' * len(each['head']),
                                *(HOLE.sub(fill, line) for line in lines)]
    return tables


def made(text, tables):
    "A text with its tables put in anew."
    def fill(place):
        return '\n'.join([place[1], '', *tables[place[2]], '', '<!-- end -->'])
    return re.sub(r'(<!-- table (.+?) -->).*?<!-- end -->', fill, text, flags=re.S)


if __name__ == '__main__':
    tables = all_tables()
    for path in (ROOT / name for name in TEXTS):
        before = path.read_text(encoding='utf-8')
        after = made(before, tables)
        print(*difflib.unified_diff(before.splitlines(), after.splitlines(), str(path), n=0,
                                    lineterm=''), sep='\n')
        if '--write' in sys.argv:
            path.write_text(after, encoding='utf-8')
