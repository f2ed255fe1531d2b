"""What train.py says beside its training: which configs there are, and what a finished run leaves.

Usage:
    list_configs()
    report(config, model, flops)
"""
import ast
from pathlib import Path

from nanodepth import ROOT
from nanodepth.report.plot import draw_runs, show
from nanodepth.report.runs import read_log


def report(config, model, flops):
    "Draw and print what a finished run leaves."
    c = config
    out = Path(config.out_dir)
    saving = ''
    # beside a run with all layers from the first step on, and the same cool-down
    if c.grow:
        # FLOPs per token, with each layer once; and in the order that the model ended with
        deep = model.flops_per_token(range(c.n_layer), context=c.context)
        cooldown = model.flops_per_token(context=c.context)
        growing_steps = c.steps - c.decay_steps
        full = c.batch_size * c.context * (growing_steps * deep + c.decay_steps * cooldown)
        saving = f', {1 - flops / full:.1%} less than at full depth throughout'
    print(f'{flops:.3e} training FLOPs{saving}')
    show(out / 'loss.png', draw_runs, {out.name: [read_log(out)]})
    print(f'numbers: {out}/log.jsonl')
    print(f'checkpoint, log and picture are in {out}; nanodepth sample {out} writes text')


def list_configs():
    "Print every config with the first line of what it says of itself."
    for path in sorted((ROOT / 'config').glob('[!_]*.py')):
        try:
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
        except SyntaxError as error:
            docstring = f'(cannot be read: {error})'
        print(f'  {f"config/{path.name}":44}{docstring.partition(chr(10))[0]}')
