"""Turn a pretrained model into a depth-recurrent one: prelude, a core run r times, coda.

The idea: all layers of a residual network read and write one shared space, so a block of them can
read its own output. Early layers become the prelude, and later layers become the core and the coda.
The layers between prelude and core are dropped. Before each run of the core, an adapter mixes the
prelude's output e into the state s, so that the next state, core(adapter(s, e)), does not forget
the input. The model is then trained with a random number of runs, and at test time this number
sets the compute.

Paper: "Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence", section 3
(the model, surgery), 4.2 (the curriculum), appendix B, C.1 (which layers, the additive adapter), E
(the cuts).
What differs here: the paper's adapter begins at random, and here it begins by passing e on. Each
forward pass of the authors draws new first states, and here a position always has the same one in
evaluation, so that a text has one loss. The authors' adapter, noise and count of FLOPs are in
nanodepth/models/authors.py.

Usage:
    model = surgery(model, '2-2-2')         # model.order is now [0, 1, Core([2, 3]), 4, 5]
    core_of(model).r = 8                    # from now on the core runs eight times
    python retrofit.py 2-2-2 8              # the parts of eight layers, and the cost of each r
    python train.py config/retrofit.py      # init_from = 'out/baseline', cut = '2-2-2'
"""
import math
import re
import sys

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from grow import untie
from model import LM, ModelConfig, Refused, Span, require, spans_in, unrolled


class Core(Span):
    """Runs its items r times, with an adapter before them.

    Before each run the adapter mixes e, the stream that came into the Core, into the state s.
    Gradients flow back through the last `backprop_depth` runs only.

    train.py sets four attributes. r and backprop_depth change at each step. `generators` has one
    random generator for each row, which draws the first state of the row. If `recompute` is true,
    the backward pass computes each run again, which saves memory."""

    def __init__(self, items, r=4, backprop_depth=8):
        super().__init__(items)
        self.r, self.backprop_depth = r, backprop_depth
        self.generators, self.recompute = None, False

    @property
    def times(self):
        return self.r

    def make_weights(self, model):
        "Make the adapter, one matrix that reads (s, e). It begins as (0, 1), so that it returns e."
        width = model.config.n_embd
        self.adapter = nn.Linear(2 * width, width, bias=False)
        self.adapter.weight.data.copy_(torch.eye(2 * width)[width:])

    def muon_weights(self):
        return [self.adapter.weight]

    def mix(self, s, e):
        "Return what the core reads: (B, T, C), made of the state s and the stream e."
        return self.adapter(torch.cat((s, e), dim=-1))

    def forward(self, run, e):
        require(self.r >= 1 and self.backprop_depth >= 1,
                f'r={self.r}, backprop_depth={self.backprop_depth}: both must be at least 1')

        layers, rope = run.layers, run.rope

        def run_once(s, e, depth):
            # With `recompute`, the backward pass calls this later, when a Span around the core may
            # have restored the usual layers and positions. So they are set here.
            run.layers, run.rope = layers, rope
            return self.step(run, s, e, depth)

        s = self.first_state(run, e)
        for i in range(self.r):
            # The gradient is cut with detach, and not with torch.no_grad(): autocast keeps copies
            # of the weights, and in some versions of torch a copy made under no_grad gets no
            # gradient.
            if i <= self.r - self.backprop_depth:
                s = s.detach()
            if self.recompute and torch.is_grad_enabled():
                s = checkpoint(run_once, s, e, run.depth, use_reentrant=False)
            else:
                s = run_once(s, e, run.depth)
        return s                                                                # (B, T, C)

    def step(self, run, s, e, depth):
        "Return the state (B, T, C) after one more run of the items, which begin at this depth."
        x = self.mix(s, e)
        # Autocast makes x bfloat16. The stream is float32, or each run would round it.
        return run(x.to(e.dtype), self.items, depth)

    def first_state(self, run, e):
        """Return the first state, which is noise (B, T, C). In training each row draws its own
        noise. In evaluation the noise depends on a token's position alone, so that neither a cache
        nor the other rows of a batch change it."""
        B, T, C = e.shape
        if self.generators:
            s = torch.stack([self.noise((T, C), each) for each in self.generators])
        else:       # each block of 64 positions has its own seed, so few blocks must be drawn
            blocks = range(run.start // 64, (run.start + T - 1) // 64 + 1)
            s = torch.cat([self.noise((64, C), torch.Generator().manual_seed(i)) for i in blocks])
            s = s[run.start % 64:][:T]                                          # (T, C)
        return (s.to(e) * self.std(C)).expand(B, T, C)

    def noise(self, shape, generator):
        return torch.randn(shape, generator=generator, device=generator.device)

    def std(self, width):
        """Return the standard deviation of the noise: the formula of the authors' first model.
        (Their code keeps its value for the width 5280 at any width.)"""
        return math.sqrt(2 / (5 * width))

    def flops(self, model, context):
        """Return the training FLOPs of one token: for each weight 2 in the forward pass and 4 in
        the backward pass, so that a run without gradient costs a third."""
        per_run = model.flops_of(self.items, context) + self.flops_of_linears()
        with_gradient = min(self.r, self.backprop_depth)
        return with_gradient * per_run + (self.r - with_gradient) * (per_run // 3)


def core_of(model):
    "Return the Core in a model's order, or None. (A model of Hugging Face has no order.)"
    spans = spans_in(getattr(model, 'order', ()))
    return next((span for span in spans if isinstance(span, Core)), None)


# ------------------------------------------------------------------------------------------ surgery

def surgery(model, shape, kind=Core, **settings):
    """Return a recurrent model, made of copies of the layers that `shape` keeps. `shape` is '4-8-4'
    or three lists of layers. `kind` is the class of the core, and `settings` are passed to it."""
    require(model.order == [*range(len(model.layers))],
            f'surgery is for a model that runs each of its layers once, not {model.order}')
    require(isinstance(kind, type) and issubclass(kind, Core),
            f'{kind} must be a subclass of Core (in a config: core = MyCore)')
    prelude, core, coda = parts_of_shape(shape, len(model.layers))
    return untie(model, [*prelude, kind(core, **settings), *coda])


def parts_of_shape(shape, n_layer):
    """Return prelude, core and coda as three lists of layers. '4-8-4' keeps the first 4 layers, the
    8 layers before the last 4, and the last 4."""
    parts = shape
    if isinstance(shape, str):
        require(re.fullmatch(r'\d+-\d+-\d+', shape),
                f'the shape {shape} is not three numbers of layers, such as 4-8-4')
        prelude, core, coda = map(int, shape.split('-'))
        require(prelude + core + coda <= n_layer,
                f'the shape {shape} has more layers than the model, which has {n_layer}')
        end = n_layer - coda
        parts = [*range(prelude)], [*range(end - core, end)], [*range(end, n_layer)]
    require(len(parts) == 3, f'the shape {shape} must have three parts')
    require(len(parts[1]) >= 1, f'the shape {shape} has no layers in its core')
    layers = [i for part in parts for i in part]
    require(len({*layers}) == len(layers) and {*layers} <= {*range(n_layer)},
            f'the shape {shape} must name layers from 0 to {n_layer - 1}, and none of them twice')
    return parts


# ---------------------------------------------------------------------------------------- how often

def sample_recurrence(mean_r, generator):
    """Return r for a training step: 1 + Poisson(rate), where the rate is lognormal with the mean
    mean_r. So the mean of r is mean_r + 1. The authors' code does the same, and calls it mean_r.
    (The authors draw r for each micro-batch.)"""
    sigma = 1 / 2           # of the rate's logarithm
    normal = torch.randn(1, generator=generator, dtype=torch.float64)
    rate = (sigma * normal + math.log(mean_r) - sigma ** 2 / 2).exp()
    return int(torch.poisson(rate, generator=generator).item()) + 1


def ramp(step, steps, top, share, curve='linear'):
    """Return a whole number that rises from 1 to `top` over a share of the steps. The curricula of
    mean_r and of backprop_depth are such ramps."""
    require(curve in ('linear', '1-sqrt'), f'curriculum_shape={curve} must be linear or 1-sqrt')
    require(0 <= share <= 1, f'a curriculum over {share:g} of the steps: give a share from 0 to 1')
    risen = min(1, (step + 1) / max(1, share * steps))
    if curve == '1-sqrt':
        risen = 1 - math.sqrt(1 - risen)
    return max(1, math.ceil(top * risen - 1e-9))        # rounded up, but 3.0000000001 to 3


if __name__ == '__main__':
    words = sys.argv[1:]
    if len(words) != 2 or not words[1].isdigit():
        raise SystemExit(__doc__)
    shape, n_layer = words[0], int(words[1])
    try:
        parts = parts_of_shape(shape, n_layer)
        model = surgery(LM(ModelConfig(n_layer=n_layer)), shape)
    except Refused as error:
        sys.exit(f'retrofit: {error}')
    for name, layers in zip(('prelude', 'core', 'coda'), parts):
        print(f'{name:8} layers {" ".join(map(str, layers))}')
    once = LM(ModelConfig(n_layer=n_layer)).flops_per_token()
    for r in range(1, 9):
        core_of(model).r = r
        print(f'r = {r}: {len(unrolled(model.order)):3} layers deep, '
              f'{model.flops_per_token() / once:4.0%} of the training FLOPs of {n_layer} layers')
