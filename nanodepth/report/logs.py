"""The logs of runs: written by training, and read by every later table and picture. A run writes a
JSON line for each measurement. Runs called NAME-SEED that were trained with that seed are one
group.
Usage: groups = read_groups(['out/lidas-0', 'out/lidas-1'])     # {name: [the log of each seed]}
"""
import json
import math
import os
import sys
from pathlib import Path

from tqdm import tqdm

from nanodepth.common.errors import Refused
from nanodepth.common.files import replace
from nanodepth.report.tables import groups_of, run_names


# the bar itself has ten places, however much stands behind it
BAR = '{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]'


class Log:
    """log.jsonl, a line for each logged step, and the progress bar. A run that resumes drops the
    lines after its step first: it will write them again, so that a log has neither gaps nor doubles
    wherever the run was cut off."""

    def __init__(self, path, keep_up_to, steps=None, silent=False, online=None):
        self.file, self.shown, self.steps, self.online = None, {}, steps, None
        if online and not silent:       # the settings of a run that wandb shows, too
            import wandb
            self.online = wandb.init(project='nanodepth', name=Path(path).parent.name,
                                     config=online)
        # where nobody watches a bar, as under Slurm or nohup, a logged step is a line
        self.plain = not silent and steps is not None and not sys.stderr.isatty()
        self.bar = tqdm(total=steps, initial=max(0, keep_up_to), dynamic_ncols=True,
                        disable=silent or steps is None or self.plain, bar_format=BAR)
        if not silent:
            kept = [line for line in read_lines(path) if line['step'] <= keep_up_to]
            replace(path, ''.join(json.dumps(line) + '\n' for line in kept).encode())
            self.file = open(path, 'a', encoding='utf-8')

    def write(self, **line):
        if self.file:
            self.file.write(json.dumps(line) + '\n')
            self.file.flush()
            if self.online:
                self.online.log(line, step=line['step'])
            if 'depth' in line:
                self.shown['layers'] = line['depth']
            for name, short in dict(val_loss='val', loss='loss').items():
                if name in line:
                    self.shown[short] = f'{line[name]:.3f}'
            self.shown |= {kind: f'{result["accuracy"]:.0%}'
                           for kind, result in line.get('kinds', {}).items() if kind != 'text'}
            self.bar.set_postfix(self.shown, refresh=False)
            if self.plain:
                print(in_words(line, self.steps), file=sys.stderr, flush=True)

    def show_step(self, tokens_per_s, mfu):
        "One step more on the bar; mfu: the share of the GPU's FLOPs that it used, or None."
        self.shown['tok_s'] = f'{tokens_per_s:,.0f}'
        if mfu is not None:
            self.shown['mfu'] = f'{mfu:.0%}'
        self.bar.update()

    def sync(self):
        "Force the log to the disk, as the checkpoint beside it is."
        if self.file:
            os.fsync(self.file.fileno())

    def close(self):
        self.bar.close()
        if self.file:
            self.file.close()
        if self.online:
            self.online.finish()


UNITS = dict(val_loss='validation loss {:.4f}', loss='loss {:.4f}', lr='rate {:.2e}',
             n_layer='{} layers', tokens_per_s='{:,} tokens/s', mfu='{:.1%} of the peak',
             memory_gb='{:.1f} GB')


def in_words(line, steps):
    "A line of the log for a reader, such as `step 10 of 600: loss 3.2000, rate 4.00e-03, ...`."
    parts = [text.format(line[name]) for name, text in UNITS.items()
             if line.get(name) is not None]
    return f'step {line["step"]} of {steps}: {", ".join(parts)}'


def read_lines(path):
    """The lines of a log that are a step's. A run at work, or one that was cut off, may have half a
    line at the end."""
    lines = []
    for raw in path.read_bytes().splitlines() if path.exists() else []:
        try:
            line = json.loads(raw)
            line['step'], line['flops']
        except (ValueError, KeyError, TypeError):
            continue
        lines.append(line)
    return lines


def read_log(folder):
    "A run's log as a list of dicts, in the order of the steps."
    path = Path(folder) / 'log.jsonl'
    if not path.exists():
        raise Refused(f'there is no {path}: is {folder} the folder of a run?')
    return read_lines(path)


def read_groups(folders):
    "{group of seeds: the log of each of its runs}."
    paths = run_names(folders)
    logs = {}
    for name, group in groups_of(paths).items():
        logs.setdefault(group, []).append(read_log(paths[name]))
    return logs


def growths(log):
    """The lines of a log at which the model is deeper than on the line before: it has grown, or
    begun to loop."""
    deep = [line.get('depth', line.get('n_layer', 0)) for line in log]
    return [line for line, before, now in zip(log[1:], deep, deep[1:]) if now > before]


def without_compiling(log):
    """The log with its first logged steps as fast as later ones: a run that finds no compiled
    kernels waits for them there, and the next run does not."""
    lines = [line for line in log if 'seconds' in line]
    if len(lines) < 4:
        return log
    zero, first, second, third = lines[:4]
    pace = (third['seconds'] - second['seconds']) / (third['step'] - second['step'])
    waited = first['seconds'] - pace * (first['step'] - zero['step'])
    return [line | dict(seconds=line['seconds'] - waited) if line.get('seconds') else line
            for line in log]


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
            rows.append(dict(seed=seed, step=step, tokens=line.get('tokens', 0),
                             flops=seen[0][step]['flops'], layers=line.get('n_layer', 0),
                             minutes=line.get('seconds', 0) / 60,
                             loss=line['val_loss'], **kinds))
    return rows
