"""Ways to run a piece of a network K times. A window g is one Euler step of length 1 on x' = F(x),
where F(x) = g(x) - x, so any other way to solve that equation is another way to loop. A solver is a
function (g, x, K, **options) -> x whose first evaluation is g(x).
Usage: x = heun(g, x, K=3)      # three steps, each of two evaluations of g
"""
import ast
import functools
import inspect
import math
import numbers

import torch

from nanodepth.common.errors import Refused, check_choice
from nanodepth.wrapper import IN_PACKAGE, SOLVERS, Window, rk

lerp = torch.lerp       # exactly x at 0 and y at 1, as wrapper.py says


def wide(t):
    "At least float32: sums of many states need it."
    return t.to(torch.promote_types(t.dtype, torch.float32))


# ---------------------------------------------------------------------------- Euler and Runge-Kutta

def by_tableau(g, x, K, a, b, T=1):
    """K steps of length h = T/K by an explicit tableau: stage i stands at x + h sum_j a[i][j] k_j,
    the step is h sum_i b[i] k_i. T, the time at which the steps end, is 1 in "Training-Free
    Looped Transformers", and 2 to 2.5 in its authors' best results."""
    if (a is None or b is None or len(a) != len(b)
            or any(w for i, row in enumerate(a) for w in list(row)[i:])):
        raise Refused(f'a={a}, b={b}: a tableau has a row of a for each entry of b, and row i '
                      'has at most i numbers before its zeros')
    if abs(sum(b) - 1) > 1e-6:
        raise Refused(f'b={b}: the weights of the stages have the sum 1')

    h = T / K

    def along(row):
        return (wide(x) + sum(w * h * k for w, k in zip(row, slopes))).type_as(x)

    for _ in range(K):
        slopes = []
        for row in a:
            y = along(row) if slopes else x
            slopes.append(wide(g(y)) - wide(y))
        x = along(b)
    return x


def euler(g, x, K, alphas=None, tol=None, T=1):
    """K steps of length T/K, or of the lengths `alphas` (a number: all alike), as in "Training-Free
    Looped Transformers", Eq. 10. With `tol`, a token whose state has moved by less than this share
    of its norm stays where it is, and when all do, no more evaluations are made."""
    if alphas is not None and T != 1:
        raise Refused(f'T={T} has no effect beside alphas: these lengths say where the steps end')
    if not isinstance(alphas, (list, tuple)):
        alphas = [T / K if alphas is None else alphas] * K
    if len(alphas) != K:
        raise Refused(f'alphas={alphas}: K={K} steps need {K} lengths')
    moving = None
    for alpha in alphas:
        y = g(x)
        new = lerp(x, y, alpha)
        if tol is not None:
            new = new if moving is None else torch.where(moving, new, x)
            moving = (new - x).norm(dim=-1, keepdim=True) > tol * x.norm(dim=-1, keepdim=True)
        x = new
        if tol is not None and not moving.any():
            break
    return x


def butcher(g, x, K, a=None, b=None, beta=None, T=1):
    "K Runge-Kutta steps by a table of coefficients, a Butcher tableau (a, b); without one, rk."
    if a is not None or b is not None:
        if beta is not None:
            raise Refused(f'beta={beta} has no effect beside a tableau: there is no plain output '
                          'to go back to')
        return by_tableau(g, x, K, a, b, T)
    return rk(g, x, K, 0.5 if beta is None else beta, T)


def midpoint(g, x, K, T=1):
    return by_tableau(g, x, K, [[], [1 / 2]], [0, 1], T)


def heun(g, x, K, T=1):
    return by_tableau(g, x, K, [[], [1]], [1 / 2, 1 / 2], T)


def rk4(g, x, K, T=1):
    stages = [[], [1 / 2], [0, 1 / 2], [0, 0, 1]]
    weights = [1 / 6, 1 / 3, 1 / 3, 1 / 6]
    return by_tableau(g, x, K, stages, weights, T)


def norms(x):           # per token, so that no token knows of later ones
    return wide(x).norm(dim=-1, keepdim=True)                                       # (.., 1)


def with_norm(x, wanted):
    tiny = torch.finfo(wanted.dtype).tiny
    return (wide(x) * (wanted / norms(x).clamp(min=tiny))).type_as(x)


def layer_anchored_frozen(g, x, K, beta=0.5, T=1):
    """rk for one layer, whose state's length goes from x's to g(x)'s along a line, but for the last
    step's."""
    h = T / K
    anchor = g(x)
    start, end = norms(x), norms(anchor)
    x = with_norm(lerp(x, anchor, h), start + (end - start) / K) if K > 1 else lerp(x, anchor, h)
    for k in range(1, K):
        x = lerp(x, g(x), h)
        if k < K - 1:
            x = with_norm(x, start + (end - start) * (k + 1) / K)
    return lerp(x, anchor, beta)


# ---------------------------------------------------------------- towards a fixed point, and others

def heavy_ball(g, x, K, alpha=0.5, beta=0.3):
    "Steps of length alpha, each with the share beta of the step before."
    before = x
    for _ in range(K):
        x, before = lerp(x, g(x), alpha) + beta * (x - before), x
    return x


def anderson(g, x, K, m=2, beta=1.0):
    """The combination of the last m + 1 states whose residuals g(x) - x cancel best, and from
    there the share beta towards its image. It is Walker and Ni's, of each token by itself. The
    paper's Anderson (its Table 1) is another method: it adds the residual's increments where they
    add the image's. Its authors' code solves one problem for a whole batch, by which a token knows
    of later ones."""
    states, images = [], []
    for _ in range(K):
        states = [*states, x][-m - 1:]
        images = [*images, g(x)][-m - 1:]
        at, to = (wide(torch.stack(t, -1)) for t in (states, images))        # (.., C, up to m + 1)
        if len(states) > 1:
            residuals = to - at
            changes = residuals.diff(dim=-1).nan_to_num(0, 0, 0)    # what is lost stays its token's
            # a pseudo-inverse: near a fixed point the changes are nearly parallel, at one zero
            rtol = 10 * torch.finfo(changes.dtype).eps
            with torch.autocast(x.device.type, enabled=False):
                gamma = torch.linalg.pinv(changes, rtol=rtol) @ residuals[..., -1:]
                at, to = (t[..., -1] - (t.diff(dim=-1) @ gamma)[..., 0] for t in (at, to))
        else:
            at, to = at[..., 0], to[..., 0]
        x = lerp(at, to, beta).type_as(x)
    return x


def aitken(g, x, K, safeguard=True):
    """Of each coordinate: the limit of a geometric series through x, g(x), g(g(x)). Two evaluations
    an update. Where there is next to no curvature: the plain window."""
    if K % 2:
        raise Refused(f'K={K}: Aitken takes two evaluations an update, so K must be even')
    for _ in range(K // 2):
        once = g(x)
        twice = g(once)
        first = wide(once) - wide(x)
        second = wide(twice) - 2 * wide(once) + wide(x)
        size = first.abs()
        step = -first * first / second
        if safeguard:           # gives the plain window wherever 0 < g' < 1
            step = step.clamp(-size, size)
        step = torch.where(second.abs() > 1e-3 * size + 1e-4, step, first)
        x = (wide(x) + step).type_as(x)
    return x


def norm_stab(g, x, K, alpha=0.5):
    """Steps of length alpha, after each of which every token's state gets back the length that it
    came with."""
    came = norms(x)
    for _ in range(K):
        x = with_norm(lerp(x, g(x), alpha), came)
    return x


def poly_blend(g, x, K, weights=None):
    "A weighted sum of the naive states x_0 ... x_K; without weights: the mean of x_1 ... x_K."
    weights = [0] + [1 / K] * K if weights is None else list(weights)
    if len(weights) != K + 1 or abs(sum(weights) - 1) > 1e-6:
        raise Refused(f'weights={weights}: K={K} needs {K + 1} of them, for x_0 to x_{K}, with the '
                      'sum 1')
    total = weights[0] * wide(x) if weights[0] else 0
    for weight in weights[1:]:
        x = g(x)
        total = total + weight * wide(x)
    return total.type_as(x)


# They are those of "Training-Free Looped Transformers", section 2.3 (Eq. 10 to 16, Table 1) and
# appendix E. What these leave open is as in the authors' code.
SOLVERS.update({name: globals()[name] for name in ('euler', *IN_PACKAGE)})
BY_LAYER = {'layer_anchored_frozen'}        # these work layer by layer, and pin experts
BOUNDS = dict(K=(1, math.inf), T=(1e-3, 1e3), beta=(0, 1))


def read_solver(text):
    "'euler(tol=0.1)' as a name and its options."
    name, has_options, _ = text.partition('(')
    if not has_options:
        return name, {}
    try:
        call = ast.parse(text, mode='eval').body
        [] = call.args                  # all have names
        return name, {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AttributeError):
        raise Refused(f'solver={text}: write it as euler(tol=0.1)') from None


def pick_solver(solver, K, **options):
    """(its function, which solves g from x with K and the options; how often that evaluates g at
    most), or one line why not. A function, a name of SOLVERS, or a text with options."""
    name = solver
    if isinstance(solver, str):
        name, more = read_solver(solver)
        for option in more:
            if option == 'K' or options.get(option) is not None:
                raise Refused(f'solver={solver!r}: {option} is given beside it')
        options |= more
        check_choice('solver', name, list(SOLVERS))
        solver = SOLVERS[name]
    takes = list(inspect.signature(solver).parameters)[2:]
    options = {option: value for option, value in options.items() if value is not None} | dict(K=K)
    for option in options:
        if option not in takes:
            raise Refused(f'the solver {name!r} has no option {option!r}; it takes: '
                          f'{", ".join(takes)}')
    for name, value in options.items():
        low, high = BOUNDS.get(name, (-math.inf, math.inf))
        if isinstance(value, numbers.Real) and not low <= value <= high:
            raise Refused(f'{name}={value} must be from {low} to {high}')
    options = {option: list(value) if isinstance(value, (tuple, range)) else value
               for option, value in options.items()}
    # a tolerance could end it sooner
    kept = {option: value for option, value in options.items() if option != 'tol'}
    try:
        evaluations = Window([], solver, **kept).evaluations()
    except (TypeError, RuntimeError):
        raise Refused(f'the options of {name!r} are not of its kind: {options}') from None
    return functools.partial(solver, **options), evaluations
