"The wrapper on our own model, and what it refuses. Hugging Face families: test_wrapper_hf.py."
import contextlib
import copy
import pickle
import weakref

import pytest
import torch
import torch.nn as nn

from nanodepth.grow import untie
from nanodepth.loop import repeat_block
from nanodepth.model import KVCache
from nanodepth.variants.caches import CACHES
from nanodepth.variants.hosts import pick_window
from nanodepth.wrapper import LAYERWISE, SOLVERS, looped, looped_by_hand, patch, unpatch

WINDOW = (2, 4)


def tokens(n=12, batch=2, seed=0):
    return torch.randint(50, (batch, n), generator=torch.Generator().manual_seed(seed))


def in_pieces(model, t, pieces):
    "Logits with a cache, fed piece by piece, and the cache."
    cache, out, at = KVCache(len(model.order)), [], 0
    for n in pieces:
        out.append(model(t[:, at:at + n], cache=cache))
        at += n
    return torch.cat(out, dim=1), cache


@pytest.fixture
def six(tiny):
    with torch.no_grad():
        yield tiny(n_layer=6, n_kv_head=2)


def test_naive_is_a_repeated_block_to_the_last_bit(six):
    t, order = tokens(), repeat_block(six.order, 2, 3, 3)
    with looped(six, WINDOW, 'naive', 3, cache='exact'):
        whole = six(t)
        pieces, _ = in_pieces(six, t, [7, 1, 2, 1, 1])
    assert torch.equal(whole, six(t, order=order)) and not torch.equal(whole, six(t))
    cache, out = KVCache(len(order)), []
    for piece in t.split([7, 1, 2, 1, 1], dim=1):
        out.append(six(piece, order=order, cache=cache))
    assert torch.equal(pieces, torch.cat(out, dim=1))


def test_the_idea_in_ten_lines_is_the_wrapper(six, tiny):
    loop, t = tiny(n_layer=4, order=[0, 1, 2, 1, 2, 3], ln_scaling=True), tokens()
    for model in (six, loop):
        for K, beta in ((1, 0.5), (3, 0.5), (4, 0.2)):
            with looped(model, WINDOW, 'rk', K, beta):
                want = model(t)
            assert torch.allclose(looped_by_hand(model, t, *WINDOW, K, beta), want, atol=1e-5)


def test_the_window_counts_positions_of_the_order(tiny):
    loop = tiny(n_layer=3, order=[0, 1, 2] * 3)
    free, t = untie(loop, loop.order), tokens()
    for mode in ('block', 'layer'):
        with looped(loop, (2, 5), mode=mode), looped(free, (2, 5), mode=mode):
            assert torch.equal(loop(t), free(t))
            assert torch.equal(in_pieces(loop, t, [5, 1, 6])[0], in_pieces(free, t, [5, 1, 6])[0])
    by_hand = loop(t, order=[0, 1, 2, 0, 1, 1, 2, 0, 1, 2])
    # layer 1 stands at 1, 4 and 7: only the second is looped
    with looped(loop, (4, 4), 'naive', 2):
        assert torch.equal(loop(t), by_hand)


@pytest.mark.parametrize('method', SOLVERS)
@pytest.mark.parametrize('mode', ('block', 'layer'))
def test_wrapped_logits_are_the_solver_applied_by_hand(six, method, mode):
    t = tokens()
    x = six.run(six.embed(t), [0, 1])
    for block in [[2, 3, 4]] if mode == 'block' else [[2], [3], [4]]:
        x = SOLVERS[method](lambda y: six.run(y, block, depth=block[0]), x, 2)
    by_hand = six.head(six.norm(six.run(x, [5], depth=5)))
    if method == LAYERWISE and mode == 'block':
        with pytest.raises(ValueError, match="mode='block' is not one of layer"):
            patch(six, WINDOW, method, 2, mode=mode)
        mode, by_hand = 'layer', None
    with looped(six, WINDOW, method, 2, mode=mode):
        assert by_hand is None or torch.equal(six(t), by_hand)
        named = six(t)
    if method == LAYERWISE:
        with looped(six, WINDOW, method, 2):        # it goes layer by layer by itself
            assert torch.equal(six(t), named)


def test_a_wrapped_window_ends_at_its_time(six):
    t = tokens()
    window = lambda y: six.run(y, [2, 3, 4], depth=2)
    for method in ('euler', 'rk', 'midpoint'):
        x = SOLVERS[method](window, six.run(six.embed(t), [0, 1]), 4, T=2)
        with looped(six, WINDOW, method, 4, T=2):
            looped_logits = six(t)
        assert torch.equal(looped_logits, six.head(six.norm(six.run(x, [5], depth=5))))
    for method in ('naive', 'heavy_ball', 'norm_stab'):
        with pytest.raises(ValueError, match=f"'{method}' has no option 'T'"):
            patch(six, WINDOW, method, T=2)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_off_values_are_the_unlooped_model(six, dtype):
    model, t = six.to(dtype), tokens()
    plain, cached = model(t), in_pieces(model, t, [6, 1, 1, 4])
    for K, beta in ((1, 0.3), (3, 1.0)):
        for cache in ('first', 'exact'):
            with looped(model, WINDOW, 'rk', K, beta, cache=cache):
                assert torch.equal(model(t), plain)
                logits, kept = in_pieces(model, t, [6, 1, 1, 4])
                assert torch.equal(logits, cached[0])
                assert all(torch.equal(a.keys, b.keys) for a, b in zip(kept.layers,
                        cached[1].layers))


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


@pytest.mark.parametrize('mode', ('block', 'layer'))
def test_copies_and_pickles_have_their_own_layers(six, mode):
    t = tokens()
    plain = six(t)
    handle = patch(six, WINDOW, mode=mode)
    other, loaded = copy.deepcopy(six), pickle.loads(pickle.dumps(six))
    wrapped = six(t)
    assert torch.equal(other(t), wrapped) and torch.equal(loaded(t), wrapped)
    other.layers[3].mlp.down.weight.zero_()
    assert not torch.equal(other(t), wrapped) and torch.equal(six(t), wrapped)
    unpatch(loaded)
    assert torch.equal(loaded(t), plain) and torch.equal(six(t), wrapped)
    handle.unpatch()
    assert torch.equal(six(t), plain)


# ---------------------------------------------------------------------------------------- the cache

@pytest.mark.parametrize('mode', ('block', 'layer'))
@pytest.mark.parametrize('method, K', [('rk', 3), ('naive', 2), ('heun', 1)])
def test_continuing_is_recomputing(six, mode, method, K):
    t = tokens()
    with looped(six, WINDOW, method, K, cache='exact', mode=mode):
        whole = six(t)
        for pieces in ([7, 1, 1, 2, 1], [1] * 12, [11, 1]):
            assert torch.allclose(in_pieces(six, t, pieces)[0], whole, atol=2e-5)


def test_first_token_by_token_against_a_slow_form(six):
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
    x2 = lambda n, rows=None: six.run(six.embed(t[:, :n]), [0, 1])
    plain = in_pieces(six, t, [7])[1]
    with looped(six, WINDOW, 'rk', 3, cache=how, mode=mode):
        cache, at = KVCache(6), 0
        for n in (7, 1, 1, 3):
            six(t[:, at:at + n], cache=cache)
            at += n
            assert [slot.get_seq_length() for slot in cache.layers] == [at] * (6 + 6
                    * (how == 'exact'))
        prompt = in_pieces(six, t, [7])[1]
    alike = [torch.equal(a.keys, b.keys) for a, b in zip(prompt.layers, plain.layers)]
    first = how in ('first', 'natural', 'none', 'exact')
    assert alike[:2] == [True, True] and not alike[5]
    assert alike[2] == first
    if mode == 'layer':     # 'first' is the unlooped chain; else later layers got other input
        assert alike[3:5] == [how == 'first'] * 2
    if mode == 'block':
        assert alike[2:5] == [first] * 3
        if how == 'last':                           # the keys of a plain pass that starts from x_K
            end = SOLVERS['rk'](lambda y: six.run(y, [2, 3, 4], depth=2), x2(7), 3)
            slots = KVCache(6)
            six.run(end, [2, 3, 4], depth=2, cache=slots)
            assert all(torch.equal(slots.layers[d].keys, prompt.layers[d].keys) for d in (2, 3, 4))
        if how == 'last_eval':                      # ... and from the point of the last evaluation
            points = []
            SOLVERS['rk'](lambda y: points.append(y) or six.run(y, [2, 3, 4], depth=2), x2(7), 3)
            slots = KVCache(6)
            six.run(points[-1], [2, 3, 4], depth=2, cache=slots)
            assert all(torch.equal(slots.layers[d].keys, prompt.layers[d].keys) for d in (2, 3, 4))


def test_none_shows_the_window_no_past(six):
    t = tokens()
    with looped(six, WINDOW, 'rk', 3, cache='none'):
        _, cache = in_pieces(six, t, [7])
        changed = copy.deepcopy(cache)
        for d in (2, 3, 4):
            changed.layers[d].keys = torch.randn_like(changed.layers[d].keys)
        assert torch.equal(six(t[:, 7:8], cache=cache), six(t[:, 7:8], cache=changed))


@pytest.mark.parametrize('mode', ('block', 'layer'))
def test_decoding_with_fewer_loops(six, mode):
    t = tokens()

    def steps(decode):
        ran, cache = [], KVCache(6)
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
    # ... and the count begins anew behind them
    assert steps(0) == steps('bypass') and steps(2) == [3, 3, 3, 1, 3, 3, 3]
    if mode == 'layer':         # the unlooped chain takes one more pass, where there is a cache
        with looped(six, WINDOW, 'rk', 3, mode=mode):
            ran = []
            hook = six.layers[3].mlp.register_forward_hook(lambda *_: ran.append(1))
            six(t, cache=KVCache(6))
            assert len(ran) == 4
            six(t)
            assert len(ran) == 7
        hook.remove()


def test_first_n_counts_on_each_text_by_itself(six):
    a, b = KVCache(6), KVCache(6)
    with looped(six, WINDOW, 'naive', 2, decode=1):
        six(tokens(5), cache=a)
        six(tokens(1), cache=b)                             # a prompt of one token is a prompt
        ran = []
        six.layers[3].mlp.register_forward_hook(lambda *_: ran.append(1))
        six(tokens(1), cache=a), six(tokens(1), cache=b)
        assert len(ran) == 4
        six(tokens(1), cache=a), six(tokens(1), cache=b)
        assert len(ran) == 6


def test_generation_past_the_context(six):
    with looped(six, WINDOW, cache='exact'):
        out = six.generate(tokens(20, 1), 20, temperature=0)
        want = tokens(20, 1)
        for _ in range(20):
            want = torch.cat((want, six(want[:, -32:])[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(out, want)


def test_gradients_and_the_tap_go_through(six):
    with torch.enable_grad(), looped(six, WINDOW):
        six(tokens(), tokens(seed=1)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in six.layers[3].parameters())
    seen = []
    with looped(six, WINDOW, 'naive', 2):
        six(tokens(), tap=lambda depth, part, x, update: seen.append((depth, part)) or update)
    assert [d for d, part in seen if part == 'mlp'] == [0, 1, 2, 3, 4, 2, 3, 4, 5]


def test_a_forward_leaves_nothing_alive(six):
    """No cache, mask or stream is held until the next forward; and when a layer fails, the cache
    has its own slots again."""
    def fail(*_):
        raise RuntimeError('stop')
    t = tokens()
    for mode in ('block', 'layer'):
        for broken in (False, True):
            with looped(six, WINDOW, cache='exact', mode=mode):
                cache = KVCache(6)
                held = weakref.ref(cache)
                hook = six.layers[3].mlp.register_forward_hook(fail) if broken else None
                with pytest.raises(RuntimeError,
                                   match='stop') if broken else contextlib.nullcontext():
                    six(t, cache=cache)
                if broken:
                    hook.remove()
                    assert all(type(slot) is KVCache.Slot and 'update' not in vars(slot)
                               for slot in cache.layers)
                else:
                    del cache
                    assert held() is None
                assert torch.isfinite(six(t)).all()


def test_threads_do_not_share_a_forward(six):
    from concurrent.futures import ThreadPoolExecutor
    rows = [tokens(seed=seed) for seed in range(4)]

    def run(i):
        with torch.no_grad():
            return all(torch.equal(six(rows[i]), want[i]) for _ in range(20))
    with looped(six, WINDOW, cache='exact'):
        want = [six(row) for row in rows]
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(run, range(4)))


def test_an_exact_cache_keeps_to_its_settings(six):
    t, cache = tokens(), KVCache(6)
    with looped(six, WINDOW, K=3, cache='exact'):
        six(t[:, :5], cache=cache)
    for window, K in (((1, 3), 3), (WINDOW, 2)):
        with looped(six, window, K=K, cache='exact'), pytest.raises(ValueError,
                match="cache='exact': this KV cache was filled with another"):
            six(t[:, 5:6], cache=cache)
    six(t[:, 5:6], cache=cache)                                     # a token without a loop
    with looped(six, WINDOW, K=3, cache='exact'), pytest.raises(ValueError,
            match='partly without a loop'):
        six(t[:, 6:7], cache=cache)


# ----------------------------------------------------------------------------- windows and refusals

@pytest.mark.parametrize('window, depth, expected', [
    (None, 28, (12, 15)), (None, 36, (15, 18)), (None, 48, (22, 25)), ('mid6', 36, (15, 20)),
    (None, 35, (15, 18)), ('mid4', 32, (14, 17)), (None, 8, (2, 5)), (None, 3, (0, 2)),
    ('mid3', 28, (13, 15)), ('mid6', 28, (11, 16)), ('mid1', 28, (14, 14)),
    ('mid12', 28, (8, 19)), ((3, 5), 6, (3, 5)), ([0, 5], 6, (0, 5)), ('3-5', 6, (3, 5)),
    ('0-0', 6, (0, 0)), (0.5, 8, (2, 5)), (0.0, 8, (0, 3)), (1.0, 8, (4, 7)),
    (0.6, 28, (15, 18)), (0.5, 36, (16, 19)), ('0.6', 28, (15, 18))])
def test_windows(window, depth, expected):
    assert pick_window(window, depth) == expected


@pytest.mark.parametrize('window', [(3, 6), (4, 3), (-1, 2), '3-6', 'mid7', 'mid0', 'middle', 1.5,
                                    4, (1, 2, 3), (0.5, 2), '-3', '3-'])
def test_windows_that_cannot_be(six, window):
    with pytest.raises(ValueError, match="window=.*within 0 to 5.*'mid4'"):
        patch(six, window)
    assert not any('forward' in vars(layer) for layer in six.layers)


class Stack(nn.Module):
    "Something with layers that are not a decoder's."

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))


@pytest.mark.parametrize('arguments, message', [
    (dict(method='rkk'), "method='rkk' is not one of .*; did you mean 'rk'"),
    (dict(beta=1.5), 'beta=1.5'),
    (dict(K=0), 'K=0'), (dict(method='aitken', K=3), 'even'),
    (dict(cache='frist'), "cache='frist' is not one of .*; did you mean 'first'"),
    (dict(mode='blocks'), "mode='blocks'.*block, layer"),
    (dict(pin='mix'), "pin='mix'.*None, mixture, indices"), (dict(pin='mixture'), 'no router'),
    (dict(decode='ful'), "decode='ful': 'full', 'bypass'"),
    (dict(decode=-1), 'decode=-1'), (dict(decode=True), 'decode=True'),
    (dict(cache='exact', method='euler', tol=0.1), 'halting tolerance'),
    (dict(cache='exact', decode='bypass'), "decode='full'"), (dict(gamma=1), "no option 'gamma'")])
def test_what_is_refused_before_anything_is_touched(six, arguments, message):
    before = {name: dict(vars(m)) for name, m in six.named_modules()}
    with pytest.raises(ValueError, match=message) as error:
        patch(six, WINDOW, **arguments)
    assert '\n' not in str(error.value)
    assert {name: dict(vars(m)) for name, m in six.named_modules()} == before


def test_models_that_cannot_be_looped(six, tiny):
    from nanodepth.retrofit import surgery
    for model in (nn.Linear(2, 2), Stack(), surgery(six, '2-2-2')):
        with pytest.raises(ValueError, match='no list of layers|recurrent'):
            patch(model, WINDOW)
    patch(six, (0, 1))
    with pytest.raises(ValueError, match='looped already: unpatch it first'):
        patch(six, WINDOW)


def test_a_window_is_entered_at_its_first_layer(six):
    t = tokens()
    plain, prefix = six(t), six(t, order=[0, 1, 2, 3])
    x = six.run(six.embed(t), [0, 1, 2])
    with looped(six, WINDOW):
        with pytest.raises(ValueError, match='the window 2-4 is entered at 3'):
            six.run(x, [3, 4, 5], depth=3)
        # it ends within the window: nothing to loop
        assert torch.equal(six(t, order=[0, 1, 2, 3]), prefix)
        with pytest.raises(ValueError, match='position 4 of the looped window holds another layer'):
            six(t, order=[0, 1, 2, 3, 2, 3, 4, 5])
        assert not torch.equal(six(t), plain)
