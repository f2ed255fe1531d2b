"Every solver by itself, on maps of which the result is known. In a model: test_windows.py."
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanodepth import wrapper
from nanodepth.common.errors import Refused
from nanodepth.looping.solvers import SOLVERS, pick_solver
from nanodepth.scoring.way import Way

ONE = torch.tensor([[[1.0]]], dtype=torch.float64)
F = lambda x: -0.5 * x                          # g(x) = x / 2 then: by hand, every step below
g_half = lambda x: x + F(x)


@pytest.mark.parametrize('solver, K, options, expected', [
    ('naive', 3, {}, 1 / 8),
    ('naive', 1, {}, 0.5),                      # one step of length 1 is the plain window
    ('euler', 1, {}, 0.5),
    ('butcher', 1, {}, 0.5),
    ('poly_blend', 1, {}, 0.5),
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
    ('heavy_ball', 2, dict(alpha=0.5), 0.75 * 0.75 + 0.3 * (0.75 - 1)),
    ('anderson', 2, dict(m=1), 0.0),             # one dimension: two evaluations know a linear map
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
def test_by_hand_on_a_linear_map(solver, K, options, expected):
    x = SOLVERS[solver](g_half, ONE, K, **options)
    assert abs(x.item() - expected) < 1e-12


def by_stages(g, x, K, beta):
    "rk by Equations 13 to 15, written out."
    result, slopes = x, []
    for weight in [beta + (1 - beta) / K] + [(1 - beta) / K] * (K - 1):
        y = x + sum(slopes, torch.zeros_like(x)) / K
        slopes.append(g(y) - y)
        result = result + weight * slopes[-1]
    return result


def test_equation_16_and_its_tableau():
    torch.manual_seed(0)
    A, x = torch.randn(5, 5, dtype=torch.float64) / 3, torch.randn(2, 3, 5, dtype=torch.float64)
    g = lambda y: y + torch.tanh(y @ A)
    for K, beta in ((1, 0.2), (2, 0.5), (3, 0.5), (5, 0.1), (4, 0.0)):
        ours = SOLVERS['rk'](g, x, K, beta=beta)
        assert torch.allclose(ours, by_stages(g, x, K, beta), atol=1e-12)
        damped = SOLVERS['euler'](g, x, K)
        assert torch.allclose(ours, beta * g(x) + (1 - beta) * damped, atol=1e-12)
        assert torch.equal(ours, SOLVERS['butcher'](g, x, K, beta=beta))


@pytest.mark.parametrize('solver', SOLVERS)
def test_evaluations_are_counted_and_begin_with_the_plain_window(solver):
    for K in (2, 4):
        seen = []
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
        before = x.clone()
        want = SOLVERS[solver](lambda y: seen.append(y) or y * 0.9 + 0.1, x, K)
        picked, evaluations = pick_solver(solver, K)            # with its own defaults
        assert len(seen) == evaluations
        assert torch.equal(picked(lambda y: y * 0.9 + 0.1, x), want)
        assert torch.equal(seen[0], x)              # the wrapper relies on it
        assert torch.equal(x, before)


@pytest.mark.parametrize('solver', SOLVERS)
def test_the_dtype_stays_and_no_token_knows_of_others(solver):
    g = lambda y: y * 0.9 + 0.1
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert SOLVERS[solver](g, torch.randn(2, 3, 4).to(dtype), 2).dtype == dtype
    x = torch.randn(2, 3, 4)
    clean = SOLVERS[solver](g, x, 2)
    x[1, 0] = math.nan
    broken = SOLVERS[solver](g, x, 2)
    assert torch.allclose(broken[0], clean[0]) and broken[1, 0].isnan().all()
    assert torch.allclose(broken[1, 1:], clean[1, 1:])
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.allclose(SOLVERS[solver](g, x[:1], 2), clean[:1], atol=1e-6)


def test_layer_anchored_frozen_by_its_definition():
    "The authors' steps, a token at a time."
    torch.manual_seed(0)
    A, x = torch.randn(5, 5, dtype=torch.float64) / 2, torch.randn(2, 3, 5, dtype=torch.float64)
    layer = lambda y: y + torch.tanh(y @ A)
    for K, beta, T in ((1, 0.5, 1), (2, 0.5, 1), (6, 0.3, 1), (4, 0.5, 2.0)):
        s = T / K
        want = []
        for token in x.flatten(0, 1):
            nat = layer(token)
            N = [token.norm() + (nat.norm() - token.norm()) * k / K for k in range(K + 1)]
            h = (1 - s) * token + s * nat
            h = h / h.norm() * N[1] if K > 1 else h
            for k in range(1, K):
                h = (1 - s) * h + s * layer(h)
                if k < K - 1:
                    h = h / h.norm() * N[k + 1]
            want.append(beta * nat + (1 - beta) * h)
        got = SOLVERS['layer_anchored_frozen'](layer, x, K, beta=beta, T=T)
        assert torch.allclose(got.flatten(0, 1), torch.stack(want), atol=1e-12)


def test_aitken_takes_the_plain_step_where_there_is_no_curvature():
    "A straight line but for rounding: extrapolating it would step back by the safeguard's length."
    drift = lambda y: y + 1 + 1e-6 * y
    x = torch.zeros(1, 1, 1, dtype=torch.float64)
    assert SOLVERS['aitken'](drift, x, 2).item() == pytest.approx(1.0)
    assert SOLVERS['aitken'](drift, x, 2, safeguard=False).item() == pytest.approx(1.0)


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
    alone, one_of_one = SOLVERS['anderson'](g, x[0, 0], 2), SOLVERS['anderson'](g, x[:1, 0], 2)
    assert torch.allclose(alone, one_of_one[0])         # a lone vector is one problem


def test_norm_stab_turns_and_keeps_the_length():
    "Half of the way to a quarter of a turn is an eighth."
    quarter = lambda y: torch.stack((-y[..., 1], y[..., 0]), -1)
    turned = SOLVERS['norm_stab'](quarter, torch.tensor([[[3.0, 0.0]]]), 2)
    assert torch.allclose(turned, torch.tensor([[[0.0, 3.0]]]), atol=1e-6)


def test_a_tolerance_stops_tokens_one_by_one():
    "Each by its own length."
    calls = []

    def g(x):
        calls.append(1)
        return x + torch.tensor([1.0, 1e-4, 1e-4]).view(1, 3, 1) * x
    start = torch.tensor([1.0, 1000.0, 1.0]).view(1, 3, 1).expand(1, 3, 3)
    x = SOLVERS['euler'](g, start, 4, tol=1e-2) / start
    assert len(calls) == 4
    assert torch.allclose(x[0, 0], torch.full((3,), 1.25 ** 4))
    assert torch.allclose(x[0, 1:], torch.full((2, 3), 1 + 1e-4 / 4))
    calls.clear()
    SOLVERS['euler'](lambda x: calls.append(1) or x, start, 4, tol=1e-2)
    assert len(calls) == 1
    assert pick_solver('euler', 4, tol=10)[1] == 4          # at most


def rk(g, x, K):
    "Another one of that name."
    return g(x)


@pytest.mark.parametrize('call, message', [
    (lambda: pick_solver('rkk', 3), "did you mean 'rk'"),
    (lambda: pick_solver('rk', 0), 'K=0 must be from 1'),
    (lambda: pick_solver('rk', 3, beta=np.float32(1.5)), 'beta=1.5.*0 to 1'),
    (lambda: pick_solver('aitken', 3), 'K=3.*even'),
    (lambda: pick_solver('naive', 3, T=2), "'naive' has no option 'T'"),
    (lambda: SOLVERS['butcher'](g_half, ONE, 1, b=[1.0], beta=0.5), 'no effect beside a tableau'),
    (lambda: pick_solver('euler', 3, alphas=[0.5, 0.5]), 'K=3 steps need 3'),
    (lambda: pick_solver('euler(', 3), r'write it as euler\(tol=0.1\)'),
    (lambda: pick_solver('euler(tol)', 3), r'write it as euler\(tol=0.1\)'),
    (lambda: pick_solver('euler(tol=x)', 3), r'write it as euler\(tol=0.1\)'),
    (lambda: wrapper.Window([0], 'fading'), 'solver fading: known are naive, rk, euler'),
    (lambda: wrapper.Window([0], rk), 'another solver is called rk')])
def test_what_no_solver_does(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_names_of_the_package_are_taken_where_it_is_not_there(monkeypatch):
    "It would open a run of a solver of yours with its own of that name."
    ours = {name for name, each in SOLVERS.items() if each.__module__.startswith('nanodepth.')}
    assert ours == {*wrapper.IN_PACKAGE, 'naive', 'rk', 'euler'}
    monkeypatch.setattr(wrapper, 'SOLVERS', dict(rk=wrapper.rk))
    yours = {}
    exec('def heun(g, x, K): return g(x)\ndef mine(g, x, K): return g(x)', yours)
    assert wrapper.Window([0], yours['mine']).solver is yours['mine']
    with pytest.raises(ValueError, match='another solver is called heun: give yours'):
        wrapper.Window([0], yours['heun'])


def test_one_table_whose_euler_is_wrapper_pys_and_more():
    x, W = torch.randn(3, 5, 8), torch.randn(8, 8) / 4
    g = lambda y: y + torch.tanh(y @ W)
    assert SOLVERS is wrapper.SOLVERS and SOLVERS['euler'] is not wrapper.euler
    for how in ({}, dict(T=2)):
        assert torch.equal(wrapper.euler(g, x, 3, **how), SOLVERS['euler'](g, x, 3, **how))
    assert wrapper.Window([0], wrapper.euler).solver is SOLVERS['euler']


def test_options_in_a_text():
    picked, evaluations = pick_solver('heavy_ball(alpha=0.4, beta=0.1)', 3)
    assert picked.keywords == dict(alpha=0.4, beta=0.1, K=3) and evaluations == 3


def test_a_way_keeps_the_solver_that_it_found(monkeypatch):
    "A comparison reads configs after it, which may bring another one of that name."
    def mine(g, x, K):
        return g(x)
    monkeypatch.setitem(SOLVERS, 'mine', mine)
    way = Way(window='0-1', solver='mine', K=3)
    monkeypatch.setitem(SOLVERS, 'mine', SOLVERS['naive'])
    [span, last] = way.order(SimpleNamespace(order=[0, 1, 2]))
    assert span.items == [0, 1] and span.solver(torch.exp, torch.zeros(1), 3) == 1 and last == 2
