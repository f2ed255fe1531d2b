"""Which layer came from which, stage by stage, and what growing saves.

Usage:
    python grow.py 32 --block=4                         # a table, and out/grow.png
"""
from common.errors import Refused, check_choice, number_list
from engine.cost import training_flops
from grow import GROWTH, growth_plan
from model import ModelConfig
from report.plot import draw_origins, show
from tools.options import make_parser

SHAPE = 'n_embd', 'n_head', 'n_kv_head', 'ffn_dim', 'vocab_size', 'context'


def origins(grow, n_layer, block):
    "The order of every growth: it says which layer of the stage before each layer is a copy of."
    depths = [depth for _, depth in growth_plan(grow, n_layer, block, n_layer ** 2)]
    return [GROWTH[grow](depth, block) for depth in depths[:-1]]


def main(argv=None):
    parser = make_parser(
        __doc__, out='out/grow.png', block=(4, 'layers of a block'),
        operators=('midas,lidas', f'any of {",".join(GROWTH)}'),
        alpha=(1.0, 'PROP-alpha: stage i gets a share i^alpha of the steps'),
        steps=(200_000, 'training steps'),
        decay_steps=(30_000, 'the last so many, before which the full depth is reached'),
        tokens=(2**20, 'tokens of a step'),
        shape=('960,15,5,2560,49152,2048', 'width,heads,kv heads,ffn,vocabulary,context'))
    parser.add_argument('n_layer', type=int, help='the final depth')
    args = parser.parse_args(argv)
    names = args.operators.split(',')
    for name in names:
        check_choice('operators', name, GROWTH)
    pictures = {name: origins(name, args.n_layer, args.block) for name in names}
    shape = number_list('--shape', args.shape, most=2 ** 24)
    if len(shape) != len(SHAPE) or min(shape) < 1:
        raise Refused(f'--shape={args.shape} must be {len(SHAPE)} numbers from 1 on: '
                      'width,heads,kv heads,ffn,vocabulary,context')
    config = ModelConfig(n_layer=args.n_layer, **dict(zip(SHAPE, shape)))
    plans = {}              # {the stages: the operators that have them}
    for name in names:
        plan = growth_plan(name, args.n_layer, args.block, args.steps - args.decay_steps,
                           args.alpha)
        plans.setdefault(tuple(plan), []).append(name)
    for name, orders in pictures.items():
        print(f'{name}: for each layer of a stage, the layer of the stage before that it '
              'copies')
        for order in orders:
            print(f'  {len(set(order)):3} -> {len(order):3}: {" ".join(map(str, order))}')
    for plan, of in plans.items():
        print(f'stages of {", ".join(of)}: '
              + ', '.join(f'{depth} layers from step {first:,}' for first, depth in plan))
        grown, full = (training_flops(config, p, args.steps, args.tokens)
                       for p in (plan, [(0, args.n_layer)]))
        print(f'training: {grown / 1e15:,.3f} petaFLOPs grown, {full / 1e15:,.3f} at full depth '
              f'throughout: {1 - grown / full:.1%} saved')
    if max(map(len, plans)) == 1:
        return print('one block is the whole model: nothing grows')
    show(args.out, draw_origins, pictures)
