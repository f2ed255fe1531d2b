"""Windows and orders: in ours, in the package's form, and in any family of transformers.

Promised: an order of Spans is those loops written out; a window is its solver by hand, and an order
its layers by hand; continuing a text by an exact cache is recomputing it; what each cache holds; a
model is afterwards as it was; what cannot be is a line. `make test` runs six families that differ
in what they do, `make families` (FAMILIES=all) all of them in both forms of attention.
"""
import contextlib
import copy
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from conftest import restored, Times
from families import ALIBI, EAGER_ONLY, FAMILIES, MIXTURES, tiny as family
from test_probe import no_gradients
from test_solvers import by_stages

from nanodepth import wrapper
from nanodepth.common.errors import Refused
from nanodepth.grow import untie
from nanodepth.loop import running
from nanodepth.common.whose import is_ours
from nanodepth.looping import caches
from nanodepth.looping.layers import layers_of, pick_window
from nanodepth.looping.orders import in_order, looped, order_of
from nanodepth.model import Span, seen, spans_in, unrolled
from nanodepth.probe import depth_score
from nanodepth.retrofit import Core, core_of, new_adapter, surgery
from nanodepth.wrapper import Window, looped_by_hand, naive, rk

transformers.logging.set_verbosity_error()

# an ordinary one, one with names of its own, a hybrid of two kinds of attention, a mixture of
# experts with shared ones, one whose layers return tuples and that knows distances by a bias
COVERING = 'llama', 'gpt2', 'qwen2_hybrid', 'gemma3_text', 'deepseek_v3', 'bloom'
ALL = bool(os.environ.get('FAMILIES'))
FORMS = [(name, form) for name in (FAMILIES if ALL else COVERING)
         for form in (['eager'] if name in EAGER_ONLY else ['sdpa', 'eager'] if ALL else ['sdpa'])]
SOME = [each for each in FORMS if ALL or each[0] not in ('bloom', 'qwen2_hybrid')]
EXPERTS = MIXTURES if ALL else ('qwen2_moe', 'gpt_oss')
WINDOW = (2, 4)
both = pytest.mark.parametrize('looped', [wrapper.looped, looped], ids=['wrapper', 'package'])
families = pytest.mark.parametrize('name, form', FORMS)
some_families = pytest.mark.parametrize('name, form', SOME)
modes = pytest.mark.parametrize('mode', ('block', 'layer'))


@pytest.fixture
def six(tiny):
    return tiny(n_layer=6, n_kv_head=2)


@pytest.fixture(params=[False, True], ids=['plain', 'ln_scaling'])
def listed(tiny, request):
    "Six layers whose order is a list of anything, also where the depth decides what a layer does."
    model = tiny(n_layer=6, ln_scaling=request.param)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return model


def tokens(n=12, batch=2, seed=0):
    return torch.randint(2, 50, (batch, n), generator=torch.Generator().manual_seed(seed))


def in_pieces(model, t, pieces, cache=None, **inputs):
    "Logits with a cache, fed piece by piece, and the cache."
    cache, out, at = {} if is_ours(model) else cache, [], 0
    for n in pieces:
        if is_ours(model):
            out.append(model(t[:, at:at + n], cache=cache))
        else:
            given = {key: value[:, :at + n] if key == 'attention_mask' else value[:, at:at + n]
                     for key, value in inputs.items()}
            answer = model(t[:, at:at + n], past_key_values=cache, use_cache=True, **given)
            cache = answer.past_key_values
            out.append(answer.logits)
        at += n
    return torch.cat(out, dim=1), cache


def slots_of(cache):
    "(keys, values) of every depth of ours, and of the later evaluations with cache='exact'."
    slots = []
    for key, slot in cache.items():
        if key != 'layers':             # the order that filled it
            slots += slots_of(slot) if isinstance(slot, dict) else [slot]
    return slots


def half_steps(g, x):
    "rk with K = 2 and beta = 0.5, written out."
    plain = g(x)
    x = torch.lerp(x, plain, 0.5)
    x = torch.lerp(x, g(x), 0.5)
    return torch.lerp(x, plain, 0.5)


# ------------------------------------------------------------------------- an order is a list

@pytest.mark.parametrize('order, plain, unlooped', [
    ([0, Span([1, Span([2, 1])]), 3, Span([]), 5], [0, 1, 2, 1, 3, 5], [0, 1, 2, 3, 4, 5]),
    ([0, Times([1, Times([2]), 3]), 2, 5], [0, 1, 2, 2, 3, 1, 2, 2, 3, 2, 5],
     [0, 1, 2, 2, 3, 1, 2, 2, 3, 4, 5])])
def test_a_span_is_the_order_that_it_unrolls_to(listed, order, plain, unlooped):
    "And layers of a model's own are each item once."
    t = tokens()
    assert unrolled(order) == plain
    assert torch.equal(listed(t, order=order), listed(t, order=plain))
    assert listed.flops_per_token(order) == listed.flops_per_token(plain)
    found = []
    for each in (order, plain):
        with running(listed, each):
            found.append((in_pieces(listed, t, [5, 1, 6]), depth_score(listed, t)[1]))
    ((logits, cache), scores), ((plain_logits, plain_cache), plain_scores) = found
    assert torch.equal(logits, plain_logits) and torch.equal(scores, plain_scores)
    assert [*cache] == ['layers', *range(len(plain))] and seen(cache, 1) == 12
    for d in range(len(plain)):
        assert all(map(torch.equal, cache[d], plain_cache[d]))
    grown = untie(listed, order)
    assert unrolled(grown.order) == unlooped and len(grown.layers) == max(unlooped) + 1
    assert torch.equal(grown(t), listed(t, order=plain))


def by_hand(model, x, items, depth=0):
    "The stream after items, of which each Core and each Window (rk with K = 2) is written out."
    for item in items:
        def once(x, depth=depth, item=item):
            return by_hand(model, x, item.items, depth)
        if isinstance(item, int):
            x = model.run(x, [item], depth)
        elif isinstance(item, Core):
            e, x = x, item.first_state(x, 0)
            for i in range(item.r):
                both = torch.cat((x, e), -1)
                x = once(model.adapter(both), depth + i * len(unrolled(item.items)))
        elif item.solver is rk:
            x = half_steps(once, x)
        else:
            for _ in range(item.K):
                x = once(x)
        depth += len(unrolled([item]))
    return x


@pytest.mark.parametrize('order, depth, r', [
    ([0, 1, 2, Window([3, 4], rk, K=2), 5], 6, None), ([0, 1, Core([2, 3], r=3), 4, 5], 10, 3),
    ([0, 1, Core([2, Window([3], rk, K=2)], r=3), 4, 5], 10, 3),
    ([0, Window([1, Core([2, 3], r=2)], rk, K=2), 4, 5], 8, 2),
    ([0, Window([1, Window([2], naive, K=2), 3], rk, K=2), 4, 5], 6, None),
    ([0, Window([1, Window([3], rk, K=2)], naive, K=3), 4, 5], 5, None)], ids=str)
def test_spans_within_spans_are_those_written_out_and_continue_a_text(listed, order, depth, r):
    "By caches that are exact."
    t, listed.adapter, listed.order = tokens(), new_adapter(32, 'linear'), copy.deepcopy(order)
    x = by_hand(listed, listed.embed(t), order)
    assert torch.equal(listed.head(listed.norm(x)), listed(t)) and len(unrolled(order)) == depth
    assert getattr(core_of(listed), 'r', None) == r
    for span in spans_in(listed.order):
        span.keeps = 'exact'
    torch.testing.assert_close(in_pieces(listed, t, [5, 1, 4, 1, 1])[0], listed(t), rtol=1e-4,
                               atol=1e-4)


def test_an_exact_cache_within_one_that_keeps_the_first(listed):
    "With K = 1 that keeps what all keep; each evaluation begins with what was there before."
    inner = Window([3], rk, K=2, cache='exact')
    t, listed.order = tokens(), [0, Window([1, inner], naive, K=2), 4, 5]
    in_pieces(listed, t, [5, 1, 6])
    listed.order[1].K = 1
    torch.testing.assert_close(in_pieces(listed, t, [5, 1, 4, 1, 1])[0], listed(t), rtol=1e-4,
                               atol=1e-4)
    with looped(listed, (1, 3)), pytest.raises(Refused, match="one has cache='exact', so to gen"):
        listed(t, cache={})


# ----------------------------------------------------------------------------- a window in ours

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


@both
def test_a_with_leaves_no_trace(six, looped):
    t, plain = tokens(), six(tokens())
    with restored(six), pytest.raises(ZeroDivisionError), looped(six, WINDOW):
        assert not torch.equal(six(t), plain)
        1 / 0
    for window in ((3, 6), (4, 3), (-1, 2)):
        with restored(six), pytest.raises(Refused, match='window'), looped(six, window):
            pass


def test_withs_of_a_notebook_end_in_any_order(six):
    t, plain, given = tokens(), six(tokens()), torch.compile(six)
    with looped(six, WINDOW, K=2):
        want = six(t)
    with restored(six):
        one, two = (contextlib.ExitStack() for _ in range(2))
        for stack, model, K in ((one, given, 3), (two, six, 2)):    # a cell that is run twice
            stack.enter_context(in_order(model, np.arange(6)))
            stack.enter_context(looped(model, WINDOW, K=K))
        one.close()
        assert torch.equal(six(t), want)
        copied = copy.deepcopy(six)         # it knows of no with, and what it is told stays
        copied.order = [0, 1]
        with looped(copied, (0, 1)):
            pass
        two.close()
        assert torch.equal(six(t), plain) and copied.order == [0, 1]


def test_windows_that_are_made_before_they_are_entered(six):
    one, two = looped(six, (0, 0)), looped(six, (2, 3))
    with one, two:
        assert [isinstance(item, Window) for item in six.order] == [1, 0, 1, 0, 0]


def test_layers_that_were_exchanged_by_hand():
    "In a cache they would write into the slots of a window's places."
    model, t = family('llama'), tokens()
    layers = model.model.layers
    layers[1], layers[3] = layers[3], layers[1]
    with pytest.raises(Refused, match='layer 1 says that it is number 3'), looped(model):
        pass
    for d, layer in enumerate(layers):
        layer.self_attn.layer_idx = d
    with looped(model, (2, 3), naive, K=2, cache='exact'):
        whole = model(t, use_cache=False).logits
        assert torch.allclose(in_pieces(model, t, [7, 5])[0], whole, atol=1e-4)


def test_another_model_of_the_same_config_stays_as_it_is():
    model = family('gemma3_text')
    other = type(model)(model.config).eval()
    t = tokens()
    plain = other(t).logits
    for order in ([0, 1, 4, 5], [0, 2, 1, 3, 4, 5]):
        with in_order(model, order):
            assert torch.equal(other(t).logits, plain)
        assert model.config is other.config is model.model.layers[0].self_attn.config
    plain = model(t).logits
    with in_order(model, [0, 1]):
        want = model(t).logits
    with in_order(model, [0, 1, 4, 5]):
        model.config.num_hidden_layers = 2          # as assisted generation does, and back
        assert torch.equal(model(t).logits, want)
        model.config.num_hidden_layers = 4
    assert model.config.num_hidden_layers == 6 and torch.equal(model(t).logits, plain)


def test_a_cache_of_another_order_is_refused():
    model, t = family('llama'), tokens()
    past = model(t[:, :7]).past_key_values
    with in_order(model, [0, 2, 1, 3, 4, 5]):
        want = model(t).logits[:, 7:]
        own = transformers.DynamicCache(config=model.config)
        model(t[:, :7], past_key_values=own, return_dict=False)
        assert torch.allclose(model(t[:, 7:], past_key_values=own, return_dict=False)[0], want,
                              atol=1e-5)
        with pytest.raises(Refused, match='filled in another order'):
            model(t[:, 7:], past_key_values=past)
        past = model(t[:, :7]).past_key_values
        assert torch.allclose(model(t[:, 7:], past_key_values=past).logits, want, atol=1e-5)
    empty = transformers.DynamicCache(config=model.config)
    with in_order(model, [0, 1, 2, 3, 2, 3, 4, 5]), pytest.raises(Refused, match='made for one'):
        model(t, past_key_values=empty)
    model = family('gemma3_text')
    with in_order(model.model, [1, 3, 5]):      # whose head makes caches by a config of its own
        with pytest.raises(Refused, match='made for one'):
            model.generate(t, max_new_tokens=2)
        want = model.generate(t, max_new_tokens=4, use_cache=False)
    with in_order(model, [1, 3, 5]):
        assert torch.equal(model.generate(t, max_new_tokens=4), want)


def test_a_cache_that_counts_its_own_layers():
    model = family('minimax', layer_types=['linear_attention', 'full_attention'] * 3)
    with looped(model, (1, 1), 'rk', K=3):
        assert torch.equal(model(tokens()).logits, model(tokens(), use_cache=False).logits)


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
        result[:, at:at + 1] = rk(g, x[:, at:at + 1], K)
    by_hand = six.head(six.norm(six.run(result, [5], depth=5)))
    with looped(six, WINDOW, 'rk', K, cache='first'):
        assert torch.allclose(in_pieces(six, t, [1] * 8)[0], by_hand, atol=2e-5)


@modes
@pytest.mark.parametrize('how', caches.CACHES)
def test_what_each_cache_holds(six, how, mode):
    "Lengths after every step, and whose keys they are; an exact one continues as it is recomputed."
    t, first = tokens(), how in ('first', 'natural', 'none', 'exact')
    plain = in_pieces(six, t, [7])[1]
    with looped(six, WINDOW, 'rk', 3, cache=how, mode=mode):
        cache, at, logits = {}, 0, []
        for n in (7, 1, 1, 3):
            logits.append(six(t[:, at:at + n], cache=cache))
            at += n
            assert [k.shape[2] for k, _ in slots_of(cache)] == [at] * (12 if how == 'exact' else 6)
        assert torch.allclose(torch.cat(logits, 1), six(t), atol=2e-5) == (how == 'exact')
        prompt = in_pieces(six, t, [7])[1]
    alike = [torch.equal(prompt[d][0], plain[d][0]) for d in range(6)]
    assert alike[:3] == [True, True, first]
    assert not alike[5]
    if mode == 'layer':     # 'first' is the unlooped chain; else later layers got other input
        assert alike[3:5] == [how == 'first'] * 2
        return
    assert alike[3:5] == [first] * 2
    if not first:           # a plain pass from x_K, or from the last evaluation's point
        points, slots, x = [], {}, six.run(six.embed(t[:, :7]), [0, 1])
        end = rk(lambda y: points.append(y) or six.run(y, [2, 3, 4], depth=2), x, 3)
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


@modes
def test_bypass_loops_only_while_a_prompt_is_read(six, mode):
    t, ran = tokens(), []
    six.layers[3].mlp.register_forward_hook(lambda *_: ran.append(1))
    # several new tokens are read, not decoded
    for decode, wanted in (('full', [3] * 7), ('bypass', [3, 1, 1, 1, 3, 1, 1])):
        counts, cache = [], {}
        with looped(six, WINDOW, 'rk', 3, decode=decode, mode=mode, cache='natural'):
            for piece in t.split([5, 1, 1, 1, 2, 1, 1], dim=1):
                ran.clear()
                six(piece, cache=cache)
                counts.append(len(ran))
        assert counts == wanted


@both
def test_gradients_and_the_tap_go_through(six, looped):
    with torch.enable_grad(), looped(six, WINDOW):
        six(tokens(), tokens(seed=1)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in six.layers[3].parameters())
    tapped = []
    with looped(six, WINDOW, 'naive', 2):
        six(tokens(), tap=lambda depth, part, x, update: tapped.append((depth, part)) or update)
    assert [d for d, part in tapped if part == 'mlp'] == [0, 1, 2, 3, 4, 2, 3, 4, 5]


@both
def test_an_exact_cache_keeps_to_its_settings(six, looped):
    "Its keys and values are of the evaluations of one solver, with its options."
    t, cache, unlooped = tokens(), {}, {}
    with looped(six, WINDOW, 'rk', 3, cache='exact'):
        six(t[:, :5], cache=cache)
    six(t[:, :5], cache=unlooped)
    for kept, window, solver, K, more in (
            (cache, (1, 3), 'rk', 3, {}), (cache, WINDOW, 'rk', 2, {}),
            (cache, WINDOW, 'naive', 3, {}), (cache, WINDOW, 'rk', 3, dict(beta=0.1)),
            (unlooped, WINDOW, 'rk', 3, {})):
        with looped(six, window, solver, K, cache='exact', **more), pytest.raises(
                Refused, match='another window'):
            six(t[:, 5:6], cache=copy.deepcopy(kept))


@pytest.mark.parametrize('window', [wrapper.Window, caches.Window])
def test_a_solver_is_any_function_and_known_by_its_name_from_then_on(six, window):
    "How often it evaluates is counted."
    def twice_and_half(g, x, K, share=0.5):
        for _ in range(2 * K):
            x = torch.lerp(x, g(x), share)
        return x
    layer, t = six.flops_per_token([0]) - six.flops_per_token([]), tokens()
    x = twice_and_half(lambda x: six.run(x, [2, 3, 4], depth=2), six.run(six.embed(t), [0, 1]), 2,
                       0.25)
    for solver in (twice_and_half, 'twice_and_half'):
        six.order = [0, 1, window([2, 3, 4], solver, K=2, share=0.25), 5]
        assert str(six.order[2]) == (
            "Window([2, 3, 4], solver='twice_and_half', K=2, cache='first', share=0.25)")
        assert window([2], **six.order[2].settings()).solver is twice_and_half
        assert six.order[2].evaluations() == 4 and unrolled(six.order) == [0, 1, 2, 3, 4, 5]
        assert six.flops_per_token() == six.flops_per_token([]) + (3 + 4 * 3) * layer
        assert torch.equal(six(t), six.head(six.norm(six.run(x, [5], depth=5))))


def test_the_default_cache_and_mode_go_by_the_solver():
    block, layer = caches.Window([2]), caches.Window([2], 'layer_anchored_frozen')
    assert (block.mode, block.keeps) == ('block', 'first')
    assert (layer.mode, layer.keeps) == ('layer', 'natural')


@pytest.mark.parametrize('window, depth, expected', [
    (None, 28, (12, 15)), (None, 36, (15, 18)), (None, 48, (22, 25)), ('mid6', 36, (15, 20)),
    ('mid4', 32, (14, 17)), (None, 8, (2, 5)), (None, 3, (0, 2)), ('mid3', 28, (13, 15)),
    ('mid1', 28, (14, 14)), ((3, 5), 6, (3, 5)), ('0-0', 6, (0, 0)), (0.5, 8, (2, 5)),
    (0.0, 8, (0, 3)), (1.0, 8, (4, 7)), (0.6, 28, (15, 18)), ('0.6', 28, (15, 18))])
def test_windows(window, depth, expected):
    assert pick_window(window, depth) == expected


# ---------------------------------------------------- a window and an order in any family, and ours

def written_out(model, t):
    """(the stream that enters the first layer, run, logits): run(x, numbers) calls layers by hand,
    each as the model calls it, and logits(x) are those behind a last stream."""
    if is_ours(model):
        return (model.embed(t), lambda x, ds: model.run(x, ds, ds[0]),
                lambda x: model.head(model.norm(x)))
    layers, calls = layers_of(model), []
    hooks = [layer.register_forward_pre_hook(lambda m, args, kwargs: calls.append((args, kwargs)),
                                             with_kwargs=True) for layer in layers]
    model(t, use_cache=False)
    for hook in hooks:
        hook.remove()

    def run(x, ds):
        for d in ds:
            x = layers[d](x, *calls[d][0][1:], **calls[d][1])
            x = x[0] if isinstance(x, tuple) else x
        return x

    def logits(x):
        hook = layers[5].register_forward_hook(
            lambda module, args, output: (x, *output[1:]) if isinstance(output, tuple) else x)
        found = logits_of(model, t)
        hook.remove()
        return found
    return calls[0][0][0], run, logits


def logits_of(model, t, **how):
    return model(t) if is_ours(model) else model(t, use_cache=False, **how).logits


@modes
@pytest.mark.parametrize('name, form', [('ours', ''), *FORMS])
def test_a_window_is_its_solver_by_hand_and_leaves_no_trace(six, name, form, mode):
    model, t = six if name == 'ours' else family(name, form), tokens()
    x, run, logits = written_out(model, t)
    x = run(x, [0, 1])
    for ds in [[2, 3, 4]] if mode == 'block' else [[2], [3], [4]]:
        x = by_stages(lambda y: run(y, ds), x, 3, 0.5)
    want, plain = logits(run(x, [5])), logits_of(model, t)
    weights = [*model.state_dict()]
    assert (want - plain).abs().max() > 0.01
    with restored(model), looped(model, WINDOW, 'rk', 3, beta=0.5, mode=mode):
        assert torch.allclose(logits_of(model, t), want, atol=2e-4)
        assert torch.allclose(in_pieces(model, t, [12])[0], want, atol=2e-4)
        assert [*model.state_dict()] == weights             # a looped model is saved as ever
        for each in ('output_hidden_states', 'output_attentions') if name != 'ours' else ():
            with pytest.raises(Refused, match=f'{each}: a looped layer has one for each'):
                copy.deepcopy(model)(t, **{each: True})
        if name == 'llama':             # asked for by its config, and by nobody
            asking = copy.deepcopy(model)
            asking.config.output_hidden_states = True
            asking(t, output_hidden_states=False)
            with pytest.raises(Refused, match='output_hidden_states: a looped layer'):
                asking(t)
            for each in (model, model.model):
                with pytest.raises(Refused, match='in another order already'), in_order(each, [0]):
                    pass
    assert torch.equal(logits_of(model, t), plain)


@families
def test_an_order_is_a_run_of_its_layers_by_hand(name, form):
    "Layers are exchanged, left out and repeated, or looped: logits, cached text, and no trace."
    model, t = family(name, form), tokens()
    x, run, logits = written_out(model, t)
    looping = half_steps(lambda x: run(x, [2, 3]), run(x, [0, 1, 2, 1]))
    show = lambda: model(t, use_cache=False, output_hidden_states=True).hidden_states
    plain = show()              # now transformers has hooked the layers, for good
    for order, by_hand in (([0, 1, 3, 2, 3, 5], run(x, [0, 1, 3, 2, 3, 5])),
                           ([0, 1, 2, 1, Window([2, 3], rk, K=2), 4, 5], run(looping, [4, 5]))):
        by_hand = logits(by_hand)
        with restored(model), pytest.raises(ZeroDivisionError), in_order(model, order):
            whole = logits_of(model, t)
            assert torch.allclose(whole, by_hand, atol=1e-5)
            if order[4] == 3:
                assert torch.allclose(in_pieces(model, t, [7, 5])[0], whole, atol=1e-4)
                streams = show()[:-1]           # the last one is given after the final norm
            1 / 0
    for n, stream in enumerate(streams):
        assert torch.allclose(stream, run(x, [0, 1, 3, 2, 3, 5][:n]), atol=1e-5)
    assert all(map(torch.equal, show(), plain))


@families
def test_continuing_is_recomputing_and_the_caches_lengths(name, form):
    model, t = family(name, form), tokens()
    plain = in_pieces(model, t, [7, 1, 1, 2, 1])[1]
    for how in caches.CACHES:
        if how == 'none' and name in ALIBI:         # refused
            continue
        with looped(model, WINDOW, cache=how):
            logits, cache = in_pieces(model, t, [7, 1, 1, 2, 1])
            whole = logits_of(model, t)
        assert [slot.get_seq_length() for slot in cache.layers] == [12] * (12 if how == 'exact'
                                                                           else 6)
        assert torch.allclose(logits, whole, atol=2e-4) == (how == 'exact'), how
        unlooped = all(torch.equal(cache.layers[d].keys, plain.layers[d].keys) for d in range(5))
        assert unlooped == (how in ('first', 'natural', 'exact')), how
    with looped(model, WINDOW, K=2, cache='exact'), pytest.raises(Refused, match='another window'):
        in_pieces(model, t, [1], plain)


@some_families
def test_generation_with_the_library(name, form):
    model, t = family(name, form), tokens(7)
    make = lambda **options: model.generate(t, max_new_tokens=6, do_sample=False, pad_token_id=0,
                                            **options)
    plain = make()
    with looped(model, WINDOW, K=1):
        assert torch.equal(make(), plain)
    with looped(model, WINDOW, cache='exact'):
        assert torch.equal(make(), make(use_cache=False))
        if name != 'mpt':       # given a cache, it writes other text without a loop, too
            assert torch.equal(make(past_key_values=transformers.DynamicCache()), make())
        # beams change places in the cache
        assert torch.equal(make(num_beams=3), make(num_beams=3, use_cache=False))


@some_families
@pytest.mark.parametrize('how', ['first', 'none', 'exact'])
def test_left_padding(name, form, how):
    if how == 'none' and name in (*ALIBI, 'gpt2'):
        pytest.skip('refused, or other positions')
    model, t, mask = family(name, form), tokens(), torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    with looped(model, WINDOW, cache=how):
        for pieces in ([12], [7, 1, 1, 2, 1]):
            logits, _ = in_pieces(model, t, pieces, attention_mask=mask, position_ids=places)
            want, _ = in_pieces(model, t[1:, 3:], [pieces[0] - 3, *pieces[1:]])
            assert torch.allclose(logits[1, 3:], want[0], atol=3e-4)


@some_families
def test_static_caches(name, form):
    model, t = family(name, form), tokens()
    if not getattr(model, '_can_compile_fullgraph', False) and name not in ('gpt2', 'llama'):
        pytest.skip(f'transformers has no static cache for {name}')
    static = lambda: transformers.StaticCache(config=model.config, max_cache_len=20)
    for how in ('first', 'natural', 'last', 'last_eval'):
        for mode in ('block', 'layer'):
            with looped(model, WINDOW, cache=how, mode=mode):
                want, growing = in_pieces(model, t, [7, 1, 1, 1, 1, 1])
                got, cache = in_pieces(model, t, [7, 1, 1, 1, 1, 1], static())
            assert torch.allclose(got, want, atol=3e-4)
            assert [int(slot.get_seq_length()) for slot in cache.layers] == [12] * 6
    with looped(model, WINDOW, cache='exact'), pytest.raises(
            ValueError, match="cache='exact' needs a KV cache that grows.*natural, last,"):
        in_pieces(model, t, [7], static())


def experts_used(model, run):
    "[(indices, weights)] of layer 3's experts, one for each evaluation, while `run` runs."
    used = []
    experts = next(m for m in layers_of(model)[3].modules()
                   if type(m).__name__.endswith('Experts'))
    hook = experts.register_forward_pre_hook(lambda m, args,
                                             kwargs: used.append([*args, *kwargs.values()][1:3]),
                                             with_kwargs=True)
    run()
    hook.remove()
    return used


@modes
@pytest.mark.parametrize('name', EXPERTS)
def test_pinned_routing(name, mode):
    "Also of layers whose forward accelerate has replaced."
    model, t = family(name, std=0.5), tokens()
    with contextlib.suppress(ImportError):
        from accelerate import hooks
        hooks.add_hook_to_module(layers_of(model)[3], hooks.AlignDevicesHook('cpu'))
    cache = in_pieces(model, t, [11])[1]
    for run in (lambda: model(t, use_cache=False), lambda: model(t, use_cache=True),
                lambda: model(t[:, 11:], past_key_values=copy.deepcopy(cache), use_cache=True)):
        with looped(model, WINDOW, mode=mode, cache='natural'):
            assert len(experts_used(model, run)) == 3
        with looped(model, WINDOW, mode=mode, cache='natural', pin='mixture'):
            pinned = experts_used(model, run)
            assert all(torch.equal(i, pinned[0][0]) and torch.equal(w, pinned[0][1])
                       for i, w in pinned)
    with looped(model, WINDOW, mode=mode):
        free = experts_used(model, lambda: model(t, use_cache=False))
    assert not torch.equal(free[0][0], free[1][0])
    with looped(model, WINDOW, mode='layer', cache='first', pin='mixture'):
        slots = in_pieces(model, t, [11])[1].layers
    assert all(torch.equal(slots[d].keys, cache.layers[d].keys) for d in range(5))
    with looped(model, WINDOW, mode=mode, pin='mixture'):
        layer = layers_of(model)[4]       # a deepcopy of a router has a hook of another pin
        layer.mlp = copy.deepcopy(layer.mlp)
        with pytest.raises(Refused, match='a router was exchanged'):
            model(t)
    # what would run a layer without the pin: its last one, when it is trained, or compiled before
    layers_of(model)[4].train()
    layers_of(model)[3].mlp.compile(backend='eager')
    for enable in (model.gradient_checkpointing_enable, model.gradient_checkpointing_disable):
        enable()
        with restored(model), looped(model, WINDOW, mode=mode, pin='mixture'), pytest.raises(
                Refused, match='turn one of them off'):
            model(t, use_cache=False)


def test_a_compiled_model_keeps_to_a_pin():
    model, t = family('qwen2_moe', std=0.5), tokens()
    compiled = torch.compile(model, backend='eager')
    for pin in (None, 'mixture', None, 'mixture'):
        with looped(model, WINDOW, pin=pin):
            want = model(t, use_cache=False).logits
        with looped(compiled, WINDOW, pin=pin):
            assert torch.equal(compiled(t, use_cache=False).logits, want)


def test_an_older_instance_forward_is_kept():
    """accelerate's hooks replace a layer's forward: a looped layer calls it, and it comes back.
    (Of a parametrized one copy.copy would make no copy.)"""
    model, t = family('llama'), tokens()
    torch.nn.utils.parametrizations.weight_norm(layers_of(model)[3].mlp.up_proj)
    with looped(model, WINDOW):
        want = model(t).logits
    accelerate = pytest.importorskip('accelerate.hooks')
    accelerate.add_hook_to_module(layers_of(model)[3], accelerate.AlignDevicesHook('cpu'))
    with restored(model), looped(model, WINDOW):
        assert torch.equal(model(t).logits, want)


def test_a_compiled_model_is_its_own_and_a_mode_stays():
    model = family('gpt2', vocab_size=6).train()
    with in_order(torch.compile(model), [0, 1, 2, 1, 3]) as compiled:
        assert order_of(compiled) == [0, 1, 2, 1, 3]
        model.eval()
    assert order_of(compiled) == [*range(6)]
    assert not any(module.training for module in model.modules())


INSIDE = pytest.mark.parametrize('inside, times', [
    (lambda model: looped(model, WINDOW, naive, 2), 2),
    (lambda model: in_order(model, [0, 1, 2, 3, 4, 2, 3, 4, 5]), 2),
    (lambda model: in_order(model, [5, 2, Window([3, 4], naive, 2), Window([3], rk), 0]), 5)])


@INSIDE
def test_a_hook_on_a_layer_is_called_each_time_that_it_runs(inside, times):
    "Whether it was set before or inside, on the layer or on the place where it is found."
    model, t, vector, found = family('llama'), tokens(), torch.randn(32), []
    held = layers_of(model)[3]
    steer = lambda *args: found.append(1) or args[-1] + vector
    hook = held.register_forward_hook(steer)
    with inside(model):
        found.clear()
        want = model(t).logits
        assert len(found) == times
        hook.remove()
        plain = model(t).logits
        place = unrolled(order_of(model)).index(3)
        for each in (held, layers_of(model)[place]):
            hook = each.register_forward_hook(steer)
            assert torch.equal(model(t).logits, want)
            hook.remove()
        assert torch.equal(model(t).logits, plain) and not torch.equal(plain, want)


@INSIDE
def test_what_is_done_to_layers_inside_is_done_to_the_model(inside, times):
    "Whether they were looked up there or before, and whatever their place; so are weights."
    model, t = family('llama'), tokens()
    held = layers_of(model)[3]
    with inside(model):
        plain = model(t).logits
        layers_of(model)[unrolled(order_of(model)).index(3)].mlp = torch.nn.Identity()
        held.eval().self_attn.scaling = 2.0
        changed = model(t).logits
        weights = model.state_dict()
        assert held(torch.zeros(1, 1, 32), position_embeddings=model.model.rotary_emb(
            torch.zeros(1, 1, 32), torch.zeros(1, 1, dtype=torch.long))).shape == (1, 1, 32)
    assert isinstance(held.mlp, torch.nn.Identity) and (changed - plain).abs().max() > 0.01
    assert [*weights] == [*model.state_dict()]
    with inside(model):
        assert torch.equal(model(t).logits, changed)
    another = copy.deepcopy(held)
    with restored(model):
        for change in (lambda layers: layers.append(another),
                       lambda layers: layers.__setitem__(1, another)):
            with inside(model), pytest.raises(Refused, match='the list of layers was changed'):
                change(layers_of(model))
    with inside(model), pytest.raises(Refused, match='the list of layers was changed'):
        model.model.layers = torch.nn.ModuleList([another] * 6)
        model(t)


@pytest.mark.parametrize('order', [[0, 1, 1, 2, 3], [1, 0, 3, 2, 5, 4]])
def test_a_model_that_is_saved_in_another_order_is_itself(order, tmp_path):
    "With what was set inside. Its config counts its own layers again."
    model, t = family('gemma3_text'), tokens()
    want = model(t).logits
    with in_order(model, order):
        model.resize_token_embeddings(120)
        model.set_attn_implementation('eager')
        model.save_pretrained(tmp_path)
        assert model.config.num_hidden_layers == len(order)
    again = type(model).from_pretrained(tmp_path)
    assert torch.allclose(again(t).logits[..., :97], want, atol=1e-5)
    assert again.config.vocab_size == model.config.vocab_size == 120
    assert model.config._attn_implementation == 'eager'


@INSIDE
def test_threads_have_a_window_and_a_cache_each(inside, times):
    model = family('llama')
    make = lambda seed: model.generate(tokens(seed=seed), max_new_tokens=12, do_sample=False)
    with inside(model), ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(make, range(8)), [make(seed) for seed in range(8)]))


def test_checkpoints_are_computed_again_after_the_with():
    model, t, gradients = family('llama').train(), tokens(), []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        with torch.enable_grad(), looped(model, WINDOW):
            loss = model(t, labels=t, use_cache=False).loss
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_copy_that_is_made_inside_stays_looped():
    model, t = family('llama'), tokens()
    plain = model(t).logits
    for inside in (in_order(model, [0, 1, 2, 1, 2, 3, 4, 5]), looped(model, K=2)):
        with inside:
            copied, want = copy.deepcopy(model), model(t).logits
        with torch.enable_grad():
            assert torch.equal(copied(t).logits, want)
        layers_of(copied)[3].mlp.up_proj = torch.nn.Linear(32, 48)
        assert not torch.equal(copied(t).logits, want)
        assert torch.equal(model(t).logits, plain)


def test_hybrid_models_can_be_looped_where_they_attend():
    kinds = ['conv', 'full_attention', 'full_attention', 'full_attention', 'conv', 'conv']
    model = family('lfm2', layer_types=kinds, block_auto_adjust_ff_dim=False)
    t = tokens()
    with looped(model, (1, 3), cache='exact'):
        assert torch.allclose(in_pieces(model, t, [7, 1, 1, 1, 1, 1])[0], logits_of(model, t),
                              atol=2e-4)
    jamba = family('jamba', num_experts=2, mamba_d_state=8, attn_layer_period=2,
                   attn_layer_offset=1)
    with in_order(jamba, [5, 2, 1]):        # (of their kinds its config has no list to set)
        assert torch.allclose(in_pieces(jamba, t, [7, 1, 1, 1, 1, 1])[0], logits_of(jamba, t),
                              atol=2e-4)


# --------------------------------------------------------------------------------- what cannot be

def in_its_own_way(places, more=None):
    "A model that runs these places of its list, and adds something before one of them."
    def forward(input_ids, **_):
        x = inner.embed_tokens(input_ids)
        where = inner.rotary_emb(x, torch.arange(x.shape[1])[None])
        for d in places:
            x = inner.layers[d](x if d != more else x + 1, position_embeddings=where)
        return transformers.modeling_outputs.BaseModelOutputWithPast(inner.norm(x))
    model = family('llama')
    inner = model.model
    inner.forward = forward
    return model


def test_what_is_added_between_the_layers_of_a_window_is_not_dropped():
    "Qwen3-VL adds so what it has seen in an image."
    model, t = in_its_own_way(range(6), more=3), tokens()
    plain = model(t).logits
    with looped(model, WINDOW), pytest.raises(Refused, match='between the layers of this window'):
        model(t)
    with looped(model, (3, 4), K=1):
        assert torch.equal(model(t).logits, plain)


def its_own_list():
    model = family('llama')
    model.model.layers = type('Own', (torch.nn.ModuleList,), {})(model.model.layers)
    return model


def hooked(model):
    "By transformers, for good."
    model(tokens(), output_hidden_states=True)
    return model


def changed(name='llama', **settings):
    model = family(name)
    for key, value in settings.items():
        setattr(model.config, key, value)
    return model


def an_encoder_and_a_decoder():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=50, d_model=16, d_ff=16, num_layers=4, num_heads=2))


# it shortens the stream at the place that its config counted
GEMMA4 = dict(global_head_dim=8, num_kv_shared_layers=0, hidden_size_per_layer_input=0)
LFM2 = dict(layer_types=['conv', 'full_attention'] * 3)
# (a model, or None for ours; how it is looped, or in which order it runs; words of the line)
IMPOSSIBLE = [
    (None, dict(window='1.7'), 'within 0 to 5'), (None, dict(cache='frist'), "mean 'first'"),
    (None, dict(pin='mixture'), 'no router'),
    (None, dict(solver='rk(K=5)'), 'K is given beside it'),
    (None, dict(cache='exact', solver='euler', tol=0.1), 'halting tolerance'),
    (None, dict(cache='last_eval', solver='euler', tol=0.1), 'halting tolerance'),
    (None, dict(cache='none', decode='bypass'), "cache='none' needs .* decode='full'"),
    (None, dict(solver='layer_anchored_frozen', mode='block'), "mode='block' is not one of layer"),
    (None, dict(k=3), 'it takes: K, beta, T'), (None, dict(K=2.5), 'not of its kind: .*2.5'),
    (an_encoder_and_a_decoder, {}, 'has an encoder and a decoder'),
    (lambda: family('lfm2', **LFM2), {}, "layer 2 is of the kind 'conv'"),
    (lambda: changed(num_kv_shared_layers=2), {}, 'shares keys and values'),
    (lambda: changed(_attn_implementation='flash_attention_2'), dict(cache='none'),
     "cache='none' changes the attention mask"),
    (lambda: family('bloom'), dict(cache='none'), 'other keys than those .* its alibi'),
    (lambda: family('mpt'), dict(cache='none'), 'other keys than those .* its position_bias'),
    (lambda: in_its_own_way([0, 1, 0, 1, 2, 3, 4, 5]), {}, 'in a way of its own'),
    (lambda: in_its_own_way(range(6)), [0, 1, 2, 2, 3, 4, 5], 'in a way of its own'),
    (its_own_list, {}, 'no list of layers'),
    (lambda: family('llama'), [0, Core([1, 2])], 'is for models of ours'),
    (lambda: family('recurrent_gemma', lru_width=32), [0, 1, 1, 2, 3, 4, 5], 'a state in itself'),
    (lambda: hooked(family('gemma4_unified_text', **GEMMA4)), [0, 1, 2, 1, 2, 3, 4, 5],
     'depends on its place')]


@pytest.mark.parametrize('make, how, message', IMPOSSIBLE)
def test_what_is_refused_before_anything_is_touched(six, make, how, message):
    model = make() if make else six
    with restored(model), pytest.raises(ValueError, match=message), (
            in_order(model, how) if isinstance(how, list) else
            looped(model, **dict(window=WINDOW) | how)):
        pass


def test_a_window_neither_begins_nor_ends_within_a_core(six):
    for window in (WINDOW, (3, 9)):
        with (pytest.raises(Refused, match='not made of whole items'),
              looped(surgery(six, '2-2-2', r=4), window)):      # it runs from depth 2 to 9
            pass
