"""Options that many commands share, declared once.

Usage:
    parser = make_parser('Compare runs.', 'data', 'batches', 'device', out='out/loop.png')
    parser.add_argument('runs', nargs='+', help=RUNS)
"""
import argparse
from pathlib import Path

from common.errors import check_choice

RUNS = ('folders that train.py wrote, or Hugging Face checkpoints; NAME-SEED are averaged over '
        'their seeds')
OPTIONS = dict(
    data=dict(help='a dataset (default: what the run was trained on)'),
    batches=dict(type=int, default=8, help='batches of validation data for each measurement'),
    tasks=dict(default='',
               help='primitives to score too, with their depth: assign_code/1,copy_words'),
    n=dict(type=int, default=200, help='examples of each task'),
    show=dict(help='what the picture shows, such as loss,assign_code/1 (default: all)'),
    loop=dict(help='run the layers in another order, such as 3-2x2-3'),
    r=dict(type=int, help='how often a recurrent core runs'),
    seed=dict(type=int, default=0),
    limit=dict(type=int, help='documents of each task: to try things, not to report them'),
    dtype=dict(default='auto', choices=['auto', 'float32', 'bfloat16', 'float16']),
    device=dict(default='auto', help='auto (cuda, else mps, else cpu), or one by name'),
)


def make_parser(about, *names, out=None, **more):
    "A parser with some of these options; `out` is the default of --out; more: argparse's own."
    parser = argparse.ArgumentParser(description=about, **more)
    for name in names:
        parser.add_argument(f'--{name}', **OPTIONS[name])
    if out is not None:
        parser.add_argument('--out', type=Path, default=Path(out),
                            help=f'the picture, and the numbers beside it (default: {out})')
    return parser


def pick_shown(option, text, kinds):
    "What an option such as --show=loss,copy names, or everything."
    names = text.split(',') if text else list(kinds)
    for name in names:
        check_choice(f'--{option}', name, kinds)
    return names
