"""Train a model by a config: train.py, whose parent may be a Hugging Face checkpoint here.
Usage: nanodepth train CONFIG [--name=value ...] [--dry_run]     (--help lists the settings)
"""
import ast

import torch

from nanodepth import ROOT
from nanodepth.commands import cost
from nanodepth.common.errors import refusing
from nanodepth.models.checkpoint import data_of, open_path
from nanodepth.train import OUT_OF_MEMORY, Config, read, train


def open_parent(path, classes):
    state, model = open_path(path, classes=classes)
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
    with refusing(torch.OutOfMemoryError, why=lambda error: OUT_OF_MEMORY):
        stopped = train(read(Config, argv), open_parent)
    if stopped:         # make or a scheduler must not take the run for finished
        raise SystemExit(128 + stopped)
