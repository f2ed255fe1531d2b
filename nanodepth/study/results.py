"""The tables of README.md and of four pages in docs/, made anew from the rows of seeds.

The idea: docs/results/*.csv hold what was measured, a row a seed; docs/results/claims.toml says
which contrasts were named before the runs. This command judges them (study/claims.py) and writes
what stands between `<!-- table NAME -->` and `<!-- end -->`; the text around it is written by hand.
It also counts the lines of the seven files, where a table links one.

Usage:
    nanodepth results             # seconds
    nanodepth results --check     # exit 2 if a table says anything else
"""
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from nanodepth import ROOT
from nanodepth.common.errors import Refused, check_choice, nearest
from nanodepth.common.files import reading, replace
from nanodepth.common.options import read
from nanodepth.report.plot import draw_exits, draw_records, draw_runs, draw_ways, show
from nanodepth.report.tables import mean, read_csv, where
from nanodepth.study import diagrams, records
from nanodepth.study.claims import MARGINS, Contrast, verdicts

CHANCE = 1 / 3
UNITS = dict(flops=(1e-12, 1), parameters=(1e-6, 2))        # a factor, and digits behind the point
SHARES = 'copy', 'overlap', 'screened', 'change'         # in %, and all that ends with `right`
# the five models of the study, as the pictures call them
MODELS = dict(baseline='baseline', midas='MIDAS', lidas='LIDAS', loop_5x2='loop 5x2',
              loop_2_2x3_2='loop 2-2x3-2')
TEXTS = ('README.md', 'docs/COURSE.md', 'docs/RESULTS.md', 'docs/ROWS.md', 'docs/RECORDS.md')


def value(text):
    try:
        return float(text)
    except ValueError:
        return text


def read_rows(path):
    if not path.exists():
        return []           # nothing of it is measured yet
    return [{key: value(text) for key, text in row.items()} for row in read_csv(path)]


def read_claims(path):
    with reading(path):
        spec = tomllib.loads(path.read_text(encoding='utf-8'))
    for name in dict.fromkeys(claim['section'] for claim in spec.get('claim', [])):
        primary = [c for c in spec['claim'] if c['section'] == name and c.get('primary')]
        if len(primary) > 5:
            raise Refused(f'{path}: {name!r} has {len(primary)} primary claims, five are allowed')
    return spec


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
    seeds = sorted(a.keys() & b.keys())
    return Contrast([factor * a[seed] for seed in seeds], [factor * b[seed] for seed in seeds])


def name_of_side(side):
    "'lidas', or 'lidas repeated +4'."
    before = dict(added='+', layer='layer ')
    return ' '.join(f'{before.get(key, "")}{v}' for key, v in side.items() if v != 'ordinary')


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
    a, b = (name_of_side(claim[side]) for side in 'ab')
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


def claims_table(claims, tables):
    "Markdown: what was claimed, what the paper and we measured, and the verdicts."
    lines = ['| claim | paper | ours | seeds | p | by signs | verdict |', '|' + '---|' * 7]
    for claim, c, verdict, p in judged(claims, tables):
        known = p is not None and c.known
        p, signs = (f'{p:.2g}', f'{c.p_signs:.2g}') if known else ('', '')
        lines.append(f'| {claim["claim"]} | {claim["paper"]} | '
                     f'{ours(claim, c, tables[claim["table"]])} | {c.n} | {p} | {signs} | '
                     f'{verdict} |')
    return lines


def factor_and_digits(measure):
    "(the factor with which a number is printed, its digits)"
    share = measure in SHARES or measure.endswith('right')
    return (100, 1) if share else UNITS.get(measure, (1, 3))


def mean_and_interval(values, measure, sign=''):
    "'0.694 ± 0.002': a mean over seeds, and half its 95% interval."
    factor, digits = factor_and_digits(measure)
    c = Contrast([factor * v for v in values], [0.0] * len(values))
    half = f' ± {c.half(0.95):.{digits}f}' if c.known else ''
    return f'{c.mean:{sign}.{digits}f}{half}'


def cell_values(line, column, rows):
    """{seed: the number} of a cell: of the rows that the line and the column describe together, or
    of how far it is from another column's (`less`), or of how large a share of another line's."""
    measure = column['measure']
    described = line['rows'] | column.get('rows', {})
    values = values_of(rows, described, measure)
    if less := column.get('less'):
        others = values_of(rows, described | less, measure)
        return {seed: values[seed] - others[seed] for seed in values.keys() & others.keys()}
    if whole := column.get('share_of'):
        others = values_of(rows, described | whole, measure)
        return {seed: values[seed] / others[seed] for seed in values.keys() & others.keys()}
    return values


def models_table(spec, rows):
    """Markdown: one line for each model, one column for each measure or way of running it. The
    numbers are means over the seeds that have all cells."""
    columns = [spec.get('all_columns', {}) | column for column in spec['columns']]
    cells = [[cell_values(line, column, rows) for column in columns] for line in spec['lines']]
    measured = [set(cell) for line in cells for cell in line if cell]
    seeds = set.intersection(*measured) if measured else set()
    n = f'{len(seeds)} seed{"s" * (len(seeds) != 1)}'
    lines = [f'| {spec["of"]} ({n}) | ' + ' | '.join(c['is'] for c in columns) + ' |',
             '|' + '---|' * (len(columns) + 1)]
    for line, row in zip(spec['lines'], cells):
        texts = []
        for column, cell in zip(columns, row):
            values = [cell[seed] for seed in sorted(seeds) if seed in cell]
            if not values:
                texts.append(column.get('none', ''))
            elif 'share_of' in column:
                texts.append(f'{100 * mean(values):.0f}%')
            elif column.get('round'):
                factor, _ = factor_and_digits(column['measure'])
                texts.append(f'{factor * mean(values):.0f}')
            else:
                sign = '+' if 'less' in column else ''
                texts.append(mean_and_interval(values, column['measure'], sign))
        lines.append(f'| {line["is"]} | ' + ' | '.join(texts) + ' |')
    return lines


def written_table(spec, rows, claims):
    """Markdown: a table of words, in which {...} becomes a number. {measure = 'loss', run =
    'lidas', ...} is a mean and its interval over the rows of the table that these words describe,
    {claim = 'NAME'} how far apart the two sides of a claim are, and {verdict = 'NAME'} its verdict.
    """
    def number(match):
        at = tomllib.loads(f'at = {match[0]}')['at']
        if 'measure' not in at:
            [[kind, name]] = at.items()
            claim, c, verdict, _ = claims[name]
            return verdict if kind == 'verdict' else difference(claim, c)
        measure = at.pop('measure')
        return mean_and_interval(values_of(rows, at, measure).values(), measure)
    head, *lines = ('| ' + ' | '.join(line) + ' |' for line in [spec['head'], *spec['lines']])
    return [head, '|' + '---|' * len(spec['head']),
            *(re.sub(r'\{.*?\}', number, line) for line in lines)]


def numbers_table(spec, rows):
    "Markdown: means over seeds with half a 95% interval, a line for each setting."
    shown = where(rows, **spec.get('where', {}))
    keys, measures = spec['rows'], spec['columns']
    known = dict(flops='10^12 FLOPs', parameters='10^6 parameters')
    names = [known.get(m, m.replace('right', 'right, %')) for m in measures]
    lines = ['| ' + ' | '.join([*keys, 'seeds', *names]) + ' |',
             '|' + '---|' * (len(keys) + len(measures) + 1)]
    for at in dict.fromkeys(tuple(row[key] for key in keys) for row in shown):
        group = where(shown, **dict(zip(keys, at)))
        cells = [f'{key:g}' if isinstance(key, float) else key for key in at]
        for measure in measures:
            values = [row[measure] for row in group if isinstance(row.get(measure), float)]
            cells.append(mean_and_interval(values, measure) if values else '')
        cells.insert(len(keys), str(len(group)))
        lines.append('| ' + ' | '.join(cells) + ' |')
    return lines


def all_tables(spec, folder):
    "{name: the lines of its table}"
    claims = spec.get('claim', [])
    rows = {name: read_rows(folder / f'{name}.csv')
            for name in dict.fromkeys(
                each['table'] for kind in ('claim', 'numbers', 'models', 'written')
                for each in spec.get(kind, []))}
    tables = dict(records=records.table(read_rows(folder / 'records.csv')))
    outcomes = {}
    for section in dict.fromkeys(claim['section'] for claim in claims):
        section_claims = [claim for claim in claims if claim['section'] == section]
        outcomes |= {claim.get('name'): (claim, *outcome)
                     for claim, *outcome in judged(section_claims, rows)}
        tables[section] = claims_table(section_claims, rows) + origin(spec, section_claims[0])
    for each in spec.get('numbers', []):
        tables[each['name']] = numbers_table(each, rows[each['table']]) + origin(spec, each)
    for each in spec.get('models', []):
        tables[each['name']] = models_table(each, rows[each['table']])
    for each in spec.get('written', []):
        tables[each['name']] = written_table(each, rows[each['table']], outcomes)
    tables['where it was measured'] = measured_table(spec.get('measured', []))
    return tables


def origin(spec, each):
    "The lines below a table: at which commits its rows were measured."
    at = [commit for measured in spec.get('measured', []) if measured['table'] == each['table']
          for commit in measured['at']]
    return ['', f'*{each["table"]}.csv, measured at {", ".join(dict.fromkeys(at))}.*'] if at else []


def measured_table(measured):
    "Markdown: for each file of rows, what measured it, at which commits, and whether it is here."
    lines = ['| rows | measured by | at | here |', '|' + '---|' * 4]
    for each in measured:
        at = ', '.join(f'{commit} (seed{"s" * (len(seeds) > 1)} {", ".join(map(str, seeds))})'
                       for commit, seeds in each['at'].items())
        command = each['command'].replace('|', r'\|')
        lines.append(f'| [{each["table"]}.csv](results/{each["table"]}.csv) | `{command}` | {at} | '
                     f'{"yes" if each["here"] else "no"} |')
    return lines


def counted(match):
    "A cell that links one of the seven, and in the next cell its number of lines."
    lines = (ROOT / match[1]).read_text(encoding='utf-8').count('\n')
    return f'| [`{match[1]}`]({match[1]}) | {lines} |'


def made(text, tables):
    "A text with its tables put in anew."
    text = re.sub(r'\| \[`(\w+\.py)`\]\(\1\) \| .*? \|', counted, text)
    def fill(match):
        name = match[1]
        if name not in tables:
            raise Refused(f'there is no table {name!r}{nearest(name, tables)}')
        return '\n'.join([f'<!-- table {name} -->', '', *tables[name], '', '<!-- end -->'])
    return re.sub(r'<!-- table (.+?) -->.*?<!-- end -->', fill, text, flags=re.S)


def named(folder, table, names):
    "The rows of the models that the texts speak of, by the names that they have there."
    return [row | dict(run=names[row['run']]) for row in read_rows(folder / f'{table}.csv')
            if row['run'] in names]


@dataclass
class Options:
    WORDS = ['files']
    # the texts whose tables are made; none: all of TEXTS
    files: list[str] = field(default_factory=list)
    rows: Path = ROOT / 'docs/results'      # where claims.toml and the CSV files are
    check: bool = False                     # write nothing; say what differs
    diagrams: bool = False                  # draw the diagrams of the two pages, and nothing else


def main(argv=None):
    args = read(Options, argv, __doc__)
    folder = args.rows
    if args.diagrams:
        return diagrams.draw_all(folder.parent / 'assets')
    files = [Path(file) for file in args.files]
    spec = read_claims(folder / 'claims.toml')
    with reading(folder):
        tables = all_tables(spec, folder)
    for file in files or [ROOT / name for name in TEXTS]:
        with reading(folder):
            before = file.read_text(encoding='utf-8')
        after = made(before, tables)
        if args.check:
            differs(file, before, after)
        else:
            replace(file, after.encode())
        print(f'{file} says what the rows say')
    if not args.check:
        draw(folder, MODELS)


def logs_of(rows):
    "{run: [a log for each seed]}, as read_groups has them, from the rows of curves.csv."
    groups = {}
    for row in rows:
        line = {key: row[key] for key in ('step', 'flops', 'depth')}
        if row['loss'] != '':           # it is empty where a model grows between two measurements
            line |= dict(val_loss=row['loss'], kinds={
                kind.removesuffix(' right'): dict(accuracy=share)
                for kind, share in row.items() if kind.endswith(' right')})
        groups.setdefault(row['run'], {}).setdefault(row['seed'], []).append(line)
    return {run: list(seeds.values()) for run, seeds in groups.items()}


def draw_growing(rows):
    return draw_runs(logs_of(rows), ['loss', 'depth 3'])


def draw(folder, names):
    "The pictures of the rows, beside the texts."
    def picture(name, draw, table, names, *how):
        show(folder.parent / f'assets/{name}.png', draw, named(folder, table, names), *how)
    picture('growing', draw_growing, 'curves', names)
    picture('adding', draw_ways, 'depth', names, ['depth 5 right', 'text'], CHANCE)
    picture('exits', draw_exits, 'exits', names, 'depth 5 right', CHANCE)
    tried = read_rows(folder / 'records.csv')
    show(folder.parent / 'assets/records.png', draw_records, records.accepted(tried),
         records.judged(tried, records.SEEDS), records.RIGHT)


def differs(file, before, after):
    "Refuse a text whose tables are not those of the rows."
    for a, b in zip(before.splitlines(), after.splitlines()):
        if a != b:
            raise Refused(f'{file} says {a!r}, but the rows say {b!r}')
    if before != after:
        raise Refused(f'{file} has other lines than its rows: nanodepth results')
