"""Train a model by a config: train.py, whose parent may be a Hugging Face checkpoint here.
Usage: nanodepth train CONFIG [--name=value ...] [--dry_run]     (--help lists the settings)
"""
import ast
import contextlib
import math

import torch

from nanodepth import ROOT
from nanodepth.commands import cost
from nanodepth.common.errors import refusing
from nanodepth.common.files import claim
from nanodepth.models.checkpoint import data_of, open_path
from nanodepth.common.options import read
from nanodepth.train import train
from nanodepth.training.machine import RANK
from nanodepth.training.plan import Config

OUT_OF_MEMORY = 'the GPU has too little memory: a higher --grad_accum makes smaller pieces'


def open_parent(path, classes):
    state, model = open_path(path, classes=classes)
    if not state:               # what a published model has cost is not known
        state = dict(inherited_flops=math.nan)
    return model, state | dict(data=data_of(path, state))


def main(argv):
    if not argv:
        print(*__doc__.splitlines()[1:], sep='\n')
        for path in sorted((ROOT / 'config').glob('[!_]*.py')):
            about = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
            print(f'  {f"config/{path.name}":44}{about.partition(chr(10))[0]}')
        raise SystemExit(2)
    if any(arg.partition('=')[0] == '--dry_run' for arg in argv):
        return cost.main(argv)
    config = read(Config, argv)
    with refusing(torch.OutOfMemoryError, why=lambda error: OUT_OF_MEMORY):
        with claim(config.out_dir) if RANK == 0 else contextlib.nullcontext():
            stopped = train(config, open_parent)
    if stopped:         # make or a scheduler must not take the run for finished
        raise SystemExit(128 + stopped)
