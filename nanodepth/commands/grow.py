"""Which layer came from which, stage by stage, and what growing saves.

Usage:
    python grow.py 32 --block=4                         # a table, and out/grow.png
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.engine.cost import training_flops
from nanodepth.grow import GROWTH, growth_plan
from nanodepth.model import ModelConfig
from nanodepth.report.plot import draw_origins, show


@dataclass
class Options:
    WORDS = ['n_layer']
    n_layer: int               # the final depth
    block: int = 4                      # layers of a block
    operators: tuple[Literal[tuple(GROWTH)], ...] = ('midas', 'lidas')      # grow.py's
    alpha: float = 1.0                  # PROP-alpha: stage i gets a share i^alpha of the steps
    steps: int = 200_000                # training steps
    decay_steps: int = 30_000           # the last so many, before which the full depth is reached
    tokens: int = 2 ** 20               # tokens of a step
    # width, heads, heads of keys, width of the MLP, vocabulary, context
    shape: tuple[int, ...] = (960, 15, 5, 2560, 49152, 2048)
    out: Path = Path('out/grow.png')


SHAPE = 'n_embd', 'n_head', 'n_kv_head', 'ffn_dim', 'vocab_size', 'context'


def main(argv=None):
    options = read(Options, argv, __doc__)
    if len(options.shape) != len(SHAPE) or min(options.shape) < 1:
        raise Refused(f'--shape={",".join(map(str, options.shape))} must be {len(SHAPE)} numbers '
                      'from 1 on: width,heads,kv heads,ffn,vocabulary,context')
    config = ModelConfig(n_layer=options.n_layer, **dict(zip(SHAPE, options.shape)))
    plans = {}              # {the stages: the operators that have them}
    pictures = {}           # {operator: the order of each growth}
    for name in options.operators:
        plan = growth_plan(name, options.n_layer, options.block,
                           options.steps - options.decay_steps, options.alpha)
        plans.setdefault(tuple(plan), []).append(name)
        pictures[name] = [GROWTH[name](depth, options.block) for _, depth in plan[:-1]]
    for name, orders in pictures.items():
        print(f'{name}: for each layer of a stage, the layer of the stage before that it '
              'copies')
        for order in orders:
            print(f'  {len(set(order)):3} -> {len(order):3}: {" ".join(map(str, order))}')
    for plan, of in plans.items():
        print(f'stages of {", ".join(of)}: '
              + ', '.join(f'{depth} layers from step {first:,}' for first, depth in plan))
        grown, full = (training_flops(config, p, options.steps, options.tokens)
                       for p in (plan, [(0, options.n_layer)]))
        print(f'training: {grown / 1e15:,.3f} petaFLOPs grown, {full / 1e15:,.3f} at full depth '
              f'throughout: {1 - grown / full:.1%} saved')
    if max(map(len, plans)) == 1:
        return print('one block is the whole model: nothing grows')
    show(options.out, draw_origins, pictures)
