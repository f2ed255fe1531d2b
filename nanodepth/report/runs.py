"""Several runs side by side: means over their seeds, and when each skill appeared.

The idea: runs that are called NAME-SEED, and were trained with that seed, are one group.

Usage:
    groups = read_groups(['out/lidas-0', 'out/lidas-1', 'out/baseline'])    # {name: [log per seed]}
    print_table(table(groups))
"""
import math
from pathlib import Path

from nanodepth.common.errors import Refused
from nanodepth.report.logs import read_lines
from nanodepth.report.tables import by_seed, run_names


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
