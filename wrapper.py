"""Loop a frozen model's middle layers, and undo it without a trace.

The idea: a window g of residual layers adds F(x) = g(x) - x to the stream x. That is one Euler step
of length 1 on x' = F(x), and the later layers were trained on where it ends. Running the window K
times goes K such steps, to states that they have never seen. So take K steps of length 1/K instead:
they end near the same place, but each step reads what the one before it has written.

They end near the plain output, and not on it. So the result then goes back towards it, by the share
beta: 1 is the plain model, 0 the small steps alone. The more, the closer the later layers stay to
what they know.

Paper: "Training-Free Looped Transformers", sections 2 and 3, appendices D and P (which settings),
C and G.2 (what the KV cache keeps).
Here: the middle n of L layers begin at L // 2 - n // 2, as the paper's windows on its 28 layers do.

Usage:
    with looped(model, window=(3, 5), K=3, beta=0.5): model.generate(tokens, 20)
    model.order = [0, 1, 2, Window([3, 4], rk, K=3), 5]             # from now on
    model.order = [0, 1, 2, Window([3]), Window([4]), 5]            # each layer by itself
    python wrapper.py           # where K steps through x' = 0.8 x end, from x = 1
    # a model of transformers: `from nanodepth import looped`, or nanodepth evaluate --window=mid4
"""
import contextlib

import torch

from loop import running
from model import Refused, Step, seen

# --------------------------------------------------------------------------- the idea, by hand

def looped_by_hand(model, tokens, a, b, K, beta=0.5):
    "Logits of a model with its layers a to b looped."
    def g(x):                               # one pass through the window
        return model.run(x, model.order[a:b + 1], depth=a)
    x = model.run(model.embed(tokens), model.order[:a])
    plain = g(x)
    x = x + (plain - x) / K                 # the first of K small steps reuses `plain`
    for _ in range(K - 1):
        x = x + (g(x) - x) / K
    x = beta * plain + (1 - beta) * x       # a part of the way back to the plain output
    x = model.run(x, model.order[b + 1:], depth=b + 1)
    return model.head(model.norm(x))


# ------------------------------------------------------------------ ways to run a window K times
# torch.lerp(x, y, h) is x + h (y - x), rounded so that h = 1 gives y itself: to the last bit, K = 1
# is the plain window. Any function (g, x, K, ...) whose first evaluation is g(x) is a solver.

def naive(g, x, K):
    "The window K times: steps of length 1, to time K."
    for _ in range(K):
        x = g(x)
    return x


def euler(g, x, K, T=1):
    "K steps of length T/K, to the time T: 1 in the paper's method, 2 in its best results."
    for _ in range(K):
        x = torch.lerp(x, g(x), T / K)
    return x


def rk(g, x, K, beta=0.5, T=1):
    """looped_by_hand's Euler steps, and the way back. All of it is one Runge-Kutta step of K stages
    (Eq. 13 to 16), hence the name."""
    plain = g(x)
    x = torch.lerp(x, plain, T / K)
    for _ in range(K - 1):
        x = torch.lerp(x, g(x), T / K)
    return torch.lerp(x, plain, beta)       # beta plain + (1 - beta) x


SOLVERS = dict(naive=naive, euler=euler, rk=rk)

# --------------------------------------------------------------------------------- in any order

class Window(Step):
    """Its items, evaluated several times at the same depths, as a solver says.

    With a cache, a later token looks back at a layer's keys and values, of which each evaluation
    makes its own. cache='first' keeps those of the first evaluation, which are the plain model's.
    So generation, which uses the cache, differs from one forward of the whole text. cache='exact'
    keeps all, so that evaluation k sees evaluation k: both agree, at K times the memory."""

    def __init__(self, items, solver=rk, K=3, cache='first', **options):
        super().__init__(items)
        assert K >= 1 and cache in ('first', 'exact')
        self.solver = SOLVERS.get(solver, solver)       # a function, or its name
        self.K, self.cache, self.options = K, cache, options

    def __repr__(self):
        return f'Window({self.items}, {self.solver.__name__!r}, K={self.K})'

    def settings(self):
        name = self.solver.__name__
        if SOLVERS.get(name) is not self.solver:
            raise Refused(f'no file can name the solver {name}: known are {", ".join(SOLVERS)}')
        return dict(solver=name, K=self.K, cache=self.cache, **self.options)

    def __call__(self, model, x, depth, cache=None, **how):
        before = None if cache is None else copy_of(cache)
        k = 0

        def g(x):
            nonlocal k
            k += 1
            return model.run(x, self.items, depth, cache=self.cache_of(k, cache, before, depth),
                             **how)
        return self.solver(g, x, self.K, **self.options)

    def cache_of(self, k, cache, before, depth):
        """What evaluation k reads and adds to. `before` is the cache as this forward found it.
        Evaluation 1 always has the cache itself. With 'first', a later one has what was there
        before, and what it adds is forgotten. With 'exact', it has a cache of its own within the
        cache, which holds what evaluation k of earlier forwards has added."""
        if cache is None or k == 1:
            return cache
        if self.cache == 'first':
            return copy_of(before)
        own = cache.setdefault((depth, self.solver, *sorted(self.options.items()), self.K, k), {})
        assert seen(own, depth) == seen(before, depth), (
            'this cache was filled with another window: go on with that, or with a new cache')
        return own

    def evaluations(self):
        "How often the solver evaluates g. It is run on a number, because K may not be that."
        evaluated = []

        def g(x):
            evaluated.append(x)
            return x + 1
        self.solver(g, torch.zeros(1, 1, 1), self.K, **self.options)
        return len(evaluated)

    def flops(self, model, context, r=None, backprop_depth=None):
        return self.evaluations() * super().flops(model, context, r, backprop_depth)


def copy_of(cache):
    "A cache as it is now. What is added to it, or to the caches within it, is not in the copy."
    return {key: copy_of(value) if isinstance(value, dict) else value
            for key, value in cache.items()}


@contextlib.contextmanager
def looped(model, window=None, solver=rk, K=3, cache='first', **options):
    """Inside a `with`, loop the items a to b of a model's order, both included. The window is
    (a, b); None: the middle four."""
    order = model.order
    n = min(4, len(order))
    middle = len(order) // 2 - n // 2
    a, b = window or (middle, middle + n - 1)
    assert 0 <= a <= b < len(order), f'the window {a}-{b} in an order of {len(order)} items'
    step = Window(order[a:b + 1], solver, K, cache, **options)
    with running(model, [*order[:a], step, *order[b + 1:]]):
        yield model


if __name__ == '__main__':
    print('K   naive   euler      rk   (the plain window gives 1.8, and e^0.8 = 2.226)')
    for K in (1, 2, 3, 4):
        ends = [solver(lambda x: x + 0.8 * x, torch.ones(()), K).item()
                for solver in (naive, euler, rk)]
        print(K, *(f'{end:7.3f}' for end in ends))
