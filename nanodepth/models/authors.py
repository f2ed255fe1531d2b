"""Define the core of the authors of "Retrofitted Recurrence" where it differs from retrofit.py: its
adapters, its first states, and the paper's count of FLOPs.
Usage: model = surgery(model, '4-8-4', AuthorsCore, start='authors')
"""
import torch
import torch.nn as nn

from nanodepth.model import require
from nanodepth.retrofit import Core, core_of

AUTHORS_STD = 0.0087039     # sqrt(2 / (5 * 5280)), the width of their first model, at any width


class AuthorsCore(Core):
    """A Core with another adapter and other first states.

    inject     the adapter at the beginning: 'random', as torch makes it, or 'identity', as in a
               Core. With 'add' there is no adapter, but the sum s + e
    start      the first states: 'normal' noise with the std sqrt(2 / (5 width)), or as the
               'authors' have it, with the std 0.0087 at any width, cut at 3 sigma
    state_std  another std; 0 means first states of zeros

    The authors draw new first states in each forward pass. Here a text always has the same ones in
    evaluation, as in a Core."""

    def __init__(self, items, r=4, backprop_depth=8, inject='random', start='normal',
                 state_std=None):
        super().__init__(items, r, backprop_depth)
        require(inject in ('random', 'identity', 'add'), f'inject={inject} must be random, '
                'identity or add')
        require(start in ('normal', 'authors'), f'start={start} must be normal or authors')
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
    "Return prelude, core and coda: the items before the Core, inside it and after it."
    order, core = model.order, core_of(model)
    require(core in order, f'the order {order} has no Core, or only one within another Span')
    index = order.index(core)
    return order[:index], core.items, order[index + 1:]


def flops_paper(model, r=None):
    """Return the training FLOPs of a token as the paper counts them, to compare with its tables: 6
    for each weight of a layer that has a backward pass, and 2 for each of the others. (Logs have
    flops_per_token, which counts attention, adapter and head as well.)"""
    layer = sum(p.numel() for p in model.layers[0].parameters())
    prelude, core, coda = parts_of(model)
    r = r or core_of(model).r
    with_gradient = min(r, core_of(model).backprop_depth)
    learning = len(prelude + coda) + with_gradient * len(core)
    return layer * (6 * learning + 2 * (r - with_gradient) * len(core))
