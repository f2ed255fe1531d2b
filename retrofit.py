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
    model.order = [0, 1, Core([2, 3], r=4), 4, 5]
    python retrofit.py 2-4-2 12                 # the order that such a cut of 12 layers has
    nanodepth cut out/baseline 2-2-2            # makes out/baseline_2-2-2, says what was kept
    python data/toy/prepare.py --depths=6 --out=data/toy_deep       # deeper chains to train it on
    python train.py config/retrofit.py
    nanodepth evaluate out/retrofit --r=1,2,4,8,16          # loss and primitives against r
"""
import math
import sys

import torch
from torch.utils.checkpoint import checkpoint

from nanodepth.common.errors import Refused, check_choice, refusals
from nanodepth.common.seeds import seed_for
from nanodepth.common.steps import core_in, steps_of
from nanodepth.grow import untie
from nanodepth.looping import starts
from nanodepth.model import LM, unrolled


def recurrent_by_hand(model, tokens, r, s):
    """The idea: logits of a model whose core runs r times, from a first state s (B, T, C) on. Its
    prelude, core and coda are three lists of layers, its adapter is a matrix. (LN-scaling would
    have to be told each run's position.)"""
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


def surgery(model, shape, recurrence=4, **options):
    """A recurrent model from copies of the layers that are kept. `shape` is '4-8-4' (the first four
    layers, the last four, and the eight before those), or the three lists of layers. The rest is
    for the Core."""
    parts = (cut(shape, len(model.layers)) if isinstance(shape, str)
             else [list(part) for part in shape])
    kept = [i for part in parts for i in part]
    if len(set(kept)) != len(kept):
        raise Refused(f'the layers {sorted({i for i in kept if kept.count(i) > 1})} stand in '
                      f'more than one place of {parts}')
    if model.order != list(range(len(model.layers))):
        raise Refused('this model has an order of its own: untie it first, and then cut it')
    prelude, core, coda = parts
    return untie(model, [*prelude, Core(core, recurrence, **options), *coda])


def recurrent(config, prelude, core, coda, recurrence=4, **options):
    "A new model of this kind."
    model = LM(config)
    model.order = [*prelude, Core(core, recurrence, **options), *coda]
    return model


def core_of(model):
    "The recurrent core in a model's order, or None."
    return core_in(getattr(model, 'order', ()))


def parts_of(model):
    "(prelude, core, coda): the items before the core, within it and behind it."
    return core_of(model).parts(model.order)


# --------------------------------------------------------------------------------------- the core

# what a checkpoint keeps of it, beside the layers of the three parts
OPTIONS = 'inject', 'start', 'fresh', 'state_std', 'recurrence', 'backprop_depth'


class Core:
    """A step of an order: its items run r times, each time behind an adapter that mixes the stream
    e, as it came in, into the state s. This r, which configs and files call `recurrence`, counts
    where a forward is given none; in training r is random. Gradients go back through the last
    `backprop_depth` runs. The adapter is the model's, and `inject` says what a new one begins as.
    """
    recompute = False       # keep only the states between runs, and compute a run anew backwards

    def __init__(self, items, r=4, *, backprop_depth=8, inject='identity', start='normal',
                 fresh=False, state_std=None):
        self.items = list(items)
        if not self.items:
            raise Refused('the core has no layers: there is nothing to repeat')
        self.recurrence = r
        self.backprop_depth = backprop_depth
        self.inject, self.start, self.fresh = inject, start, fresh      # looping/starts.py
        self.state_std = state_std
        self.width = None   # of the model that it is in
        self.table = None   # the first states of a text's positions, made when they are needed

    def enter(self, model, order, new=True):
        """The model gets an adapter, if it has none and the order is to be its own. model.adapter
        is a matrix, or None where inject='add' needs none. Here is also what a core refuses."""
        if self.width not in (None, model.config.n_embd):
            raise Refused('this core is in a model of another width: make one for each model')
        self.context, self.width = model.config.context, model.config.n_embd    # for first states
        if self.state_std is None:
            self.state_std = starts.std_of(self.start, self.width)
        if sum(hasattr(step, 'recurrence') for step in steps_of(order)) > 1:
            raise Refused('an order has one core: its adapter has one name in a checkpoint')
        has = hasattr(model, 'adapter')
        if not has and not new:
            raise Refused('a core brings an adapter into the model: set model.order')
        if has and (model.adapter is None) != (self.inject == 'add'):
            raise Refused(f'inject={self.inject!r} does not fit the adapter that this model has')
        if not has:
            model.adapter = starts.new_adapter(self.inject, self.width)
            if model.adapter is not None:           # None: s + e
                model.adapter.to(model.embed.weight)    # on the layers' device, in their dtype

    def parts(self, order):
        "(prelude, core, coda) of the order that it stands in."
        if self not in order:
            raise Refused(f'in the order {order} the core stands within another step')
        at = order.index(self)
        return order[:at], self.items, order[at + 1:]

    def __repr__(self):
        return f'Core({self.items}, r={self.recurrence})'

    # ------------------------------------------------------------------------------- one forward

    def first_state(self, e, seen, generator):
        """The state (B, T, C) that the first run gets, of tokens after `seen` others: noise. In
        training it is drawn by a list of generators, one for each row, or by one for all rows.
        Without one, every position has a fixed state of its own, so that cached, batched and plain
        forwards agree."""
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

    def recur(self, s, e, walk, position):
        "One run: adapter, then items."
        adapter = walk.model.adapter
        x = s + e if adapter is None else adapter(torch.cat((s, e), dim=-1))
        x = x.to(e.dtype)                       # under autocast an adapter returns bfloat16
        return walk.run(x, self.items, position)                                # (B, T, C)

    def __call__(self, e, walk, position):
        r, with_grad = self.how_often(**walk.how)
        s = self.first_state(e, walk.seen, walk.how.get('generator'))
        first_learned = r - with_grad       # gradients go back to this run, and no further
        for i in range(r):
            if i <= first_learned:
                s = s.detach()
            if self.recompute and torch.is_grad_enabled():
                s = checkpoint(self.recur, s, e, walk, position, use_reentrant=False)
            else:
                s = self.recur(s, e, walk, position)
            position += len(unrolled(self.items, **walk.how))
        return s

    def how_often(self, r=None, backprop_depth=None, generator=None):
        "(r, through how many of these gradients go back); it is given all of `how`."
        r = self.recurrence if r is None else r
        if r < 1:
            raise Refused(f'r={r} is too small: the core must run at least once (try r=1)')
        with_grad = self.backprop_depth if backprop_depth is None else backprop_depth
        if with_grad < 1:
            raise Refused(f'backprop_depth={with_grad} is too small: gradients go back through at '
                          'least the last run')
        return r, min(r, with_grad)

    # ------------------------------------------------------------------------------- what it costs

    def unrolled(self, **how):
        return unrolled(self.items, **how) * self.how_often(**how)[0]

    def flops(self, model, context, **how):
        "A run costs a third without a backward pass, which is twice the forward."
        r, with_grad = self.how_often(**how)
        once = model.flops_of(self.items, context, **how)
        if model.adapter is not None:
            once += 6 * model.adapter.weight.numel()
        forward_alone = once // 3
        return with_grad * once + (r - with_grad) * forward_alone


def flops_paper(model, mean=None):
    """The paper's count: 6 for each weight of a layer with a backward pass and 2 for each without,
    at so many recurrences."""
    layer = sum(p.numel() for p in model.layers[0].parameters())
    prelude, core, coda = parts_of(model)
    mean, with_grad = core_of(model).how_often(mean)
    learned = len(prelude + coda) + with_grad * len(core)
    return layer * (6 * learned + 2 * (mean - with_grad) * len(core))


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
    if len(sys.argv) != 3:
        print(__doc__)
    else:
        with refusals('retrofit'):
            prelude, core, coda = cut(sys.argv[1], int(sys.argv[2]))
            print([*prelude, Core(core), *coda])
