"Test each solver on maps whose result is known. (In models: test_windows.py.)"
import functools
import math

import pytest
import torch

from nanodepth.model import Refused
from nanodepth.wrapper import SOLVERS, Window

NEEDED = dict(poly_blend=lambda K: dict(weights=[1 / (K + 1)] * (K + 1)))    # without a default
ONE = torch.tensor([[[1.0]]], dtype=torch.float64)
g_half = lambda x: x - 0.5 * x                  # by hand, every step below


@pytest.mark.parametrize('solver, K, options, expected', [
    ('naive', 3, {}, 1 / 8),
    ('naive', 1, {}, 0.5),                      # one step of length 1 is the plain window
    ('anchored', 3, {}, 0.5 * 0.5 + 0.5 * (5 / 6) ** 3),
    ('midpoint', 1, {}, 1 - 0.5 + 0.125),
    ('heun', 1, {}, 1 - 0.5 + 0.125),
    ('rk4', 1, {}, 1 - 0.5 + 1 / 8 - 1 / 48 + 1 / 384),
    ('midpoint', 2, {}, (1 - 0.25 + 1 / 32) ** 2),
    ('heavy_ball', 2, {}, 0.75 * 0.75 + 0.3 * (0.75 - 1)),
    ('anderson', 2, dict(m=1), 0.0),             # one dimension: two evaluations know a linear map
    ('aitken', 2, {}, 0.5),         # the series ends at 0, and the safeguard at the plain window
    ('euler', 2, dict(T=2), 0.25),                      # two steps of length 1: naive
    ('anchored', 2, dict(T=2), 0.5 * 0.25 + 0.5 * 0.5),
    ('midpoint', 1, dict(T=2), 1 - 1 + 0.5)])           # h = 2: x (1 - h/2 + h^2/8)
def test_solver_on_a_linear_map(solver, K, options, expected):
    x = SOLVERS[solver](g_half, ONE, K, **options)
    assert abs(x.item() - expected) < 1e-12


def by_stages(g, x, K, beta):
    "Anchored steps, by Equations 13 to 15, written out."
    result, slopes = x, []
    for weight in [beta + (1 - beta) / K] + [(1 - beta) / K] * (K - 1):
        y = x + sum(slopes, torch.zeros_like(x)) / K
        slopes.append(g(y) - y)
        result = result + weight * slopes[-1]
    return result


def test_anchored_is_equation_16():
    torch.manual_seed(0)
    A, x = torch.randn(5, 5, dtype=torch.float64) / 3, torch.randn(2, 3, 5, dtype=torch.float64)
    g = lambda y: y + torch.tanh(y @ A)
    for K, beta in ((1, 0.2), (2, 0.5), (3, 0.5), (5, 0.1), (4, 0.0)):
        ours = SOLVERS['anchored'](g, x, K, beta=beta)
        assert torch.allclose(ours, by_stages(g, x, K, beta), atol=1e-12)
        damped = SOLVERS['euler'](g, x, K)
        assert torch.allclose(ours, beta * g(x) + (1 - beta) * damped, atol=1e-12)


def slow_uniform(g, x, K):
    "x_(k+1) = g((x_0 + ... + x_k) / (k + 1)), the paper's Table 1."
    states = [x]
    for _ in range(K):
        states.append(g(torch.stack(states).mean(0)))
    return states[-1]


def slow_steps(g, x, K, alphas=None, T=1, tol=0):
    "Euler, a token at a time. The first step that moves a token too little is its last one."
    tokens = []
    for token in x.flatten(0, -2):
        for alpha in alphas or [T / K] * K:
            before, token = token, token + alpha * (g(token) - token)
            if (token - before).norm() <= tol * before.norm():
                break
        tokens.append(token)
    return torch.stack(tokens).view_as(x)


def slow_norm_stab(g, x, K, alpha=0.5):
    tokens = []
    for token in x.flatten(0, -2):
        length = token.norm()
        for _ in range(K):
            token = (1 - alpha) * token + alpha * g(token)
            token = token / token.norm() * length
        tokens.append(token)
    return torch.stack(tokens).view_as(x)


def slow_poly_blend(g, x, K, weights):
    states = [x]
    for _ in range(K):
        states.append(g(states[-1]))
    return torch.einsum('k,kbtc->btc', torch.tensor(weights, dtype=x.dtype), torch.stack(states))


@pytest.mark.parametrize('solver, slow, settings', [
    ('uniform', slow_uniform, {}), ('euler', slow_steps, {}), ('euler', slow_steps, dict(T=2)),
    ('euler', slow_steps, dict(alphas=(0.7, 0.5, 0.3))), ('euler', slow_steps, dict(tol=0.2)),
    ('euler', slow_steps, dict(alphas=(0.5, 0.5, 0.5), tol=0.1)),
    ('norm_stab', slow_norm_stab, {}), ('norm_stab', slow_norm_stab, dict(alpha=0.7)),
    ('poly_blend', slow_poly_blend, dict(weights=(0.1, 0.2, 0.3, 0.4)))])
def test_solver_is_its_formula(solver, slow, settings):
    "With tol, some tokens stop after the first step, some later, and some not at all."
    torch.manual_seed(0)
    A = torch.randn(5, 5, dtype=torch.float64)
    x = torch.randn(2, 6, 5, dtype=torch.float64) * torch.logspace(-1, 1.5, 6)[None, :, None]
    g = lambda y: y + torch.tanh(y @ A)
    for K in (3,) if 'alphas' in settings or 'weights' in settings else (1, 2, 3, 5):
        result = SOLVERS[solver](g, x, K, **settings)
        assert torch.allclose(result, slow(g, x, K, **settings), atol=1e-12, rtol=1e-12)
    if 'tol' in settings:
        without = {name: value for name, value in settings.items() if name != 'tol'}
        is_stopped = (SOLVERS[solver](g, x, K, **without) != result).any(-1)
        assert is_stopped.any() and not is_stopped.all()


def test_a_list_of_equal_steps_is_euler():
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    g = lambda y: y * 0.9 + 0.1
    assert torch.equal(SOLVERS['euler'](g, x, 4), SOLVERS['euler'](g, x, 4, alphas=(0.25,) * 4))
    assert torch.equal(SOLVERS['euler'](g, x, 4), SOLVERS['anchored'](g, x, 4, beta=0))
    for settings, message in (
            (dict(solver='euler', alphas=(0.6, 0.4)), 'has 2 lengths, and K=3 steps need 3'),
            (dict(solver='euler', alphas=(1, 1, 1), T=2), 'leave out T'),
            (dict(solver='poly_blend', weights=(0.5, 0.5)), 'K=3 needs 4 weights')):
        solver = settings.pop('solver')
        with pytest.raises(Refused, match=message):
            SOLVERS[solver](g, x, 3, **settings)


@pytest.mark.parametrize('solver', SOLVERS)
def test_solver_evaluations_are_counted(solver):
    for K in (2, 4):
        seen = []
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
        before = x.clone()
        settings = NEEDED.get(solver, lambda K: {})(K)
        SOLVERS[solver](lambda y: seen.append(y) or y * 0.9 + 0.1, x, K, **settings)
        assert len(seen) == Window([], solver, K, **settings).evaluations()
        assert torch.equal(seen[0], x)              # the wrapper relies on it
        assert torch.equal(x, before)


@pytest.mark.parametrize('solver', SOLVERS)
def test_solver_keeps_dtype_and_tokens_apart(solver):
    g = lambda y: y * 0.9 + 0.1
    run = functools.partial(SOLVERS[solver], g, K=2, **NEEDED.get(solver, lambda K: {})(2))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert run(torch.randn(2, 3, 4).to(dtype)).dtype == dtype
    x = torch.randn(2, 3, 4)
    clean = run(x)
    x[1, 0] = math.nan
    broken = run(x)
    assert torch.allclose(broken[0], clean[0]) and broken[1, 0].isnan().all()
    assert torch.allclose(broken[1, 1:], clean[1, 1:])
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.allclose(run(x[:1]), clean[:1], atol=1e-6)


def test_aitken_without_curvature():
    "A straight line but for rounding: extrapolating it would step back by the safeguard's length."
    drift = lambda y: y + 1 + 1e-6 * y
    x = torch.zeros(1, 1, 1, dtype=torch.float64)
    assert SOLVERS['aitken'](drift, x, 2).item() == pytest.approx(1.0)
    with pytest.raises(Refused, match='K=3: aitken takes two evaluations'):
        SOLVERS['aitken'](drift, x, 3)


def test_anderson_solves_a_linear_problem():
    torch.manual_seed(0)
    A = torch.tensor([[0.5, 0.3], [-0.2, 0.7]], dtype=torch.float64)
    b = torch.tensor([1.0, -2.0], dtype=torch.float64)
    g = lambda x: x @ A.T + b
    fixed = torch.linalg.solve(torch.eye(2, dtype=torch.float64) - A, b)
    for beta in (0.5, 1.0):
        assert torch.allclose(SOLVERS['anderson'](g, torch.zeros(1, 1, 2, dtype=torch.float64), 4,
                                                  m=2, beta=beta), fixed, atol=1e-9)
    x = torch.randn(3, 4, 2, dtype=torch.float64)       # at a fixed point all changes are zero
    assert torch.equal(SOLVERS['anderson'](lambda y: y, x, 4), x)
    assert torch.equal(SOLVERS['anderson'](g, x, 3), SOLVERS['anderson'](g, x, 3, beta=1.0))


@pytest.mark.parametrize('how, message', [
    (dict(K=0), 'K=0: a number of steps'), (dict(K=2.0), 'K=2.0: a number of steps'),
    (dict(decode='none'), 'decode=none must be full or bypass'),
    (dict(solver='naive', T=2), "solver=naive: got an unexpected keyword argument 'T'")])
def test_window_refuses_settings(how, message):
    with pytest.raises(Refused, match=message):
        Window([0], **how)
