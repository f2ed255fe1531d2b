"""Several runs side by side: means over their seeds, and when each skill appeared.

The idea: runs that are called NAME-SEED, and were trained with that seed, are one group. A row of the table is a group, at the last
step that all of its seeds have measured.

Usage:
    groups = read_groups(['out/lidas-0', 'out/lidas-1', 'out/baseline'])    # {name: [log per seed]}
    print_table(table(groups))
"""
import math
from pathlib import Path

from nanodepth.common.columns import columns
from nanodepth.common.errors import Refused
from nanodepth.report.logs import read_lines
from nanodepth.report.tables import by_seed, difference, mean, number, over_seeds, run_names, where


def read_log(folder):
    "A run's log as a list of dicts, in the order of the steps."
    path = Path(folder) / 'log.jsonl'
    if not path.exists():
        raise Refused(f'there is no {path}: is {folder} the folder of a run?')
    return read_lines(path)


def read_groups(folders):
    paths = run_names(folders)
    return {group: [read_log(paths[name]) for name in names]
            for group, names in by_seed(paths).items()}


def growths(log):
    """The lines of a log at which the model is deeper than on the line before: it has grown, or
    begun to loop."""
    deep = [line.get('depth', line.get('n_layer', 0)) for line in log]
    return [line for line, before, now in zip(log[1:], deep, deep[1:]) if now > before]


def kinds_of(groups):
    "The kinds of answers in {name: [one log per seed]}."
    lines = [line for group in groups.values() for log in group for line in log]
    return list(dict.fromkeys(kind for line in lines for kind in line.get('kinds', {})))


def measured(group):
    """A row for each seed and each step that all seeds have measured: the losses, and the accuracy
    on each kind of answer."""
    seen = [{line['step']: line for line in log if 'val_loss' in line} for log in group]
    rows = []
    for step in sorted(set(seen[0]).intersection(*seen)):
        for seed, lines in enumerate(seen):
            line = lines[step]
            kinds = {kind: result.get('loss' if kind == 'text' else 'accuracy', math.nan)
                     for kind, result in line.get('kinds', {}).items()}
            rows.append(dict(seed=seed, step=step, flops=seen[0][step]['flops'],
                             layers=line.get('n_layer', 0), minutes=line.get('seconds', 0) / 60,
                             loss=line['val_loss'], **kinds))
    return rows


def table(groups, emerged=0.8):
    """A row for each group: means and standard errors over its seeds at the last step that all of
    them have measured, and for each kind the step and the FLOPs at which the accuracy first reached
    `emerged` (means over the seeds that got there: `reached`)."""
    kinds = kinds_of(groups)
    kinds = list(dict.fromkeys(['text', *kinds]))
    table_rows = []
    for name, group in groups.items():
        rows = measured(group)
        if not rows:
            raise Refused(f'{name} has no measurement yet that all of its seeds share')
        last = [dict.fromkeys(kinds, math.nan) | row | dict(run=name)
                for row in where(rows, step=rows[-1]['step'])]
        [end] = over_seeds(last, [], ['loss', *kinds])
        row = dict(run=name, seeds=len(group), steps=end['step'])
        row |= {key: end[key] for key in ('layers', 'flops', 'minutes', 'loss', 'loss se')}
        for kind in kinds:
            row |= {kind: end[kind], f'{kind} se': end[f'{kind} se']}
            if kind != 'text':
                there = [r for r in rows if r.get(kind, math.nan) >= emerged]
                first = list({r['seed']: r for r in reversed(there)}.values())
                row |= {f'{kind} reached': len(first),
                        f'{kind} step': mean([r['step'] for r in first]),
                        f'{kind} flops': mean([r['flops'] for r in first])}
        table_rows.append(row)
    return table_rows


def print_table(rows):
    """The rows in columns. A mean and its standard error are followed by its distance from the
    first row's, in standard errors of the difference: below 2 it is not resolved (with three
    seeds, chance gives more than 2 in one case of ten)."""
    kinds = [key.removesuffix(' reached') for key in rows[0] if key.endswith(' reached')]
    ends = [['run', 'seeds', 'steps', 'FLOPs', 'minutes', 'loss', 'on text',
             *(f'{kind}, %' for kind in kinds)]]
    firsts = [['over 80% from', *(f'{kind}: step, FLOPs' for kind in kinds)]]
    for row in rows:
        ends.append([row['run'], str(row['seeds']), f'{row["steps"]:,.0f}', f'{row["flops"]:.3e}',
                     f'{row["minutes"]:.1f}'])
        for kind in ('loss', 'text', *kinds):
            away = difference(row, rows[0], kind)[1] if row is not rows[0] else None
            ends[-1].append(number(row[kind], row[f'{kind} se'], kind in kinds)
                            + ('' if away is None else f' ({away:+.1f})'))
        firsts.append([row['run']])
        for kind in kinds:
            reached = row[f'{kind} reached']
            seeds = row['seeds']
            some = '' if reached == seeds else f' ({reached} of {seeds} seeds)'
            firsts[-1].append(f'{row[f"{kind} step"]:.0f}, {row[f"{kind} flops"]:.2e}{some}'
                              if reached else 'never')
    print(columns(ends), columns(firsts), sep='\n\n')
