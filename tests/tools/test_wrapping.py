"""Test windows in models of model.py, in any order, and in any decoder of transformers.

Promised: with any cache, and a text read in any pieces, the logits are those of one slow form.
After its `with` a model is as it was before. What is impossible is refused in one line. `make test`
runs six families that differ in what they do, and `make families` (FAMILIES=all) runs all of them
in both forms of attention.
"""
import copy
import io
import os
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
import transformers
from accelerate import hooks
from helpers import Times, restored
from families import EAGER_ONLY, FAMILIES, MIXTURES, tiny as family
from test_probe import no_gradients
from test_solvers import by_stages

from nanodepth import wrapped
from nanodepth.common.errors import Refused
from nanodepth.common.origin import is_ours
from nanodepth.grow import untie
from nanodepth.loop import in_order
from nanodepth.model import Pass, Span, seen, unrolled
from nanodepth.probe import depth_score
from nanodepth.models.authors import AuthorsCore
from nanodepth.retrofit import Core, surgery
from nanodepth.wrapper import Window, pick_window
from nanodepth.wrapping.others import layers_of

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


@pytest.fixture
def six(tiny):
    return tiny(n_layer=6, n_kv_head=2)


@pytest.fixture(params=[False, True], ids=['plain', 'ln_scaling'])
def listed(tiny, request):
    "Six layers whose order is a list of anything, also where the depth decides what a layer does."
    model = tiny(n_layer=6, ln_scaling=request.param)
    return model


def tokens(n=12, batch=2, seed=0):
    return torch.randint(2, 50, (batch, n), generator=torch.Generator().manual_seed(seed))


def in_pieces(model, t, pieces, **inputs):
    "Logits with a cache, fed piece by piece, and the cache."
    cache, out, at = {} if is_ours(model) else None, [], 0
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


def logits_of(model, t):
    return model(t) if is_ours(model) else model(t, use_cache=False).logits


# ---------------------------------------------------------------------------------- one slow form

def rk_window(items, cache='first', decode='full'):
    return Window(items, 'anchored', 3, cache, decode, beta=0.3)


def reading(model, t):
    """(the stream of a text; layer(x, i, depth), which calls a layer as the model does, on all
    tokens or the last ones; logits(x) behind the last tokens' stream)."""
    if is_ours(model):
        return (model.embed(t), lambda x, i, depth: Pass(model, x.shape[1])(x, [i], depth),
                lambda x: model.head(model.norm(x)))
    layers, calls = layers_of(model), []
    noting = [each.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
              for each in layers]
    model(t, use_cache=False)
    for hook in noting:
        hook.remove()

    def of_last(value, n):
        if isinstance(value, tuple):
            return tuple(of_last(each, n) for each in value)
        for dim, size in enumerate(getattr(value, 'shape', ())):
            value = value.narrow(dim, size - n, n) if size == t.shape[1] else value
        return value

    def layer(x, i, depth):
        args, kwargs = calls[i]
        kwargs = {name: of_last(value, x.shape[1]) for name, value in kwargs.items()}
        x = layers[i](x, *of_last(args[1:], x.shape[1]), **kwargs)
        return x[0] if isinstance(x, tuple) else x

    def logits(x):
        def put(module, args, output):
            stream = output[0] if isinstance(output, tuple) else output
            stream = torch.cat((stream[:, :-x.shape[1]], x), 1)
            return (stream, *output[1:]) if isinstance(output, tuple) else stream
        hook = layers[-1].register_forward_hook(put)
        last = logits_of(model, t)[:, -x.shape[1]:]
        hook.remove()
        return last
    return calls[0][0][0], layer, logits


def slowly(readings, order, model=None):
    """Logits of a text that is read in pieces. Instead of keys, the streams are kept of which a
    cache holds the keys, by depth: a layer reads them again, with the new ones behind them."""
    pieces, past, came = [], {}, 0

    def run(x, items, depth, kept):
        for item in items:
            if isinstance(item, int):
                kept[depth] = x
                whole = torch.cat((past.get(depth, x[:, :0]), x), 1)
                x = layer(whole, item, depth)[:, -n:]
            elif isinstance(item, Window):
                x = window(x, item, depth, kept)
            elif isinstance(item, Core):
                e, run_of_now = x, Pass(model, n, {(0, 0): [x.new_zeros(1, 1, came, 1)]})
                x = item.first_state(run_of_now, e)
                for i in range(item.r):
                    s = item.mix(x, e)
                    x = run(s, item.items, depth + i * len(unrolled(item.items)), kept)
            else:
                x = run(x, item.items, depth, kept)
            depth += len(unrolled([item]))
        return x

    def window(x, item, depth, kept):
        if item.decode == 'bypass' and n == 1 and came:
            return run(x, item.items, depth, kept)
        made = []               # of each evaluation, the streams that its layers read

        def g(y):
            made.append({})
            return run(y, item.items, depth, made[-1])
        x = by_stages(g, x, item.K, item.options['beta'])
        if item.cache == 'last':
            made.insert(0, {})
            run(x, item.items, depth, made[0])
        kept |= made[0]
        return x

    for stream, layer, logits in readings:
        n, kept = stream.shape[1] - came, {}
        pieces.append(logits(run(stream[:, -n:], order, 0, kept)))
        past = {depth: torch.cat((past[depth], x), 1) if depth in past else x
                for depth, x in kept.items()}
        came += n
    return torch.cat(pieces, 1)


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=2e-4)


PIECES = 5, 1, 5
PARTS = dict(block=[[2, 3, 4]], layer=[[2], [3], [4]])      # of the window, by its mode
# (how nanodepth.wrapped is called, the same as an order)
WAYS = [(dict(cache=cache, mode=mode, decode=decode),
         [0, 1, *(rk_window(part, cache, decode) for part in PARTS[mode]), 5])
        for cache in ('first', 'last') for mode in PARTS for decode in ('full', 'bypass')]


@pytest.mark.parametrize('name, form', [('ours', ''), *FORMS])
def test_wrapped_as_the_slow_form(six, name, form):
    "By each cache, mode and decode, and it leaves no trace, also after an error."
    model, t = six if name == 'ours' else family(name, form), tokens(11)
    readings, plain = [reading(model, t[:, :end]) for end in (5, 6, 11)], logits_of(model, t)
    for how, order in WAYS:
        want, whole = slowly(readings, order), slowly(readings[-1:], order)
        assert not close(want, whole) and not close(whole, plain)
        with restored(model), pytest.raises(ZeroDivisionError), wrapped(
                model, WINDOW, K=3, beta=0.3, **how):
            got, cache = in_pieces(model, t, PIECES)
            assert close(got, want) and close(logits_of(model, t), whole), how
            assert (seen(cache) == 11 if name == 'ours' else
                    [slot.get_seq_length() for slot in cache.layers] == [11] * 6)
            1 / 0
    assert torch.equal(logits_of(model, t), plain)


@pytest.mark.parametrize('order, depth', [
    ([0, 1, AuthorsCore([2, 3], r=3), 4, 5], 10),
    ([0, 1, AuthorsCore([2, rk_window([3])], r=3), 4, 5], 10),
    ([0, rk_window([1, AuthorsCore([2, 3], r=2)]), 4, 5], 8),
    ([0, rk_window([1, rk_window([2]), 3], 'last'), 4, 5], 6),
    ([0, 1, 2, 1, rk_window([2, 3]), 4, 5], 8),
    ([0, Span([1, Span([rk_window([2, 1])])]), 3, Span([]), 5], 6)], ids=str)
def test_span_within_span_as_the_slow_form(listed, order, depth):
    t = tokens(11)
    readings = [reading(listed, t[:, :end]) for end in (5, 6, 11)]
    listed.order = order
    want, whole = (slowly(some, order, listed) for some in (readings, readings[-1:]))
    assert close(listed(t), whole) and len(unrolled(listed.order)) == depth
    assert close(in_pieces(listed, t, PIECES)[0], want)


@pytest.mark.parametrize('order, plain, untied', [
    ([0, Span([1, Span([2, 1])]), 3, Span([]), 5], [0, 1, 2, 1, 3, 5], [0, 1, 2, 3, 4, 5]),
    ([0, Times([1, Times([2]), 3]), 2, 5], [0, 1, 2, 2, 3, 1, 2, 2, 3, 2, 5],
     [0, 1, 2, 2, 3, 1, 2, 2, 3, 4, 5])], ids=str)
def test_span_is_its_unrolled_order(listed, order, plain, untied):
    "To the last bit; and untied, layers of its own are each item once."
    t, runs = tokens(), []
    assert unrolled(order) == plain
    assert listed.flops_per_token(order) == listed.flops_per_token(plain)
    for each in (order, plain):
        with in_order(listed, each):
            logits, cache = in_pieces(listed, t, [5, 1, 6])
            runs.append([logits, listed(t), depth_score(listed, t)[1],
                         *(part for place in enumerate(plain) for part in cache[place])])
    assert all(map(torch.equal, *runs))
    grown = untie(listed, order)
    assert unrolled(grown.order) == untied and len(grown.layers) == max(untied) + 1
    assert torch.equal(grown(t), runs[0][1])


def test_span_may_exit_early(listed):
    "An early exit: the layers behind it keep their depths, and so their place in a cache."
    class Exit(Span):
        def __call__(self, run, x):
            return run(x, self.items[:1])
    cache = {}
    listed(tokens(), order=[0, Exit([1, 2, 3]), 4], cache=cache)
    assert [*cache] == [(0, 0), (1, 1), (4, 4), 'order']


@pytest.mark.parametrize('before, after', [
    ([0, 1, 2, 3], [0, Window([1, 2], K=3, beta=0), 3]),
    ([0, Window([1, 2], beta=0.5), 3], [0, Window([1, 2], beta=0.6), 3]),
    ([0, Core([1, 2, 3], r=4)], [0, Core([1, 2, 3], r=2)])], ids=str)
def test_cache_of_another_order(listed, before, after):
    "Also one that is as deep, and one whose beta or r is another."
    cache = {}
    listed(tokens(), order=before, cache=cache)
    with pytest.raises(Refused, match='this cache was filled in the order'):
        listed(tokens(1), order=after, cache=cache)


# ----------------------------------------------------------------------------- a window in ours

def test_wrapped_puts_a_window_into_the_order(six, tiny):
    "Its items are those of the order, by default the middle four."
    loop = tiny(n_layer=3, order=[0, 1, 2] * 3)
    core = surgery(six, '2-2-2', r=4)
    for model, how, order in (
            (six, {}, [0, Window([1, 2, 3, 4]), 5]),
            (loop, dict(window=(2, 5), solver='naive', cache='last'),
             [0, 1, Window([2, 0, 1, 2], 'naive', cache='last'), 0, 1, 2]),
            (core, dict(window='1-2'), [0, Window([1, core.order[2]]), 4, 5])):
        with wrapped(model, **how):
            assert str(model.order) == str(order)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_wrapped_off_values(six, dtype):
    model, t = six.to(dtype), tokens()
    plain, (cached, slots) = model(t), in_pieces(model, t, [6, 1, 1, 4])
    for K, beta in ((1, 0.3), (3, 1.0)):
        with wrapped(model, WINDOW, 'anchored', K, beta=beta):
            logits, kept = in_pieces(model, t, [6, 1, 1, 4])
            assert torch.equal(model(t), plain) and torch.equal(logits, cached)
            for place in enumerate(range(6)):
                assert torch.equal(kept[place][0], slots[place][0])


@pytest.mark.parametrize('window, depth, expected', [
    (None, 28, (12, 15)), (None, 36, (15, 18)), (None, 48, (22, 25)), ('mid6', 36, (15, 20)),
    (None, 3, (0, 2)), ('mid3', 28, (13, 15)), ((3, 5), 6, (3, 5)), ('0-0', 6, (0, 0)),
    (0.5, 8, (2, 5)), (0.0, 8, (0, 3)), (1.0, 8, (4, 7)), ('0.3', 28, (7, 10))], ids=str)
def test_pick_window(window, depth, expected):
    assert pick_window(window, depth) == expected


@pytest.mark.parametrize('window', [
    '1.7', (3, 6), (4, 3), (-1, 2), 'mid9', 'foo', (1, 2, 3), '1-', '-3-5', (0.4, 0.6),
    1e-5 - 1, 1.5])
def test_pick_window_refuses(window):
    with pytest.raises(Refused, match='window='):
        pick_window(window, 6)


@pytest.mark.parametrize('window', ['4', '1', '0', 3, 1])
def test_a_single_number_is_not_a_window(window):
    "It could mean a layer, a size or a share, so the line names these forms."
    with pytest.raises(Refused, match="(one layer is '3-3').*'mid4'.*decimal point, such as 0.5"):
        pick_window(window, 6)


# -------------------------------------------------------------------------- with transformers

@pytest.mark.parametrize('name, form', SOME)
def test_wrapped_generates_with_the_library(name, form):
    "Also by beams, with a cache of one's own, with a helper, and texts padded on the left."
    model, t = family(name, form), tokens()
    make = lambda t=t[:, :7], **options: model.generate(
        t, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0, **options)
    plain, plain_logits = make(), logits_of(model, t)
    with wrapped(model, WINDOW, K=1):
        assert torch.equal(make(), plain) and torch.equal(logits_of(model, t), plain_logits)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    with wrapped(model, WINDOW):
        assert torch.equal(make(past_key_values=transformers.DynamicCache()), make())
        alone = make(t[:1, :7], num_beams=3)
        assert torch.equal(make(num_beams=3)[:1], alone)
        if name == 'llama':
            assert torch.equal(make(t[:1, :7], assistant_model=family(name, seed=1)),
                               make(t[:1, :7]))
        logits, _ = in_pieces(model, t, [7, 1, 1, 2, 1], attention_mask=mask,
                              position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
        want, _ = in_pieces(model, t[1:, 3:], [4, 1, 1, 2, 1])
        assert torch.allclose(logits[1, 3:], want[0], atol=3e-4)
    assert torch.equal(make(), plain)


def experts_used(model, run):
    "[(indices, weights)] of layer 3's experts, one for each evaluation, while `run` runs."
    used = []
    experts = next(m for m in layers_of(model)[3].modules()
                   if type(m).__name__.endswith('Experts'))
    hook = experts.register_forward_pre_hook(
        lambda _, args, kwargs: used.append([*args, *kwargs.values()][1:3]), with_kwargs=True)
    run()
    hook.remove()
    return used


@pytest.mark.parametrize('name', EXPERTS)
def test_wrapped_pin(name):
    "Also where a layer is compiled."
    model, t = family(name, std=0.5), tokens()
    plain, cache = in_pieces(model, t, [11])
    runs = (lambda: model(t, use_cache=False), lambda: model(t, use_cache=True),
            lambda: model(t[:, 11:], past_key_values=copy.deepcopy(cache), use_cache=True))
    for mode in ('block', 'layer'):
        for run in runs:
            with wrapped(model, WINDOW, mode=mode, pin=True):
                pinned = experts_used(model, run)
            assert len(pinned) == 3
            for indices, weights in pinned:
                assert torch.equal(indices, pinned[0][0]) and torch.equal(weights, pinned[0][1])
        with wrapped(model, WINDOW, mode=mode):
            free = experts_used(model, runs[0])
            assert not torch.equal(free[0][0], free[1][0])
    with wrapped(model, WINDOW, pin=True):
        want = logits_of(model, t)
    layers_of(model)[3].compile(backend='eager')
    with wrapped(model, WINDOW, pin=True):
        assert torch.equal(logits_of(model, t), want)
    assert torch.equal(in_pieces(model, t, [11])[0], plain)
    model.train().gradient_checkpointing_enable()
    with wrapped(model, WINDOW, pin=True), pytest.raises(Refused, match='turn it off'):
        logits_of(model, t)


@pytest.mark.parametrize('name', ['llama', 'gpt2', 'qwen2_moe'])
def test_wrapped_and_torch_compile(name):
    "Compiled before the `with` or in it, the model or its layers, by either name."
    model, t = family(name), tokens()
    plain = logits_of(model, t)
    with wrapped(model, WINDOW):
        want = logits_of(model, t)
    compiled = torch.compile(model, backend='eager')
    assert torch.equal(logits_of(compiled, t), plain)
    for given in (model, compiled):
        with wrapped(given, WINDOW) as inside:
            assert inside is given and torch.equal(logits_of(compiled, t), want)
        assert torch.equal(logits_of(compiled, t), plain)
    for layer in layers_of(model):
        layer.compile(backend='eager')
    assert torch.equal(logits_of(model, t), plain)
    with wrapped(model, WINDOW):
        assert torch.equal(logits_of(model, t), want)


@pytest.mark.parametrize('name', ['llama', 'gpt2', 'bloom', 'qwen3_moe'])
@pytest.mark.parametrize('reentrant', [False, True])
def test_wrapped_gradient_checkpoints(name, reentrant):
    "The backward pass may come inside the `with`, after it, or after another forward."
    model, gradients = family(name).train(), []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.enable_input_require_grads()
    loss_of = lambda t: model(t, labels=t, use_cache=False).loss
    for kind in ('none', 'inside', 'after'):
        model.zero_grad()
        if kind != 'none':
            model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        with torch.enable_grad(), wrapped(model, WINDOW):
            loss = loss_of(tokens()) + loss_of(tokens(9, seed=1))
            if kind == 'inside':
                loss.backward()
        if kind != 'inside':
            loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for other in gradients[1:]:         # a reentrant one adds up in another order
        for a, b in zip(gradients[0], other, strict=True):
            assert torch.allclose(a, b, atol=2e-6) if reentrant else torch.equal(a, b)


def test_wrapped_with_lora():
    model, t = family('llama'), tokens()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=['q_proj', 'up_proj'], r=4,
                                                       init_lora_weights=False)).eval()
    with wrapped(model, WINDOW):
        got = logits_of(model, t)
    merged = model.merge_and_unload()
    with wrapped(merged, WINDOW):
        assert torch.allclose(got, logits_of(merged, t), atol=1e-4)


def test_wrapped_calls_the_hooks_of_a_layer():
    "accelerate's, which replaces its forward, and one of one's own, which sees each evaluation."
    model, t, calls = family('llama'), tokens(), []
    layer = layers_of(model)[3]
    with wrapped(model, WINDOW):
        want = logits_of(model, t)
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook('cpu', io_same_device=True))
    with wrapped(model, WINDOW):
        layer.register_forward_hook(lambda *_: calls.append(1))
        assert torch.equal(logits_of(model, t), want) and len(calls) == 3
    logits_of(model, t)
    assert len(calls) == 4              # what is put on a layer inside stays


def test_wrapped_threads_have_a_window_and_a_cache_each():
    model = family('llama')
    make = lambda seed: model.generate(tokens(seed=seed), max_new_tokens=12, do_sample=False)
    with wrapped(model, WINDOW), ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(make, range(8)), [make(seed) for seed in range(8)]))


# --------------------------------------------------------------------------------- what cannot be

def in_its_own_way(more):
    "A model that adds something to the stream before a layer, as Qwen3-VL adds an image."
    def forward(input_ids, **_):
        x = inner.embed_tokens(input_ids)
        where = inner.rotary_emb(x, torch.arange(x.shape[1])[None])
        for d in range(6):
            x = inner.layers[d](x if d != more else x + 1, position_embeddings=where)
        return transformers.modeling_outputs.BaseModelOutputWithPast(inner.norm(x))
    model = family('llama')
    inner = model.model
    inner.forward = forward
    return model


def an_encoder_and_a_decoder():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=50, d_model=16, d_ff=16, num_layers=4, num_heads=2))


def run_wrapped(model, **how):
    with wrapped(model, **dict(window=WINDOW) | how):
        model(tokens())


def run_wrapped_twice(model):
    with wrapped(model, (4, 5)):
        run_wrapped(model)


def copy_wrapped(model):
    with wrapped(model, WINDOW):
        copy.deepcopy(model)


def save_wrapped(model):
    with wrapped(model, WINDOW):
        torch.save(model, io.BytesIO())


@pytest.mark.parametrize('make, act, message', [
    (None, lambda m: run_wrapped(m, mode='layers'), 'mode=layers must be block or layer'),
    (None, lambda m: run_wrapped(m, pin=True), 'no mixture of experts'),
    (lambda: family('llama'), lambda m: run_wrapped(m, pin=True), 'pin: these layers have no'),
    (lambda: family('llama'), run_wrapped_twice, 'is wrapped already'),
    (lambda: family('llama'), copy_wrapped, 'a wrapped model is not copied or pickled'),
    (lambda: family('llama'), save_wrapped, 'or use save_pretrained'),
    (an_encoder_and_a_decoder, run_wrapped, 'is not a decoder with one list of 4 layers'),
    (lambda: family('lfm2', layer_types=['conv', 'full_attention'] * 3), run_wrapped,
     'layer 2 is of the kind conv'),
    (lambda: family('llama', num_kv_shared_layers=2), run_wrapped, 'its own keys and values'),
    (lambda: family('llama', output_hidden_states=True), run_wrapped, 'wrapped layer runs several'),
    (lambda: in_its_own_way(3), run_wrapped, 'adds something to the stream between')])
def test_wrapped_refuses(six, make, act, message):
    model = make() if make else six
    with restored(model), pytest.raises(Refused, match=message):
        act(model)


def test_wrapped_refuses_in_a_forward():
    model, t = family('llama'), tokens()
    with wrapped(model, WINDOW):
        for ask, message in (
                (lambda: model(t, output_hidden_states=True), 'output_hidden_states'),
                (lambda: model.model(t, output_attentions=True), 'output_attentions'),
                (lambda: model.generate(t, cache_implementation='static', max_new_tokens=2),
                 'a KV cache that grows')):
            with pytest.raises(Refused, match=message):
                ask()
    outside = in_its_own_way(3)         # before the window it may do as it likes
    plain = outside(t).logits
    with wrapped(outside, (3, 4), K=1):
        assert torch.equal(outside(t).logits, plain)
