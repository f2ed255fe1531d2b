"""Cut a pretrained model into prelude, core and coda: what was kept and dropped, what it will cost.

Usage:
    python retrofit.py out/baseline 2-4-2                       # out/baseline_2-4-2
    python retrofit.py TinyLlama 4-8-4 --select=influence --data=data/mytext
    python retrofit.py out/retrofit --eval --r=1,2,4,8          # loss against r; --eval --help
"""
import dataclasses
import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

from common.columns import columns
from common.errors import Refused, number_list
from common.files import new_model
from data.tokenizer import keep_tokenizer, refuse_another_tokenizer
from data.tokens import Loader, draw
from engine.checkpoint import build_model, describe, load, save
from engine.hf import fold_scales
from model import LM
from retrofit import cut, surgery
from tools import recurrences
from tools.options import RUN, make_parser
from variants.cuts import by_influence, screen


def scalable_start(model):
    """Random weights, for recurrence from scratch: Takase et al.'s, by the width, and the layers'
    outputs by the unrolled depth too."""
    for name, p in model.named_parameters():
        if p.dim() < 2:
            nn.init.ones_(p)
        else:
            outputs = name.endswith(('attn.o.weight', 'mlp.down.weight'))
            deep = math.sqrt(2 * len(model.order)) if outputs else 1
            nn.init.normal_(p, std=model.std / deep)
    if not model.config.tie_embeddings:
        nn.init.normal_(model.embed.weight)          # as LM's own start has it


def with_a_head(lm):
    "The model with the unembedding as a matrix of its own, which begins as the embedding."
    free = type(lm)(dataclasses.replace(lm.config, tie_embeddings=False)).to(lm.norm.weight.dtype)
    free.load_state_dict(lm.state_dict())
    return free


def operate(args):
    "Write the cut checkpoint, and print its parts."
    target = args.out or Path('out') / f'{Path(args.run).name}_{args.shape}'
    with new_model(target, 'choose another --out'):
        state = load(args.run)
        parent = open_parent(args, state)
        parts = choose_layers(args, parent)
        torch.manual_seed(draw(args.seed, 'retrofit'))
        model = surgery(parent.float(), parts, inject=args.inject, start=args.start,
                        fresh=args.fresh, mean=args.mean, backprop_depth=args.backprop_depth)
        if args.scratch:
            scalable_start(model)
        say(model, parent, parts)
        keep_tokenizer(args.run, target)
        cost = 0 if args.scratch else state.get('flops', 0) + state.get('inherited_flops', 0)
        save(target, **describe(without_recurrence(model) if args.dense else model),
             optimizers=[], step=0, flops=0, inherited_flops=cost, config={})
    now = 'the kept layers, each once' if args.dense else (
        f'python train.py config/retrofit.py --init_from={target} --data=... trains it')
    print(f'{target}: {now}')


def without_recurrence(model):
    "The same layers as an ordinary model, which runs each once."
    plain = LM(model.config)
    plain.load_state_dict({name: t for name, t in model.state_dict().items()
                           if not name.startswith('adapter.')})
    return plain


def open_parent(args, state):
    parent = build_model(state, args.run).eval()
    if args.carry_scales and parent.config.ln_scaling:
        parent = fold_scales(parent)
    return with_a_head(parent) if args.untie_head else parent


def choose_layers(args, parent):
    "(prelude, core, coda), as lists of the parent's layers."
    parts = cut(args.shape, len(parent.layers))
    sizes = [len(part) for part in parts]
    if args.select == 'influence':
        return by_influence(parent, sizes, sample_tokens(args, parent))
    if args.layers:
        parts = [number_list('--layers', part) if part else [] for part in args.layers.split('/')]
        if [len(part) for part in parts] != sizes:
            raise Refused(f'--layers={args.layers} does not name {args.shape} layers')
    return parts


def search(args):
    "Print the loss of every selection."
    parent = open_parent(args, load(args.run))
    sizes = [len(part) for part in cut(args.shape, len(parent.layers))]
    found = screen(parent, sizes, sample_tokens(args, parent, 32))
    print(columns([['loss', 'prelude', 'core', 'coda'],
                   *([f'{loss:.3f}', *map(listed, parts)] for loss, parts in found)]))


def listed(layers):
    return ' '.join(map(str, layers))


def sample_tokens(args, model, n=8):
    "Some validation rows: (n, T)."
    c = model.config
    loader = Loader(args.data, n, min(c.context, 512), split='val', vocab_size=c.vocab_size)
    refuse_another_tokenizer(args.run, loader)
    return loader.batch(0)[0]


def say(model, parent, parts):
    "Print the parts of the model and its cost."
    kept, flops = sum(model.parts()), model.flops_paper()
    body = sum(p.numel() for p in parent.layers.parameters())
    adapter = 0 if model.adapter is None else model.adapter.weight.numel()
    dropped = sorted({*range(len(parent.layers))}.difference(*parts))
    rows = [*zip(('prelude', 'core', 'coda'), parts, model.parts()),
            ('dropped', dropped, body - kept), ('adapter', [], adapter)]
    print(columns([['part', 'layers of the parent', 'parameters'],
                   *([name, listed(layers), f'{n:,}'] for name, layers, n in rows)]))
    print(f'{kept:,} parameters in layers, {kept / body:.1%} of the parent; '
          f'{model.effective_params(model.mean):,} effective at r = {model.mean}; {flops:,} '
          f"training FLOPs a token by the paper's count, {flops / (6 * body):.2f} times the "
          "parent's")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if '--eval' in argv:
        return recurrences.main([arg for arg in argv if arg != '--eval'])
    parser = make_parser(
        __doc__, 'seed', 'data', out=(Path, 'the folder to write'),
        inject=('identity', "how e is mixed into the state: identity (linear, begun as e), authors "
                "(linear, begun as theirs), linear (begun wider), add"),
        start=('normal', 'the first state: normal, authors or zero'),
        fresh=(False, 'another first state in each forward, as the authors have it'),
        untie_head=(False, 'give a tied unembedding weights of its own'),
        carry_scales=(False, "of an LN-scaled parent: kept layers keep their scales (else they get "
                      "their new depths')"),
        mean=(4, 'recurrences'),
        backprop_depth=(8, 'gradients go back through the last so many'),
        layers=('', 'explicit lists, such as 0,1/16,17,18,19/20,21'),
        select=(['late', 'influence'], 'late: by the shape; influence: ShortGPT, on --data'),
        search=(False, 'print the loss of every selection on --data, before any training'),
        scratch=(False, 'random weights: recurrence from scratch'),
        dense=(False, 'write the kept layers as an ordinary model: the pruned partner'))
    parser.add_argument('run', nargs='?', help=RUN)
    parser.add_argument('shape', nargs='?', help='layers of prelude, core and coda, such as 2-4-2')
    args = parser.parse_args(argv)
    looks = args.search or args.select == 'influence'
    if not (args.run and args.shape) or looks and not args.data:
        parser.error('give a checkpoint and a shape, such as out/baseline 2-4-2, and --data with '
                     '--select=influence and --search')
    if args.select == 'influence' and args.layers:
        parser.error('--layers names the layers that --select=influence would choose: give one')
    search(args) if args.search else operate(args)
