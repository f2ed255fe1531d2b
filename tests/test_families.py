"""Any family of transformers, and the wrapper on it. `make test` runs six families that differ in
what they do, `make families` (FAMILIES=all) all of them in both forms of attention.
"""
import copy
import os

import pytest
import torch
import transformers
from families import ALIBI, EAGER_ONLY, FAMILIES, MIXTURES, tiny as family

from nanodepth.common.errors import Refused
from nanodepth.looping.caches import CACHES
from nanodepth.looping.layers import Pin, layers_of
from nanodepth.looping.patch import looped, patch
from nanodepth.models.orders import in_order

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
families = pytest.mark.parametrize('name, form', FORMS)
some_families = pytest.mark.parametrize('name, form', SOME)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def tokens(n=12, batch=2, seed=0):
    return torch.randint(2, 97, (batch, n), generator=torch.Generator().manual_seed(seed))


def calls_of(model, t):
    "[(args, kwargs)] of each layer, in a forward of the model as it is."
    calls = []
    hooks = [layer.register_forward_pre_hook(lambda m, args, kwargs: calls.append((args, kwargs)),
                                             with_kwargs=True) for layer in layers_of(model)]
    model(t, use_cache=False)
    [hook.remove() for hook in hooks]
    return calls


def through(model, calls, ds, x):
    "A stream through some layers, each called by hand with its own arguments."
    for d in ds:
        x = layers_of(model)[d](x, *calls[d][0][1:], **calls[d][1])
        x = x[0] if isinstance(x, tuple) else x
    return x


def logits_with(model, t, d, x):
    "Logits where layer d gives the stream x, whatever it is given."
    hook = layers_of(model)[d].register_forward_hook(
        lambda module, args, output: (x, *output[1:]) if isinstance(output, tuple) else x)
    logits = model(t, use_cache=False).logits
    hook.remove()
    return logits


def by_hand(model, t, solve, mode):
    "Logits of the unpatched model with its window replaced."
    calls, (a, b) = calls_of(model, t), WINDOW
    x = calls[a][0][0]
    for ds in [range(a, b + 1)] if mode == 'block' else [[d] for d in range(a, b + 1)]:
        x = solve(lambda y: through(model, calls, ds, y), x)
    return logits_with(model, t, b, x)


def anchored(g, x):
    "K = 3, beta = 0.5, from Equations 13 to 15."
    k1 = g(x) - x
    k2 = g(x + k1 / 3) - (x + k1 / 3)
    k3 = g(x + k1 / 3 + k2 / 3) - (x + k1 / 3 + k2 / 3)
    return x + (0.5 + 0.5 / 3) * k1 + 0.5 / 3 * k2 + 0.5 / 3 * k3


def in_pieces(model, t, pieces, cache=None, **inputs):
    out, at = [], 0
    for n in pieces:
        given = {key: value[:, :at + n] if key == 'attention_mask' else value[:, at:at + n]
                 for key, value in inputs.items()}
        answer = model(t[:, at:at + n], past_key_values=cache, use_cache=True, **given)
        cache, at = answer.past_key_values, at + n
        out.append(answer.logits)
    return torch.cat(out, dim=1), cache


def padded(n=3):
    "A batch of two, the second of which begins n places later."
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :n] = 0
    return dict(attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))


@families
def test_wrapped_logits_are_those_by_hand_and_no_trace_stays(name, form):
    model, t = family(name, form), tokens()
    plain = model(t, output_hidden_states=True)
    names, state = [n for n, _ in model.named_modules()], list(model.state_dict())
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    for mode in ('block', 'layer'):
        want = by_hand(model, t, anchored, mode)
        assert (want - plain.logits).abs().max() > 0.01
        with looped(model, WINDOW, 'rk', 3, 0.5, mode=mode):
            assert torch.allclose(model(t, use_cache=False).logits, want, atol=2e-4)
            assert torch.allclose(model(t, use_cache=True).logits, want, atol=2e-4)
            for each in ('output_hidden_states', 'output_attentions'):
                with pytest.raises(Refused, match=f'{each}: a looped layer has one for each'):
                    copy.deepcopy(model)(t, **{each: True})
            assert ([n for n, _ in model.named_modules()] == names and list(model.state_dict())
                    == state)
    after = model(t, output_hidden_states=True)
    assert (torch.equal(after.logits, plain.logits)
            and all(map(torch.equal, after.hidden_states, plain.hidden_states)))
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before


@families
def test_continuing_is_recomputing_and_the_caches_lengths(name, form):
    model, t = family(name, form), tokens()
    plain = in_pieces(model, t, [7, 1, 1, 2, 1])[1]
    for how in CACHES:
        if how == 'none' and name in ALIBI:
            with pytest.raises(Refused, match='shows a layer other keys than those'):
                patch(model, WINDOW, cache=how)
            continue
        with looped(model, WINDOW, cache=how):
            logits, cache = in_pieces(model, t, [7, 1, 1, 2, 1])
            whole = model(t, use_cache=False).logits
        assert [slot.get_seq_length() for slot in cache.layers] == [12] * (12 if how == 'exact'
                                                                           else 6)
        assert torch.allclose(logits, whole, atol=2e-4) == (how == 'exact'), how
        unlooped = all(torch.equal(cache.layers[d].keys, plain.layers[d].keys) for d in range(5))
        assert unlooped == (how in ('first', 'natural', 'exact')), how


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
        # beams change places in the cache
        assert torch.equal(make(num_beams=3), make(num_beams=3, use_cache=False))
    with looped(model, WINDOW):
        assert make(num_beams=2).shape == (2, 13)


@some_families
@pytest.mark.parametrize('how', ['first', 'none', 'exact'])
def test_left_padding(name, form, how):
    if how == 'none' and name in (*ALIBI, 'gpt2'):
        pytest.skip('refused, or other positions')
    model, t, pads = family(name, form), tokens(), padded()
    alone = t[1:, 3:]
    with looped(model, WINDOW, cache=how):
        for pieces in ([12], [7, 1, 1, 2, 1]):
            logits, _ = in_pieces(model, t, pieces, **pads)
            want, _ = in_pieces(model, alone, [pieces[0] - 3, *pieces[1:]])
            assert torch.allclose(logits[1, 3:], want[0], atol=3e-4)


@some_families
def test_static_caches(name, form):
    model, t = family(name, form), tokens()
    if not getattr(model, '_can_compile_fullgraph', False) and name not in ('gpt2', 'llama'):
        pytest.skip(f'transformers has no static cache for {name}')
    static = lambda: transformers.StaticCache(config=model.config, max_cache_len=20)
    for how in ('first', 'last', 'last_eval'):
        for mode in ('block', 'layer'):
            with looped(model, WINDOW, cache=how, mode=mode):
                want, growing = in_pieces(model, t, [7, 1, 1, 1, 1, 1])
                got, cache = in_pieces(model, t, [7, 1, 1, 1, 1, 1], static())
            assert torch.allclose(got, want, atol=3e-4)
            assert [int(slot.get_seq_length()) for slot in cache.layers] == [12] * 6
    with looped(model, WINDOW, cache='exact'), pytest.raises(
            ValueError, match="cache='exact' needs a KV cache that grows.*first, last, last_eval"):
        in_pieces(model, t, [7], static())


@families
def test_an_order_is_a_run_of_its_layers_by_hand(name, form):
    "Layers are exchanged, left out and repeated: logits, cached text, and no trace."
    model, t, order = family(name, form), tokens(), [0, 1, 3, 2, 3, 5]
    calls, plain = calls_of(model, t), model(t, use_cache=False).logits
    by_hand = logits_with(model, t, 5, through(model, calls, order, calls[0][0][0]))
    with pytest.raises(ZeroDivisionError), in_order(model, order):
        whole = model(t, use_cache=False).logits
        assert torch.allclose(whole, by_hand, atol=1e-5) and not torch.allclose(whole, plain)
        first = model(t[:, :7], use_cache=True)
        rest = model(t[:, 7:], past_key_values=first.past_key_values, use_cache=True).logits
        assert torch.allclose(rest, whole[:, 7:], atol=1e-4)
        1 / 0
    assert torch.equal(model(t, use_cache=False).logits, plain)


@families
def test_an_order_shows_the_stream_after_each_of_its_places(name, form):
    "Asked for inside an order for the first time, or before: and afterwards it is the model's own."
    t, order = tokens(), [0, 1, 2, 1, 2, 3]
    show = lambda model: model(t, use_cache=False, output_hidden_states=True).hidden_states
    plain, model = show(family(name, form)), family(name, form)
    for _ in range(2):
        calls = calls_of(model, t)
        with in_order(model, order):
            shown = show(model)
        assert len(shown) == len(order) + 1
        for n in range(len(order)):         # the last one is given after the final norm
            by_hand = through(model, calls, order[:n], calls[0][0][0])
            assert torch.allclose(shown[n], by_hand, atol=1e-5)
        assert all(map(torch.equal, show(model), plain))


def test_an_order_that_cannot_be():
    model = family('llama')
    with looped(model, WINDOW), pytest.raises(Refused, match='forward was replaced'), \
            in_order(model, [0, 1]):
        pass
    model = family('gpt2', scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(Refused, match='depends on its place'), in_order(model, [0, 2, 1]):
        pass


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


@pytest.mark.parametrize('mode', ['block', 'layer'])
@pytest.mark.parametrize('name', EXPERTS)
def test_pinned_routing(name, mode):
    model, t = family(name, std=0.5), tokens()
    cache = in_pieces(model, t, [11])[1]
    ways = dict(whole=lambda: model(t, use_cache=False), prompt=lambda: model(t, use_cache=True),
                step=lambda: model(t[:, 11:], past_key_values=copy.deepcopy(cache), use_cache=True))
    for way, run in ways.items():
        with looped(model, WINDOW, mode=mode, cache='natural'):
            free = experts_used(model, run)
        assert len(free) == 3 and (way == 'step' or not torch.equal(free[0][0], free[1][0]))
        with looped(model, WINDOW, mode=mode, cache='natural', pin='mixture'):
            pinned = experts_used(model, run)
            assert all(torch.equal(i, pinned[0][0]) and torch.equal(w, pinned[0][1])
                       for i, w in pinned)
        model.train().gradient_checkpointing_enable()       # it would run a layer without the pin
        with looped(model, WINDOW, mode=mode, pin='mixture'), pytest.raises(Refused, match='turn'):
            model(t, use_cache=False)
        model.eval()
        assert not any(isinstance(hook, Pin) for m in model.modules()
                       for hook in m._forward_hooks.values())


def test_models_that_cannot_be_looped():
    t5 = transformers.T5Config(vocab_size=50, d_model=16, d_ff=16, num_layers=4, num_heads=2)
    linear = family('lfm2', layer_types=['conv', 'full_attention'] * 3)
    sharing, flash = family('llama'), family('llama')
    sharing.config.num_kv_shared_layers = 2
    flash.config._attn_implementation = 'flash_attention_2'
    for model, how, message in (
            (transformers.T5ForConditionalGeneration(t5), {}, 'has an encoder and a decoder'),
            (linear, {}, "layer 2 is of the kind 'conv'"),
            (sharing, {}, 'shares keys and values between layers'),
            (flash, dict(cache='none'), "cache='none' changes the attention mask")):
        with pytest.raises(ValueError, match=message):
            patch(model, WINDOW, **how)


def test_the_base_model_and_a_cache_without_a_config():
    model, t = family('llama'), tokens()
    with looped(model, WINDOW):
        head, want = model.lm_head, model(t).logits
        assert torch.equal(head(model.model(t).last_hidden_state), want)
    with looped(model.model, WINDOW):
        assert torch.equal(model(t).logits, want)
    for how in CACHES:
        with looped(model, WINDOW, cache=how):
            got, cache = in_pieces(model, t, [7, 1, 4], transformers.DynamicCache())
            assert torch.equal(got, in_pieces(model, t, [7, 1, 4])[0])


def test_an_older_instance_forward_is_kept():
    "accelerate's hooks replace a layer's forward: a looped layer calls it, and it comes back."
    model, t = family('llama'), tokens()
    with looped(model, WINDOW):
        want = model(t).logits
    accelerate = pytest.importorskip('accelerate.hooks')
    layers = layers_of(model)
    accelerate.add_hook_to_module(layers[3], accelerate.AlignDevicesHook('cpu'))
    theirs = layers[3].forward
    with looped(model, WINDOW):
        assert torch.equal(model(t).logits, want)
    assert layers[3].forward is theirs


def test_hybrid_models_can_be_looped_where_they_attend():
    kinds = ['conv', 'full_attention', 'full_attention', 'full_attention', 'conv', 'conv']
    model = family('lfm2', layer_types=kinds, block_auto_adjust_ff_dim=False)
    t = tokens()
    with looped(model, (1, 3), cache='exact'):
        assert torch.allclose(in_pieces(model, t, [7, 1, 1, 1, 1, 1])[0],
                              model(t, use_cache=False).logits, atol=2e-4)


class OwnWay(torch.nn.ModuleList):
    "Layers of which a model's forward takes a slice, as its config counts them."
    def __getitem__(self, i):
        return [*self][:2] * 2 if isinstance(i, slice) else super().__getitem__(i)


def test_a_model_that_goes_its_own_way_through_its_layers_is_refused():
    "It would run as ever, and every number of an order or a window would be the plain model's."
    model = family('llama')
    with in_order(model, [0, 1, 2, 2, 3, 4, 5]), looped(family('llama'), (2, 3)):
        pass
    model.model.layers = OwnWay(model.model.layers)
    for way in (in_order(model, [0, 1, 2, 2, 3, 4, 5]), looped(model, (2, 3))):
        with pytest.raises(Refused, match='in a way of its own'), way:
            pass
