"""Which layer came from which, stage by stage, and what growing saves.

Usage:
    python grow.py 32 --block=4                         # a table, and out/grow.png
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.engine.cost import at_full_depth, planned
from nanodepth.engine.plan import Plan
from nanodepth.grow import GROWTH
from nanodepth.report.plot import draw_origins, show
from nanodepth.train import Config


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
    if len(options.shape) != len(SHAPE):
        raise Refused(f'--shape={",".join(map(str, options.shape))} must be {len(SHAPE)} numbers: '
                      'width,heads,kv heads,ffn,vocabulary,context')
    shape = dict(zip(SHAPE, options.shape))
    configs = {name: Config(
        grow=name, grow_block=options.block, grow_alpha=options.alpha, n_layer=options.n_layer,
        head_dim=None, batch_size=max(1, options.tokens // shape['context']), steps=options.steps,
        decay_steps=options.decay_steps, warmup_steps=0, **shape) for name in options.operators}
    pictures = {}           # {operator: the order of each growth}
    for name, config in configs.items():
        stages = Plan(config).stages
        pictures[name] = [GROWTH[name](depth, options.block) for _, depth in stages[:-1]]
        print(f'{name}: for each layer of a stage, the layer of the stage before that it '
              'copies')
        for order in pictures[name]:
            print(f'  {len(set(order)):3} -> {len(order):3}: {" ".join(map(str, order))}')
        print('stages: ' + ', '.join(f'{depth} layers from step {first:,}'
                                     for first, depth in stages))
        grown, full = planned(config), at_full_depth(config)
        print(f'training: {grown / 1e15:,.3f} petaFLOPs grown, {full / 1e15:,.3f} at full depth '
              f'throughout: {1 - grown / full:.1%} saved')
    if not any(pictures.values()):
        return print('one block is the whole model: nothing grows')
    show(options.out, draw_origins, pictures)
