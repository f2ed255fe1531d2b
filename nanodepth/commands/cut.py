"""Make another model of a trained one. An ordinary model's layers become the prelude, core and coda
of a recurrent one. A looped model becomes an ordinary one, whose layers have their own weights.
    nanodepth cut out/baseline 2-4-2            # writes out/baseline_2-4-2
    nanodepth cut out/loop_2x4 --untie          # writes out/loop_2x4_untied, to train on from there
"""
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn

from nanodepth.common.errors import Refused, refusing
from nanodepth.common.files import new_folder
from nanodepth.common.options import read
from nanodepth.common.whose import copy_licence
from nanodepth.grow import untie
from nanodepth.model import spans_in, unrolled
from nanodepth.models.authors import AuthorsCore, authors_surgery, flops_paper, parts_of
from nanodepth.models.checkpoint import cost_of, data_of, open_path, spent_on
from nanodepth.models.hf import fold_scales
from nanodepth.report.tables import columns
from nanodepth.retrofit import Core, core_of, parts_of_shape
from nanodepth.text.tokenizer import keep_tokenizer
from nanodepth.training.checkpoint import save
from nanodepth.training.plan import seed_for


@dataclass
class Options:
    run: str           # a folder that train.py wrote, or a Hugging Face checkpoint
    shape: str | None = None            # layers of prelude, core and coda, such as 2-4-2
    untie: bool = False         # instead: of a looped run, give each of its layers its own weights
    # how e is mixed into the state: identity (linear, begun as e), authors (linear, begun as
    # theirs), linear (begun wider), add
    inject: Literal['identity', 'linear', 'authors', 'add'] = 'identity'
    start: Literal['normal', 'authors', 'zero'] = 'normal'      # the first state
    fresh: bool = False         # another first state in each forward, as the authors have it
    recurrence: int = 4         # how often the core runs; in training r averages one more
    backprop_depth: int = 8     # gradients go back through the last so many
    layers: str = ''            # explicit lists, such as 0,1/16,17,18,19/20,21
    untie_head: bool = False    # give a tied unembedding weights of its own
    scratch: bool = False       # random weights: recurrence from scratch
    dense: bool = False         # write the kept layers as an ordinary model: the pruned partner
    seed: int = 0               # of every draw
    out: Path | None = None     # the folder to write; None: out/NAME_SHAPE or out/NAME_untied


def scalable_start(model):
    """Random weights, for recurrence from scratch: Takase et al.'s, by the width, and the layers'
    outputs by the unrolled depth too."""
    for name, p in model.named_parameters():
        if name.endswith('bias'):
            nn.init.zeros_(p)
        elif p.dim() < 2:               # a norm's
            nn.init.ones_(p)
        else:
            outputs = name.endswith(('attn.o.weight', 'mlp.down.weight'))
            deep = math.sqrt(2 * len(unrolled(model.order))) if outputs else 1
            nn.init.normal_(p, std=math.sqrt(2 / (5 * model.config.n_embd)) / deep)
    if not model.config.tie_embeddings:
        nn.init.normal_(model.embed.weight)          # as LM's own start has it


def choose_layers(options, parent):
    "(prelude, core, coda), as lists of the parent's layers."
    parts = parts_of_shape(options.shape, len(parent.layers))
    if options.layers:
        sizes = [len(part) for part in parts]
        with refusing(ValueError, why=lambda error: f'--layers: {error}'):
            parts = [[int(number) for number in part.split(',') if number]
                     for part in options.layers.split('/')]
        if [len(part) for part in parts] != sizes:
            raise Refused(f'--layers={options.layers} does not name {options.shape} layers')
        if not {*sum(parts, [])} <= {*range(len(parent.layers))}:
            raise Refused(f'--layers={options.layers}: the model has the layers 0 to '
                          f'{len(parent.layers) - 1}')
    return parts


def operate(options, target, folder):
    "Write the cut checkpoint, and print its parts."
    state, parent = open_path(options.run)
    if spans := spans_in(parent.order):
        raise Refused(f'{options.run} has {spans} in its order already: cut an ordinary model')
    if options.untie_head:      # it begins as the embedding
        parent.head.weight = nn.Parameter(parent.head.weight.detach().clone())
        parent.config.tie_embeddings = False
    parent.float()
    parts = choose_layers(options, parent)
    is_plain = parent.order == [*range(len(parent.layers))]         # surgery refuses all others
    if parent.config.ln_scaling and is_plain and not options.scratch:
        parent = fold_scales(parent)        # else a layer got the scale of its new depth
    torch.manual_seed(seed_for(options.seed, 'retrofit'))
    how = dict(r=options.recurrence, backprop_depth=options.backprop_depth)
    kind = Core
    if options.fresh or options.start != 'normal':
        kind, zero = AuthorsCore, options.start == 'zero'
        how |= dict(fresh=options.fresh, start='normal' if zero else options.start,
                    state_std=0.0 if zero else None)
    model = authors_surgery(parent, parts, options.inject, kind, **how)
    if options.scratch:
        scalable_start(model)
    print_parts(model, parent, parts, options.dense)
    if options.dense:
        model = untie(parent, sum(parts, []))
    keep_tokenizer(options.run, folder)
    made_of = dict(flops=0) if options.scratch else state
    save(folder, model, [], flops=0, inherited_flops=spent_on(made_of),
         published=math.isnan(cost_of(made_of)), config=state.get('config', {}),
         data=data_of(options.run, state))
    now = 'the kept layers, each once' if options.dense else (
        f'nanodepth train config/retrofit.py --init_from={target} --cut=none '
        f'--recurrence={options.recurrence} --data=... trains it')
    print(f'{target}: {now}')


def params_of(model):
    """The parameters of the layers of (prelude, core, coda), as the paper counts: without adapter,
    embeddings and final norm."""
    layer = sum(p.numel() for p in model.layers[0].parameters())
    return tuple(len(part) * layer for part in parts_of(model))


def effective_params(model, r):
    prelude, core, coda = params_of(model)
    return prelude + r * core + coda


def print_parts(model, parent, parts, dense):
    "The parts of the model and, if it will recur, what a recurrence costs."
    kept, core = sum(params_of(model)), core_of(model)
    body = sum(p.numel() for p in parent.layers.parameters())
    dropped = sorted({*range(len(parent.layers))}.difference(*parts))
    rows = [*zip(('prelude', 'core', 'coda'), parts, params_of(model)),
            ('dropped', dropped, len(dropped) * body // len(parent.layers))]
    cost = ''
    if not dense:
        rows.append(('adapter', [], sum(p.numel() for p in model.adapter.parameters())))
        flops, r = flops_paper(model), core.r
        cost = (f'; {effective_params(model, r):,} effective at r = {r}; '
                f"{flops:,} training FLOPs a token by the paper's count, {flops / (6 * body):.2f} "
                "times the parent's")
    print(columns([['part', 'layers of the parent', 'parameters'],
                   *([name, ' '.join(map(str, layers)), f'{n:,}'] for name, layers, n in rows)]))
    print(f'{kept:,} parameters in layers, {kept / body:.1%} of the parent{cost}')


def cut_ties(options, target, folder):
    "A looped run as an ordinary checkpoint of its unrolled depth, to go on from with init_from."
    state, model = open_path(options.run)
    if 'order' not in state or spans_in(model.order):
        raise Refused(f'{options.run} is no looped run of ours: its layers have their own weights, '
                      'or a Span says how they run')
    free = untie(model, model.order)
    keep_tokenizer(options.run, folder)
    kept = {name: state.get(name) for name in ('flops', 'inherited_flops', 'published', 'config')}
    save(folder, free, [], data=data_of(options.run, state), **kept)
    print(f'{target}: {len(free.layers)} layers of their own, where {options.run} runs '
          f'{len(model.layers)}')


def main(argv=None):
    options = read(Options, argv, ['run', 'shape'])
    if options.untie == bool(options.shape):
        raise Refused('give a shape, such as 2-4-2, or --untie')
    if options.dense and options.scratch:
        raise Refused('--dense keeps weights, --scratch none: train.py makes a new ordinary model')
    own = 'run', 'shape', 'untie', 'out'
    others = [each.name for each in fields(Options)
              if each.name not in own and getattr(options, each.name) != each.default]
    if options.untie and others:
        raise Refused(f'--{others[0]} is for a shape, and has no effect beside --untie')
    made = options.shape or 'untied'
    target = options.out or Path('out') / f'{Path(options.run).absolute().name}_{made}'
    with new_folder(target) as folder:
        (cut_ties if options.untie else operate)(options, target, folder)
        copy_licence(options.run, folder)
