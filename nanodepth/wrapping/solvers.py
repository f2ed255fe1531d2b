"""The other solvers of "Training-Free Looped Transformers", Table 1 and appendix E. In the paper,
none is reliably better than anchored steps. Each treats every token by itself, so no token knows of
later ones.
Usage: with wrapped(model, solver='heun', K=2): ...
"""
import torch

from nanodepth.model import require
from nanodepth.wrapper import SOLVERS


def wide(t):
    "Return t in float32 or wider, which sums of several states need."
    return t.to(torch.promote_types(t.dtype, torch.float32))


def runge_kutta(g, x, K, a, b, T):
    """Take K steps of length h = T/K. Stage i evaluates the slope k_i at x + h sum_j a[i][j] k_j,
    and the step is h sum_i b[i] k_i."""
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
    "Take K steps of the midpoint method."
    return runge_kutta(g, x, K, [[], [1 / 2]], [0, 1], T)


def heun(g, x, K, T=1):
    "Take K steps of Heun's method."
    return runge_kutta(g, x, K, [[], [1]], [1 / 2, 1 / 2], T)


def rk4(g, x, K, T=1):
    "Take K steps of the classical Runge-Kutta method."
    stages = [[], [1 / 2], [0, 1 / 2], [0, 0, 1]]
    return runge_kutta(g, x, K, stages, [1 / 6, 1 / 3, 1 / 3, 1 / 6], T)


def heavy_ball(g, x, K, alpha=0.5, beta=0.3):
    "Take K steps of length alpha, to each of which the share beta of the step before is added."
    before = x
    for _ in range(K):
        x, before = torch.lerp(x, g(x), alpha) + beta * (x - before), x
    return x


def anderson(g, x, K, m=2, beta=1.0):
    """In each of K steps, take the combination of the last m + 1 states whose residuals g(x) - x
    cancel best, and move from there by the share beta towards its image. This is the method of
    Walker and Ni. What differs in the paper: Table 1 has the increments of the residual where
    Walker and Ni have those of the image, and the authors' code solves for all tokens of a batch
    together."""
    states, images = [], []
    for _ in range(K):
        states = [*states, x][-m - 1:]
        images = [*images, g(x)][-m - 1:]
        at, to = (wide(torch.stack(t, -1)) for t in (states, images))        # (.., C, up to m + 1)
        residuals = to - at
        # Near a fixed point the changes are nearly parallel, hence a pseudo-inverse. It refuses
        # numbers that are not finite, so these become zeros, and spoil no other token.
        changes = residuals.diff(dim=-1).nan_to_num(0, 0, 0)
        rtol = 10 * torch.finfo(changes.dtype).eps
        with torch.autocast(x.device.type, enabled=False):
            gamma = torch.linalg.pinv(changes, rtol=rtol) @ residuals[..., -1:]
            at, to = (t[..., -1] - (t.diff(dim=-1) @ gamma)[..., 0] for t in (at, to))
        x = torch.lerp(at, to, beta).type_as(x)
    return x


def aitken(g, x, K):
    """Move each coordinate to the limit of the geometric series through x, g(x) and g(g(x)), by at
    most |g(x) - x| (the paper's safeguard). A coordinate with next to no curvature moves to
    g(x)."""
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


def uniform(g, x, K):
    """Evaluate the window on the mean of all states so far, K times: "Uniform Loop", the rival in
    the paper's Table 1 and Figure 4a. What differs in the authors' code: it averages after each
    layer of the window, and the first state is not in the mean."""
    total, average = wide(x), x
    for k in range(K):
        x = g(average)
        total = total + wide(x)
        average = (total / (k + 2)).type_as(x)
    return x


def norm_stab(g, x, K, alpha=0.5):
    "Take K steps of length alpha. After each, rescale a token's state to the length it began with."
    length = wide(x).norm(dim=-1, keepdim=True)                                 # (B, T, 1)
    for _ in range(K):
        x = torch.lerp(x, g(x), alpha)
        now = wide(x).norm(dim=-1, keepdim=True).clamp(min=1e-6)
        x = (wide(x) * (length / now)).type_as(x)
    return x


def poly_blend(g, x, K, weights):
    """Return the weighted sum of x, g(x), g(g(x)) and so on: K + 1 weights, which should add up to
    1."""
    require(len(weights) == K + 1, f'weights={weights}: K={K} needs {K + 1} weights')
    total = weights[0] * wide(x)
    for weight in weights[1:]:
        x = g(x)
        total = total + weight * wide(x)
    return total.type_as(x)


midpoint.per_step = heun.per_step = 2       # evaluations in each of the K steps
rk4.per_step = 4
for solver in (midpoint, heun, rk4, heavy_ball, anderson, aitken, uniform, norm_stab, poly_blend):
    SOLVERS[solver.__name__] = solver
