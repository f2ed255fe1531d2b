"""Which layer came from which, stage by stage. (What growing saves: train.py CONFIG --dry_run.)

Usage:
    python grow.py 32 --block=4
"""
from dataclasses import dataclass
from typing import Literal

from nanodepth.common.options import read
from nanodepth.grow import GROWTH, growth_plan


@dataclass
class Options:
    WORDS = ['n_layer']
    n_layer: int               # the final depth
    block: int = 4                      # layers of a block
    operators: tuple[Literal[tuple(GROWTH)], ...] = ('midas', 'lidas')      # grow.py's
    alpha: float = 1.0                  # PROP-alpha: stage i gets a share i^alpha of the steps
    steps: int = 170_000                # training steps before the decay


def main(argv=None):
    o = read(Options, argv, __doc__)
    for name in o.operators:
        plan = growth_plan(name, o.n_layer, o.block, o.steps, o.alpha)
        print(f'{name}: for each layer of a stage, the layer of the stage before that it copies')
        for _, depth in plan[:-1]:
            order = GROWTH[name](depth, o.block)
            print(f'  {depth:3} -> {len(order):3}: {" ".join(map(str, order))}')
        print('stages: ' + ', '.join(f'{depth} layers from step {first:,}'
                                     for first, depth in plan))
