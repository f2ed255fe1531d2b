"""Between looping and growing: shared layers, and a low-rank difference for each position.

The idea: order[i] picks the layer, and i picks what is added to it there. Each of a layer's seven
matrices W becomes W + up @ down at a position, `up` (out, rank) and `down` (rank, in) being the
position's own. Rank 0 is the tied loop; a rank that is full can be any model that has grown out of
it. `up` begins at zero, so at first the loop computes what it did, to the last bit.

Paper: "Relaxed Recursive Transformers" (arXiv 2410.20672), which begins with the SVD of an ordinary
model's layers (start='svd').
Here: W + up @ down is formed once a forward, where others compute up @ (down @ x) for each token:
so `merge` gives the same logits, to the last bit. The ledger of FLOPs counts the latter. The norms
are shared; where the SVD begins, they are multiplied into the matrices behind them.

Usage:
    model = relax(model, rank=8)                        # a looped model: its order has repeats
    model = relax(model, 8, parse_loop('2x4'), 'svd')   # an ordinary one of 8 layers, as a loop
    plain = merge(model)                                # 8 layers of their own, the same logits
    python train.py config/loop_2x4.py --relax_rank=8
"""
import copy
import dataclasses

import torch
import torch.nn as nn

from common.errors import Refused, check_choice
from model import LM, check_order

MATRICES = ('attn.q', 'attn.k', 'attn.v', 'attn.o', 'mlp.gate', 'mlp.up', 'mlp.down')
READ = dict(attn_norm=MATRICES[:3], mlp_norm=MATRICES[4:6])     # the matrices behind each norm


class Difference(nn.Module):
    "What a position adds to the matrices of its layer."

    def __init__(self, layer, rank, generator=None):
        super().__init__()
        shapes = [layer.get_submodule(name).weight.shape for name in MATRICES]
        self.up = nn.ParameterList(torch.zeros(n, rank) for n, _ in shapes)
        self.down = nn.ParameterList(torch.randn(rank, m, generator=generator) * m ** -0.5
                                     for _, m in shapes)

    def added_to(self, layer):
        "{name: the weight of the layer at this position}"
        return {f'{name}.weight': layer.get_submodule(name).weight + up @ down
                for name, up, down in zip(MATRICES, self.up, self.down)}


class Relaxed(LM):
    "A looped model with a Difference for each position of its order."

    def __init__(self, config, rank):
        super().__init__(config)
        self.rank, self.positions = rank, self.order
        self.differences = nn.ModuleList(Difference(self.layers[i], rank) for i in self.order)

    def layer(self, i, d):
        if self.positions[d:d + 1] != [i]:
            raise Refused(f'layer {i} cannot run at position {d}: the differences belong to the '
                          f'order {self.positions}; `merge` makes a model that runs in any order')
        layer, weights = self.layers[i], self.differences[d].added_to(self.layers[i])
        return lambda *args: torch.func.functional_call(layer, weights, args)

    def flops_per_token(self, order=None, *, context=None):
        added = sum(p.numel() for p in self.differences[0].parameters()) * len(self.positions)
        return super().flops_per_token(order, context=context) + 6 * added


def relax(model, rank, loop=None, start='zero', generator=None):
    """The model with differences of a rank; rank 0: without. `loop`: make it a loop first, with as
    many positions as the model has layers; a shared layer begins as the mean of those that it
    stands for, and with start='svd' each position's difference as what is left, as far as the rank
    goes. Drawn with torch's own generator, or another."""
    check_choice('start', start, ('zero', 'svd'))
    if rank < 0 or model.rank or model.recurs:
        raise Refused(f'rank={rank}: it is 0 or more, of a model without differences or a '
                      'recurrent core')
    if loop is None and start == 'svd':
        raise Refused("start='svd' makes a loop of an ordinary model: name the loop")
    left = None
    if loop is not None:
        model, left = shared(model, check_order(loop, max(loop) + 1))
    if rank == 0:
        return model
    with torch.device('meta'):          # no weights yet: they are the model's own, not copies
        new = Relaxed(model.config, rank)
    new.differences = nn.ModuleList(Difference(model.layers[i], rank, generator)
                                    for i in model.order)
    for name, part in (*model.named_children(), *model.named_buffers(recurse=False)):
        setattr(new, name, part)
    if start == 'svd':
        for difference, weights in zip(new.differences, left):
            for up, down, (u, s, v) in zip(difference.up, difference.down, weights):
                k = min(rank, len(s))
                up.data[:, :k], down.data[:k] = u[:, :k] * s[:k], v[:k]
    return new.to(model.embed.weight.device).train(model.training)


@torch.no_grad()
def shared(model, order):
    """(a loop whose layer i is the mean of the model's layers that stand where the order says i;
    of each position the SVD of what its matrices differ from that)."""
    if model.order != [*range(len(order))]:
        raise Refused(f'a loop of {len(order)} positions is made of {len(order)} layers that run '
                      f'once each, but the model runs {model.order}')
    if model.config.qk_norm:
        raise Refused('a model with norms of queries and keys cannot be made a loop: such norms '
                      'cannot be multiplied into a matrix')
    layers = copy.deepcopy(model.layers)
    for layer in layers:
        for norm, matrices in READ.items():
            for name in matrices:
                layer.get_submodule(name).weight.mul_(layer.get_submodule(norm).weight)
            layer.get_submodule(norm).weight.fill_(1)
    new = LM(dataclasses.replace(model.config, n_layer=max(order) + 1, order=order))
    for name, module in model.named_children():
        if name != 'layers':
            setattr(new, name, copy.deepcopy(module))
    if model.config.tie_embeddings:
        new.head.weight = new.embed.weight
    for i, layer in enumerate(new.layers):
        mine = [dict(layers[d].named_parameters()) for d, j in enumerate(order) if j == i]
        for name, p in layer.named_parameters():
            p.copy_(torch.stack([each[name] for each in mine]).mean(0))
    left = [[torch.linalg.svd(layer.get_submodule(name).weight
                              - new.layers[i].get_submodule(name).weight, full_matrices=False)
             for name in MATRICES] for i, layer in zip(order, layers)]
    return new.to(model.embed.weight.device).train(model.training), left


@torch.no_grad()
def merge(model):
    "The ordinary model that computes what the relaxed one does: the order untied, W + up @ down."
    new = LM(dataclasses.replace(model.config, n_layer=len(model.positions), order=None))
    shell = copy.deepcopy({name: module for name, module in model.named_children()
                           if name not in ('layers', 'differences')})
    for name, module in shell.items():      # one deepcopy for all of them keeps a tied head tied
        setattr(new, name, module)
    new.layers = nn.ModuleList(copy.deepcopy(model.layers[i]) for i in model.positions)
    for layer, i, difference in zip(new.layers, model.positions, model.differences):
        for name, weight in difference.added_to(model.layers[i]).items():
            layer.get_parameter(name).copy_(weight)
    return new.to(model.embed.weight.device).train(model.training)
