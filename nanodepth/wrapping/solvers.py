"""The other solvers of "Training-Free Looped Transformers", Table 1 and appendix E. None beats rk.
Each treats every token by itself, so that none knows of later ones.
Usage: with wrapped(model, solver='heun', K=2): ...
"""
import torch

from nanodepth.model import require
from nanodepth.wrapper import SOLVERS


def wide(t):
    "At least float32: sums of many states need it."
    return t.to(torch.promote_types(t.dtype, torch.float32))


def runge_kutta(g, x, K, a, b, T):
    "K steps of h = T/K: stage i stands at x + h sum_j a[i][j] k_j, the step is h sum_i b[i] k_i."
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


def midpoint(g, x, K, T=1):
    return runge_kutta(g, x, K, [[], [1 / 2]], [0, 1], T)


def heun(g, x, K, T=1):
    return runge_kutta(g, x, K, [[], [1]], [1 / 2, 1 / 2], T)


def rk4(g, x, K, T=1):
    stages = [[], [1 / 2], [0, 1 / 2], [0, 0, 1]]
    return runge_kutta(g, x, K, stages, [1 / 6, 1 / 3, 1 / 3, 1 / 6], T)


def heavy_ball(g, x, K, alpha=0.5, beta=0.3):
    "Steps of length alpha, each with the share beta of the step before."
    before = x
    for _ in range(K):
        x, before = torch.lerp(x, g(x), alpha) + beta * (x - before), x
    return x


def anderson(g, x, K, m=2, beta=1.0):
    """The combination of the last m + 1 states whose residuals g(x) - x cancel best, and from there
    the share beta towards its image: Walker and Ni's. The paper prints another method, which adds
    the residual's increments where they add the image's, and its code solves for a whole batch."""
    states, images = [], []
    for _ in range(K):
        states = [*states, x][-m - 1:]
        images = [*images, g(x)][-m - 1:]
        at, to = (wide(torch.stack(t, -1)) for t in (states, images))        # (.., C, up to m + 1)
        residuals = to - at
        # A pseudo-inverse, because near a fixed point their changes are nearly parallel. It refuses
        # what is not finite, so a token that is lost gets zeros, and stays the only one.
        changes = residuals.diff(dim=-1).nan_to_num(0, 0, 0)
        rtol = 10 * torch.finfo(changes.dtype).eps
        with torch.autocast(x.device.type, enabled=False):
            gamma = torch.linalg.pinv(changes, rtol=rtol) @ residuals[..., -1:]
            at, to = (t[..., -1] - (t.diff(dim=-1) @ gamma)[..., 0] for t in (at, to))
        x = torch.lerp(at, to, beta).type_as(x)
    return x


def aitken(g, x, K):
    """Of each coordinate, the limit of a geometric series through x, g(x), g(g(x)), with the
    paper's safeguard. Where there is next to no curvature, it is the plain window."""
    require(K % 2 == 0, f'K={K}: aitken takes two evaluations for each update, so K is even')
    for _ in range(K // 2):
        once = g(x)
        twice = g(once)
        first = wide(once) - wide(x)
        second = wide(twice) - 2 * wide(once) + wide(x)
        size = first.abs()
        step = (-first * first / second).clamp(-size, size)
        x = (wide(x) + torch.where(second.abs() > 1e-3 * size + 1e-4, step, first)).type_as(x)
    return x


midpoint.per_step = heun.per_step = 2       # evaluations, for each of the K steps
rk4.per_step = 4
for solver in (midpoint, heun, rk4, heavy_ball, anderson, aitken):
    SOLVERS[solver.__name__] = solver
