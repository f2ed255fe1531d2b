"""The numbers of runs: a log for each, and tables of several, over their seeds.

The idea: a run tells everything as it goes along, a JSON line a measurement; whatever is said about
it later, table or picture (plot.py), is made from these lines. No number of one seed is a result:
runs named NAME-SEED are averaged, and their standard error stands beside the mean.

Usage:
    # {name: [a log for each seed]}
    groups = by_seed({name: read_log(path) for name, path in run_names(paths).items()})
    print_table(table(groups))
"""
import csv
import json
import math
import os
import re
from pathlib import Path

from common.columns import columns
from common.errors import Refused


class Log:
    """log.jsonl, a line for each logged step. A run that resumes drops the lines after its step
    first: it will write them again, so that a log has neither gaps nor doubles wherever the run was
    cut off."""

    def __init__(self, path, last_step, silent=False):
        self.file = None
        if not silent:
            kept = [line for line in read_lines(path) if line['step'] <= last_step]
            fresh = path.with_suffix('.tmp')
            fresh.write_text(''.join(json.dumps(line) + '\n' for line in kept))
            os.replace(fresh, path)
            self.file = open(path, 'a')

    def write(self, **line):
        if self.file:
            self.file.write(json.dumps(line) + '\n')
            self.file.flush()


def read_log(folder):
    "A run's log as a list of dicts, in the order of the steps."
    path = Path(folder) / 'log.jsonl'
    if not path.exists():
        raise Refused(f'there is no {path}: is {folder} the folder of a run?')
    return read_lines(path)


def read_lines(path):
    """The lines of a log up to the first that is not whole: a run at work, or one that was cut
    off, may have half a line."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def run_names(paths):
    "{name: path}: the last part of each path, where that tells them apart."
    names = [Path(path).name for path in paths]
    return dict(zip(names if len(set(names)) == len(names) else map(str, paths), paths))


def by_seed(runs):
    """{name: log} to {name: [a log for each seed]}: lidas-0, lidas-1 and lidas-2 are one run over
    three seeds; 1e-3 is a number."""
    stem = {name: re.sub(r'(?<!\de)-\d+$', '', name) for name in runs}
    seeds = [stem[name] for name in runs if stem[name] != name]
    groups = {}
    for name, log in runs.items():
        together = seeds.count(stem[name]) > 1 and stem[name] != name
        groups.setdefault((stem[name] + '-*' if stem[name] in runs else stem[name]) if together
                          else name, []).append(log)
    return groups


def growths(log):
    """The lines of a log at which the model is deeper than on the line before: it has grown, or
    begun to loop."""
    deep = [line.get('depth', line.get('n_layer', 0)) for line in log]
    return [line for line, before, now in zip(log[1:], deep, deep[1:]) if now > before]


def kinds_of(logs):
    return list(dict.fromkeys(kind for log in logs for line in log for kind in line.get('kinds',
            {})))


def pick(kind, what):
    return lambda line: line['kinds'].get(kind, {}).get(what, math.nan)


def at_all_seeds(group, x, value):
    "[(x, [value of each seed])] at the steps that all seeds have measured."
    seen = [{line['step']: line for line in log if 'val_loss' in line} for log in group]
    steps = sorted(set(seen[0]).intersection(*seen))
    return ([(seen[0][step][x], [value(lines[step]) for lines in seen]) for step in steps]
            or [(math.nan, [math.nan])])


def mean(values):
    return sum(values) / len(values) if values else math.nan


def standard_error(values):
    n, middle = len(values), mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.nan


# ------------------------------------------------------------------------------------------- tables

def write_csv(rows, picture):
    "The numbers beside their picture."
    path = picture.with_suffix('.csv')
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'w', newline='') as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    print(f'numbers: {path}')


def number(value, error=math.nan, percent=False):
    "A mean and, where there is one, its standard error: 0.694 ± 0.002, or in percent 97.3 ± 0.6."
    factor, digits = (100, 1) if percent else (1, 3)
    return f'{factor * value:.{digits}f}' + ('' if math.isnan(error)
                                             else f' ± {factor * error:.{digits}f}')


def table(groups, emerged=0.8):
    """A row for each group: means and standard errors over its seeds at the last step that all of
    them have measured, and for each kind the step and the FLOPs at which the accuracy first reached
    `emerged` (means over the seeds that got there: `reached`)."""
    rows, kinds = [], kinds_of([log for group in groups.values() for log in group])
    for name, group in groups.items():
        end = max(set.intersection(*({e['step'] for e in log if 'val_loss' in e} for log in group)),
                  default=None)
        if end is None:
            raise Refused(f'{name} has no measurement yet that all of its seeds share')
        last = [next(e for e in log if e['step'] == end and 'val_loss' in e) for log in group]
        row = dict(run=name, seeds=len(group), steps=mean([e['step'] for e in last]),
                   layers=mean([e['n_layer'] for e in last]),
                   flops=mean([e['flops'] for e in last]),
                   minutes=mean([e['seconds'] / 60 for e in last]))
        for key, value in {'loss': lambda e: e['val_loss'], 'text': pick('text', 'loss'),
                           **{kind: pick(kind, 'accuracy') for kind in kinds
                              if kind != 'text'}}.items():
            values = [value(e) for e in last]
            row[key], row[f'{key} se'] = mean(values), standard_error(values)
        for kind in kinds:
            if kind != 'text':
                first = [
                    next((e for e in log if 'val_loss' in e and pick(kind, 'accuracy')(e)
                          >= emerged), None) for log in group]
                first = [e for e in first if e]
                row[f'{kind} reached'] = len(first)
                row[f'{kind} step'], row[f'{kind} flops'] = (mean([e[x] for e in first])
                        for x in ('step', 'flops'))
        rows.append(row)
    return rows


def print_table(rows):
    """The rows in columns. Behind a mean and its standard error stands how far it is from the first
    row's, in standard errors of the difference: below 2 it is not resolved (and with three seeds, 2
    is not much: chance gives more in one case of ten)."""
    kinds = [key.removesuffix(' reached') for key in rows[0] if key.endswith(' reached')]
    ends = [['run', 'seeds', 'steps', 'FLOPs', 'minutes', 'loss', 'on text',
             *(f'{kind}, %' for kind in kinds)]]
    firsts = [['over 80% from', *(f'{kind}: step, FLOPs' for kind in kinds)]]
    for row in rows:
        ends.append([row['run'], str(row['seeds']), f'{row["steps"]:,.0f}', f'{row["flops"]:.3e}',
                     f'{row["minutes"]:.1f}'])
        for key in ('loss', 'text', *kinds):
            cell, error = number(row[key], row[f'{key} se'],
                                 key in kinds), math.hypot(row[f'{key} se'], rows[0][f'{key} se'])
            cell += (f' ({(row[key] - rows[0][key]) / error:+.1f})' if row is not rows[0]
                     and error > 0 else '')
            ends[-1].append(cell)
        firsts.append([row['run']])
        for kind in kinds:
            some = ('' if row[f'{kind} reached'] == row['seeds']
                    else f' ({row[f"{kind} reached"]} of {row["seeds"]} seeds)')
            firsts[-1].append(f'{row[f"{kind} step"]:.0f}, {row[f"{kind} flops"]:.2e}{some}'
                              if row[f'{kind} reached'] else 'never')
    print(columns(ends), columns(firsts), sep='\n\n')
