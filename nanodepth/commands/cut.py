"""Make a new model from layers of a trained one. Layers of an ordinary model become the prelude,
core and coda of a recurrent model, or an ordinary model of fewer layers. (train.py's setting `cut`
keeps the first layers and the last ones, and here you may name them.) With --untie, a looped model
becomes an ordinary one, whose layers have their own weights.
    nanodepth cut out/baseline 2-4-2            # writes out/baseline_2-4-2
    nanodepth cut out/loop_2x4 --untie          # writes out/loop_2x4_untied, to train on from there
"""
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nanodepth.common.files import new_folder
from nanodepth.common.options import read
from nanodepth.common.origin import copy_licence
from nanodepth.grow import untie
from nanodepth.model import require, spans_in
from nanodepth.models.authors import AuthorsCore, flops_paper
from nanodepth.models.checkpoint import cost_of, data_of, open_path, spent_on
from nanodepth.models.hf import fold_scales
from nanodepth.report.tables import columns
from nanodepth.retrofit import parts_of_shape, surgery
from nanodepth.text.tokenizer import keep_tokenizer
from nanodepth.training.checkpoint import save
from nanodepth.training.plan import seed_for


@dataclass
class Options:
    run: str           # a folder that train.py wrote, or a Hugging Face checkpoint
    shape: str | None = None            # layers of prelude, core and coda, such as 2-4-2
    untie: bool = False         # in place of a shape: give each layer of a loop its own weights
    layers: str = ''            # the layers that are kept, such as 0,1/16,17,18,19/20,21
    dense: bool = False         # write the kept layers as an ordinary model: the pruned partner
    inject: Literal['identity', 'add'] | None = None    # how e is mixed into the state (identity)
    authors: bool = False       # the authors' adapter and first states, and an untied head
    seed: int = 0               # of the authors' random adapter
    out: Path | None = None     # the folder to write; None: out/NAME_SHAPE or out/NAME_untied


def chosen(options, n):
    "Return prelude, core and coda as lists of the parent's n layers."
    parts = parts_of_shape(options.shape, n)
    if options.layers:
        named = [[int(i) if i.isdigit() else n for i in part.split(',') if i]
                 for part in options.layers.split('/')]
        require([*map(len, named)] == [*map(len, parts)] and {*sum(named, [])} <= {*range(n)},
                f'--layers={options.layers} does not name {options.shape} of the layers 0 to '
                f'{n - 1}')
        parts = named
    return parts


def operate(options, parent):
    "Return the recurrent model, or its dense partner, and print its parts."
    require(not spans_in(parent.order), f'{options.run} has Spans already: cut an ordinary model')
    parts = chosen(options, len(parent.layers))
    if parent.config.ln_scaling and parent.order == [*range(len(parent.layers))]:
        parent = fold_scales(parent)        # so that a layer keeps the scale of its old depth
    layer = sum(p.numel() for p in parent.layers[0].parameters())
    dropped = sorted({*range(len(parent.layers))}.difference(*parts))
    print(columns([['part', 'layers of the parent', 'parameters'],
                   *([name, ' '.join(map(str, layers)), f'{len(layers) * layer:,}'] for name, layers
                     in zip(('prelude', 'core', 'coda', 'dropped'), [*parts, dropped]))]))
    if options.authors:
        parent.head.weight = torch.nn.Parameter(parent.head.weight.detach().clone())
        parent.config.tie_embeddings = False
        torch.manual_seed(seed_for(options.seed, 'retrofit'))
    if options.authors or options.inject:
        model = surgery(parent, parts, AuthorsCore, inject=options.inject or 'random',
                        start='authors' if options.authors else 'normal')
    else:
        model = surgery(parent, parts)
    if options.dense:
        return untie(parent, sum(parts, []))
    share = flops_paper(model, 4) / (6 * layer * len(parent.layers))
    print(f"at r = 4 a token costs {flops_paper(model, 4):,} training FLOPs by the paper's count, "
          f"{share:.2f} times the parent's")
    return model


def main(argv=None):
    options = read(Options, argv, ['run', 'shape'])
    of_shape = options.layers, options.dense, options.inject, options.authors
    require(options.untie != bool(options.shape) and not (options.untie and any(of_shape)),
            'give a shape, such as 2-4-2, or --untie alone')
    name = f'{Path(options.run).absolute().name}_{options.shape or "untied"}'
    target = options.out or Path('out') / name
    with new_folder(target) as folder:
        state, parent = open_path(options.run)
        if options.untie:
            require(parent.order != [*range(len(parent.layers))] and not spans_in(parent.order),
                    f'{options.run} is not a loop: its layers have their own weights, or a Span '
                    'runs them')
            model = untie(parent, parent.order)
        else:
            model = operate(options, parent.float())
        keep_tokenizer(options.run, folder)
        save(folder, model, [], flops=0, inherited_flops=spent_on(state),
             published=math.isnan(cost_of(state)), config=state.get('config') or {},
             data=data_of(options.run, state))
        copy_licence(options.run, folder)
    is_plain = options.dense or options.untie
    how = 'CONFIG' if is_plain else 'config/retrofit.py --cut=none --data=...'
    print(f'{target}: nanodepth train {how} --init_from={target} continues with it')
