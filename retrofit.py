"""Turn a pretrained model into a depth-recurrent one: prelude, a core run r times, coda.

The idea: layers of a residual network work in one shared space, so a block of them can be fed its
own output. Early layers become the prelude, later ones core and coda, those between are dropped; in
front of the core, an adapter mixes the prelude's output e into the state s, so that the next state,
core(adapter(s, e)), does not forget the input. After some training with a random number of
recurrences, that number sets the compute at test time.

Paper: "Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence", section 3
(the model, surgery, the count of FLOPs), 4.2 (the curriculum), appendix B, C.1 (which layers, the
additive adapter), E (the cuts).
Differs:
- The adapter first returns e, and ignores s. So with no layer dropped the model is its parent, at
  any r, until it is trained (but LN-scaling sees the depth). The first state at a token's place is
  always the same. What the authors' code does is inject='authors', start='authors', fresh=True.
- We draw r once per step. They draw it once per micro-batch, so their grad_accum changes results.

Usage:
    model = surgery(model, '2-2-2')         # model.order is now [0, 1, Core([2, 3]), 4, 5]
    core_of(model).r = 8                    # from now on the core runs eight times
    python retrofit.py out/baseline 2-2-2   # cuts a run of train.py into out/baseline_2-2-2
    python train.py config/retrofit.py      # trains that
"""
import functools
import math
import re
import shutil
import sys
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from grow import untie
from model import Refused, Span, require, seed_for, seen, spans_in, unrolled


def recurrent_by_hand(model, tokens, r, s):
    """The idea: logits of a model whose core runs r times, from a first state s (B, T, C) on.
    (LN-scaling would have to be told each run's depth.)"""
    prelude, core, coda = parts_of(model)
    e = model.run(model.embed(tokens), prelude)
    for _ in range(r):
        s = model.run(model.adapter(torch.cat((s, e), dim=-1)), core)
    return model.head(model.norm(model.run(s, coda)))


def core_of(model):
    "The Core in a model's order, or None. (A model of transformers has no order.)"
    spans = spans_in(getattr(model, 'order', ()))
    return next((span for span in spans if isinstance(span, Core)), None)


def parts_of(model):
    "(prelude, core, coda): the items before the Core, within it and after it."
    order, core = model.order, core_of(model)
    require(core in order, f'the order {order} has no Core, or only one within another Span')
    place = order.index(core)
    return order[:place], core.items, order[place + 1:]


# ------------------------------------------------------------------------------------------ surgery

def cut(shape, n_layer):
    "'4-8-4' as prelude, core and coda: the first 4 layers, the 8 before the last 4, the last 4."
    require(re.fullmatch(r'\d+-\d+-\d+', shape),
            f'the shape {shape} is not three numbers of layers, such as 4-8-4')
    prelude, core, coda = map(int, shape.split('-'))
    require(core >= 1 and prelude + core + coda <= n_layer,
            f'the shape {shape} has no core, or more layers than the {n_layer} of the model')
    end = n_layer - coda
    return [*range(prelude)], [*range(end - core, end)], [*range(end, n_layer)]


def surgery(model, shape, inject='identity', **options):
    """A recurrent model from copies of the layers that are kept. `shape` is '4-8-4', or the three
    lists of layers. The options are the Core's."""
    require(model.order == [*range(len(model.layers))], 'untie a looped model before you cut it')
    prelude, core, coda = cut(shape, len(model.layers)) if isinstance(shape, str) else shape
    new = untie(model, [*prelude, Core(core, **options), *coda])
    new.adapter = new_adapter(model.config.n_embd, inject)
    new.adapter.to(model.embed.weight)          # its device and dtype
    return new


def new_adapter(width, inject='identity'):
    """From (s, e) to the core's input. It begins as (s, e) to e ('identity'), with small random
    weights ('linear'), as the 'authors' have it, or it is s + e and has no weights ('add')."""
    if inject == 'add':
        return Add()
    adapter = nn.Linear(2 * width, width, bias=False)
    if inject == 'identity':
        with torch.no_grad():
            adapter.weight.copy_(torch.cat((torch.zeros(width, width), torch.eye(width)), dim=1))
    elif inject == 'linear':
        nn.init.normal_(adapter.weight, std=math.sqrt(2 / (5 * width)))
    else:
        assert inject == 'authors', f'inject={inject}'      # as torch begins it
    return adapter


class Add(nn.Module):
    "The adapter without weights: s + e."

    def forward(self, both):
        s, e = both.chunk(2, dim=-1)
        return s + e


# ---------------------------------------------------------------------------------------- the core

AUTHORS_STD = 0.0087039     # sqrt(2 / (5 * 5280)), the width of their first model, at any width


class Core(Span):
    """Its items run r times, each time after model.adapter, which mixes the stream e, as it came
    in, into the state s. Gradients go back through the last `backprop_depth` runs.

    start      of the first state: 'normal' noise of the std sqrt(2 / (5 width)), or the 'authors',
               whose std is 0.0087 at any width and which is cut at 3 sigma
    state_std  another std; 0 begins with zeros
    fresh      another first state in each forward; else a text's first states are always the same,
               so that cached, batched and plain forwards agree

    In training r and backprop_depth change in each step, and `generators`, one for each row, draw
    the first states. With `recompute` each run is computed once more in the backward pass, and less
    is kept in memory."""

    def __init__(self, items, r=4, backprop_depth=8, start='normal', state_std=None, fresh=False):
        super().__init__(items)
        assert start in ('normal', 'authors'), f'start={start}'
        self.r, self.backprop_depth = r, backprop_depth
        self.start, self.state_std, self.fresh = start, state_std, fresh
        self.generators, self.recompute = None, False
        self.forwards = 0               # with `fresh`: each has another seed

    def __repr__(self):
        return f'Core({self.items}, r={self.r})'

    def rewind(self):
        "With `fresh`, the next forwards draw once more what the first ones have drawn."
        self.forwards = 0

    def with_gradient(self):
        "How many of its runs get gradients."
        require(self.r >= 1 and self.backprop_depth >= 1,
                f'r={self.r}, backprop_depth={self.backprop_depth}: both are at least 1')
        return min(self.r, self.backprop_depth)

    def first_state(self, e, first):
        "(B, T, C) for the stream e, whose first token has the place `first` in its text."
        B, T, C = e.shape
        if self.generators:             # in training: one for each row
            s = torch.stack([noise(self.start, (T, C), each) for each in self.generators])
        elif self.fresh:
            self.forwards += 1
            seed = seed_for(0, 'first state', self.forwards)
            s = noise(self.start, (B, T, C), torch.Generator(e.device).manual_seed(seed))
        else:                           # of each place (in sizes that double, so few are drawn)
            pieces = 2 ** max(0, math.ceil(math.log2((first + T) / 64)))
            s = fixed_noise(self.start, pieces, C, e.device)[first:first + T]           # (T, C)
        return (s.to(e) * self.std(C)).expand(B, T, C)

    def std(self, width):
        if self.state_std is not None:
            return self.state_std
        return AUTHORS_STD if self.start == 'authors' else math.sqrt(2 / (5 * width))

    def run_once(self, model, s, e, depth, cache, tap):
        "From a state to the next."
        x = model.adapter(torch.cat((s, e), dim=-1))
        # Autocast made it bfloat16. As a residual stream it is float32, or each run would round it.
        return model.run(x.to(e.dtype), self.items, depth, cache, tap)

    def __call__(self, model, e, depth, cache=None, tap=None):
        require(hasattr(model, 'adapter'), 'a Core needs an adapter: surgery makes one')
        first_with_gradient = self.r - self.with_gradient()
        s = self.first_state(e, seen(cache, depth))
        for i in range(self.r):
            # Gradients end at the state before the last runs: each earlier one is cut off. (Under
            # no_grad, autocast would keep copies of the weights that have no gradients.)
            if i <= first_with_gradient:
                s = s.detach()
            if self.recompute and torch.is_grad_enabled():
                s = checkpoint(self.run_once, model, s, e, depth, cache, tap, use_reentrant=False)
            else:
                s = self.run_once(model, s, e, depth, cache, tap)
            depth += len(unrolled(self.items))
        return s                                                                # (B, T, C)

    def unrolled(self):
        return unrolled(self.items) * self.r

    def flops(self, model, context):
        "A run without a backward pass costs a third: that pass is twice the forward."
        of_run = model.flops_of(self.items, context)
        of_run += 6 * sum(p.numel() for p in model.adapter.parameters())
        with_gradient = self.with_gradient()
        return with_gradient * of_run + (self.r - with_gradient) * (of_run // 3)


def noise(start, shape, generator):
    if start == 'authors':
        x = torch.empty(shape, device=generator.device)
        return nn.init.trunc_normal_(x, a=-3, b=3, generator=generator)
    return torch.randn(shape, generator=generator, device=generator.device)


@functools.lru_cache(maxsize=2)
def fixed_noise(start, pieces, width, device):
    """(64 pieces, width), in which row i is always the same. So it is drawn in pieces: a longer
    draw need not begin as a shorter one does."""
    generator = torch.Generator().manual_seed(0)
    return torch.cat([noise(start, (64, width), generator) for _ in range(pieces)]).to(device)


def flops_paper(model, r=None):
    """The paper's count, to compare with its tables: 6 for each weight of a layer with a backward
    pass and 2 for each without. Logs have flops_per_token's, with attention, adapter and head."""
    layer = sum(p.numel() for p in model.layers[0].parameters())
    prelude, core, coda = parts_of(model)
    r = r or core_of(model).r
    with_gradient = min(r, core_of(model).backprop_depth)
    learning = len(prelude + coda) + with_gradient * len(core)
    return layer * (6 * learning + 2 * (r - with_gradient) * len(core))


# ---------------------------------------------------------------------------------------- how often

def sample_recurrence(mean_r, step, seed):
    """r of a training step, the same on every rank: 1 + Poisson(rate). The logarithm of the rate is
    normal with std sigma, around log(mean_r) - sigma^2 / 2, so that the rate's mean is mean_r, the
    authors' mean_recurrence. So r averages mean_r + 1."""
    generator = torch.Generator().manual_seed(seed_for(seed, 'recurrence', step))
    sigma = 1 / 2
    normal = torch.randn(1, generator=generator, dtype=torch.float64)
    rate = (sigma * normal + math.log(mean_r) - sigma ** 2 / 2).exp()
    return int(torch.poisson(rate, generator=generator).item()) + 1


def recurrence_curriculum(step, steps, most, warm_fraction, shape='linear'):
    """mean_r at a step, or backprop_depth: whole numbers that rise from 1 to `most` over the first
    part of the steps."""
    assert shape in ('linear', '1-sqrt'), f'curriculum_shape={shape}'
    risen = min(1, (step + 1) / max(1, warm_fraction * steps))
    if shape == '1-sqrt':
        risen = 1 - math.sqrt(1 - risen)
    return max(1, math.ceil(most * risen - 1e-9))       # 1e-9: 3.0000000001 is 3


if __name__ == '__main__':
    import retrofit     # this file, once more: with the class Core that checkpoint.py knows
    from training.checkpoint import load, save
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    given, shape = Path(sys.argv[1]), sys.argv[2]
    folder = given.parent if given.suffix == '.pt' else given       # of its run
    out = folder.with_name(f'{folder.name}_{shape}')
    try:
        model, saved = load(given)
        recurrent = retrofit.surgery(model, shape)          # it may refuse, before anything is made
        require(not out.exists(), f'{out} is there already: remove it, or give it another name')
    except Refused as error:
        sys.exit(f'retrofit: {error}')
    out.mkdir()
    save(out, recurrent, [], config=saved['config'], published=saved.get('published'), flops=0,
         data=saved['data'], inherited_flops=saved['flops'] + saved['inherited_flops'])
    for path in [*folder.glob('*.json'), *folder.glob('*.jinja')]:      # run.json, a tokenizer
        shutil.copy(path, out)
    print(f'{out}: prelude, core and coda were the layers', *cut(shape, len(model.layers)))
