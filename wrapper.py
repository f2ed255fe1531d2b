"""Run a frozen model's middle layers several times, and undo it without a trace.

The idea: a window g of residual layers adds F(x) = g(x) - x to the stream x. That is one Euler step
of length 1 on x' = F(x), and the later layers were trained on where it ends. Running the window K
times goes K such steps, to states that they have never seen. So take K steps of length 1/K instead:
they end near the same place, but each step reads what the one before it has written.

The small steps end near the plain output, but not on it. So both are mixed: the result is
beta x plain + (1 - beta) x small steps. With beta = 1 it is the plain model, on which the later
layers were trained, and with beta = 0 it is the small steps alone.

Paper: "Training-Free Looped Transformers", sections 2 and 3, Algorithms 3 to 5, appendices D and P
(which settings), C, G and N (what the KV cache keeps). What differs here: Algorithm 3 prints K - 1
small steps, but Equation 16 has K, and so has this file. The default cache is 'first'.

Usage:
    with wrapped(model, window=(3, 4), K=3, beta=0.5): model.generate(tokens, 20)   # layers 3, 4
    model.order = [0, 1, 2, Window([3, 4], K=3), 5]         # the same, from now on
    from nanodepth import wrapped                           # the same for a Hugging Face model
"""
import contextlib
import inspect
import math
import operator

import torch

from loop import in_order
from model import Refused, Span, require

# ------------------------------------------------- solvers: ways to run a window g(x) several times
# torch.lerp(x, y, h) is x + h (y - x), rounded so that h = 1 returns y itself. So K = 1 is the
# plain window to the last bit.

def naive(g, x, K):
    "Run the window K times: K steps of length 1, to time K."
    for _ in range(K):
        x = g(x)
    return x


def anchored(g, x, K, beta=0.5, T=1):
    """Take K small steps, and mix the result with the plain output, as with an anchor. Together
    they are one Runge-Kutta step of K stages (the paper's Equations 13 to 16). T is the time at
    which the steps end. It is 1 in the paper, and in its authors' code there are also runs with
    2."""
    plain = g(x)
    x = torch.lerp(x, plain, T / K)         # the first small step reuses `plain`
    for _ in range(K - 1):
        x = torch.lerp(x, g(x), T / K)
    return torch.lerp(x, plain, beta)       # beta plain + (1 - beta) x


def euler(g, x, K, T=1, alphas=None, tol=0):
    """Take the small steps alone. `alphas` are the lengths of the K steps, in place of T/K for each
    (the paper's Table 9). If a step moves a token's state by at most `tol` times the norm
    of the state, the token takes no further steps (Table 6)."""
    require(not alphas or T == 1, 'alphas are the lengths of all steps already: leave out T')
    alphas = alphas or [T / K] * K
    require(len(alphas) == K, f'alphas={alphas} has {len(alphas)} lengths, and K={K} '
            f'steps need {K}')
    moves = torch.ones_like(x[..., :1], dtype=torch.bool)           # (B, tokens, 1)
    for alpha in alphas:
        before, x = x, torch.lerp(x, g(x), alpha)
        if tol:
            x = torch.where(moves, x, before)
            moved, norm = (t.norm(dim=-1, keepdim=True) for t in (x - before, before))
            moves = moves & (moved > tol * norm)
    return x


# To add a solver of yours, write SOLVERS['mine'] = mine, a function (g, x, K, ...). It must
# evaluate g(x) first, with the x that it gets, because a cache keeps the keys of that evaluation.
# If it evaluates g twice in each of its K steps, set mine.per_step = 2, so that FLOPs are counted
# right.
SOLVERS = dict(naive=naive, anchored=anchored, euler=euler,
               rk=anchored)         # another name, as in the paper (it is not the textbooks' rk4)


class Window(Span):
    """Runs its items several times at the same depths, in the way of a solver.

    cache   the evaluation whose keys and values later tokens see. 'first' is the first evaluation,
            so the keys are the plain model's. 'last' is one more run of the window, on the result
            (flops does not count it). The paper's text has 'last' as its default, and its tables
            nearly always 'first', which did better in long answers. With either, generation differs
            from one forward pass of the whole text.
    decode  'full', or 'bypass': if a single token follows other tokens, the window runs once. So
            only prompts are wrapped.
    """

    def __init__(self, items, solver='anchored', K=3, cache='first', decode='full', **options):
        super().__init__(items)
        require(solver in SOLVERS, f'solver={solver}: known are {", ".join(SOLVERS)}')
        require(isinstance(K, int) and K >= 1, f'K={K}: a number of steps, so at least 1')
        require(cache in ('first', 'last'), f'cache={cache} must be first or last')
        require(decode in ('full', 'bypass'), f'decode={decode} must be full or bypass')
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
        # inside another Window, only the first of that Window's evaluations is for the cache
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
    """Return the first and the last item of a window in an order of n items, which are usually
    layers.

    A window is given by its first and its last item, so (3, 5) or '3-5' are the items 3, 4 and 5.
    Or it is 'mid4', the middle four, which None means, too. Or it is a share of the depth, such as
    0.5, which means the four items around it. (Of 36 items, 'mid4' is 15-18, as in the paper.)"""
    window = f'mid{min(4, n)}' if window is None else window
    forms = (f"window={window} must be the first and the last layer, (3, 5) or '3-5' (one layer "
             "is '3-3'); or 'mid4', the middle four; or a share with a decimal point, such as 0.5")
    try:
        if isinstance(window, str) and window.startswith('mid'):
            size = int(window[3:])
            a = 15 if (n, size) == (36, 4) else n // 2 - size // 2
            b = a + size - 1
        elif isinstance(window, float) or isinstance(window, str) and '.' in window:
            require(0 <= float(window) <= 1, forms)
            middle = math.ceil(float(window) * n)       # two layers before it, and two from it on
            a = max(0, min(middle - 2, n - 4))
            b = min(a + 3, n - 1)
        elif isinstance(window, str):
            a, b = map(int, window.split('-'))
        else:
            a, b = map(operator.index, window)
    except (TypeError, ValueError):
        raise Refused(forms) from None
    require(a <= b, f'window={window}: the first layer must not come after the last one')
    require(0 <= a and b < n, f'window={window}: the order has the items 0 to {n - 1}')
    return a, b


def make_windows(items, mode, solver, K, cache, decode, options):
    "Return the items as one Window, or as one Window for each item."
    require(mode in ('block', 'layer'), f'mode={mode} must be block or layer')
    parts = [items] if mode == 'block' else [[item] for item in items]
    return [Window(part, solver, K, cache, decode, **options) for part in parts]


@contextlib.contextmanager
def wrapped(model, window=None, solver='anchored', K=3, cache='first', mode='block', decode='full',
            **options):
    """Inside this `with`, a window of the items in the model's order runs several times: all items
    as one 'block', or each 'layer' by itself. The options are for the solver."""
    require(hasattr(model, 'order'), f'{type(model).__name__} is not a model of this repo: use '
            'from nanodepth import wrapped')
    order = list(model.order)
    a, b = pick_window(window, len(order))
    inside = make_windows(order[a:b + 1], mode, solver, K, cache, decode, options)
    with in_order(model, [*order[:a], *inside, *order[b + 1:]]):
        yield model


if __name__ == '__main__':
    print(__doc__)
