import math

import pytest
import torch

from nanodepth.wrapper import SOLVERS, pick_solver

ONE = torch.tensor([[[1.0]]], dtype=torch.float64)
F = lambda x: -0.5 * x                          # g(x) = x / 2 then: by hand, every step below
g_half = lambda x: x + F(x)


@pytest.mark.parametrize('method, K, options, expected', [
    ('naive', 3, {}, 1 / 8),
    ('euler', 2, {}, 0.75 ** 2),
    ('euler', 2, dict(alphas=[0.6, 0.4]), 0.7 * 0.8),
    ('euler', 3, dict(alphas=0.5), 0.75 ** 3),
    ('rk', 3, dict(beta=0.5), 0.5 * 0.5 + 0.5 * (5 / 6) ** 3),
    ('rk', 2, dict(beta=0.25), 0.25 * 0.5 + 0.75 * 0.75 ** 2),
    ('butcher', 1, dict(a=[[], [0.5]], b=[0, 1]), 1 - 0.5 + 0.125),
    ('midpoint', 1, {}, 1 - 0.5 + 0.125),
    ('heun', 1, {}, 1 - 0.5 + 0.125),
    ('rk4', 1, {}, 1 - 0.5 + 1 / 8 - 1 / 48 + 1 / 384),
    ('midpoint', 2, {}, (1 - 0.25 + 1 / 32) ** 2),
    ('heavy_ball', 2, dict(alpha=0.5, beta=0.5), 0.75 * 0.75 + 0.5 * (0.75 - 1)),
    ('anderson', 2, dict(m=1, beta=1.0), 0.0),    # one dimension: two evaluations know a linear map
    ('aitken', 2, dict(safeguard=False), 0.0),        # the geometric series ends at the fixed point
    ('aitken', 2, dict(safeguard=True), 0.5),       # ... the safeguard stops it at the plain window
    ('norm_stab', 4, {}, 1.0),                          # the length is all there is of a number
    ('poly_blend', 2, dict(weights=[0.4, 0.2, 0.4]), 0.4 + 0.1 + 0.1),
    ('poly_blend', 2, {}, (0.5 + 0.25) / 2),
    ('euler', 2, dict(T=2), 0.25),                      # two steps of length 1: naive
    ('rk', 2, dict(T=2), 0.5 * 0.25 + 0.5 * 0.5),
    ('midpoint', 1, dict(T=2), 1 - 1 + 0.5),            # h = 2: x (1 - h/2 + h^2/8)
    ('butcher', 2, dict(T=2), 0.375),
    ('layer_anchored_frozen', 2, {}, (0.75 * 0.75 + 0.5) / 2)])  # a number's length is its own
def test_by_hand_on_a_linear_map(method, K, options, expected):
    x = SOLVERS[method](g_half, ONE, K, **options)
    assert abs(x.item() - expected) < 1e-12


def test_there_is_a_gold_value_for_every_method():
    marks = test_by_hand_on_a_linear_map.pytestmark[0].args[1]
    assert {mark[0] for mark in marks} == set(SOLVERS)


def field(x):
    "A curved field with a known flow: x' = -x^2, x(1) = x / (1 + x)."
    return x - x * x


@pytest.mark.parametrize('method, options, order',
                         [('euler', {}, 1), ('rk', dict(beta=0.0), 1), ('midpoint', {}, 2),
                          ('heun', {}, 2), ('rk4', {}, 4)])
def test_orders_of_accuracy(method, options, order):
    x = torch.tensor([[[0.9]]], dtype=torch.float64)
    error = [abs(SOLVERS[method](field, x, K, **options) - x / (1 + x)).item() for K in (8, 16)]
    assert abs(math.log2(error[0] / error[1]) - order) < 0.2


def test_the_anchored_method_is_of_first_order_for_every_beta():
    """On x' = F(x) over a short time h: the error of one step falls as h^2 and not faster, however
    many stages it has."""
    for beta, K in ((0.5, 3), (0.2, 4)):
        errors = []
        for h in (0.02, 0.01):
            x = torch.tensor([[[0.9]]], dtype=torch.float64)
            errors.append(abs(SOLVERS['rk'](lambda y: y - h * y * y, x, K, beta=beta) - x
                              / (1 + h * x)).item())
        assert abs(math.log2(errors[0] / errors[1]) - 2) < 0.1


def test_equation_16_and_its_tableau():
    torch.manual_seed(0)
    A, x = torch.randn(5, 5, dtype=torch.float64) / 3, torch.randn(2, 3, 5, dtype=torch.float64)
    g = lambda y: y + torch.tanh(y @ A)
    for K, beta in ((1, 0.2), (2, 0.5), (3, 0.5), (5, 0.1), (4, 0.0)):
        damped = SOLVERS['euler'](g, x, K)
        # times 1/K: butcher's h
        tableau = dict(a=[[1.0] * i for i in range(K)],
                       b=[K * beta * (i == 0) + (1 - beta) for i in range(K)])
        by_stages, ks = x, []
        # Eq. 13 to 15, written out
        for i, b in enumerate([beta + (1 - beta) / K] + [(1 - beta) / K] * (K - 1)):
            y = x + sum(ks, torch.zeros_like(x)) / K
            ks.append(g(y) - y)
            by_stages = by_stages + b * ks[-1]
        ours = SOLVERS['rk'](g, x, K, beta=beta)
        assert torch.allclose(ours, beta * g(x) + (1 - beta) * damped, atol=1e-12)
        assert torch.allclose(ours, by_stages, atol=1e-12)
        assert torch.equal(ours, SOLVERS['butcher'](g, x, K, beta=beta))
        if K == 1:
            assert torch.allclose(ours, SOLVERS['butcher'](g, x, 1, **tableau), atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_one_step_or_the_whole_anchor_is_the_plain_window(dtype):
    torch.manual_seed(0)
    A, x = torch.randn(7, 7).to(dtype), torch.randn(2, 5, 7).to(dtype)
    g = lambda y: y + torch.tanh(y @ A)
    for method in ('naive', 'euler', 'rk', 'butcher', 'poly_blend'):
        assert torch.equal(SOLVERS[method](g, x, 1), g(x)), method
    for beta in (0.1, 0.3, 0.5, 0.7):
        assert torch.equal(SOLVERS['rk'](g, x, 1, beta=beta), g(x))
    for K in (2, 3, 7):
        assert torch.equal(SOLVERS['rk'](g, x, K, beta=1.0), g(x))


@pytest.mark.parametrize('method', SOLVERS)
def test_evaluations_are_counted_and_begin_with_the_plain_window(method):
    for K in (2, 4):
        seen = []
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
        SOLVERS[method](lambda y: seen.append(y) or y * 0.9 + 0.1, x, K)
        assert len(seen) == pick_solver(method, K)[1]
        assert torch.equal(seen[0], x)              # the wrapper relies on it


@pytest.mark.parametrize('method', SOLVERS)
def test_the_dtype_and_the_other_sequences_stay(method):
    g = lambda y: y * 0.9 + 0.1
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert SOLVERS[method](g, torch.randn(2, 3, 4).to(dtype), 2).dtype == dtype
    x = torch.randn(2, 3, 4)
    clean = SOLVERS[method](g, x, 2)
    x[1, 0] = math.nan
    broken = SOLVERS[method](g, x, 2)
    assert torch.allclose(broken[0], clean[0]) and broken[1, 0].isnan().all()
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.allclose(SOLVERS[method](g, x[:1], 2), clean[:1], atol=1e-6)


def test_layer_anchored_frozen_by_its_definition():
    "The authors' steps, a token at a time."
    torch.manual_seed(0)
    A, x = torch.randn(5, 5, dtype=torch.float64) / 2, torch.randn(2, 3, 5, dtype=torch.float64)
    layer = lambda y: y + torch.tanh(y @ A)
    for K, beta, T in ((1, 0.5, 1), (2, 0.5, 1), (6, 0.3, 1), (4, 0.5, 2.0)):
        s = T / K
        want = torch.empty_like(x)
        for i in range(2):
            for j in range(3):
                token = x[i, j]
                nat = layer(token)
                N = [token.norm() + (nat.norm() - token.norm()) * k / K for k in range(K + 1)]
                h = (1 - s) * token + s * nat
                h = h / h.norm() * N[1] if K > 1 else h
                for k in range(1, K):
                    h = (1 - s) * h + s * layer(h)
                    if k < K - 1:
                        h = h / h.norm() * N[k + 1]
                want[i, j] = beta * nat + (1 - beta) * h
        got = SOLVERS['layer_anchored_frozen'](layer, x, K, beta=beta, T=T)
        assert torch.allclose(got, want, atol=1e-12)


def test_aitken_takes_the_plain_step_where_there_is_no_curvature():
    "A straight line but for rounding: extrapolating it would step back by the safeguard's length."
    drift = lambda y: y + 1 + 1e-6 * y
    x = torch.zeros(1, 1, 1, dtype=torch.float64)
    assert SOLVERS['aitken'](drift, x, 2).item() == pytest.approx(1.0)
    assert SOLVERS['aitken'](drift, x, 2, safeguard=False).item() == pytest.approx(1.0)


def test_a_method_has_its_own_defaults_and_not_another_ones():
    "rk's beta does not reach heavy_ball or anderson: their authors have .3 and 1."
    for method, beta in (('rk', 0.5), ('heavy_ball', 0.3), ('anderson', 1.0)):
        solver, _ = pick_solver(method, 3)
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
        assert torch.equal(solver(torch.tanh, x), SOLVERS[method](torch.tanh, x, 3, beta=beta))
    for T in (0, -1, '1', math.inf):
        with pytest.raises(ValueError, match='T='):
            pick_solver('rk', 3, T=T)


def test_anderson_solves_a_linear_problem_and_keeps_sequences_apart():
    torch.manual_seed(0)
    A = torch.tensor([[0.5, 0.3], [-0.2, 0.7]], dtype=torch.float64)
    b = torch.tensor([1.0, -2.0], dtype=torch.float64)
    g = lambda x: x @ A.T + b
    fixed = torch.linalg.solve(torch.eye(2, dtype=torch.float64) - A, b)
    for beta in (0.5, 1.0):
        assert torch.allclose(SOLVERS['anderson'](g, torch.zeros(1, 1, 2, dtype=torch.float64), 4,
                                                  m=2, beta=beta), fixed, atol=1e-9)
    # one without a batch
    assert torch.allclose(SOLVERS['anderson'](g, torch.zeros(2, dtype=torch.float64), 4, m=2),
                          fixed, atol=1e-9)
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    curved = lambda y: y + torch.tanh(y @ A.T + b)
    together = SOLVERS['anderson'](curved, x, 4)
    alone = torch.cat([SOLVERS['anderson'](curved, row[None], 4) for row in x])
    assert torch.allclose(together, alone, atol=1e-10)
    still = SOLVERS['anderson'](lambda y: y, x, 4)        # at a fixed point all changes are zero
    assert torch.equal(still, x)


def test_a_tolerance_stops_tokens_one_by_one():
    calls = []

    def g(x):
        calls.append(1)
        return x + torch.tensor([1.0, 1e-4]).view(1, 2, 1) * x
    x = SOLVERS['euler'](g, torch.ones(1, 2, 3), 4, tol=1e-2)
    assert len(calls) == 4
    assert (torch.allclose(x[0, 0], torch.full((3,), 1.25 ** 4)) and torch.allclose(x[0, 1],
            torch.full((3,), 1 + 1e-4 / 4)))
    assert pick_solver('euler', 8, tol=0.3)[1] == 8             # at most
    calls.clear()
    SOLVERS['euler'](lambda x: calls.append(1) or x, torch.ones(1, 2, 3), 4, tol=1e-2)
    assert len(calls) == 1


def test_norms_and_blends():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7)
    out = SOLVERS['norm_stab'](lambda y: 3 * y + torch.randn(7), x, 3, alpha=0.7)
    assert torch.allclose(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.equal(SOLVERS['poly_blend'](g_half, x, 2, weights=[0, 0, 1]),
                       SOLVERS['naive'](g_half, x, 2))


@pytest.mark.parametrize('call, message', [
    (lambda: pick_solver('rkk', 3), "did you mean 'rk'"),
    (lambda: pick_solver('rk', 0), 'K=0.*at least once'),
    (lambda: pick_solver('rk', 1.5), 'K=1.5'),
    (lambda: pick_solver('rk', 3, beta=1.5), 'beta=1.5.*0 to 1'),
    (lambda: pick_solver('heavy_ball', 3, beta=-0.1), 'beta=-0.1'),
    (lambda: pick_solver('aitken', 3), 'K=3.*even'),
    (lambda: pick_solver('rk', 3, alphas=[1]), "'rk' has no option 'alphas'; it takes: beta"),
    (lambda: pick_solver('euler', 3, alphas=[0.5, 0.5]), 'K=3 steps need 3'),
    (lambda: pick_solver('poly_blend', 2, weights=[0.5, 0.5]), 'needs 3'),
    (lambda: pick_solver('poly_blend', 1, weights=[0.7, 0.7]), 'sum 1'),
    (lambda: pick_solver('butcher', 1, a=[[0.5], [1]], b=[0.5, 0.5]), 'tableau'),
    (lambda: pick_solver('butcher', 1, a=[[]]), 'tableau'),
    (lambda: pick_solver('euler', 2, alphas='0.5'),
     "the options of 'euler' are not of its kind: alphas='0.5'"),
    (lambda: pick_solver('anderson', 2, m=1.5), 'not of its kind'),
    (lambda: pick_solver('euler', 2, tol=-1), 'not of its kind'),
    (lambda: pick_solver('rk', 2, beta='0.5'), "beta='0.5'"),
    (lambda: pick_solver(['rk'], 2), 'is not one of naive'),
    (lambda: pick_solver('butcher', 1, beta=0.5, a=[[]], b=[1]), 'beta=0.5 has no effect'),
    (lambda: pick_solver('euler', 2, alphas=[0.5, 0.5], T=2), 'T=2 has no effect beside alphas'),
    (lambda: pick_solver('butcher', 1, a=[[]], b=[2]), 'sum 1'),
    (lambda: SOLVERS['naive'](g_half, ONE, 0), 'at least once'),
    (lambda: SOLVERS['rk'](g_half, ONE, 0), 'at least once'),
    (lambda: SOLVERS['poly_blend'](g_half, ONE, 0), 'at least once'),
    (lambda: SOLVERS['rk'](g_half, ONE, 2, beta=2), 'beta=2')])
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_solver_leaves_the_stream_that_goes_in_as_it_was():
    for method in SOLVERS:
        x = torch.randn(1, 2, 3)
        before = x.clone()
        SOLVERS[method](lambda y: y * 0.5 + 1, x, 2)
        assert torch.equal(x, before), method
