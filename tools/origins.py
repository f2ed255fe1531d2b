"""Which layer came from which, stage by stage, and what growing saves.

Usage:
    python grow.py 32 --block=4                         # a table, and out/grow.png
"""
import argparse
from pathlib import Path

from common.errors import Refused
from engine.cost import training_flops
from grow import GROWTH, growth_plan
from model import ModelConfig
from report.plot import draw_origins, show


def origins(grow, n_layer, block):
    "The order of every growth: it says which layer of the stage before each layer is a copy of."
    depths = [depth for _, depth in growth_plan(grow, n_layer, block, n_layer ** 2)]
    return [GROWTH[grow](depth, block) for depth in depths[:-1]]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description='Show which layer came from which, stage by stage, and what growing saves.')
    parser.add_argument('n_layer', type=int, help='the final depth')
    parser.add_argument('--block', type=int, default=4)
    parser.add_argument('--operators', default='midas,lidas', help=f'any of {",".join(GROWTH)}')
    parser.add_argument('--alpha', type=float, default=1.0,
                        help='PROP-alpha: stage i gets a share i^alpha of the steps')
    parser.add_argument('--steps', type=int, default=200_000)
    parser.add_argument('--decay_steps', type=int, default=30_000,
                        help='the full depth is reached before them')
    parser.add_argument('--shape', default='960,15,5,2560,49152,2048',
                        help='width,heads,kv heads,ffn,vocabulary,context')
    parser.add_argument('--tokens', type=int, default=2**20, help='tokens of a step')
    parser.add_argument('--out', type=Path, default=Path('out/grow.png'))
    args = parser.parse_args(argv)
    names = args.operators.split(',')
    for name in names:
        if name not in GROWTH:
            raise Refused(f'there is no operator {name!r}: {", ".join(GROWTH)}')
    pictures = {name: origins(name, args.n_layer, args.block) for name in names}
    width, heads, kv, ffn, vocab, context = map(int, args.shape.split(','))
    config = ModelConfig(vocab_size=vocab, n_layer=args.n_layer, n_embd=width, n_head=heads,
                         n_kv_head=kv, ffn_dim=ffn,
                         context=context)
    plan = growth_plan(names[0], args.n_layer, args.block, args.steps - args.decay_steps,
                       args.alpha)
    for name, orders in pictures.items():
        print(f'{name}: each layer of a stage, named by the layer of the stage before '
              'that it is a copy of')
        for order in orders:
            print(f'  {len(set(order)):3} -> {len(order):3}: {" ".join(map(str, order))}')
    print('stages: ' + ', '.join(f'{depth} layers from step {first:,}' for first, depth in plan))
    grown, full = (training_flops(config, p, args.steps, args.tokens)
                   for p in (plan, [(0, args.n_layer)]))
    print(f'training: {grown / 1e15:,.3f} petaFLOPs grown, {full / 1e15:,.3f} at '
          'full depth all the way: '
          f'{1 - grown / full:.1%} saved')
    if len(plan) == 1:
        return print('one block is the whole model: nothing grows')
    show(args.out, draw_origins, pictures)
