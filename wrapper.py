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
    # a model of transformers: `from nanodepth import looped`, or nanodepth evaluate --window=mid4
"""
import contextlib
import itertools

import torch

from loop import running
from model import Span, require, seen, unrolled

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


def rk(g, x, K, beta=0.5, T=1):
    """The small steps of looped_by_hand, and the way back. All of it is one Runge-Kutta step of K
    stages (the paper's Eq. 13 to 16), hence the name. T is the time at which the steps end: 1 in
    the paper's method, 2 in its best results."""
    plain = g(x)
    x = torch.lerp(x, plain, T / K)
    for _ in range(K - 1):
        x = torch.lerp(x, g(x), T / K)
    return torch.lerp(x, plain, beta)       # beta plain + (1 - beta) x


def euler(g, x, K, T=1):
    "The steps alone, without the way back."
    return rk(g, x, K, beta=0, T=T)


SOLVERS = dict(naive=naive, rk=rk, euler=euler)         # the package adds these:
IN_PACKAGE = ('aitken anderson butcher heavy_ball heun layer_anchored_frozen midpoint norm_stab '
              'poly_blend rk4').split()

# --------------------------------------------------------------------------------- in any order

def name_of(solver):
    """A checkpoint keeps a solver by its name. A function of yours is entered in SOLVERS here, when
    it is first used."""
    if isinstance(solver, str):
        require(solver in SOLVERS, f'solver {solver}: known are {", ".join(SOLVERS)}')
        return solver
    name = solver.__name__
    if solver.__module__ != __name__:       # else it is this file's
        require(name.isidentifier(), 'a solver is kept by its name: write a def')
        known = SOLVERS.get(name)
        is_free = known.__module__ == solver.__module__ if known else name not in IN_PACKAGE
        require(is_free, f'another solver is called {name}: give yours another name')
        SOLVERS[name] = solver
    return name


class Window(Span):
    """Its items, evaluated several times at the same depths, as a solver says: a function, or its
    name in SOLVERS.

    With a cache, a later token looks back at a layer's keys and values, of which each evaluation
    makes its own. cache='first' keeps those of the first evaluation, which are the plain model's.
    So generation, which uses the cache, differs from one forward of the whole text. cache='exact'
    keeps all, so that evaluation k sees evaluation k: both agree, at K times the memory."""

    def __init__(self, items, solver=rk, K=3, cache='first', **options):
        super().__init__(items)
        assert K >= 1 and cache in ('first', 'exact'), f'K={K}, cache={cache!r}'
        self.solver = SOLVERS[name_of(solver)]
        self.K, self.keeps, self.options = K, cache, options

    def settings(self):
        return dict(solver=self.solver.__name__, K=self.K, cache=self.keeps, **self.options)

    def __repr__(self):
        settings = ''.join(f', {name}={value!r}' for name, value in self.settings().items())
        return f'Window({self.items}{settings})'

    def __call__(self, model, x, depth, cache=None, tap=None):
        before = None if cache is None else copy_of(cache)
        caches = self.caches(cache, before, depth)

        def g(x):
            return model.run(x, self.items, depth, next(caches), tap)
        return self.solver(g, x, self.K, **self.options)

    def caches(self, cache, before, depth):
        """The cache that each evaluation reads and adds to, one after the other. `before` is a copy
        of the cache, as this forward found it."""
        yield cache             # the first evaluation has the cache itself
        for k in itertools.count(2):
            if cache is None:
                yield None
            elif self.keeps == 'first':
                yield copy_of(before)       # what is added to this is forgotten
            else:           # a cache within the cache: what evaluation k of earlier forwards added
                own = cache.setdefault((depth, repr(self), k), {})
                require(seen(own, depth) == seen(before, depth),
                        'this cache was filled with another window: go on with that, or a new one')
                yield own

    def evaluations(self):
        "How often the solver evaluates g, which may not be K: it is tried on a dummy stream."
        evaluated = []

        def g(x):
            evaluated.append(x)
            return x + 1
        self.solver(g, torch.zeros(1, 1, 1), self.K, **self.options)
        return len(evaluated)

    def flops(self, model, context):
        return self.evaluations() * super().flops(model, context)


def copy_of(cache):
    "A cache as it is now. What is added to it, or to the caches within it, is not in the copy."
    return {key: copy_of(value) if isinstance(value, dict) else value
            for key, value in cache.items()}


def around(order, a, b):
    "The items of an order before the depths a to b, those at them, and those after."
    starts = [len(unrolled(order[:i])) for i in range(len(order) + 1)]      # of each item, a depth
    require({a, b + 1} <= {*starts} and a <= b,
            f'the window {a}-{b} is not made of whole items of the order {order}')
    first, end = starts.index(a), starts.index(b + 1)
    return order[:first], order[first:end], order[end:]


@contextlib.contextmanager
def looped(model, window=None, solver='rk', K=3, cache='first', **options):
    """Inside a `with`, a model's layers a to b, as they run, are looped, both included. The window
    is (a, b); None: the middle four."""
    depth = len(unrolled(model.order))
    n = min(4, depth)
    middle = depth // 2 - n // 2
    a, b = window or (middle, middle + n - 1)
    before, items, after = around(model.order, a, b)
    with running(model, [*before, Window(items, solver, K, cache, **options), *after]):
        yield model
