"""Run a frozen model's middle layers several times, and undo it without a trace.

The idea: a window g of residual layers adds F(x) = g(x) - x to the stream x. That is one Euler step
of length 1 on x' = F(x), and the later layers were trained on where it ends. Running the window K
times goes K such steps, to states that they have never seen. So take K steps of length 1/K instead:
they end near the same place, but each step reads what the one before it has written.

They end near the plain output, and not on it. So the result then goes back towards it, by the share
beta: 1 is the plain model, on which the later layers were trained, and 0 the small steps alone.

Paper: "Training-Free Looped Transformers", sections 2 and 3, Algorithms 3 to 5, appendices D and P
(which settings), C, G and N (what the KV cache keeps). Differs: Algorithm 3, the default cache
(docs/FIGURES.md, at its end).

Usage:
    with wrapped(model, window=(3, 5), K=3, beta=0.5): model.generate(tokens, 20)
    model.order = [0, 1, 2, Window([3, 4], K=3), 5]         # from now on
    from nanodepth import wrapped                           # the same for a model of transformers
"""
import contextlib
import inspect
import math
import operator

import torch

from loop import in_order
from model import Refused, Span, require

# ------------------------------------------------- solvers: ways to run a window g(x) several times
# torch.lerp(x, y, h) is x + h (y - x), rounded so that h = 1 gives y itself: to the last bit, K = 1
# is the plain window.

def naive(g, x, K):
    "The window K times: steps of length 1, to time K."
    for _ in range(K):
        x = g(x)
    return x


def rk(g, x, K, beta=0.5, T=1):
    """K small steps, and the way back. All of it is one Runge-Kutta step of K stages (the paper's
    Eq. 13 to 16), hence the name. T is the time at which the steps end: 1 in the paper's method, 2
    in its best results."""
    plain = g(x)
    x = torch.lerp(x, plain, T / K)         # the first small step reuses `plain`
    for _ in range(K - 1):
        x = torch.lerp(x, g(x), T / K)
    return torch.lerp(x, plain, beta)       # beta plain + (1 - beta) x


def euler(g, x, K, T=1):
    "The small steps alone."
    return rk(g, x, K, beta=0, T=T)


# SOLVERS['mine'] = mine enters one of yours, a function (g, x, K, ...). It begins with g(x), of the
# x that it was given, because a cache keeps the keys of that evaluation. If it evaluates g twice in
# each of its K steps, set mine.per_step = 2, for FLOPs.
SOLVERS = dict(naive=naive, rk=rk, euler=euler)


class Window(Span):
    """Its items, evaluated several times at the same depths, as a solver says.

    cache   which evaluation's keys and values later tokens see. 'first': the first one's, which
            are the plain model's. 'last': those of one more pass, over the result. The paper's
            default is 'last', and 'first' did better in its long answers. (With either,
            generation differs from one forward of the whole text.)
    decode  'full', or 'bypass': where one token follows others, the window runs once. So only
            prompts are wrapped
    """

    def __init__(self, items, solver='rk', K=3, cache='first', decode='full', **options):
        super().__init__(items)
        require(solver in SOLVERS, f'solver={solver}: known are {", ".join(SOLVERS)}')
        require(isinstance(K, int) and K >= 1, f'K={K}: how often, so at least 1')
        require(cache in ('first', 'last'), f'cache={cache}: first or last')
        require(decode in ('full', 'bypass'), f'decode={decode}: full or bypass')
        try:
            inspect.signature(SOLVERS[solver]).bind('g', 'x', K, **options)
        except TypeError as error:
            raise Refused(f'solver={solver}: {error}') from None
        self.solver, self.K, self.cache, self.decode = solver, K, cache, decode
        self.options = options

    def settings(self):
        own = dict(solver=self.solver, K=self.K, cache=self.cache, decode=self.decode)
        return own | self.options

    def forward(self, run, x):
        if self.decode == 'bypass' and run.start and x.shape[1] == 1:
            return run(x, self.items)
        depths = range(run.depth, run.depth + len(self.unrolled()))
        # within another Window, only the first of its evaluations is for the cache
        is_for_cache = run.cache is not None and not run.wrote(depths)
        x = SOLVERS[self.solver](lambda y: run(y, self.items, depths.start), x, self.K,
                                 **self.options)
        if self.cache == 'last' and is_for_cache:
            run.forget(depths)
            run(x, self.items, depths.start)
        return x

    def evaluations(self):
        return self.K * getattr(SOLVERS[self.solver], 'per_step', 1)

    def flops(self, model, context):
        return self.evaluations() * super().flops(model, context)


def pick_window(window, n):
    """(a, b), both included, of n layers. A window is (3, 5) or '3-5'; 'mid4', the middle four, or
    None; or a share of the depth, such as 0.5: the four layers around it."""
    window = f'mid{min(4, n)}' if window is None else window
    forms = f"window={window}: (3, 5) or '3-5', 'mid4', or a share from 0 to 1, such as 0.5"
    try:
        if isinstance(window, str) and window.startswith('mid'):
            size = int(window[3:])
            a = 15 if (n, size) == (36, 4) else n // 2 - size // 2      # (15 to 18 in the paper)
            b = a + size - 1
        elif isinstance(window, str) and '-' in window:
            a, b = map(int, window.split('-'))
        elif isinstance(window, (str, float)):
            require(0 <= float(window) <= 1, forms)
            middle = math.ceil(float(window) * n)           # two layers before it and two behind
            a = max(0, min(middle - 2, n - 4))
            b = min(a + 3, n - 1)
        else:
            a, b = map(operator.index, window)
    except (TypeError, ValueError):
        raise Refused(forms) from None
    require(0 <= a <= b < n, f'window={window} is not within the layers 0 to {n - 1}')
    return a, b


def make_windows(items, mode, solver, K, cache, decode, options):
    "The items as one Window, or one Window for each of them."
    require(mode in ('block', 'layer'), f'mode={mode}: block or layer')
    parts = [items] if mode == 'block' else [[item] for item in items]
    return [Window(part, solver, K, cache, decode, **options) for part in parts]


@contextlib.contextmanager
def wrapped(model, window=None, solver='rk', K=3, cache='first', mode='block', decode='full',
            **options):
    """Inside a `with`, a window of the items of the model's order runs several times, as one
    'block', or 'layer' by layer. The options are the solver's."""
    require(hasattr(model, 'order'), f'{type(model).__name__} is no model of this repo: '
            'from nanodepth import wrapped')
    order = list(model.order)
    a, b = pick_window(window, len(order))
    inside = make_windows(order[a:b + 1], mode, solver, K, cache, decode, options)
    with in_order(model, [*order[:a], *inside, *order[b + 1:]]):
        yield model
