"""The log of a run.

The idea: a run writes a JSON line for each measurement; every later table (runs.py) and picture
(plot.py) is made from these lines.

Usage:
    log = Log('out/lidas/log.jsonl', keep_up_to=-1, steps=600)
    log.write(step=10, loss=3.2)
    lines = read_lines('out/lidas/log.jsonl')
"""
import json
import os

from tqdm import tqdm

from nanodepth.common.files import aside, replace


class Log:
    """log.jsonl, a line for each logged step, and the progress bar. A run that resumes drops the
    lines after its step first: it will write them again, so that a log has neither gaps nor doubles
    wherever the run was cut off. What cannot be read before that is kept beside it, and said."""

    def __init__(self, path, keep_up_to, steps=None, silent=False, say=print):
        self.file, self.shown = None, {}
        self.bar = tqdm(total=steps, initial=max(0, keep_up_to), disable=silent or steps is None,
                        unit='step', dynamic_ncols=True)
        if silent:
            return
        lines, bad = sort_lines(path)
        kept = [line for line in lines if line['step'] <= keep_up_to]
        if bad and (len(bad) > 1 or len(kept) == len(lines)):      # not just the line cut off
            other = aside(path, '.unreadable')
            replace(other, path.read_bytes())
            say(f'{path} has {len(bad)} lines that cannot be read, the first at line {bad[0]}: '
                f'left out, and the file as it was kept as {other}')
        if keep_up_to > 0 and not kept:
            say(f'{path} has no line up to step {keep_up_to}, where this run goes on: what it had '
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
            self.shown |= {kind: f'{result["accuracy"]:.0%}'
                           for kind, result in line.get('kinds', {}).items() if kind != 'text'}
            self.bar.set_postfix(self.shown, refresh=False)

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


def read_lines(path):
    """The lines of a log that are a step's. A run at work, or one that was cut off, may have half a
    line at the end."""
    return sort_lines(path)[0]


def sort_lines(path):
    "(the lines of a log that are a step's, the numbers of those that are not)."
    lines, bad = [], []
    raw_lines = path.read_bytes().splitlines() if path.exists() else []
    for place, raw in enumerate(raw_lines, 1):
        try:
            line = json.loads(raw)
            line['step'], line['flops']
            lines.append(line)
        except (ValueError, KeyError, TypeError):
            bad.append(place)
    return lines, bad
