"""What the authors of "Retrofitted Recurrence" have otherwise than retrofit.py, which says where it
differs: their adapters, their first states, and their count of FLOPs.
Usage: model = surgery(model, '4-8-4', AuthorsCore, start='authors')
"""
import torch
import torch.nn as nn

from nanodepth.model import require
from nanodepth.retrofit import Core, core_of

AUTHORS_STD = 0.0087039     # sqrt(2 / (5 * 5280)), the width of their first model, at any width


class AuthorsCore(Core):
    """A Core with another adapter and other first states.

    inject     how the adapter begins: 'random', as torch begins it, or 'identity', as a Core's.
               With 'add' there is none: the sum s + e replaces it
    start      'normal' noise of the std sqrt(2 / (5 width)), or the 'authors', of the std 0.0087 at
               any width, cut at 3 sigma
    state_std  another std; 0 begins with zeros

    Theirs are drawn anew in each forward. Here a text has always the same, as in a Core."""

    def __init__(self, items, r=4, backprop_depth=8, inject='random', start='normal',
                 state_std=None):
        super().__init__(items, r, backprop_depth)
        require(inject in ('random', 'identity', 'add'), f'inject={inject}: random, identity, add')
        require(start in ('normal', 'authors'), f'start={start}: normal or authors')
        self.inject, self.start, self.state_std = inject, start, state_std

    def make_weights(self, model):
        if self.inject == 'identity':
            super().make_weights(model)
        elif self.inject == 'random':
            self.adapter = nn.Linear(2 * model.config.n_embd, model.config.n_embd, bias=False)

    def mix(self, s, e):
        return s + e if self.inject == 'add' else super().mix(s, e)

    def std(self, width):
        if self.state_std is not None:
            return self.state_std
        return AUTHORS_STD if self.start == 'authors' else super().std(width)

    def noise(self, shape, generator):
        if self.start == 'normal':
            return super().noise(shape, generator)
        x = torch.empty(shape, device=generator.device)
        return nn.init.trunc_normal_(x, a=-3, b=3, generator=generator)


def parts_of(model):
    "(prelude, core, coda): the items before the Core, within it and after it."
    order, core = model.order, core_of(model)
    require(core in order, f'the order {order} has no Core, or only one within another Span')
    place = order.index(core)
    return order[:place], core.items, order[place + 1:]


def flops_paper(model, r=None):
    """The paper's count, to compare with its tables: 6 for each weight of a layer with a backward
    pass and 2 for each without. Logs have flops_per_token's, with attention, adapter and head."""
    layer = sum(p.numel() for p in model.layers[0].parameters())
    prelude, core, coda = parts_of(model)
    r = r or core_of(model).r
    with_gradient = min(r, core_of(model).backprop_depth)
    learning = len(prelude + coda) + with_gradient * len(core)
    return layer * (6 * learning + 2 * (r - with_gradient) * len(core))
