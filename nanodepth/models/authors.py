"""What the authors of "Retrofitted Recurrence" have otherwise than retrofit.py, which says where it
differs: their first states, their adapters, and their count of FLOPs.
Usage: model = authors_surgery(model, '4-8-4', start='authors')
"""
import math

import torch
import torch.nn as nn

from nanodepth.model import require
from nanodepth.retrofit import Core, core_of, surgery

AUTHORS_STD = 0.0087039     # sqrt(2 / (5 * 5280)), the width of their first model, at any width


class AuthorsCore(Core):
    """A Core with other first states.

    start      'normal' noise of the std sqrt(2 / (5 width)), or the 'authors', of the std 0.0087 at
               any width, cut at 3 sigma
    state_std  another std; 0 begins with zeros

    Theirs are drawn anew in each forward. Here a text has always the same, as in a Core."""

    def __init__(self, items, r=4, backprop_depth=8, start='normal', state_std=None):
        super().__init__(items, r, backprop_depth)
        require(start in ('normal', 'authors'), f'start={start}: normal or authors')
        self.start, self.state_std = start, state_std

    def settings(self):
        return super().settings() | dict(start=self.start, state_std=self.state_std)

    def std(self, width):
        if self.state_std is not None:
            return self.state_std
        return AUTHORS_STD if self.start == 'authors' else super().std(width)

    def noise(self, shape, generator):
        if self.start == 'normal':
            return super().noise(shape, generator)
        x = torch.empty(shape, device=generator.device)
        return nn.init.trunc_normal_(x, a=-3, b=3, generator=generator)


def authors_surgery(model, shape, inject='authors', kind=AuthorsCore, **settings):
    """surgery with their Core. inject: 'authors', an adapter as torch begins it; 'linear', one that
    begins wider; or one of surgery's own."""
    if inject in ('identity', 'add'):
        return surgery(model, shape, inject, kind, **settings)
    require(inject in ('authors', 'linear'), f'inject={inject}: authors, linear, identity or add')
    width = model.config.n_embd
    begun = nn.Linear(2 * width, width, bias=False)
    if inject == 'linear':
        nn.init.normal_(begun.weight, std=math.sqrt(2 / (5 * width)))
    new = surgery(model, shape, kind=kind, **settings)
    new.adapter.load_state_dict(begun.state_dict())
    return new


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
