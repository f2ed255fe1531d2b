"""Which layer came from which, stage by stage. (What growing saves: train.py CONFIG --dry_run.)

Usage:
    python grow.py 32 --block=4
"""
from dataclasses import dataclass

from nanodepth.common.options import read
from nanodepth.grow import GROWTH, growth_plan


@dataclass
class Options:
    WORDS = ['n_layer']
    n_layer: int               # the final depth
    block: int = 4                      # layers of a block


def main(argv=None):
    o = read(Options, argv, __doc__)
    for name in ('midas', 'lidas'):
        plan = growth_plan(name, o.n_layer, o.block, constant_steps=170_000)
        print(f'{name}: for each layer of a stage, the layer of the stage before that it copies')
        for _, depth in plan[:-1]:
            order = GROWTH[name](depth, o.block)
            print(f'  {depth:3} -> {len(order):3}: {" ".join(map(str, order))}')
