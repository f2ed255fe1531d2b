"""Cut a pretrained model into prelude, core and coda: what was kept, what was dropped, what it will
cost.

Usage:
    python retrofit.py out/baseline 2-4-2                       # out/baseline_2-4-2
    python retrofit.py TinyLlama 4-8-4 --select=influence --data=data/mytext
    python retrofit.py out/retrofit --eval --r=1,2,4,8          # recurrences.py
"""
import json
import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

from common.columns import columns
from common.errors import Refused
from data.tokenizer import tokenizer_file
from data.tokens import Loader, draw
from engine.checkpoint import build_model, describe, exists, load, save
from retrofit import cut, surgery
from tools import recurrences
from tools.options import make_parser
from variants.cuts import by_influence, screen


def scalable_start(model):
    """Random weights, for recurrence from scratch: Takase et al.'s, by the width, and the layers'
    outputs by the unrolled depth too."""
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            outputs = name.endswith(('attn.o.weight', 'mlp.down.weight'))
            nn.init.normal_(p, std=model.std / math.sqrt(2 * len(model.order)) if outputs
                            else model.std)
        else:
            nn.init.ones_(p)
    if not model.config.tie_embeddings:
        nn.init.normal_(model.lm.embed.weight)          # as LM's own start has it


def operate(args):
    "python retrofit.py FROM 4-8-4: write the operated checkpoint, and say what it is made of."
    source, shape = args.paths
    folder, file, state = Path(source), tokenizer_file(source), load(source)
    about = (folder.parent if folder.is_file() else folder) / 'run.json'
    if not file and not about.exists():
        raise Refused(f'{source} does not say which tokenizer it reads: it has neither a '
                      'tokenizer.json nor a run.json')
    tokenizer = json.dumps(dict(tokenizer=str(file.resolve()))) if file else about.read_text()
    target = args.out or Path('out') / f'{Path(source).name}_{shape}'
    if exists(target):
        raise Refused(f'{target} holds a checkpoint already: choose another --out')
    parent = build_model(state, source).eval()
    parts = cut(shape, len(parent.layers))
    sizes = [len(part) for part in parts]
    if args.select == 'influence':
        parts = by_influence(parent, sizes, sample_tokens(args.data, parent.config))
    elif args.layers:
        parts = [[int(i) for i in filter(None, part.split(','))] for part in args.layers.split('/')]
        if [len(part) for part in parts] != sizes:
            raise Refused(f'--layers={args.layers} does not name {shape} layers')
    if args.search:
        found = screen(parent, sizes, sample_tokens(args.data, parent.config, 32))
        return print(columns([['loss', 'prelude', 'core', 'coda'],
                              *([f'{loss:.3f}', *(' '.join(map(str, part)) for part in of)]
                                for loss, of in found)]))
    torch.manual_seed(draw(args.seed, 'retrofit'))
    model = surgery(parent.float(), parts, inject=args.inject, start=args.start, mean=args.mean,
                    backprop_depth=args.backprop_depth)
    if args.scratch:
        scalable_start(model)
    body = sum(p.numel() for p in parent.layers.parameters())
    rows = [['part', 'layers of the parent', 'parameters']]
    rows += [[name, ' '.join(map(str, part)), f'{n:,}']
             for name, part, n in zip(('prelude', 'core', 'coda'), parts, model.parts())]
    dropped = sorted({*range(len(parent.layers))} - {i for part in parts for i in part})
    rows += [['dropped', ' '.join(map(str, dropped)), f'{body - sum(model.parts()):,}'],
             ['adapter', '', f'{0 if model.adapter is None else model.adapter.weight.numel():,}']]
    print(columns(rows))
    print(f'{sum(model.parts()):,} parameters in layers, '
          f'{sum(model.parts()) / body:.1%} of the parent; '
          f'{model.effective_params(args.mean):,} effective '
          f'at r = {args.mean}; {model.flops_paper():,} training FLOPs a token by '
          f'the paper\'s count, {model.flops_paper() / (6 * body):.2f} times the parent\'s')
    cost = 0 if args.scratch else state.get('flops', 0) + state.get('inherited_flops', 0)
    save(target, **describe(model.lm if args.dense else model), optimizers=[], step=0, flops=0,
         inherited_flops=cost, config={})
    (target / 'run.json').write_text(tokenizer)
    now = 'the kept layers, each once' if args.dense else f'train.py --init_from={target} trains it'
    print(f'{target}: {now}')


def sample_tokens(data, config, n=8):
    "Some validation rows: (n, T)."
    return Loader(data, n, min(config.context, 512), split='val',
                  vocab_size=config.vocab_size).batch(0)[0]


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if '--eval' in argv:
        return recurrences.main([arg for arg in argv if arg != '--eval'])
    parser = make_parser('Cut a checkpoint into prelude, core and coda.', 'seed', 'data',
                         epilog='With --eval: measure runs against the number of '
                                     'recurrences (--eval --help).')
    parser.add_argument('paths', nargs='+',
                        help='a checkpoint and a shape, such as out/baseline 2-4-2')
    parser.add_argument('--out', type=Path, help='the folder to write')
    parser.add_argument('--inject', default='identity',
                        help='how e is mixed into the state: linear (the paper), identity (linear, '
                        'begun as e), add')
    parser.add_argument('--start', default='normal', help='the first state: normal or zero')
    parser.add_argument('--mean', type=int, default=4, help='recurrences')
    parser.add_argument('--backprop_depth', type=int, default=8,
                        help='gradients go back through the last so many')
    parser.add_argument('--layers', help='explicit lists, such as 0,1/16,17,18,19/20,21')
    parser.add_argument('--select', choices=['late', 'influence'], default='late',
                        help='late: by the shape; influence: ShortGPT, on --data')
    parser.add_argument('--search', action='store_true',
                        help='print the loss of every selection on --data, before any training')
    parser.add_argument('--scratch', action='store_true',
                        help='random weights: recurrence from scratch')
    parser.add_argument('--dense', action='store_true',
                        help='write the kept layers as an ordinary model: the pruned partner')
    args = parser.parse_args(argv)
    if len(args.paths) != 2 or (args.search or args.select == 'influence') and not args.data:
        parser.error('give a checkpoint and a shape, such as out/baseline 2-4-2 (and --data '
                     'with --select=influence and --search)')
    operate(args)
