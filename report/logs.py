"""The log of a run, and a table of several.

The idea: a run writes a JSON line for each measurement; every later table and picture (plot.py) is
made from these lines.

Usage:
    groups = read_groups(['out/lidas-0', 'out/lidas-1', 'out/baseline'])    # {name: [log per seed]}
    print_table(table(groups))
"""
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from common.columns import columns
from common.errors import Refused
from common.fields import fill, within
from common.files import aside, reading, replace
from report.tables import by_seed, difference, mean, number, over_seeds, run_names, where


class Log:
    """log.jsonl, a line for each logged step, and the progress bar. A run that resumes drops the
    lines after its step first: it will write them again, so that a log has neither gaps nor doubles
    wherever the run was cut off. What cannot be read before that is kept beside it, and said."""

    def __init__(self, path, last_step, steps=None, silent=False, say=print):
        self.file, self.shown = None, {}
        self.bar = tqdm(total=steps, initial=max(0, last_step), disable=silent or steps is None,
                        unit='step', dynamic_ncols=True)
        if silent:
            return
        lines, bad = read_lines(path, whole=True)
        kept = [line for line in lines if line['step'] <= last_step]
        if bad and (len(bad) > 1 or len(kept) == len(lines)):      # not just the line cut off
            other = aside(path, '.unreadable')
            replace(other, path.read_bytes())
            say(f'{path} has {len(bad)} lines that cannot be read, the first at line {bad[0]}: '
                f'left out, and the file as it was kept as {other}')
        if last_step > 0 and not kept:
            say(f'{path} has no line up to step {last_step}, where this run goes on: what it had '
                'logged is lost')
        replace(path, ''.join(json.dumps(line) + '\n' for line in kept).encode())
        self.file = open(path, 'a')

    def write(self, **line):
        if self.file:
            self.file.write(json.dumps(line) + '\n')
            self.file.flush()
            if 'depth' in line:
                self.shown['layers'] = line['depth']
            for name, short in dict(val_loss='val', loss='loss').items():
                if name in line:
                    self.shown[short] = f'{line[name]:.3f}'
            self.shown |= {kind: f'{found["accuracy"]:.0%}'
                           for kind, found in line.get('kinds', {}).items() if kind != 'text'}
            self.bar.set_postfix(self.shown, refresh=False)

    def show_step(self, tokens_per_s, mfu):
        "One step more on the bar; mfu: the share of the GPU's FLOPs that it used, if known."
        self.shown |= dict(tok_s=f'{tokens_per_s:,.0f}') | ({} if mfu is None else dict(mfu=mfu))
        self.bar.update()

    def sync(self):
        "Force the log to the disk, as the checkpoint beside it is."
        if self.file:
            os.fsync(self.file.fileno())

    def close(self):
        self.bar.close()
        if self.file:
            self.file.close()


def read_log(folder):
    "A run's log as a list of dicts, in the order of the steps."
    path = Path(folder) / 'log.jsonl'
    if not path.exists():
        raise Refused(f'there is no {path}: is {folder} the folder of a run?')
    return read_lines(path)


@dataclass
class Line:
    "What tables and pictures read of a line of a log."
    step: int
    flops: int | float
    tokens: int | float = within(0, 1e30, default=0)
    seconds: float = 0
    n_layer: int = 0
    depth: int = 0
    loss: float = 0
    val_loss: float = 0
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)


def read_lines(path, whole=False):
    """The lines of a log that are a step's; with `whole`, also the numbers of those that are not. A
    run at work, or one that was cut off, may have half a line at the end."""
    lines, bad = [], []
    with reading(path):
        raw_lines = path.read_bytes().splitlines() if path.exists() else []
    for place, raw in enumerate(raw_lines, 1):
        try:
            with reading(path):
                line = json.loads(raw)
                fill(Line, line, path, others=True)
            lines.append(line)
        except Refused:
            bad.append(place)
    return (lines, bad) if whole else lines


def read_groups(folders):
    paths = run_names(folders)
    return {group: [read_log(paths[name]) for name in names]
            for group, names in by_seed(paths).items()}


def growths(log):
    """The lines of a log at which the model is deeper than on the line before: it has grown, or
    begun to loop."""
    deep = [line.get('depth', line.get('n_layer', 0)) for line in log]
    return [line for line, before, now in zip(log[1:], deep, deep[1:]) if now > before]


def kinds_of(logs):
    lines = [line for log in logs for line in log]
    return list(dict.fromkeys(kind for line in lines for kind in line.get('kinds', {})))


def measured(group):
    """A row for each seed and each step that all seeds have measured: the losses, and the accuracy
    on each kind of answer."""
    seen = [{line['step']: line for line in log if 'val_loss' in line} for log in group]
    rows = []
    for step in sorted(set(seen[0]).intersection(*seen)):
        for seed, lines in enumerate(seen):
            line = lines[step]
            kinds = {kind: found.get('loss' if kind == 'text' else 'accuracy', math.nan)
                     for kind, found in line.get('kinds', {}).items()}
            rows.append(dict(seed=seed, step=step, flops=seen[0][step]['flops'],
                             layers=line.get('n_layer', 0), minutes=line.get('seconds', 0) / 60,
                             loss=line['val_loss'], **kinds))
    return rows


def table(groups, emerged=0.8):
    """A row for each group: means and standard errors over its seeds at the last step that all of
    them have measured, and for each kind the step and the FLOPs at which the accuracy first reached
    `emerged` (means over the seeds that got there: `reached`)."""
    kinds, found = kinds_of([log for group in groups.values() for log in group]), []
    kinds = list(dict.fromkeys(['text', *kinds]))
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
        found.append(row)
    return found


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
            reached, seeds = row[f'{kind} reached'], row['seeds']
            some = '' if reached == seeds else f' ({reached} of {seeds} seeds)'
            firsts[-1].append(f'{row[f"{kind} step"]:.0f}, {row[f"{kind} flops"]:.2e}{some}'
                              if reached else 'never')
    print(columns(ends), columns(firsts), sep='\n\n')
