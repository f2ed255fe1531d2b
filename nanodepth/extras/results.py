"""Make the tables of README.md and of the pages in docs/ anew, from the rows of seeds in
docs/results/. Its claims.toml says which contrasts were named before the runs, and claims.py judges
them. The text around `<!-- table NAME -->` and `<!-- end -->` is written by hand.
    nanodepth results --check       # takes seconds, and exits with 2 if a table says anything else
"""
import difflib
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from nanodepth import ROOT
from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import replace
from nanodepth.train import read
from nanodepth.extras.claims import verdicts
from nanodepth.report.contrasts import MARGINS, Contrast
from nanodepth.report.tables import mean, read_rows, where

UNITS = dict(flops=(1e-12, 1), parameters=(1e-6, 2))        # a factor, and digits behind the point
SHARES = 'copy', 'overlap', 'screened', 'change'         # in %, and all that ends with `right`
TEXTS = 'README.md', 'docs/COURSE.md', 'docs/RESULTS.md', 'docs/ATLAS.md'
SHARED = 'task', 'measure', 'group', 'best'
HOLE = re.compile(r'\{(?:[^{}]|\{[^{}]*\})*\}')


# -------------------------------------------------------------------------------------- from rows

def values_of(rows, side, measure):
    "{seed: the number} of the rows that a contrast's side describes."
    if rows:
        check_choice('measure', measure, rows[0])
    matching = where(rows, **{key: float(v) if isinstance(v, (int, float)) else v
                              for key, v in side.items()})
    values = {row['seed']: row[measure] for row in matching if isinstance(row.get(measure), float)}
    if len(values) < sum(isinstance(row.get(measure), float) for row in matching):
        raise Refused(f'{side} describes several rows of one seed')
    return values


def side_of(claim, side, rows):
    "{seed: a side of the contrast}, less what is to be taken off it."
    values = values_of(rows, claim[side], claim['measure'])
    if less := claim.get(f'less_{side}'):
        off = values_of(rows, less, claim['measure'])
        values = {seed: values[seed] - off[seed] for seed in values.keys() & off.keys()}
    return values


def contrast(claim, rows):
    a, b = (side_of(claim, side, rows) for side in 'ab')
    factor = 100 if claim['unit'] == 'points' else 1
    part, shift = claim.get('part_b', 1), claim.get('shift_b', 0)
    seeds = sorted(a.keys() & b.keys())
    return Contrast([factor * a[seed] for seed in seeds],
                    [factor * (part * b[seed] + shift) for seed in seeds])


# -------------------------------------------------------------------------------- a table of claims

def name_of_side(side, other):
    "'lidas', or 'lidas repeated +4': without the task that both sides share."
    before = dict(added='+', layer='layer ')
    return ' '.join(f'{before.get(key, "")}{v}' for key, v in side.items()
                    if (key, v) != ('way', 'ordinary') and (key not in SHARED or v != other[key]))


def difference(claim, c, mark=''):
    "'+0.123 ± 0.045'; the mean between marks."
    digits = 1 if claim['unit'] == 'points' else 3
    text = f'{mark}{c.mean:+.{digits}f}{mark}' if c.n else 'not measured yet'
    return text + (f' ± {c.half(0.95):.{digits}f}' if c.known else '')


def ours(claim, c, rows):
    "What was measured, in words."
    if not c.n:
        return 'not measured yet'
    digits = 1 if claim['unit'] == 'points' else 3
    of = 'gain of ' if 'less_a' in claim else ''
    a, b = (name_of_side(claim[side], claim[other]) for side, other in ('ab', 'ba'))
    text = (f'{of}{a} {mean(c.a):.{digits}f}, {of}{b} {mean(c.b):.{digits}f}: '
            f'{difference(claim, c, "**")}')
    if beside := claim.get('beside'):
        a, b = (values_of(rows, claim[side], beside) for side in 'ab')
        shown = [mean([side[seed] for seed in side if seed in a and seed in b]) for side in (a, b)]
        text += ' (right: ' + ' against '.join(f'{100 * v:.0f}%' for v in shown) + ')'
    return text


def judged(claims, tables):
    "[(claim, contrast, verdict, p)]: the primary claims, then the others, which have no verdict."
    claims = sorted(claims, key=lambda claim: not claim.get('primary'))
    contrasts = [contrast(claim, tables[claim['table']]) for claim in claims]
    first = [i for i, claim in enumerate(claims) if claim.get('primary')]
    outcomes = dict(zip(first, verdicts([contrasts[i] for i in first],
                                        [MARGINS[claims[i]['unit']] for i in first],
                                        [claims[i]['direction'] for i in first])))
    return [(claim, contrasts[i], *outcomes.get(i, ('', None))) for i, claim in enumerate(claims)]


def claims_table(outcomes, tables):
    "Markdown: what was claimed, what the paper and we measured, and the verdicts."
    lines = ['| claim | paper | ours | seeds | p | by signs | verdict |', '|' + '---|' * 7]
    for claim, c, verdict, p in outcomes:
        known = p is not None and c.known
        p, signs = (f'{p:.2g}', f'{c.p_signs:.2g}') if known else ('', '')
        lines.append(f'| {claim["claim"]} | {claim["paper"]} | '
                     f'{ours(claim, c, tables[claim["table"]])} | {c.n} | {p} | {signs} | '
                     f'{verdict} |')
    return lines


# --------------------------------------------------------------------------------- a table of words

def number(at, rows, claims):
    """What a hole says. {claim = 'NAME'} is how far apart the two sides of a claim are, {verdict =
    'NAME'} its verdict. {measure = 'loss', run = 'lidas', ...} is a mean and its interval over the
    rows that these words describe; with `less` how far they are from other rows, with `share_of`
    how large a part of them; with `round` without an interval."""
    if 'measure' not in at:
        [[kind, name]] = at.items()
        claim, c, verdict, _ = claims[name]
        return verdict if kind == 'verdict' else difference(claim, c)
    measure, less, whole, rounds = (at.pop(key, None) for key in ('measure', 'less', 'share_of',
                                                                  'round'))
    values = values_of(rows, at, measure)
    if less or whole:
        others = values_of(rows, at | (less or whole), measure)
        values = {seed: v / others[seed] if whole else v - others[seed]
                  for seed, v in values.items() if seed in others}
    values = [values[seed] for seed in sorted(values)]
    if whole:
        return f'{100 * mean(values):.0f}%'
    share = measure in SHARES or measure.endswith('right')
    factor, digits = (100, 1) if share else UNITS.get(measure, (1, 3))
    c = Contrast([factor * v for v in values], [0.0] * len(values))
    if rounds:
        return f'{c.mean:.0f}'
    half = f' ± {c.half(0.95):.{digits}f}' if c.known else ''
    return f'{c.mean:{"+" if less else ""}.{digits}f}{half}'


def written_table(spec, rows, claims):
    "Markdown: a table of words, in which {...} becomes a number."
    def fill(match):
        return number(tomllib.loads(f'at = {match[0]}')['at'], rows, claims)
    head, *lines = ('| ' + ' | '.join(line) + ' |' for line in [spec['head'], *spec['lines']])
    return [head, '|' + '---|' * len(spec['head']), *(HOLE.sub(fill, line) for line in lines)]


def all_tables(spec, folder):
    "{name: the lines of its table}"
    claims, written = spec.get('claim', []), spec.get('written', [])
    rows = {name: read_rows(folder / f'{name}.csv')
            for name in dict.fromkeys(each['table'] for each in claims + written)}
    tables, named = {}, {}
    for section in dict.fromkeys(claim['section'] for claim in claims):
        outcomes = judged([claim for claim in claims if claim['section'] == section], rows)
        named |= {outcome[0].get('name'): outcome for outcome in outcomes}
        tables[section] = claims_table(outcomes, rows)
    for each in written:
        tables[each['name']] = written_table(each, rows[each['table']], named)
    return tables


# -------------------------------------------------------------------------------------- into a text

def counted(match):
    "A cell that links one of the seven, and in the next cell its number of lines."
    lines = (ROOT / match[1]).read_text(encoding='utf-8').count('\n')
    return f'| [`{match[1]}`]({match[1]}) | {lines} |'


def made(text, tables):
    "A text with its tables put in anew."
    text = re.sub(r'\| \[`(\w+\.py)`\]\(\1\) \| .*? \|', counted, text)
    def fill(match):
        return '\n'.join([match[1], '', *tables[match[2]], '', '<!-- end -->'])
    return re.sub(r'(<!-- table (.+?) -->).*?<!-- end -->', fill, text, flags=re.S)


@dataclass
class Options:
    # the texts whose tables are made; none: all of TEXTS
    files: list[str] = field(default_factory=list)
    rows: Path = ROOT / 'docs/results'      # where claims.toml and the CSV files are
    check: bool = False                     # write nothing; say what differs


def main(argv=None):
    args = read(Options, argv, ['files'])
    files = [Path(file) for file in args.files] or [ROOT / name for name in TEXTS]
    texts = {file: file.read_text(encoding='utf-8') for file in files}      # before the work
    spec = tomllib.loads((args.rows / 'claims.toml').read_text(encoding='utf-8'))
    tables = all_tables(spec, args.rows)
    for file, before in texts.items():
        after = made(before, tables)
        if not args.check and before != after:
            replace(file, after.encode())
        elif before != after:
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm='')
            raise Refused('\n'.join([f'{file} does not say what the rows say:', *lines]))
        print(f'{file} says what the rows say')
