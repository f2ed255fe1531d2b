"""Read the logs of runs, in which training writes a line of JSON for each measurement.
Usage: groups = read_groups(['out/lidas-0', 'out/lidas-1'])     # {name: [the log of each seed]}
"""
import math
from pathlib import Path

from nanodepth.common.files import read_run
from nanodepth.model import require
from nanodepth.report.tables import names_of, run_names
from nanodepth.training.checkpoint import read_log


def log_of(folder):
    """Return a run's log as a list of dicts, in the order of the steps. Its FLOPs include those of
    the model that the run began from, except those of a published model."""
    path, state = Path(folder) / 'log.jsonl', read_run(folder)
    require(path.exists(), f'there is no {path}: is {folder} the folder of a run?')
    before, seed = state.get('inherited_flops', 0), (state.get('config') or {}).get('seed', 0)
    return [line | dict(flops=before + line.get('flops', 0), seed=seed) for line in read_log(path)]


def read_groups(folders):
    "Return {group of seeds: [the log of each run]}."
    logs = {}
    for name, folder in run_names(folders).items():
        logs.setdefault(names_of(name)['group'], []).append(log_of(folder))
    return logs


def growths(log):
    """Return the lines of a log at which the model is deeper than before, because it has grown or
    begun to loop."""
    deep = [line.get('depth', line.get('n_layer', 0)) for line in log]
    return [line for line, before, now in zip(log[1:], deep, deep[1:]) if now > before]


def kinds_of(groups):
    "Return the kinds of answers in {name: [one log for each seed]}."
    lines = [line for group in groups.values() for log in group for line in log]
    return list(dict.fromkeys(kind for line in lines for kind in line.get('kinds', {})))


def measured(group):
    """Return a row for each seed and each step that all seeds have measured, with the losses and
    the accuracy on each kind of answer."""
    seen = [{line['step']: line for line in log if 'val_loss' in line} for log in group]
    rows = []
    for step in sorted(set(seen[0]).intersection(*seen)):
        for line in (lines[step] for lines in seen):
            kinds = {kind: result.get('loss' if kind == 'text' else 'accuracy', math.nan)
                     for kind, result in line.get('kinds', {}).items()}
            rows.append(dict(seed=line.get('seed', 0), step=step, tokens=line.get('tokens', 0),
                             flops=line['flops'], layers=line.get('n_layer', 0),
                             minutes=line.get('seconds', 0) / 60, loss=line['val_loss'], **kinds))
    return rows
