"""wrapper.py, and the package's windows, which can do more: a window of layers as a step of a
solver, on our own model; every solver by itself on maps of which the result is known. Other
families: test_families.py.
"""
import copy
import math
import weakref

import numpy as np
import pytest
import torch

from nanodepth import wrapper
from nanodepth.grow import untie
from nanodepth.loop import repeat_block
from nanodepth.looping.caches import CACHES
from nanodepth.looping.layers import pick_window
from nanodepth.looping.patch import looped, patch, unpatch, windows_of
from nanodepth.looping.solvers import SOLVERS, pick_solver
from nanodepth.model import Refused
from nanodepth.retrofit import surgery
from nanodepth.wrapper import looped_by_hand

WINDOW = (2, 4)
both = pytest.mark.parametrize('looped', [wrapper.looped, looped], ids=['wrapper', 'package'])


def tokens(n=12, batch=2, seed=0):
    return torch.randint(50, (batch, n), generator=torch.Generator().manual_seed(seed))


def in_pieces(model, t, pieces):
    "Logits with a cache, fed piece by piece, and the cache."
    cache, out, at = {}, [], 0
    for n in pieces:
        out.append(model(t[:, at:at + n], cache=cache))
        at += n
    return torch.cat(out, dim=1), cache


@pytest.fixture
def six(tiny):
    with torch.no_grad():
        yield tiny(n_layer=6, n_kv_head=2)


def slots_of(cache):
    "(keys, values) of every depth, and of the later evaluations with cache='exact'."
    slots = []
    for key, slot in cache.items():
        if key != 'layers':             # the order that filled it
            slots += slots_of(slot) if isinstance(slot, dict) else [slot]
    return slots


@both
def test_naive_is_a_repeated_block_to_the_last_bit(six, looped):
    t, order = tokens(), repeat_block(six.order, 2, 3, 3)
    with looped(six, WINDOW, 'naive', 3, cache='exact'):
        whole = six(t)
        pieces, _ = in_pieces(six, t, [7, 1, 2, 1, 1])
    assert torch.equal(whole, six(t, order=order)) and not torch.equal(whole, six(t))
    cache, out = {}, []
    for piece in t.split([7, 1, 2, 1, 1], dim=1):
        out.append(six(piece, order=order, cache=cache))
    assert torch.equal(pieces, torch.cat(out, dim=1))


@both
def test_the_idea_in_ten_lines_is_the_wrapper(six, tiny, looped):
    loop, t = tiny(n_layer=4, order=[0, 1, 2, 1, 2, 3], ln_scaling=True), tokens()
    for model in (six, loop):
        for K, beta in ((1, 0.5), (3, 0.5), (4, 0.2)):
            with looped(model, WINDOW, K=K, beta=beta):
                want = model(t)
            assert torch.allclose(looped_by_hand(model, t, *WINDOW, K, beta), want, atol=1e-5)
    by_hand = looped_by_hand(six, t, 1, 4, 3, 0.5)
    with looped(six):                           # the defaults are the recipe: the middle four
        assert torch.allclose(six(t), by_hand, atol=1e-5)


@both
def test_the_window_counts_depths_of_the_order(tiny, looped):
    loop = tiny(n_layer=3, order=[0, 1, 2] * 3)
    free, t = untie(loop, loop.order), tokens()
    ways = [{}] if looped is wrapper.looped else [{}, dict(mode='layer')]
    for how in ways:
        with looped(loop, (2, 5), **how), looped(free, (2, 5), **how):
            assert torch.equal(loop(t), free(t))
            assert torch.equal(in_pieces(loop, t, [5, 1, 6])[0], in_pieces(free, t, [5, 1, 6])[0])
    by_hand = loop(t, order=[0, 1, 2, 0, 1, 1, 2, 0, 1, 2])
    # layer 1 stands at 1, 4 and 7: only the second is looped
    with looped(loop, (4, 4), 'naive', 2):
        assert torch.equal(loop(t), by_hand)


@pytest.mark.parametrize('method, mode', [('rk', 'block'), ('rk', 'layer'),
                                          ('layer_anchored_frozen', 'layer')])
def test_wrapped_logits_are_the_solver_applied_by_hand(six, method, mode):
    t = tokens()
    x = six.run(six.embed(t), [0, 1])
    for block in [[2, 3, 4]] if mode == 'block' else [[2], [3], [4]]:
        x = SOLVERS[method](lambda y: six.run(y, block, depth=block[0]), x, 2)
    by_hand = six.head(six.norm(six.run(x, [5], depth=5)))
    with looped(six, WINDOW, method, 2, mode=mode):
        assert torch.equal(six(t), by_hand)


def test_a_picked_solver_has_its_own_defaults():
    x, W = torch.randn(3, 5, 8), torch.randn(8, 8) / 4
    for method in SOLVERS:
        solver, _ = pick_solver(method, 4)
        want = SOLVERS[method](lambda y: y + torch.tanh(y @ W), x, 4)
        assert torch.equal(solver(lambda y: y + torch.tanh(y @ W), x), want), method


@both
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_off_values_are_the_unlooped_model(six, dtype, looped):
    model, t = six.to(dtype), tokens()
    plain, cached = model(t), in_pieces(model, t, [6, 1, 1, 4])
    for K, beta in ((1, 0.3), (3, 1.0)):
        for cache in ('first', 'exact'):
            with looped(model, WINDOW, 'rk', K, beta=beta, cache=cache):
                assert torch.equal(model(t), plain)
                logits, kept = in_pieces(model, t, [6, 1, 1, 4])
                assert torch.equal(logits, cached[0])
                assert all(torch.equal(kept[d][0], cached[1][d][0]) for d in range(6))


def test_unpatching_leaves_no_trace(six):
    t = tokens()
    plain, names, state = six(t), [n for n, _ in six.named_modules()], list(six.state_dict())
    before = {name: dict(vars(m)) for name, m in six.named_modules()}
    handle = patch(six, WINDOW)
    assert not torch.equal(six(t), plain)
    assert [n for n, _ in six.named_modules()] == names and list(six.state_dict()) == state
    handle.unpatch()
    handle.unpatch()                                            # twice does no harm
    assert torch.equal(six(t), plain) and handle.window == WINDOW
    assert {name: dict(vars(m)) for name, m in six.named_modules()} == before
    with pytest.raises(RuntimeError, match='stop'):
        with looped(six, WINDOW):
            raise RuntimeError('stop')
    assert torch.equal(six(t), plain)
    with looped(six, (0, 1)), pytest.raises(Refused, match='looped already: unpatch it first'):
        patch(six, WINDOW)
    with pytest.raises(Refused, match='begins or ends within a recurrent core'):
        patch(surgery(six, '2-2-2'), WINDOW)


def test_a_with_leaves_no_trace(six):
    t, own = tokens(), six.order
    plain = six(t)
    with pytest.raises(RuntimeError, match='stop'), wrapper.looped(six, WINDOW):
        assert not torch.equal(six(t), plain)
        raise RuntimeError('stop')
    assert six.order is own and torch.equal(six(t), plain)
    for window in ((3, 6), (4, 3), (-1, 2)):
        with pytest.raises(AssertionError), wrapper.looped(six, window):
            pass


@pytest.mark.parametrize('mode', ('block', 'layer'))
@pytest.mark.parametrize('method, K', [('rk', 3), ('naive', 2), ('heun', 1)])
def test_continuing_is_recomputing(six, mode, method, K):
    t = tokens()
    with looped(six, WINDOW, method, K, cache='exact', mode=mode):
        whole = six(t)
        for pieces in ([7, 1, 1, 2, 1], [1] * 12, [11, 1]):
            assert torch.allclose(in_pieces(six, t, pieces)[0], whole, atol=2e-5)


@pytest.mark.parametrize('solver, K', [('rk', 3), ('euler', 3), ('naive', 2)])
def test_continuing_is_recomputing_in_wrapper_py(six, solver, K):
    t = tokens()
    with wrapper.looped(six, WINDOW, solver, K, cache='exact'):
        whole, (cached, cache) = six(t), in_pieces(six, t, [7, 1, 1, 2, 1])
        assert torch.allclose(cached, whole, atol=2e-5)
        assert [k.shape[2] for k, _ in slots_of(cache)] == [12] * (6 + 3 * (K - 1))
    with looped(six, WINDOW, solver, K, cache='exact'):
        assert torch.equal(in_pieces(six, t, [7, 1, 1, 2, 1])[0], cached)


@both
def test_first_token_by_token_against_a_slow_form(six, looped):
    """Evaluation k of token t: the others carry their evaluation-1 streams, t alone its own. One
    pass over the window a token and evaluation."""
    t, K = tokens(8), 3
    x = six.run(six.embed(t), [0, 1])
    result = torch.empty_like(x)
    for at in range(8):
        def g(y):                                   # y (B, 1, C): this token's state
            return six.run(torch.cat((x[:, :at], y), 1), [2, 3, 4], depth=2)[:, -1:]
        result[:, at:at + 1] = SOLVERS['rk'](g, x[:, at:at + 1], K)
    by_hand = six.head(six.norm(six.run(result, [5], depth=5)))
    with looped(six, WINDOW, 'rk', K, cache='first'):
        assert torch.allclose(in_pieces(six, t, [1] * 8)[0], by_hand, atol=2e-5)


@pytest.mark.parametrize('mode', ('block', 'layer'))
@pytest.mark.parametrize('how', CACHES)
def test_what_each_cache_holds(six, how, mode):
    "Lengths after every step; and whose keys they are."
    t = tokens()
    plain = in_pieces(six, t, [7])[1]
    with looped(six, WINDOW, 'rk', 3, cache=how, mode=mode):
        cache, at = {}, 0
        for n in (7, 1, 1, 3):
            six(t[:, at:at + n], cache=cache)
            at += n
            versions = 6 + 6 * (how == 'exact')
            assert [k.shape[2] for k, _ in slots_of(cache)] == [at] * versions
        prompt = in_pieces(six, t, [7])[1]
    alike = [torch.equal(prompt[d][0], plain[d][0]) for d in range(6)]
    first = how in ('first', 'natural', 'none', 'exact')
    assert alike[:2] == [True, True] and not alike[5]
    assert alike[2] == first
    if mode == 'layer':     # 'first' is the unlooped chain; else later layers got other input
        assert alike[3:5] == [how == 'first'] * 2
    if mode == 'block':
        assert alike[2:5] == [first] * 3
        if how.startswith('last'):      # a plain pass from x_K, or from the last evaluation's point
            points, slots, x = [], {}, six.run(six.embed(t[:, :7]), [0, 1])
            end = SOLVERS['rk'](lambda y: points.append(y) or six.run(y, [2, 3, 4], depth=2), x, 3)
            six.run(end if how == 'last' else points[-1], [2, 3, 4], depth=2, cache=slots)
            assert all(torch.equal(slots[d][0], prompt[d][0]) for d in (2, 3, 4))


def test_none_shows_the_window_no_past(six):
    t = tokens()
    with looped(six, WINDOW, 'rk', 3, cache='none'):
        _, cache = in_pieces(six, t, [7])
        changed = copy.deepcopy(cache)
        for d in (2, 3, 4):
            changed[d] = torch.randn_like(changed[d][0]), changed[d][1]
        assert torch.equal(six(t[:, 7:8], cache=cache), six(t[:, 7:8], cache=changed))


@pytest.mark.parametrize('mode', ('block', 'layer'))
def test_bypass_loops_only_while_a_prompt_is_read(six, mode):
    t = tokens()

    def steps(decode):
        ran, cache = [], {}
        hook = six.layers[3].mlp.register_forward_hook(lambda *_: ran.append(1))
        with looped(six, WINDOW, 'rk', 3, decode=decode, mode=mode, cache='natural'):
            counts = []
            for piece in t.split([5, 1, 1, 1, 2, 1, 1], dim=1):
                ran.clear()
                six(piece, cache=cache)
                counts.append(len(ran))
        hook.remove()
        return counts
    assert steps('full') == [3] * 7
    # several new tokens are read, not decoded
    assert steps('bypass') == [3, 1, 1, 1, 3, 1, 1]


@both
def test_gradients_and_the_tap_go_through(six, looped):
    with torch.enable_grad(), looped(six, WINDOW):
        six(tokens(), tokens(seed=1)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in six.layers[3].parameters())
    seen = []
    with looped(six, WINDOW, 'naive', 2):
        six(tokens(), tap=lambda depth, part, x, update: seen.append((depth, part)) or update)
    assert [d for d, part in seen if part == 'mlp'] == [0, 1, 2, 3, 4, 2, 3, 4, 5]


class Cache(dict):
    "One that can be watched."


@pytest.mark.parametrize('mode', ('block', 'layer'))
@pytest.mark.parametrize('how', ('first', 'exact'))
def test_a_forward_leaves_nothing_alive(six, how, mode):
    """No cache or stream is held until the next one. When a layer fails, a cache with one version
    has nothing of the window's."""
    def fail(*_):
        raise RuntimeError('stop')
    with looped(six, WINDOW, cache=how, mode=mode):
        cache = Cache()
        held = weakref.ref(cache)
        six(tokens(), cache=cache)
        del cache
        assert held() is None
        cache = Cache()
        hook = six.layers[3].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match='stop'):
            six(tokens(), cache=cache)
        hook.remove()
        if how == 'first' and mode == 'block':
            assert [*cache] == ['layers', 0, 1]
        assert torch.isfinite(six(tokens())).all()


@both
def test_an_exact_cache_keeps_to_its_settings(six, looped):
    t, cache = tokens(), {}
    with looped(six, WINDOW, K=3, cache='exact'):
        six(t[:, :5], cache=cache)
    for window, K in (((1, 3), 3), (WINDOW, 2)):
        with looped(six, window, K=K, cache='exact'), pytest.raises(AssertionError,
                                                                    match='another window'):
            six(t[:, 5:6], cache=copy.deepcopy(cache))
    six(t[:, 5:6], cache=cache)                                     # a token without a loop
    with looped(six, WINDOW, K=3, cache='exact'), pytest.raises(AssertionError,
                                                                match='another window'):
        six(t[:, 6:7], cache=cache)


def test_what_wrapper_pys_window_counts_and_writes(six):
    "Its solver is any function: how often it evaluates is counted, but only a name can be written."
    def twice_and_half(g, x, K, share=0.5):
        for _ in range(2 * K):
            x = torch.lerp(x, g(x), share)
        return x
    own = wrapper.Window([2, 3, 4], twice_and_half, K=2, share=0.25)
    layer = six.flops_per_token([0]) - six.flops_per_token([])
    six.order, t = [0, 1, own, 5], tokens()
    assert own.evaluations() == 4 and six.unrolled() == [0, 1, 2, 3, 4, 5]
    assert six.flops_per_token() == six.flops_per_token([]) + (3 + 4 * 3) * layer
    x = twice_and_half(lambda x: six.run(x, [2, 3, 4], depth=2), six.run(six.embed(t), [0, 1]), 2,
                       0.25)
    assert torch.equal(six(t), six.head(six.norm(six.run(x, [5], depth=5))))
    with pytest.raises(Refused, match='no file can name the solver twice_and_half'):
        own.settings()
    named = wrapper.Window([2, 3, 4], 'rk', K=2, cache='exact', beta=0.2)
    assert named.settings() == dict(solver='rk', K=2, cache='exact', beta=0.2)
    again = wrapper.Window([2, 3, 4], **named.settings())
    six.order = [0, 1, named, 5]
    want = six(t)
    six.order = [0, 1, again, 5]
    assert torch.equal(six(t), want) and again.solver is wrapper.rk
    for wrong in (dict(K=0), dict(cache='frist')):
        with pytest.raises(AssertionError):
            wrapper.Window([1], **wrong)


def test_the_packages_solvers_are_wrapper_pys_and_more():
    x, W = torch.randn(3, 5, 8), torch.randn(8, 8) / 4
    g = lambda y: y + torch.tanh(y @ W)
    for name, solver in wrapper.SOLVERS.items():
        for K in (1, 2, 3):
            assert torch.equal(solver(g, x, K), SOLVERS[name](g, x, K))
            if name != 'naive':
                assert torch.equal(solver(g, x, K, T=2), SOLVERS[name](g, x, K, T=2))


@pytest.mark.parametrize('window, depth, expected', [
    (None, 28, (12, 15)), (None, 36, (15, 18)), (None, 48, (22, 25)), ('mid6', 36, (15, 20)),
    ('mid4', 32, (14, 17)), (None, 8, (2, 5)), (None, 3, (0, 2)), ('mid3', 28, (13, 15)),
    ('mid1', 28, (14, 14)), ((3, 5), 6, (3, 5)), ('0-0', 6, (0, 0)), (0.5, 8, (2, 5)),
    (0.0, 8, (0, 3)), (1.0, 8, (4, 7)), (0.6, 28, (15, 18)), ('0.6', 28, (15, 18))])
def test_windows(window, depth, expected):
    assert pick_window(window, depth) == expected


@pytest.mark.parametrize('arguments, message', [
    (dict(window=(3, 6)), 'within 0 to 5'), (dict(window='1.7'), 'within 0 to 5'),
    (dict(cache='frist'), "did you mean 'first'"),
    (dict(pin='mixture'), 'no router'), (dict(decode='ful'), 'not one of full, bypass|full'),
    (dict(cache='exact', method='euler', tol=0.1), 'halting tolerance'),
    (dict(method='layer_anchored_frozen', mode='block'), "mode='block' is not one of layer"),
    (dict(gamma=1), "no option 'gamma'")])
def test_what_is_refused_before_anything_is_touched(six, arguments, message):
    before = {name: dict(vars(m)) for name, m in six.named_modules()}
    with pytest.raises(ValueError, match=message):
        patch(six, **dict(window=WINDOW) | arguments)
    assert {name: dict(vars(m)) for name, m in six.named_modules()} == before


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
def test_by_hand_on_a_linear_map(method, K, options, expected):
    x = SOLVERS[method](g_half, ONE, K, **options)
    assert abs(x.item() - expected) < 1e-12


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
        before = x.clone()
        SOLVERS[method](lambda y: seen.append(y) or y * 0.9 + 0.1, x, K)
        assert len(seen) == pick_solver(method, K)[1]
        assert torch.equal(seen[0], x)              # the wrapper relies on it
        assert torch.equal(x, before)


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


@pytest.mark.parametrize('call, message', [
    (lambda: pick_solver('rkk', 3), "did you mean 'rk'"),
    (lambda: pick_solver('rk', 0), 'K=0 must be from 1'),
    (lambda: pick_solver('rk', 3, beta=1.5), 'beta=1.5.*0 to 1'),
    (lambda: pick_solver('rk', 3, beta=np.float32(1.5)), 'beta=1.5.*0 to 1'),
    (lambda: pick_solver('aitken', 3), 'K=3.*even'),
    (lambda: pick_solver('naive', 3, T=2), "'naive' has no option 'T'"),
    (lambda: pick_solver('euler', 3, alphas=[0.5, 0.5]), 'K=3 steps need 3')])
def test_what_no_solver_does(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_default_cache_and_mode_go_by_the_method(six):
    for method, mode, cache in (('rk', 'block', 'first'), ('layer_anchored_frozen', 'layer',
                                                           'natural')):
        with looped(six, (2, 3), method):
            how = windows_of(six)[0]
            assert (how.mode, how.cache) == (mode, cache)
