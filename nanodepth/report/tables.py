"""Rows of numbers: averaged over seeds, in columns on the screen, or as a CSV file. No number of
one seed is a result. So the rows of a group of seeds are averaged, and the standard error stands
beside the mean.
Usage: over_seeds(rows, ['r'], ['loss'])    # [{'run': 'lidas', 'r': 2, 'loss': 0.7, ...}]
"""
import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

from nanodepth.common.errors import say
from nanodepth.common.files import checkpoint_file, read_run, replace
from nanodepth.training.plan import FREE


# What rows of numbers have beside the kinds of answers, which therefore have other names.
TAKEN = {'loss', 'val_loss', 'step', 'steps', 'tokens', 'flops', 'seconds', 'minutes', 'seed',
         'seeds', 'run', 'layers', 'lr'}


class Unit(NamedTuple):
    "How scores of one kind are written, and compared."
    word: str
    factor: int             # from a score to what is written
    digits: str
    less_is_better: bool
    margin: float | None    # a difference, as it is written, that would not matter


# of a loss, of a right answer, of how many are right, and of any other number, of which more or
# less is better
UNITS = dict(nats=Unit('nats', 1, '.3f', True, 0.02), log_prob=Unit('nats', 1, '.3f', False, 0.05),
             share=Unit('%', 100, '.1f', False, 5.0), score=Unit('', 1, '.3g', False, None),
             less=Unit('less is better', 1, '.3g', True, None))


class Score(NamedTuple):
    "How good a model is at something."
    kind: str               # of UNITS
    mean: float
    error: float | None     # its standard error, where there is one
    answers: list           # what each question, document or batch gave
    chance: float | None = None


PLAIN = 'as it is'          # the way of a model that nothing changes


def mean(values):
    return sum(values) / len(values) if values else math.nan


def standard_error(values):
    n, middle = len(values), mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.nan


def error_of(values):
    return standard_error(values) if len(values) > 1 else None


def columns(lines):
    "A table, for a screen or a Markdown file, of lines of cells, a heading first."
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines = [lines[0], ['-' * width for width in widths], *lines[1:]]
    return '\n'.join('| ' + ' | '.join(map(str.ljust, cells, widths)) + ' |' for cells in lines)


def run_names(paths):
    "{name: path}: the last part of each path, where that tells them apart."
    names = [Path(path).absolute().name for path in paths]
    return dict(zip(names if len(set(names)) == len(names) else map(str, paths), paths))


MADE = 'step', 'data', 'model_config', 'order'      # two models of which are scored as seeds of one


def groups_of(paths, more=()):
    """{name: its group of seeds} of {name: checkpoint}: in one folder, lidas-0, lidas-1 and lidas-2
    are one run over three seeds if they were trained with the seeds 0, 1 and 2. In base_1-2-1 the
    last number is no seed. Other settings make another run, and so does what `more` names of a
    checkpoint (MADE). Each seed may have a parent of its own."""
    groups, seeded = dict(zip(paths, paths)), {}
    for name, path in paths.items():
        file = checkpoint_file(path)            # a kept checkpoint may stand for its run
        stem, _, number = os.path.abspath(file.parent).rpartition('-')
        state = read_run(path) if number.isdecimal() else {}
        config = state.get('config') or {}
        if stem and config and config.get('seed') == int(number):
            settings = {key: value for key, value in config.items()
                        if key not in FREE - {'data'} | {'seed', 'init_from'}}
            made = json.dumps([settings, *map(state.get, more)], sort_keys=True, default=str)
            kept = f' {file.name}' * (file.name != 'ckpt.pt')
            seeded.setdefault(stem + kept, {})[name] = int(number), made
    names = [Path(stem).name for stem in seeded]
    for stem, of_name in seeded.items():
        seeds, made = zip(*of_name.values())
        group = Path(stem).name if names.count(Path(stem).name) == 1 else os.path.relpath(stem)
        if len({*made}) == 1 < len({*seeds}) == len(seeds):
            groups |= dict.fromkeys(of_name, f'{group}-*' if group in paths else group)
        elif len(seeds) > 1:
            say(f'{", ".join(of_name)}: not averaged as seeds of {group}, because settings, shape, '
                'steps or data differ, or a seed is there twice')
    return groups


def of_one_kind(rows):
    "A metric of lm-eval that looks like a share in some rows is one if it does so in all."
    kinds = {(row['measure'], row['kind']) for row in rows}
    for row in rows:
        if row['kind'] == 'share' and (row['measure'], 'score') in kinds:
            row['kind'] = 'score'
    return rows


def where(rows, **values):
    return [row for row in rows if all(row.get(key) == value for key, value in values.items())]


def grouped(rows):
    "{group of seeds: its rows}: a row says its group, or it is a run by itself."
    groups = {}
    for row in rows:
        groups.setdefault(row.get('group', row['run']), []).append(row)
    return groups


def over_seeds(rows, settings, kinds):
    """A row for each group of seeds and each setting: the mean of every number, and the standard
    error of every kind under 'KIND se'."""
    averaged = []
    for group, group_rows in grouped(rows).items():
        for at in dict.fromkeys(tuple(row[key] for key in settings) for row in group_rows):
            seeds = where(group_rows, **dict(zip(settings, at)))
            means = {}
            for key in dict.fromkeys(key for row in seeds for key in row):
                values = [row.get(key) for row in seeds]
                numbers = [value for value in values if isinstance(value, (int, float))]
                if numbers and key not in settings:     # None where a seed has no such number
                    means[key] = mean(numbers) if len(numbers) == len(values) else None
            errors = {f'{kind} se': standard_error([row[kind] for row in seeds]) for kind in kinds}
            averaged.append(seeds[0] | means | dict(run=group, seeds=len(seeds)) | errors)
    return averaged


def number(value, error=math.nan, kind='nats'):
    "A mean and, where there is one, its standard error: 0.694 (0.002), or of a share 97.3 (0.6)."
    unit = UNITS[kind]
    after = '' if math.isnan(error) else f' ({unit.factor * error:{unit.digits}})'
    return f'{unit.factor * value:{unit.digits}}{after}'


def change_in_words(change, error, p, kind):
    "+1.7 (1.7), p 0.250: a change, its standard error and its p, as far as there are such."
    text = number(change, math.nan if error is None else error, kind)
    text = text if text.startswith('-') else f'+{text}'
    if p is None:
        return text
    return f'{text}, p < 0.001' if p < 0.001 else f'{text}, p {p:.3f}'


def p_value(changes):
    """Of changes between two scores of the same questions, the probability of so uneven a split or
    a more uneven one, if up were as likely as down. For right and wrong this is McNemar's exact
    test; for scores with grades, as of losses, it is Wilcoxon's, by ranks, which needs scipy.
    None without changes, or without scipy."""
    changed = [c for c in changes if c]
    n = len(changed)
    if not changed:
        return 1.0 if changes else None
    if all(abs(c) == 1 for c in changed):
        fewer = min(sum(c > 0 for c in changed), sum(c < 0 for c in changed))
        return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2 ** n)
    try:
        from scipy import stats
    except ImportError:
        return None
    return float(stats.wilcoxon(changed).pvalue)


def as_csv(rows):
    "Rows as CSV, without what is a list in them."
    names = dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], list))
    file = io.StringIO(newline='')
    writer = csv.DictWriter(file, list(names), extrasaction='ignore')
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def beside(path, ending):
    "A picture's path with another ending. T1.0 and T1.5 are two names that have none yet."
    known = path.suffix in ('.png', '.pdf', '.svg', '.csv', '.html')
    return path.with_suffix(ending) if known else path.with_name(path.name + ending)


def named_after(options, *without):
    """The name of a file of what was asked: the models, and each option that was given. Two
    questions have two names; a long one is cut, and a few digits tell it from others."""
    first = Path(options.models[0])
    is_usual = first == Path('out') / first.name
    models = [first.name if is_usual else '-'.join(first.parts[-2:]), *options.models[1:]]
    parts = [models[0] + f'+{len(models) - 1}' * (len(models) > 1)]
    for each in dataclasses.fields(options):
        value = getattr(options, each.name)
        if each.name not in ('models', 'out', 'device', *without) and value != each.default:
            value = ','.join(map(str, value)) if isinstance(value, (list, tuple)) else value
            parts.append(f'{each.name}={value}')
    asked = '_'.join(parts)
    name = re.sub(r'[^\w.,=+-]+', '-', asked)
    digits = hashlib.sha256(repr([options.models, asked]).encode()).hexdigest()[:6]
    is_whole = len(name) <= 80 and len(models) == 1 and is_usual
    return name if is_whole else f'{name[:80]}_{digits}'


def write_csv(rows, picture):
    "Write the numbers beside their picture."
    path = beside(picture, '.csv')
    replace(path, as_csv(rows))
    print(f'numbers: {path}')
