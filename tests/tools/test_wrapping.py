"""Test nanodepth/wrapping/others.py: a window in any decoder of transformers.

With any cache, and with a text that is read in any pieces, the logits are those of one slow form.
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
from families import EAGER_ONLY, FAMILIES, MIXTURES, tiny as family
from helpers import restored
from slow_forms import PIECES, anchored, close, slowly, text

from nanodepth import wrapped
from nanodepth.common.errors import Refused
from nanodepth.common.origin import is_ours
from nanodepth.model import Pass, seen
from nanodepth.wrapping.others import layers_of

pytestmark = pytest.mark.usefixtures('no_gradients')
transformers.logging.set_verbosity_error()


# an ordinary family, one with other names, one with two kinds of attention, one with windows, a
# mixture of experts with shared experts, and one whose layers return tuples and whose positions are
# a bias
COVERING = 'llama', 'gpt2', 'qwen2_hybrid', 'gemma3_text', 'deepseek_v3', 'bloom'


ALL = bool(os.environ.get('FAMILIES'))
FORMS = [(name, form) for name in (FAMILIES if ALL else COVERING)
         for form in (['eager'] if name in EAGER_ONLY else ['sdpa', 'eager'] if ALL else ['sdpa'])]


SOME = [each for each in FORMS if ALL or each[0] not in ('bloom', 'qwen2_hybrid')]
EXPERTS = MIXTURES if ALL else ('qwen2_moe', 'gpt_oss')
WINDOW = (2, 4)


def in_pieces(model, t, pieces, **inputs):
    "Return the logits of a text that is read piece by piece with a cache, and the cache."
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


def reading(model, t):
    """Return the stream before the first layer, layer(x, i, depth), which calls a layer as the
    model does, and logits(x), which runs what comes after the last layer, on the last tokens."""
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


PARTS = dict(block=[[2, 3, 4]], layer=[[2], [3], [4]])      # {mode: the windows that it makes}
# (arguments of nanodepth.wrapped, the same as an order)
WAYS = [(dict(cache=cache, mode=mode, decode=decode),
         [0, 1, *(anchored(part, cache, decode) for part in PARTS[mode]), 5])
        for cache in ('first', 'last') for mode in PARTS for decode in ('full', 'bypass')]


@pytest.mark.parametrize('name, form', [('ours', ''), *FORMS])
def test_a_wrapped_model_computes_what_the_slow_form_does(six, name, form):
    """This holds for each cache, mode and decode. Nothing of the window is left, even after an
    error."""
    model, t = six if name == 'ours' else family(name, form), text(11)
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


@pytest.mark.parametrize('name, form', SOME)
def test_a_wrapped_model_generates_with_transformers(name, form):
    """Check beams, a cache of the user, an assistant model, and texts that are padded on the
    left."""
    model, t = family(name, form), text()
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
    "Return [(indices, weights)] of the experts of layer 3, for each evaluation during run()."
    used = []
    experts = next(m for m in layers_of(model)[3].modules()
                   if type(m).__name__.endswith('Experts'))
    hook = experts.register_forward_pre_hook(
        lambda _, args, kwargs: used.append([*args, *kwargs.values()][1:3]), with_kwargs=True)
    run()
    hook.remove()
    return used


@pytest.mark.parametrize('name', EXPERTS)
def test_pin_keeps_the_experts_of_the_first_evaluation(name):
    "This includes a compiled layer."
    model, t = family(name, std=0.5), text()
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
def test_a_compiled_model_may_be_wrapped(name):
    "The model or its layers are compiled, before the `with` or inside it."
    model, t = family(name), text()
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
def test_gradient_checkpoints_give_the_same_gradients(name, reentrant):
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
            loss = loss_of(text()) + loss_of(text(9, seed=1))
            if kind == 'inside':
                loss.backward()
        if kind != 'inside':
            loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for other in gradients[1:]:         # reentrant checkpoints add up in another order
        for a, b in zip(gradients[0], other, strict=True):
            assert torch.allclose(a, b, atol=2e-6) if reentrant else torch.equal(a, b)


def test_a_wrapped_model_may_have_lora():
    model, t = family('llama'), text()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=['q_proj', 'up_proj'], r=4,
                                                       init_lora_weights=False)).eval()
    with wrapped(model, WINDOW):
        got = logits_of(model, t)
    merged = model.merge_and_unload()
    with wrapped(merged, WINDOW):
        assert torch.allclose(got, logits_of(merged, t), atol=1e-4)


def test_hooks_of_a_layer_are_called():
    "accelerate's hook replaces the forward of a layer, and a user's hook sees each evaluation."
    model, t, calls = family('llama'), text(), []
    layer = layers_of(model)[3]
    with wrapped(model, WINDOW):
        want = logits_of(model, t)
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook('cpu', io_same_device=True))
    with wrapped(model, WINDOW):
        layer.register_forward_hook(lambda *_: calls.append(1))
        assert torch.equal(logits_of(model, t), want) and len(calls) == 3
    logits_of(model, t)
    assert len(calls) == 4              # a hook that was added inside stays


def test_each_thread_has_its_own_window_and_cache():
    model = family('llama')
    make = lambda seed: model.generate(text(seed=seed), max_new_tokens=12, do_sample=False)
    with wrapped(model, WINDOW), ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(make, range(8)), [make(seed) for seed in range(8)]))


def in_its_own_way(more):
    "Return a model that adds something before layer `more`, as Qwen3-VL adds an image."
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
    "Return a T5."
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=50, d_model=16, d_ff=16, num_layers=4, num_heads=2))


def run_wrapped(model, **how):
    with wrapped(model, **dict(window=WINDOW) | how):
        model(text())


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
def test_what_a_window_cannot_do_is_refused(six, make, act, message):
    model = make() if make else six
    with restored(model), pytest.raises(Refused, match=message):
        act(model)


def test_a_forward_pass_of_a_wrapped_model_refuses_what_it_cannot_do():
    model, t = family('llama'), text()
    with wrapped(model, WINDOW):
        for ask, message in (
                (lambda: model(t, output_hidden_states=True), 'output_hidden_states'),
                (lambda: model.model(t, output_attentions=True), 'output_attentions'),
                (lambda: model.generate(t, cache_implementation='static', max_new_tokens=2),
                 'a KV cache that grows')):
            with pytest.raises(Refused, match=message):
                ask()
    outside = in_its_own_way(3)         # before the window the model may add anything
    plain = outside(t).logits
    with wrapped(outside, (3, 4), K=1):
        assert torch.equal(outside(t).logits, plain)
