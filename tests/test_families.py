"""Any family of transformers: the wrapper on it, and its folder looped or in another order.

Promised: wrapped logits are those of slow forms that call the layers by hand, and no trace stays;
continuing from each KV cache is recomputing; generation, beams, padding and static caches work as
the library means them; pinned experts; a looped folder computes what `looped` does, needs nothing
of ours, and lm-eval scores it. `make test` runs six families that differ in what they do, `make
families` (FAMILIES=all) all of them in both forms of attention.
"""
import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import refused, save_run
from families import ALIBI, EAGER_ONLY, FAMILIES, MIXTURES, tiny as family

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.models.hf import save_hf
from nanodepth.looping.caches import CACHES
from nanodepth.looping.layers import Pin, depth_of, routers_of
from nanodepth.text.tokenizer import write_tokenizer
from nanodepth.wrapper import looped, patch, unpatch

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


def by_hand(model, t, solve, mode='block', **inputs):
    """Logits of the unpatched model with its window replaced: each layer's own arguments are noted
    on a first pass, the layers called with them by hand, and the result put in on a second."""
    layers, (a, b) = depth_of(model)[0], WINDOW
    noted = {}
    hooks = [layers[d].register_forward_pre_hook(lambda m, args, kwargs,
                                                 d=d: noted.update({d: (args, kwargs)}),
                                                 with_kwargs=True) for d in range(a, b + 1)]
    model(t, use_cache=False, **inputs)
    [hook.remove() for hook in hooks]

    def through(ds):
        def g(y):
            for d in ds:
                y = layers[d](y, *noted[d][0][1:], **noted[d][1])
                y = y[0] if isinstance(y, tuple) else y
            return y
        return g
    x = noted[a][0][0]
    for ds in [range(a, b + 1)] if mode == 'block' else [[d] for d in range(a, b + 1)]:
        x = solve(through(ds), x)
    hook = layers[b].register_forward_hook(
        lambda module, args, output: (x, *output[1:]) if isinstance(output, tuple) else x)
    logits = model(t, use_cache=False, **inputs).logits
    hook.remove()
    return logits


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
            answer = model(t, use_cache=True, output_hidden_states=True)
            assert torch.allclose(answer.logits, want, atol=2e-4)
            assert len(answer.hidden_states) == len(plain.hidden_states)
            assert ([n for n, _ in model.named_modules()] == names and list(model.state_dict())
                    == state)
    after = model(t, output_hidden_states=True)
    assert (torch.equal(after.logits, plain.logits)
            and all(map(torch.equal, after.hidden_states, plain.hidden_states)))
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before


@families
def test_continuing_is_recomputing_and_the_caches_lengths(name, form):
    model, t = family(name, form), tokens()
    plain = in_pieces(model, t, [7])[1]
    kept = lambda cache, d: cache.layers[d].keys
    for mode in ('block', 'layer') if ALL else ('block',):
        for how in CACHES:
            if how == 'none' and name in ALIBI:
                with pytest.raises(Refused, match='shows a layer other keys than those'):
                    patch(model, WINDOW, cache=how)
                continue
            with looped(model, WINDOW, cache=how, mode=mode):
                logits, cache = in_pieces(model, t, [7, 1, 1, 2, 1])
                assert [slot.get_seq_length() for slot in cache.layers] == [12] * (6 + 6
                        * (how == 'exact'))
                whole = model(t, use_cache=False).logits
                assert torch.allclose(logits, whole, atol=2e-4) == (how == 'exact'), how
                prompt = in_pieces(model, t, [7])[1]
            alike = [torch.equal(kept(prompt, d), kept(plain, d)) for d in range(5)]
            first = how in ('first', 'natural', 'none', 'exact')
            assert alike[:3] == [True, True, first]
            if mode == 'block' or how == 'first':       # layer by layer: the unlooped chain
                assert alike[2:] == [first] * 3
    for K, beta in ((1, 0.3), (3, 1.0)):
        with looped(model, WINDOW, 'rk', K, beta):
            assert torch.equal(in_pieces(model, t, [7, 1, 1, 2, 1])[0],
                               in_pieces(copied(model), t, [7, 1, 1, 2, 1])[0])


def copied(model):
    "An unlooped copy, from a looped model."
    other = copy.deepcopy(model)
    unpatch(other)
    return other


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
@pytest.mark.parametrize('how', CACHES)
def test_left_padding(name, form, how):
    if how == 'none' and name in ALIBI:
        pytest.skip('refused, as the test of the caches lengths shows')
    model, t, pads = family(name, form), tokens(), padded()
    if name == 'gpt2' and how == 'none':
        pads.pop('position_ids')
    alone = t[1:, 3:]
    with looped(model, WINDOW, cache=how):
        for pieces in ([12], [7, 1, 1, 2, 1]):
            logits, _ = in_pieces(model, t, pieces, **pads)
            want, _ = in_pieces(model, alone, [pieces[0] - 3, *pieces[1:]])
            if 'position_ids' in pads:
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
    for how in ('exact',) if name in ALIBI else ('none', 'exact'):
        with looped(model, WINDOW, cache=how):
            with pytest.raises(ValueError,
                               match=f"cache='{how}' needs a KV cache that grows.*first, last, "
                               "last_eval"):
                in_pieces(model, t, [7], static())


@some_families
def test_copies_and_pickles(name, form):
    model, t = family(name, form), tokens()
    handle = patch(model, WINDOW, mode='layer', pin='mixture' if name in MIXTURES else None)
    other, loaded, wrapped = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model(
        t).logits
    assert torch.equal(other(t).logits, wrapped) and torch.equal(loaded(t).logits, wrapped)
    for p in depth_of(other)[0][3].parameters():
        p.zero_()
    assert not torch.equal(other(t).logits, wrapped) and torch.equal(model(t).logits, wrapped)
    handle.unpatch(), unpatch(loaded)
    assert (torch.equal(model(t).logits, loaded(t).logits) and not torch.equal(model(t).logits,
            wrapped))


# ------------------------------------------------------------------------------ mixtures of experts

def experts_used(model, run):
    "[(indices, weights)] of layer 3's experts, one for each evaluation, while `run` runs."
    used = []
    experts = next(m for m in depth_of(model)[0][3].modules()
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
        assert not any(isinstance(hook, Pin) for m in model.modules()
                       for hook in m._forward_hooks.values())


def test_any_router_beside_experts_is_pinned_by_its_place():
    "Llama 4's returns scores and logits, where others return three things: all are handed on."
    model, t = family('llama4_text', std=0.5), tokens()
    layers = depth_of(model)[0]
    routers = [m.feed_forward.router for m in layers if hasattr(m.feed_forward, 'router')]
    assert routers and all(routers_of(layer) == [layer.feed_forward.router] for layer in layers
                           if hasattr(layer.feed_forward, 'router'))
    shared = family('qwen2_moe').model.layers[0]
    assert routers_of(shared) == [shared.mlp.gate]              # and not shared_expert_gate
    told = {router: [] for router in routers}
    with looped(model, WINDOW, K=3, pin='mixture'):
        for router in routers:          # behind the pin's: what the experts are given
            router.register_forward_hook(lambda m, args, out: told[m].append(out))
        model(t, use_cache=False)
    inside = [given for given in told.values() if len(given) == 3]
    assert inside and all(out is given[0] for given in inside for out in given)


def test_pinning_is_refused_without_a_known_router():
    model = family('llama')
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match="pin='mixture': the layers 2 to 4 have no router beside"):
        patch(model, WINDOW, pin='mixture')
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before


# ------------------------------------------------------------- refusals, and what else may be there

def test_models_that_cannot_be_looped():
    small = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=4,
                 num_attention_heads=2)
    t5 = transformers.T5Config(vocab_size=50, d_model=16, d_ff=16, num_layers=4, num_heads=2)
    mamba = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4,
                                     state_size=4)
    linear = family('lfm2', layer_types=['conv', 'full_attention'] * 3)
    sharing, twice, flash = (family('llama') for _ in range(3))
    sharing.config.num_kv_shared_layers = 2
    twice.model.layers[3] = twice.model.layers[2]
    flash.config._attn_implementation = 'flash_attention_2'
    for model, message in (
            (transformers.T5ForConditionalGeneration(t5), 'has an encoder and a decoder'),
            (transformers.MambaForCausalLM(mamba), 'no list of layers with a KV cache'),
            (transformers.BertModel(transformers.BertConfig(**small)), 'both dir|no list'),
            (linear, "layer 2 is of the kind 'conv'"), (twice, 'one layer in several places'),
            (sharing, 'shares keys and values between layers')):
        with pytest.raises(ValueError, match=message):
            patch(model, WINDOW)
        assert not any('forward' in vars(m) for m in model.modules())
    with pytest.raises(ValueError, match="cache='none' changes the attention mask"):
        patch(flash, WINDOW, cache='none')


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
    """accelerate's hooks replace a layer's forward: before the patch it is called, and after it,
    it comes back."""
    model, t = family('llama'), tokens()
    with looped(model, WINDOW):
        want = model(t).logits
    accelerate = pytest.importorskip('accelerate.hooks')
    layers, _ = depth_of(model)
    accelerate.add_hook_to_module(layers[3], accelerate.AlignDevicesHook('cpu'))
    theirs = layers[3].forward
    with looped(model, WINDOW):
        assert torch.equal(model(t).logits, want)
    assert layers[3].forward is theirs
    accelerate.remove_hook_from_module(layers[3])
    plain = model(t).logits
    handle = patch(model, WINDOW)
    accelerate.add_hook_to_module(layers[3], accelerate.AlignDevicesHook('cpu'))
    assert torch.equal(model(t).logits, want)
    handle.unpatch()
    assert torch.equal(model(t).logits, plain)


def test_training_with_gradient_checkpointing():
    model, t = family('llama'), tokens()
    with torch.enable_grad(), looped(model.train(), WINDOW):
        losses = []
        for on in (False, True):
            if on:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            loss = model(t, labels=t, use_cache=False).loss
            loss.backward()
            losses.append((loss.item(), depth_of(model)[0][3].mlp.up_proj.weight.grad.clone()))
    assert (abs(losses[0][0] - losses[1][0]) < 1e-5 and torch.allclose(losses[0][1], losses[1][1],
            atol=1e-5))


def test_what_is_refused_in_a_forward_is_said_in_a_line():
    t = tokens()
    model = family('qwen3_moe').train()
    model.gradient_checkpointing_enable()
    with looped(model, WINDOW, pin='mixture'), torch.enable_grad(), pytest.raises(
            ValueError, match='gradient checkpointing runs a layer again'):
        model(t, use_cache=False)
    model = family('gpt2')
    both = transformers.EncoderDecoderCache(transformers.DynamicCache(),
                                            transformers.DynamicCache())
    with looped(model, WINDOW), pytest.raises(ValueError, match='KV cache of the kind '
                                              'EncoderDecoderCache has no list of layers'):
        model(t, past_key_values=both)


def test_hybrid_models_can_be_looped_where_they_attend():
    kinds = ['conv', 'full_attention', 'full_attention', 'full_attention', 'conv', 'conv']
    model = family('lfm2', layer_types=kinds, block_auto_adjust_ff_dim=False)
    t = tokens()
    with looped(model, (1, 3), cache='exact'):
        assert torch.allclose(in_pieces(model, t, [7, 1, 1, 1, 1, 1])[0],
                              model(t, use_cache=False).logits, atol=2e-4)


def test_a_static_cache_filled_before_and_a_cut_one_are_counted_from_there():
    model, t, ran = family('llama'), tokens(), []
    depth_of(model)[0][3].mlp.register_forward_hook(lambda *_: ran.append(1))
    for cache in (transformers.StaticCache(config=model.config, max_cache_len=30),
                  transformers.DynamicCache(config=model.config)):
        model(t[:, :4], past_key_values=cache)
        ran.clear()
        with looped(model, WINDOW, decode=2):
            for i in range(4, 8):
                model(t[:, i:i + 1], past_key_values=cache)
        assert len(ran) == 3 + 3 + 1 + 1
    cache.crop(-4)
    ran.clear()
    with looped(model, WINDOW, decode=2):
        for i in range(4, 8):
            model(t[:, i:i + 1], past_key_values=cache)
    assert len(ran) == 3 + 3 + 1 + 1


def test_ours_and_theirs_agree(tmp_path, tiny):
    "One checkpoint through both: the same loop, the same logits."
    ours = tiny(n_layer=6, n_kv_head=2)
    save_hf(ours, tmp_path)
    theirs, t = transformers.AutoModelForCausalLM.from_pretrained(tmp_path), tokens() % 50
    for method, K, how in (('rk', 3, 'first'), ('naive', 2, 'exact'), ('heun', 1, 'last')):
        with looped(ours, WINDOW, method, K, cache=how), looped(theirs, WINDOW, method, K,
                cache=how):
            assert torch.allclose(ours(t), theirs(t).logits, atol=1e-4)
            assert torch.equal(ours.generate(t, 5, temperature=0),
                               theirs.generate(t, max_new_tokens=5, do_sample=False, pad_token_id=0,
                                               eos_token_id=None))


def test_a_cache_that_a_window_cannot_have_is_refused():
    model, prompt = family('llama', 'sdpa'), tokens(8, 1)
    filled = model(prompt).past_key_values
    with looped(model, WINDOW, K=2, cache='exact'), pytest.raises(
            ValueError, match='was filled with another window or K, or partly without a loop'):
        model(prompt[:, :1], past_key_values=filled)
    # generate_batch hands its cache to the layers by this name
    with looped(model, WINDOW, K=2), pytest.raises(ValueError, match='all texts in one paged'):
        model(prompt, cache=object())
