"""Loop a frozen model's middle layers, ours or Hugging Face's, and undo it without a trace.

The idea: a window g of residual layers adds F(x) = g(x) - x to the stream x. That is one Euler step
of length 1 on x' = F(x), and the later layers were trained on where it ends. Running the window K
times goes K such steps, to states that they have never seen. So take K steps of length 1/K instead:
they end near the same place, but each step reads what the one before it has written.

Why beta: near is not there. The result goes back towards the plain output by the share beta. 1 is
the plain model and 0 the small steps alone, so that beta says how far the later layers are taken
from what they know.

Paper: "Training-Free Looped Transformers", sections 2 and 3, appendices D and P (which settings).

Usage:
    with looped(model, window=(3, 5), method='rk', K=3, beta=0.5) as m: m.generate(tokens, 20)
    patch(model, 'mid4'); unpatch(model)                # the same without a `with`
    model.order = [0, 1, 2, Window([3, 4], rk, K=3), 5]
    python wrapper.py                   # where K steps through x' = 0.8 x end, from x = 1
    nanodepth evaluate HF_FOLDER --window=mid4 --K=3 --tasks=arc_easy   # plain and looped, scored
"""
import contextlib

import torch

from nanodepth.common.errors import check_choice
from nanodepth.looping.caches import Memory, check_cache
from nanodepth.looping.patch import install, unpatch
from nanodepth.looping.solvers import BY_LAYER, MORE, PER_TOKEN, bind, lerp
from nanodepth.model import unrolled

# --------------------------------------------------------------------------- the idea, by hand

def looped_by_hand(model, tokens, a, b, K, beta=0.5):
    "Logits of a model of ours with its layers a to b looped."
    def g(x):                               # one pass through the window
        return model.run(x, model.order[a:b + 1], position=a)
    x = model.run(model.embed(tokens), model.order[:a])
    plain = g(x)
    x = x + (plain - x) / K                 # the first of K small steps reuses `plain`
    for _ in range(K - 1):
        x = x + (g(x) - x) / K
    x = beta * plain + (1 - beta) * x       # a part of the way back to the plain output
    x = model.run(x, model.order[b + 1:], position=b + 1)
    return model.head(model.norm(x))


# ------------------------------------------------------------------ ways to run a window K times
# lerp(x, y, h) is x + h (y - x), rounded so that h = 1 gives y itself: K = 1 is the plain window.

def naive(g, x, K):
    "The window K times: steps of length 1, to time K."
    for _ in range(K):
        x = g(x)
    return x


def rk(g, x, K, beta=0.5, T=1):
    """looped_by_hand's K Euler steps to the time T, and the way back. All of it is one Runge-Kutta
    step of K stages (Eq. 13 to 16), hence the name."""
    plain = g(x)
    x = lerp(x, plain, T / K)
    for _ in range(K - 1):
        x = lerp(x, g(x), T / K)
    return lerp(x, plain, beta)             # beta plain + (1 - beta) x


SOLVERS = dict(naive=naive, rk=rk, **MORE)          # MORE: those of looping/solvers.py


def pick_solver(method, K, beta=None, **options):
    "(solver(g, x), how often it evaluates g), or an error in one line."
    check_choice('method', method, list(SOLVERS))
    return bind(method, SOLVERS[method], K, beta, **options)


# ----------------------------------------------------------------------------- the step of an order

class Window:
    """A step of an order: a solver that evaluates these items several times, at the same
    positions. It keeps nothing of a forward, so that copies and threads may share it.

    method  a name of SOLVERS, or its function
    cache   what later tokens see of a looped layer: its 'first' or 'last' evaluation's keys, or
            others of looping/caches.py, such as 'natural'
    decode  'full' loops at each new token; 'bypass' loops only while a prompt is read
    mode    the items as one 'block', or 'layer' by layer"""

    def __init__(self, items, method='rk', K=3, beta=None, cache=None, decode='full', mode=None,
                 **options):
        self.items = list(items)
        names = {solver: name for name, solver in SOLVERS.items()}
        self.method, self.K, self.decode = names.get(method, method), K, decode
        self.solver, self.evaluations = pick_solver(self.method, K, beta, **options)
        self.by_layer = self.method in BY_LAYER             # a method for each layer by itself
        self.mixes_tokens = self.method not in PER_TOKEN    # no padded rows, then (scoring asks)
        self.mode = mode or ('layer' if self.by_layer else 'block')
        self.cache = cache or ('natural' if self.by_layer else 'first')
        check_choice('mode', self.mode, ['layer'] if self.by_layer else ['block', 'layer'])
        check_cache(self, options.get('tol'))       # with a tolerance it may stop before K

    def __repr__(self):
        return f'Window({self.items}, {self.method!r}, K={self.K})'

    def enter(self, model, order, new=True):
        "It needs nothing of the model."

    def __call__(self, x, walk, position):
        if self.decode == 'bypass' and walk.seen > 0 and x.shape[-2] == 1:
            return walk.run(x, self.items, position)
        memory = Memory(self, walk, position)       # what it does with a KV cache, if there is one
        parts = [self.items] if self.mode == 'block' else [[item] for item in self.items]
        y = x
        for part in parts:
            g = memory.window(part, position)       # each call of g is one evaluation
            y = self.solver(g, y)
            position += len(unrolled(part, **walk.how))
        memory.settle(x, y)     # some caches keep one more pass, on what came in or what goes out
        return y

    def unrolled(self, **how):
        return unrolled(self.items, **how)

    def flops(self, model, context, **how):
        return self.evaluations * model.flops_of(self.items, context, **how)


# ------------------------------------------------------------------- any model, with its KV cache

def patch(model, window=None, method='rk', K=3, beta=None, pin=None, **how):
    """Loop a window of a model's layers from now on; unpatch(model) undoes it.

    window   (3, 5), both included; 'mid4', the middle four, if none is given; 0.5, the four centred
             on that fraction of the depth
    K, beta  rk's, whose beta is 0.5 if none is given; others' options are in looping/solvers.py
    cache    which pass later tokens see in the KV cache: 'first', the plain one, or as Window says
    others   rarely needed: Window explains decode and mode, looping/layers.py pin

    One of ours gets another order; another family's gets looping/'s engine into its layers."""
    def step(items):
        return Window(items, method, K, beta, **how)
    return install(model, window, step, pin)


@contextlib.contextmanager
def looped(model, window=None, method='rk', K=3, beta=None, **how):
    "patch inside a `with`."
    patch(model, window, method, K, beta, **how)
    try:
        yield model
    finally:
        unpatch(model)


if __name__ == '__main__':
    print('K   naive   steps   and back')
    for K in (1, 2, 3, 4):
        ends = [solver(lambda x: x + 0.8 * x, torch.ones(()), K, **how).item()
                for solver, how in ((naive, {}), (rk, dict(beta=0)), (rk, {}))]
        print(K, *(f'{end:7.3f}' for end in ends))
