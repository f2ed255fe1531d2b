"""Turn a pretrained model into a depth-recurrent one: prelude, a core run r times, coda.

The idea: layers of a residual network work in one shared space, so a block of them can be fed its
own output. Early layers become the prelude, later ones core and coda, those between are dropped; in
front of the core, an adapter mixes the prelude's output e into the state s, so that the next state,
core(adapter(s, e)), does not forget the input. After some training with a random number of
recurrences, that number sets the compute at test time.

Paper: "Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence", section 3
(the model, surgery, the count of FLOPs), 4.2 (the curriculum), appendix B, C.1 (which layers, the
additive adapter), E (the cuts).
Differs: the paper prints no numbers for the start, but the authors' code does. With our defaults
the adapter begins as the projection on e, and the first state is noise that is fixed for each
position; looping/starts.py has theirs, and others.
In training, r is 1 + Poisson(rate), as in the authors' code. The rate is random too. Its mean is
the setting `recurrence`, so that r averages recurrence + 1. We draw r once per step. The authors
draw it once per micro-batch, so their grad_accum changes results.

Usage:
    python retrofit.py out/baseline 2-2-2       # makes out/baseline_2-2-2, says what was kept
    python data/toy/prepare.py --depths=6 --out=data/toy_deep       # deeper chains to train it on
    python train.py config/retrofit.py
    nanodepth evaluate out/retrofit --r=1,2,4,8,16          # loss and primitives against r
"""
import math

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.seeds import seed_for
from nanodepth.grow import untie
from nanodepth.looping import starts
from nanodepth.model import LM, KVCache, check_order


def recurrent_by_hand(model, tokens, r, s):
    """The idea: logits of a Recurrent whose core runs r times, from a first state s (B, T, C) on.
    (LN-scaling would have to be told each run's position.)"""
    e = model.run(model.embed(tokens), model.prelude)
    for _ in range(r):
        s = model.run(model.adapter(torch.cat((s, e), dim=-1)), model.core)
    return model.head(model.norm(model.run(s, model.coda)))


# ------------------------------------------------------------------------------------------ surgery

def cut(shape, n_layer):
    "'4-8-4' as three lists of layers."
    try:
        prelude, core, coda = map(int, shape.split('-'))
    except ValueError:
        raise Refused(f'the shape {shape!r} is not three numbers of layers, such as '
                      '4-8-4') from None
    needed = prelude + core + coda
    if min(prelude, coda) < 0 or core < 1 or needed > n_layer:
        raise Refused(f'the shape {shape!r} needs {needed} layers and a core of at least one, '
                      f'but the model has {n_layer}')
    core_end = n_layer - coda
    return [*range(prelude)], [*range(core_end - core, core_end)], [*range(core_end, n_layer)]


def surgery(model, shape, **options):
    """Make a Recurrent model from copies of the layers that are kept. `shape` is '4-8-4' (the
    first four layers, the last four, and the eight before those), or the three lists of layers."""
    parts = (cut(shape, len(model.layers)) if isinstance(shape, str)
             else [list(part) for part in shape])
    kept = check_order([i for part in parts for i in part], len(model.layers))
    if len(set(kept)) != len(kept):
        raise Refused(f'the layers {sorted({i for i in kept if kept.count(i) > 1})} stand in '
                      f'more than one place of {parts}')
    if model.recurs or model.order != list(range(len(model.layers))):
        raise Refused('this model has an order of its own: untie it first, and then cut it')
    start, end = len(parts[0]), len(parts[0] + parts[1])        # of the core, among the copies
    new = untie(model, kept)
    # an LM already: all that it lacks is how its layers recur (__init__ would draw new weights)
    new.__class__ = Recurrent
    new.recur_by(range(start), range(start, end), range(end, len(kept)), **options)
    return new


# -------------------------------------------------------------------------------------- the model

class Recurrent(LM):
    """An LM whose layers run as prelude, r times core, coda: three lists of its layers.
    `recurrence` is the r that runs when none is given (in training r is random, and averages
    recurrence + 1), and `backprop_depth` through how many of its last runs gradients go."""
    recurs = True
    table = None            # the first states of a text's positions, made when they are needed
    recompute = False       # keep the states between recurrences alone for the backward pass

    def __init__(self, config, prelude, core, coda, **options):
        super().__init__(config)
        self.recur_by(prelude, core, coda, **options)

    def recur_by(self, prelude, core, coda, *, recurrence=4, backprop_depth=8, inject='identity',
                 start='normal', fresh=False, state_std=None):
        if not core:
            raise Refused('the core has no layers: there is nothing to repeat')
        check_order([*prelude, *core, *coda], self.config.n_layer)
        self.prelude, self.core, self.coda = list(prelude), list(core), list(coda)
        self.recurrence, self.backprop_depth = recurrence, backprop_depth
        self.inject, self.start, self.fresh = inject, start, fresh      # looping/starts.py
        C = self.config.n_embd
        self.state_std = starts.std_of(start, C) if state_std is None else state_std
        if inject == 'identity':            # (s, e) to e: with no layer dropped, it is its parent
            self.adapter = nn.Linear(2 * C, C, bias=False)
            self.adapter.weight.data.copy_(torch.cat((torch.zeros(C, C), torch.eye(C)), dim=1))
        else:
            self.adapter = starts.another_adapter(inject, C)
        if self.adapter is not None:            # None: s + e
            self.adapter.to(self.embed.weight)      # on the layers' device, in their dtype

    @property
    def order(self):
        return self.unrolled(self.recurrence)

    def unrolled(self, r):
        return self.prelude + self.core * r + self.coda

    def new_cache(self, r=None):
        "An empty cache: a slot for each position of the unrolled order."
        return KVCache(len(self.unrolled(self.recurrence if r is None else r)))

    # ------------------------------------------------------------------------------- one forward

    def first_state(self, e, seen, generator):
        """The state (B, T, C) that the first recurrence gets, of tokens after `seen` others: noise.
        A generator for each row draws it in training. Else every position has a state of its own,
        so that cached, batched and plain forwards agree."""
        if generator is None and self.fresh:
            generator = starts.next_generator(self)
        if generator is None:
            end = seen + e.shape[1]
            s = starts.states_until(self, end, e.device)[seen:end]              # (T, C)
        elif isinstance(generator, torch.Generator):
            s = starts.noise(self.start, e.shape, generator)                    # (B, T, C)
        else:
            s = torch.stack([starts.noise(self.start, e.shape[1:], g) for g in generator])
        return (s.to(e) * self.state_std).expand_as(e)

    def recur(self, s, e, i, cache, tap=None):
        "Recurrence i, counted from 0: adapter, then core."
        x = s + e if self.adapter is None else self.adapter(torch.cat((s, e), dim=-1))
        x = x.to(e.dtype)                       # under autocast an adapter returns bfloat16
        return self.run(x, self.core, cache=cache, tap=tap,
                        position=len(self.prelude) + i * len(self.core))           # (B, T, C)

    def hidden(self, tokens, *, order=None, r=None, cache=None, generator=None,
               backprop_depth=None, tap=None):
        "The residual stream before the final norm."
        r = self.recurrence if r is None else r
        with_grad = self.backprop_depth if backprop_depth is None else backprop_depth
        if order is not None or self.config.order is not None:
            raise Refused('a recurrent core runs in an order of its own and takes no other: give r')
        if r < 1:
            raise Refused(f'r={r} is too small: the core must run at least once (try r=1)')
        if cache is not None and len(cache.layers) != len(self.unrolled(r)):
            raise Refused(f'r={r}, but this cache holds the keys of another r: go on with that')
        seen = 0 if cache is None else cache.seen
        e = self.run(self.embed(tokens), self.prelude, cache=cache, tap=tap)    # (B, T, C)
        s = self.first_state(e, seen, generator)
        for i in range(r):
            if i <= r - with_grad:
                s = s.detach()          # truncated back-propagation: no earlier graph is kept
            if self.recompute and torch.is_grad_enabled():
                s = checkpoint(self.recur, s, e, i, cache, tap, use_reentrant=False)
            else:
                s = self.recur(s, e, i, cache, tap)
        x = self.run(s, self.coda, cache=cache, tap=tap,
                     position=len(self.prelude) + r * len(self.core))
        if cache is not None:
            cache.seen += tokens.shape[1]
        return x

    def run_from(self, inputs, position, tokens, *, order=None, tap=None):
        "All of it again, because adapters stand between its layers."
        if self.fresh:
            raise Refused('each forward of this model begins with fresh noise, which would be '
                          'measured too: set model.fresh = False')
        return self.hidden(tokens, order=order, tap=tap)

    # ------------------------------------------------------------------------------- what it costs

    def flops_per_token(self, *, r=None, backprop_depth=None, context=None):
        """Training FLOPs of one token, as LM.flops_per_token counts; a recurrence without a
        backward pass costs a third."""
        r = self.recurrence if r is None else r
        with_grad = min(r, self.backprop_depth if backprop_depth is None else backprop_depth)

        def count(order):       # of an ordinary model; with no layers, of the head
            return LM.flops_per_token(self, order, context=context)
        once = count(self.core) - count([])
        if self.adapter is not None:
            once += 6 * self.adapter.weight.numel()
        return (count(self.prelude + self.coda) + with_grad * once
                + (r - with_grad) * once // 3)

    def flops_paper(self, mean=None):
        """The paper's count: 6 for each weight of a layer with a backward pass and 2 for each
        without, at so many recurrences."""
        layer = sum(p.numel() for p in self.layers[0].parameters())
        mean = self.recurrence if mean is None else mean
        with_grad = min(mean, self.backprop_depth)
        learned = len(self.prelude + self.coda) + with_grad * len(self.core)
        return layer * (6 * learned + 2 * (mean - with_grad) * len(self.core))


# ---------------------------------------------------------------------------------------- how often

def sample_recurrence(mean, step, seed):
    """r of a training step, the same on every rank: 1 + Poisson(exp(tau)), where tau is normal with
    std sigma and mean log(mean) - sigma^2 / 2, so that exp(tau) has the mean `mean` (and r has
    mean + 1)."""
    generator = torch.Generator().manual_seed(seed_for(seed, 'recurrence', step))
    sigma = 1 / 2
    normal = torch.randn(1, generator=generator, dtype=torch.float64)
    tau = sigma * normal + math.log(mean) - sigma ** 2 / 2
    return int(torch.poisson(tau.exp(), generator=generator).item()) + 1


def recurrence_curriculum(step, steps, mean, warm_fraction, shape='linear'):
    """What sample_recurrence gets for `mean` at a step: whole numbers that rise from 1 to `mean`
    over the first part of the steps, and then `mean`."""
    check_choice('curriculum_shape', shape, ('linear', '1-sqrt'))
    warm = warm_fraction * steps
    if step + 1 >= warm:
        return mean
    risen = (step + 1) / warm
    if shape == '1-sqrt':
        risen = 1 - math.sqrt(1 - risen)
    return max(1, math.ceil(mean * risen - 1e-9))       # 1e-9: 3.0000000001 is 3


if __name__ == '__main__':
    from nanodepth.__main__ import main as nanodepth
    nanodepth('cut')
