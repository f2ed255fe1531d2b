"""The tables of docs/RESULTS.md, made anew from the claims and from the rows of seeds.

The idea: docs/results/*.csv hold what was measured, a row a seed; docs/results/claims.toml says
which contrasts were named before the runs. This command judges them (report/claims.py) and writes
what stands between `<!-- table NAME -->` and `<!-- end -->`; the text around it is written by hand.

Usage:
    python nanodepth.py results             # seconds
    python nanodepth.py results --check     # exit 2 if RESULTS.md says anything else
"""
import re
import tomllib
from pathlib import Path

from common.errors import Refused, check_choice, nearest, refusing
from common.files import ROOT, replace
from report.claims import MARGINS, Contrast, verdicts
from report.panels import draw_ways
from report.plot import show
from report.tables import mean, read_csv, where
from tools.options import make_parser

SHOWN = ['depth 4', 'depth 5', 'text']     # of the picture
NEEDED = ('section', 'claim', 'paper', 'table', 'measure', 'unit', 'a', 'b', 'direction')


def value(text):
    try:
        return float(text)
    except ValueError:
        return text


def read_rows(path):
    if not path.exists():
        raise Refused(f'there is no {path}: `make seed-0` writes it')
    return [{key: value(text) for key, text in row.items()} for row in read_csv(path)]


def read_claims(path):
    with refusing(tomllib.TOMLDecodeError, why=lambda error: f'{path}: {error}'):
        spec = tomllib.loads(path.read_text())
    for claim in spec.get('claim', []):
        missing = [name for name in NEEDED if name not in claim]
        if missing:
            raise Refused(f'{path}: the claim {claim.get("claim")!r} has no {", ".join(missing)}')
        check_choice(f'{path}: unit', claim['unit'], tuple(MARGINS))
    for name in dict.fromkeys(claim['section'] for claim in spec.get('claim', [])):
        primary = [c for c in spec['claim'] if c['section'] == name and c.get('primary')]
        if len(primary) > 5:
            raise Refused(f'{path}: {name!r} has {len(primary)} primary claims, five are allowed')
    return spec


def values_of(rows, about, measure):
    "{seed: the number} of the rows that a contrast's side describes."
    mine = where(rows, **{key: float(v) if isinstance(v, (int, float)) else v
                          for key, v in about.items()})
    found = {row['seed']: row[measure] for row in mine if isinstance(row.get(measure), float)}
    if len(found) < sum(isinstance(row.get(measure), float) for row in mine):
        raise Refused(f'{about} describes several rows of one seed')
    return found


def side_of(claim, side, rows):
    "{seed: a side of the contrast}, less what is to be taken off it."
    found = values_of(rows, claim[side], claim['measure'])
    if less := claim.get(f'less_{side}'):
        off = values_of(rows, less, claim['measure'])
        found = {seed: found[seed] - off[seed] for seed in found.keys() & off.keys()}
    return found


def contrast(claim, rows):
    a, b = (side_of(claim, side, rows) for side in 'ab')
    factor = 100 if claim['unit'] == 'points' else 1
    if claim.get('paired', True):
        a, b = ({seed: side[seed] for seed in sorted(a.keys() & b.keys())} for side in (a, b))
    return Contrast([factor * v for v in a.values()], [factor * v for v in b.values()],
                    claim.get('paired', True))


def name_of(about):
    "'lidas', or 'lidas repeated +4'."
    return ' '.join(f'+{v}' if key == 'added' else str(v) for key, v in about.items()
                    if v != 'ordinary')


def ours(claim, found, rows):
    "What was measured, in words."
    if not found.n:
        return 'not measured yet'
    digits = 1 if claim['unit'] == 'points' else 3
    text = (f'{name_of(claim["a"])} {mean(found.a):.{digits}f}, {name_of(claim["b"])} '
            f'{mean(found.b):.{digits}f}: **{found.mean:+.{digits}f}**')
    if found.known:
        text += f' ± {found.half(0.95):.{digits}f}'
    if beside := claim.get('beside'):
        shown = [mean([*values_of(rows, claim[side], beside).values()]) for side in 'ab']
        text += ' (right: ' + ' against '.join(f'{100 * v:.0f}%' for v in shown) + ')'
    return text


def claims_table(claims, tables):
    "Markdown: the primary claims, judged, and then the others, with intervals alone."
    lines = ['| claim | paper | ours | seeds | p | by signs | verdict |', '|' + '---|' * 7]
    claims = sorted(claims, key=lambda claim: not claim.get('primary'))
    found = [contrast(claim, tables[claim['table']]) for claim in claims]
    first = [i for i, claim in enumerate(claims) if claim.get('primary')]
    judged = dict(zip(first, verdicts([found[i] for i in first],
                                      [MARGINS[claims[i]['unit']] for i in first],
                                      [claims[i]['direction'] for i in first])))
    for i, (claim, c) in enumerate(zip(claims, found)):
        verdict, p = judged.get(i, ('', None))
        p = f'{p:.2g}' if p is not None and c.known else ''
        signs = f'{c.p_signs:.2g}' if c.known and i in judged else ''
        lines.append(f'| {claim["claim"]} | {claim["paper"]} | '
                     f'{ours(claim, c, tables[claim["table"]])} | {c.n} | {p} | {signs} | '
                     f'{verdict} |')
    return lines


def numbers_table(spec, rows):
    "Markdown: means over seeds with half a 95% interval, a line for each setting."
    mine = where(rows, **spec.get('where', {}))
    keys, measures = spec['rows'], spec['columns']
    names = [dict(flops='10^12 FLOPs').get(m, m.replace('right', 'right, %')) for m in measures]
    lines = ['| ' + ' | '.join([*keys, 'seeds', *names]) + ' |',
             '|' + '---|' * (len(keys) + len(measures) + 1)]
    for at in dict.fromkeys(tuple(row[key] for key in keys) for row in mine):
        group = where(mine, **dict(zip(keys, at)))
        cells = [f'{key:g}' if isinstance(key, float) else key for key in at]
        for measure in measures:
            values = [row[measure] for row in group if isinstance(row.get(measure), float)]
            share = measure == 'copy' or measure.endswith(' right')
            factor, digits = (100, 1) if share else (1e-12, 1) if measure == 'flops' else (1, 3)
            c = Contrast([factor * v for v in values], [0.0] * len(values))
            cells.append('' if not values else f'{c.mean:.{digits}f}'
                         + (f' ± {c.half(0.95):.{digits}f}' if c.known else ''))
        cells.insert(len(keys), str(len(group)))
        lines.append('| ' + ' | '.join(cells) + ' |')
    return lines


def made(text, spec, folder):
    "RESULTS.md with its tables made anew."
    tables = {name: read_rows(folder / f'{name}.csv')
              for name in dict.fromkeys(c['table'] for c in [*spec.get('claim', []),
                                                             *spec.get('numbers', [])])}

    def fill(match):
        name = match[1]
        claims = [c for c in spec.get('claim', []) if c['section'] == name]
        numbers = [n for n in spec.get('numbers', []) if n['name'] == name]
        if not claims and not numbers:
            known = {c['section'] for c in spec['claim']} | {n['name'] for n in spec['numbers']}
            raise Refused(f'there is no table {name!r}{nearest(name, known)}')
        lines = claims_table(claims, tables) if claims else numbers_table(
            numbers[0], tables[numbers[0]['table']])
        return '\n'.join([f'<!-- table {name} -->', '', *lines, '', '<!-- end -->'])
    return re.sub(r'<!-- table (.+?) -->.*?<!-- end -->', fill, text, flags=re.S)


def main(argv=None):
    parser = make_parser(__doc__, file=(ROOT / 'docs/RESULTS.md', 'what is written'),
                         rows=(ROOT / 'docs/results', 'the folder of claims.toml and the rows'))
    parser.add_argument('--check', action='store_true', help='write nothing; say what differs')
    args = parser.parse_args(argv)
    file, folder = Path(args.file), Path(args.rows)
    before = file.read_text()
    after = made(before, read_claims(folder / 'claims.toml'), folder)
    if args.check:
        for a, b in zip(before.splitlines(), after.splitlines()):
            if a != b:
                raise Refused(f'{file} says {a!r}, but the rows say {b!r}')
        if before != after:
            raise Refused(f'{file} has other lines than its rows: python nanodepth.py results')
        return print(f'{file} says what the rows say')
    replace(file, after.encode())
    print(f'tables: {file}')
    show(file.parent / 'assets/adding.png', draw_ways, read_rows(folder / 'depth.csv'), SHOWN)
