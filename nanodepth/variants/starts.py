"""How a recurrent model begins: the adapter's first weights, and the first state.

The idea: a retrofitted model should begin as its parent, and its core should not come to rely on
one state to start from. So the adapter first passes on the prelude's output alone, and the first
state is noise. Others begin otherwise, and the options of `surgery` in retrofit.py say how, each
with our default first:
    inject  identity  the adapter begins as the projection on e: with no layer dropped, the model
                      is its parent, at any r (but LN-scaling sees the depth)
            authors   as torch starts a Linear
            linear    normal, std sqrt(2 / (5 width))
            add       s + e, without an adapter
    start   normal    the first state's std is sqrt(2 / (5 width))
            authors   normal, std 0.0087 at any width, cut at 3 sigma
            zero
    fresh   False     one table of states, so that cached, batched and plain forwards agree
            True      drawn anew in every forward, as the authors do

Paper: "Retrofitted Recurrence", section 3 and appendix C.1; the numbers are those of its code.
"""
import math

import torch
import torch.nn as nn

from nanodepth.common.errors import check_choice
from nanodepth.text.loader import draw

AUTHORS_STD = 0.0087039     # sqrt(2 / (5 * 5280)): their first model's width, kept at any other


class Starts:
    "What a Recurrent begins with."

    def begin(self, inject='identity', start='normal', fresh=False, state_std=None):
        check_choice('inject', inject, ('identity', 'linear', 'authors', 'add'))
        check_choice('start', start, ('normal', 'authors', 'zero'))
        self.inject, self.start, self.fresh = inject, start, fresh
        self.forwards = 0               # with `fresh`, each has another draw
        self.table = None               # the first states of a text's positions
        self.std = math.sqrt(2 / (5 * self.config.n_embd))
        by_start = AUTHORS_STD if start == 'authors' else self.std
        self.state_std = by_start if state_std is None else state_std
        self.adapter = self.make_adapter()

    def make_adapter(self):
        "What mixes (state, prelude's output): (B, T, 2 C) to (B, T, C). None: they are added."
        if self.inject == 'add':
            return None
        C = self.config.n_embd
        adapter = nn.Linear(2 * C, C, bias=False)       # `authors`: as torch begins it
        with torch.no_grad():
            if self.inject == 'linear':
                nn.init.normal_(adapter.weight, std=self.std)
            elif self.inject == 'identity':             # (s, e) to e
                adapter.weight.copy_(torch.cat((torch.zeros(C, C), torch.eye(C)), dim=1))
        return adapter.to(self.embed.weight)            # on the layers' device, in their dtype

    def first_state(self, e, seen, generator):
        "The state (B, T, C) that the first recurrence gets, of tokens after `seen` others."
        if self.start == 'zero':
            return torch.zeros_like(e)
        if generator is None and self.fresh:
            self.forwards += 1
            generator = torch.Generator().manual_seed(draw(0, 'first state', self.forwards))
        if generator is None:
            end = seen + e.shape[1]
            if self.table is None or len(self.table) < end:
                with torch.inference_mode(False):   # else nothing could be trained with it later
                    self.table = self.make_table(end, e.shape[-1])
            if self.table.device != e.device:       # once, and not in every forward
                self.table = self.table.to(e.device)
            s = self.table[seen:end]                                        # (T, C)
        elif isinstance(generator, torch.Generator):
            s = self.noise(e.shape, generator)                                  # (B, T, C)
        else:       # one for each sequence
            s = torch.stack([self.noise(e.shape[1:], g) for g in generator])
        return (s.to(e) * self.state_std).expand_as(e)

    def make_table(self, end, width):
        """The first states of the positions before `end`, and some more: the whole context would be
        too much. They are drawn 64 at a time, because randn of another size may begin otherwise."""
        n = min(self.config.context, max(64, 2 ** math.ceil(math.log2(end))))
        seeded = torch.Generator().manual_seed(0)
        return torch.cat([self.noise((min(64, n - first), width), seeded)
                          for first in range(0, n, 64)])

    def noise(self, shape, generator):
        if self.start == 'authors':
            x = torch.empty(shape, device=generator.device)
            return nn.init.trunc_normal_(x, a=-3, b=3, generator=generator)
        return torch.randn(shape, generator=generator, device=generator.device)
