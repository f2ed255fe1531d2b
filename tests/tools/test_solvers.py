"""Test nanodepth/wrapping/solvers.py: each solver against its formula, written out, and on maps
whose result is known."""
import pytest
import torch
from slow_forms import ONE, check_solver, half, moved_by_tanh

import nanodepth  # noqa: F401    (adds its solvers)
from model import Refused
from wrapper import SOLVERS

NEEDED = dict(poly_blend=lambda K: dict(weights=[1 / (K + 1)] * (K + 1)))    # they have no default


@pytest.mark.parametrize('solver, K, options, expected', [
    ('midpoint', 1, {}, 1 - 0.5 + 0.125),
    ('heun', 1, {}, 1 - 0.5 + 0.125),
    ('rk4', 1, {}, 1 - 0.5 + 1 / 8 - 1 / 48 + 1 / 384),
    ('midpoint', 2, {}, (1 - 0.25 + 1 / 32) ** 2),
    ('midpoint', 1, dict(T=2), 1 - 1 + 0.5),            # h = 2: x (1 - h/2 + h^2/8)
    ('heavy_ball', 2, {}, 0.75 * 0.75 + 0.3 * (0.75 - 1)),
    ('anderson', 2, dict(m=1), 0.0),    # in one dimension two evaluations determine a linear map
    ('aitken', 2, {}, 0.5)])            # the series ends at 0, but the safeguard stops earlier
def test_solver_on_a_linear_map(solver, K, options, expected):
    assert abs(SOLVERS[solver](half, ONE, K, **options).item() - expected) < 1e-12


def slow_uniform(g, x, K):
    "Compute x_(k+1) = g((x_0 + ... + x_k) / (k + 1)), as the paper's Table 1 has it."
    states = [x]
    for _ in range(K):
        states.append(g(torch.stack(states).mean(0)))
    return states[-1]


def slow_norm_stab(g, x, K, alpha=0.5):
    "Take Euler steps, token by token, each of which restores the norm of the token."
    tokens = []
    for token in x.flatten(0, -2):
        length = token.norm()
        for _ in range(K):
            token = (1 - alpha) * token + alpha * g(token)
            token = token / token.norm() * length
        tokens.append(token)
    return torch.stack(tokens).view_as(x)


def slow_poly_blend(g, x, K, weights):
    "Return the weighted sum of x, g(x), g(g(x)), ..."
    states = [x]
    for _ in range(K):
        states.append(g(states[-1]))
    return torch.einsum('k,kbtc->btc', torch.tensor(weights, dtype=x.dtype), torch.stack(states))


@pytest.mark.parametrize('solver, slow, settings', [
    ('uniform', slow_uniform, {}), ('norm_stab', slow_norm_stab, {}),
    ('norm_stab', slow_norm_stab, dict(alpha=0.7)),
    ('poly_blend', slow_poly_blend, dict(weights=(0.1, 0.2, 0.3, 0.4)))])
def test_solver_is_its_formula(solver, slow, settings):
    x, g = moved_by_tanh()
    for K in (3,) if 'weights' in settings else (1, 2, 3, 5):
        result = SOLVERS[solver](g, x, K, **settings)
        assert torch.allclose(result, slow(g, x, K, **settings), atol=1e-12, rtol=1e-12)


def test_poly_blend_needs_a_weight_for_each_state():
    with pytest.raises(Refused, match='K=3 needs 4 weights'):
        SOLVERS['poly_blend'](half, ONE, 3, weights=(0.5, 0.5))


@pytest.mark.parametrize('solver', sorted(SOLVERS.keys() - {'naive', 'anchored', 'euler', 'rk'}))
def test_solver_keeps_what_a_window_relies_on(solver):
    check_solver(solver, NEEDED.get(solver, lambda K: {}))


def test_aitken_does_not_extrapolate_a_straight_line():
    "Rounding gives the line a tiny curvature, and extrapolating that would lead far away."
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
