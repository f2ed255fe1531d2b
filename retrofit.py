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
position; variants/starts.py has theirs, and others.
In training, r is 1 + Poisson(rate), and the rate is log-normal with the mean `mean`, as in the
authors' code. We draw r once per step. The authors draw it once per micro-batch, so their
grad_accum changes results.

Usage:
    python retrofit.py out/baseline 2-2-2                   # what was kept, what was dropped
    python data/toy/prepare.py --depths=6 --out=data/toy_deep       # deeper chains to train it on
    python train.py config/retrofit.py
    nanodepth evaluate out/retrofit --r=1,2,4,8,16          # loss and primitives against r
"""
import math

import torch

from nanodepth.common.errors import Refused, check_choice
from nanodepth.grow import untie
from nanodepth.model import LM, KVCache, check_order
from nanodepth.text.loader import draw
from nanodepth.variants.starts import Starts


def recurrent_by_hand(model, tokens, r, s):
    "The idea, of a first state s (B, T, C): logits of a Recurrent whose core runs r times."
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
    end = n_layer - coda        # of the core
    return [*range(prelude)], [*range(end - core, end)], [*range(end, n_layer)]


def surgery(model, shape, **options):
    """Make a Recurrent model from copies of the layers that are kept. `shape` is '4-8-4' (the
    first four layers, the last four, and the eight before those), or the three lists of layers."""
    parts = (cut(shape, len(model.layers)) if isinstance(shape, str)
             else [list(part) for part in shape])
    kept = check_order([i for part in parts for i in part], len(model.layers))
    if len(set(kept)) != len(kept):
        raise Refused(f'the layers {sorted({i for i in kept if kept.count(i) > 1})} stand in '
                      f'more than one place of {parts}')
    if model.order != list(range(len(model.layers))):
        raise Refused('this model has an order of its own: untie it first, and then cut it')
    copies = untie(model, kept)
    p, q = len(parts[0]), len(parts[0] + parts[1])      # in the copies, the core is p, ..., q - 1
    with torch.device('meta'):      # no weights yet: all will be the copies
        new = Recurrent(copies.config, range(p), range(p, q), range(q, len(kept)), **options)
    for name in ('embed', 'layers', 'norm', 'head', 'cos', 'sin'):
        setattr(new, name, getattr(copies, name))
    new.adapter = new.make_adapter()        # the one so far has no weights either
    return new.train(model.training)


# -------------------------------------------------------------------------------------- the model

class Recurrent(Starts, LM):
    """An LM whose layers run as prelude, r times core, coda: three lists of its layers. `mean` is
    the r that runs when none is given. The adapter and the first state are those of
    variants/starts.py, which `begins` are handed to."""
    recurs = True

    def __init__(self, config, prelude, core, coda, *, mean=4, backprop_depth=8, **begins):
        super().__init__(config)
        if not core:
            raise Refused('the core has no layers: there is nothing to repeat')
        check_order([*prelude, *core, *coda], config.n_layer)
        self.prelude, self.core, self.coda = list(prelude), list(core), list(coda)
        self.mean, self.backprop_depth = mean, backprop_depth
        # variants/starts.py: the adapter, Linear(2C, C), which begins as (s, e) -> e; the first
        # state, a table of normal noise with a row for each position
        self.begin(**begins)

    @property
    def order(self):
        return self.unrolled(self.mean)

    def unrolled(self, r):
        return self.prelude + self.core * r + self.coda

    def new_cache(self, r=None):
        "An empty cache: a slot for each position of the unrolled order."
        return KVCache(len(self.unrolled(self.mean if r is None else r)))

    def check_cache(self, cache, r):
        "With another r than before, the coda would read the core's keys."
        if cache is not None and len(cache.layers) != len(self.unrolled(r)):
            had = (len(cache.layers) - len(self.unrolled(0))) // len(self.core)
            raise Refused(f'r={r}, but this cache holds keys of r={had}: go on with that')

    # ------------------------------------------------------------------------------- one forward

    def recur(self, s, e, i, cache, tap=None):
        "Recurrence i, counted from 0: adapter, then core."
        mixed = s + e if self.adapter is None else self.adapter(torch.cat((s, e), dim=-1))
        return self.run(mixed.to(e.dtype), self.core, cache=cache, tap=tap,
                        depth=len(self.prelude) + i * len(self.core))           # (B, T, C)

    def hidden(self, tokens, *, r=None, cache=None, generator=None, backprop_depth=None, tap=None):
        "The residual stream before the final norm."
        r = self.mean if r is None else r
        learned = self.backprop_depth if backprop_depth is None else backprop_depth
        if r < 1:
            raise Refused(f'r={r} is too small: the core must run at least once (try r=1)')
        self.check_cache(cache, r)
        seen = 0 if cache is None else cache.seen
        e = self.run(self.embed(tokens), self.prelude, cache=cache, tap=tap)    # (B, T, C)
        s = self.first_state(e, seen, generator)
        for i in range(r):
            with learning(i, r - learned):      # only the last ones keep a graph
                s = self.recur(s, e, i, cache, tap)
        x = self.run(s, self.coda, cache=cache, tap=tap,
                     depth=len(self.prelude) + r * len(self.core))
        if cache is not None:
            cache.seen += tokens.shape[1]
        return x

    # ------------------------------------------------------------------------------- what it costs

    def parts(self):
        """Parameters of the layers of (prelude, core, coda), as the paper counts: without adapter,
        embeddings and final norm."""
        layer = sum(p.numel() for p in self.layers[0].parameters())
        return tuple(len(part) * layer for part in (self.prelude, self.core, self.coda))

    def effective_params(self, r):
        prelude, core, coda = self.parts()
        return prelude + r * core + coda

    def flops_per_token(self, *, r=None, backprop_depth=None, context=None):
        """Training FLOPs of one token, as LM.flops_per_token counts; a recurrence without a
        backward pass costs a third."""
        r = self.mean if r is None else r
        learned = min(r, self.backprop_depth if backprop_depth is None else backprop_depth)
        count = super().flops_per_token
        head = count([], context=context)
        once = count(self.core, context=context) - head
        if self.adapter is not None:
            once += 6 * self.adapter.weight.numel()
        outside = count(self.prelude + self.coda, context=context)
        return outside + learned * once + (r - learned) * once // 3

    def flops_paper(self, mean=None):
        """The paper's count: 6 for each weight with a backward pass and 2 for each without, at
        the mean number of recurrences."""
        prelude, core, coda = self.parts()
        mean = self.mean if mean is None else mean
        learned = min(mean, self.backprop_depth)
        return 6 * (prelude + coda + learned * core) + 2 * (mean - learned) * core


def learning(i, first_learned):
    "Truncated back-propagation: a context in which recurrence i keeps a graph, or none before."
    if i == first_learned:      # autocast would reuse weights that it cast without a graph
        torch.clear_autocast_cache()
    return torch.set_grad_enabled(torch.is_grad_enabled() and i >= first_learned)


# ---------------------------------------------------------------------------------------- how often

def sample_recurrence(mean, step, seed):
    """r of a training step, the same on every rank: 1 + Poisson(exp(tau)), where tau is normal with
    std sigma and mean log(mean) - sigma^2 / 2, so that exp(tau) has the mean `mean`."""
    generator = torch.Generator().manual_seed(draw(seed, 'recurrence', step))
    sigma = 1 / 2
    normal = torch.randn(1, generator=generator, dtype=torch.float64)
    tau = sigma * normal + math.log(mean) - sigma ** 2 / 2
    return int(torch.poisson(tau.exp(), generator=generator).item()) + 1


def first_noise(seed, step, rows, device):
    "Each row's generator for its first state in a step, however rows are shared out to ranks."
    return [torch.Generator(device).manual_seed(draw(seed, f'state of row {row}', step))
            for row in rows]


def recurrence_curriculum(step, steps, mean, warm_fraction, shape='linear'):
    """The mean for sample_recurrence at a step: a staircase from 1 to `mean` over the first part of
    the steps, then `mean`."""
    check_choice('curriculum_shape', shape, ('linear', '1-sqrt'))
    warm = warm_fraction * steps
    if step + 1 >= warm:
        return mean
    risen = (step + 1) / warm           # the first step stands one stair above 0
    if shape == '1-sqrt':
        risen = 1 - math.sqrt(1 - risen)
    return max(1, math.ceil(mean * risen - 1e-9))       # a rounding error is no stair


if __name__ == '__main__':
    from nanodepth.__main__ import main as nanodepth
    nanodepth('cut')
