"""Between looping and growing: shared layers, and a low-rank difference for each position.

The idea: order[i] picks the layer, and i picks what is added to it there. Each of a layer's seven
matrices W becomes W + up @ down at a position, `up` (out, rank) and `down` (rank, in) being the
position's own. Rank 0 is the tied loop; a rank that is full can be any model that has grown out of
it. `up` begins at zero, so at first the loop computes what it did, to the last bit.

Paper: "Relaxed Recursive Transformers" (arXiv 2410.20672), which begins with the SVD of an ordinary
model's layers (start='svd').
Here: W + up @ down is formed once a forward, where others compute up @ (down @ x) for each token:
so `merge` gives the same logits, to the last bit, and in training each position's weights are held
as an ordinary model's are. The ledger of FLOPs counts the others' way. The norms are shared; where
the SVD begins, they are multiplied into the matrices behind them.

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
        "{name: the weight of the layer at this position}, in the type of the weights"
        with torch.autocast(self.up[0].device.type, enabled=False):
            return {f'{name}.weight': layer.get_submodule(name).weight + up @ down
                    for name, up, down in zip(MATRICES, self.up, self.down)}


class Shared(nn.Module):
    "A layer, and what each of its positions adds to it: `depth` says at which of them it runs."

    def __init__(self, layer, positions, rank, generator=None):
        super().__init__()
        self.layer = layer
        self.differences = nn.ModuleDict({str(d): Difference(layer, rank, generator)
                                          for d in positions})

    def forward(self, x, rope, scale=None, depth=0, cache=None, tap=None, mask=None):
        if str(depth) not in self.differences:
            raise Refused(f'a layer with differences for the positions {[*self.differences]} '
                          f'cannot run at {depth}: `merge` makes a model that runs in any order')
        weights = self.differences[str(depth)].added_to(self.layer)
        return torch.func.functional_call(self.layer, weights,
                                          (x, rope, scale, depth, cache, tap, mask))

    def compile(self):
        "The layer alone: it is the same at each position."
        self.layer.compile()


class Relaxed(LM):
    "A looped model with a Difference for each position of its order."

    def __init__(self, config, rank, generator=None):
        super().__init__(config)
        self.rank = rank
        self.layers = nn.ModuleList(
            Shared(layer, [d for d, j in enumerate(self.order) if i == j], rank, generator)
            for i, layer in enumerate(self.layers))

    def flops_per_token(self, order=None, *, context=None):
        order = self.order if order is None else list(order)
        first, *_ = each = [sum(p.numel() for p in shared.differences.parameters())
                            for shared in self.layers]
        added = sum(each) if order == self.order else 0
        # the ledger takes all parameters of the first layer to run at each position
        return super().flops_per_token(order, context=context) + 6 * (added - first * len(order))


def relax(model, rank, loop=None, start='zero', seed=None):
    """The model with differences of a rank; rank 0: without. `loop`: make it a loop first, with as
    many positions as the model has layers; a shared layer begins as the mean of those that it
    stands for, and with start='svd' each position's difference as what is left, as far as the rank
    goes. `seed`: of what `down` begins with; None: torch's own generator."""
    check_choice('start', start, ('zero', 'svd'))
    if rank < 0 or model.rank or model.recurs:
        raise Refused(f'rank={rank}: it is 0 or more, of a model without differences or a '
                      'recurrent core')
    if loop is None and start == 'svd':
        raise Refused("start='svd' makes a loop of an ordinary model: name the loop")
    left = None
    if loop is not None:
        model, left = mean_loop(model, check_order(loop, len(set(loop))))
    if rank == 0:
        return model
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    new = Relaxed(model.config, rank, generator)
    # the same parameters, not copies of them: an optimizer goes on with what it holds
    for shared, layer in zip(new.layers, model.layers):
        shared.layer = layer
    new.embed, new.norm, new.head = model.embed, model.norm, model.head
    if start == 'svd':
        for d, (i, weights) in enumerate(zip(model.order, left)):
            difference = new.layers[i].differences[str(d)]
            for up, down, (u, s, v) in zip(difference.up, difference.down, weights):
                k = min(rank, len(s))
                up.data[:, :k] = u[:, :k] * s[:k]
                down.data[:k] = v[:k]
    return new.to(model.embed.weight).train(model.training)


@torch.no_grad()
def mean_loop(model, order):
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
    # one deepcopy for all of them keeps a tied head tied
    new.embed, new.norm, new.head = copy.deepcopy((model.embed, model.norm, model.head))
    for i, layer in enumerate(new.layers):
        copies = [dict(layers[d].named_parameters()) for d, j in enumerate(order) if j == i]
        for name, p in layer.named_parameters():
            p.copy_(torch.stack([each[name] for each in copies]).mean(0))
    new = new.to(model.embed.weight).train(model.training)
    left = [[torch.linalg.svd((layer.get_submodule(name).weight
                               - new.layers[i].get_submodule(name).weight).float(),
                              full_matrices=False)
             for name in MATRICES] for i, layer in zip(order, layers)]
    return new, left


@torch.no_grad()
def merge(model):
    "The ordinary model that computes what the relaxed one does: the order untied, W + up @ down."
    new = LM(dataclasses.replace(model.config, n_layer=len(model.order), order=None))
    new.embed, new.norm, new.head = copy.deepcopy((model.embed, model.norm, model.head))
    new.layers = nn.ModuleList(copy.deepcopy(model.layers[i].layer) for i in model.order)
    for d, (i, layer) in enumerate(zip(model.order, new.layers)):
        shared = model.layers[i]
        for name, weight in shared.differences[str(d)].added_to(shared.layer).items():
            layer.get_parameter(name).copy_(weight)
    return new.to(model.embed.weight).train(model.training)
