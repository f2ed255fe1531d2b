"""Per-token exit: a recurrent model stops thinking about a token when its state stops moving.

The idea: after some recurrences most tokens' states hardly change, so a token may stop there: its
state is kept, and tokens that attend to it later see the keys and values of its last recurrence.
Easy tokens cost little, hard ones the full r.

Paper: "Retrofitted Recurrence" names such a criterion as future work (section 5).
Here: two measures of movement, the state's relative change, and the divergence of the output from
that of the recurrence before; and a third that asks no movement, but whether the answer read off is
sure. The last two pay for coda and head behind every recurrence. Tokens that stopped are still
carried along in a batch, so that `used` counts what a kernel could save; time is saved when all of
them have stopped.

Usage:
    stop = Exit(0.05)                   # or Exit(1e-3, by='kl'), Exit(0.1, by='sure')
    logits = recurrent(tokens, r=32, exit=stop)     # a threshold of 0 is fixed r, bit for bit
    print(stop.used / stop.full)                    # the share of the recurrences that was taken
"""
import copy
import math

import torch

from nanodepth.common.errors import Refused, check_choice


class Exit:
    """A token stops when it moves by less than the threshold. `used` counts the recurrences that
    tokens took, `full` those of fixed r, over all forwards."""

    def __init__(self, threshold, by='latent'):
        check_choice('by', by, ('latent', 'kl', 'sure'))
        if not threshold >= 0:
            raise Refused(f'threshold={threshold} must not be negative')
        self.threshold, self.by, self.used, self.full = threshold, by, 0, 0

    def step(self, model, s, e, i, r, cache):
        p, n = len(model.prelude), len(model.core)
        slots = cache.layers[p + i * n:p + (i + 1) * n]
        if i == 0:
            self.done = torch.zeros(s.shape[:2], dtype=torch.bool, device=s.device)        # (B, T)
            self.before, self.added = None, None
        self.full += self.done.numel()
        self.used += int((~self.done).sum())
        # nothing to compute: only the kept keys and values are added
        if self.done.all():
            for slot, (k, v) in zip(slots, self.added):
                slot.update(k, v)
            return s
        cache.layers[p + i * n:p + (i + 1) * n] = [Kept(slot, self, j)
                                                   for j, slot in enumerate(slots)]
        self.fresh = [None] * n
        new = model.recur(s, e, i, cache)
        cache.layers[p + i * n:p + (i + 1) * n] = slots
        self.added = self.fresh
        new = torch.where(self.done[..., None], s, new)
        self.done = self.done | (self.change(model, s, new, i, r, cache) < self.threshold)
        return new

    def change(self, model, s, new, i, r, cache):
        if self.by == 'latent':
            # (B, T)
            return (new - s).float().norm(dim=-1) / s.float().norm(dim=-1).clamp(min=1e-12)
        scratch = copy.copy(cache)
        # update makes new tensors: the slots stay as they are
        scratch.layers = [copy.copy(slot) for slot in cache.layers]
        x = model.run(new, model.coda, depth=len(model.prelude) + r * len(model.core),
                         cache=scratch)
        now = model.head(model.norm(x)).float().log_softmax(-1)
        before = self.before
        self.before = now
        if self.by == 'sure':       # what the likeliest answer lacks to certainty
            return 1 - now.max(-1).values.exp()
        return (torch.full(s.shape[:2], math.inf, device=s.device) if before is None
                else (now.exp() * (now - before)).sum(-1).clamp(min=0))


class Kept:
    "A cache slot in which tokens that stopped keep the keys and values of their last recurrence."

    def __init__(self, slot, owner, j):
        self.slot, self.owner, self.j = slot, owner, j

    def update(self, k, v):
        if self.owner.added is not None:
            done = self.owner.done[:, None, :, None]
            old_k, old_v = self.owner.added[self.j]
            k = torch.where(done, old_k, k)
            v = torch.where(done, old_v, v)
        self.owner.fresh[self.j] = k, v
        return self.slot.update(k, v)
