"""What train.py says beside its training: which configs there are, and what a finished run leaves.

Usage:
    list_configs()
    report(config, model, flops)
"""
import ast
import dataclasses
from pathlib import Path

from nanodepth import ROOT
from nanodepth.engine.cost import at_full_depth
from nanodepth.report.plot import draw_run, show
from nanodepth.report.logs import read_log


def report(config, model, flops):
    "Draw and print what a finished run leaves."
    out = Path(config.out_dir)
    saving = ''
    if config.grow:
        full = at_full_depth(dataclasses.replace(config, vocab_size=model.config.vocab_size))
        saving = f', {1 - flops / full:.1%} less than at full depth throughout'
    print(f'{flops:.3e} training FLOPs{saving}')
    show(out / 'loss.png', draw_run, out.name, read_log(out))
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
