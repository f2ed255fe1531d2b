"""Hugging Face checkpoints: in and out, ours and the authors', looped and in another order. Other
families, and loops of them: test_windows.py.
"""
import builtins
import functools
import inspect
import json
import math
import os
import random
import signal

import pytest
import test_data
import tiktoken
import tokenizers
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from conftest import byte_level_bpe, logits, refused, same, save_run, weights_of
from families import LLAMA3, tiny as family

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import export
from nanodepth.commands.train import open_parent
from nanodepth.common.errors import Refused
from nanodepth.model import Pass, Span
from nanodepth.models.checkpoint import load_model, open_any
from nanodepth.models.hf import load_hf, save_hf
from nanodepth.models import joined
from nanodepth.models.joined import save_joined
from nanodepth.models.raven import save_authors
from nanodepth.models.authors import authors_surgery, parts_of
from nanodepth.retrofit import Adapter, core_of, surgery
from nanodepth.wrapper import Window
from nanodepth.text import primitives
from nanodepth.text.tokenizer import (as_tokenizers, generation_of, get_tokenizer,
                                      start_of_document)
from nanodepth.train import train

transformers.utils.logging.disable_progress_bar()


def theirs(folder, name='llama', seed=0, **fields):
    "A tiny random checkpoint made by transformers: every part matters, the norms too."
    model = family(name, seed=seed, **dict(num_hidden_layers=3, head_dim=None) | fields)
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    model.save_pretrained(folder)
    return model


def close(a, b):
    return (a - b).abs().max() <= 1e-5 * b.abs().max()


def automodel(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='auto').eval()


ROPE = dict(rope_type='llama3', rope_theta=5e5, **LLAMA3)


@pytest.mark.parametrize('name, seed', [*zip(('llama', 'qwen3') * 4, range(8)),
                                        ('qwen2', 11), ('qwen2', 37)])       # tied, and untied
def test_logits_are_those_of_transformers_and_out_again_every_bit_is_kept(tmp_path, name, seed):
    rng = random.Random(seed)
    kv, ratio = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    fields = dict(num_attention_heads=kv * ratio, num_key_value_heads=kv,
                  hidden_size=kv * ratio * rng.choice([4, 6, 16]),
                  intermediate_size=rng.choice([24, 50, 96]),
                  num_hidden_layers=rng.choice([1, 2, 5]), vocab_size=rng.choice([31, 67, 257]),
                  tie_word_embeddings=rng.random() < 0.5,
                  rms_norm_eps=rng.choice([1e-6, 1e-5, 1e-2]))
    if rng.random() < 0.5 or name == 'qwen3':
        fields['head_dim'] = rng.choice([8, 10, 32])
    if seed % 3 == 0:
        fields['rope_parameters'] = ROPE
    reference = theirs(tmp_path / 'x', name, seed=seed, **fields)
    if seed % 3 == 0:       # it stands in the rope's settings and beside them, which counts
        path = tmp_path / 'x/config.json'
        path.write_text(json.dumps(json.loads(path.read_text())
                                   | dict(original_max_position_embeddings=20)))
        reference = automodel(tmp_path / 'x')
    tokens = torch.randint(fields['vocab_size'], (2, 64))
    model = load_hf(tmp_path / 'x')
    assert model.config.qkv_bias == (name == 'qwen2')
    tied = fields['tie_word_embeddings']
    assert model.config.tie_embeddings == tied == (model.head.weight is model.embed.weight)
    assert close(logits(model, tokens), logits(reference, tokens))
    assert torch.equal(model.generate(tokens[:, :9], 8, temperature=0),
                       reference.generate(tokens[:, :9], max_new_tokens=8, min_new_tokens=8,
                                          do_sample=False, pad_token_id=0))
    dtype = [torch.float32, torch.bfloat16][seed % 2]
    save_hf(model.to(dtype), tmp_path / 'y')
    given, kept = (load_file(tmp_path / folder / 'model.safetensors') for folder in 'xy')
    assert (tmp_path / 'y/model.safetensors').stat().st_mode & 0o777 == 0o644
    assert same(kept, {key: given[key].to(dtype) for key in kept})
    assert given.keys() - kept.keys() <= ({'lm_head.weight'} if tied else set())
    again = load_hf(tmp_path / 'y').state_dict()
    assert same(again, model.state_dict())
    assert {t.dtype for t in [*kept.values(), *again.values()]} == {dtype}
    # without a tokenizer no token ends a text: transformers would take 2
    assert automodel(tmp_path / 'y').config.eos_token_id is None


MODELS = {
    'ordinary, with an adapter that its order does not need': dict(),
    'looped': dict(order=[0, 1, 2, 1, 2, 3]),
    'other numbers, looped LN-scaling': dict(rope_theta=5e5, norm_eps=1e-2, ffn_dim=50,
                                             ln_scaling=True, order=[0, 1, 0, 1, 2, 3]),
    'qk-norm, own head_dim, GQA, tied': dict(qk_norm=True, head_dim=12, n_kv_head=2,
                                             tie_embeddings=True),
    'untied, rope scaling': dict(tie_embeddings=False, rope_scaling=LLAMA3),
    'looped, biases': dict(qkv_bias=True, order=[0, 1, 1, 2, 3]),
}


@pytest.mark.parametrize('name', MODELS)
def test_what_we_write_transformers_reads(tmp_path, tiny, name):
    model = tiny(vocab_size=257, **MODELS[name])
    if 'adapter' in name:
        model.adapter = Adapter(32)
    save_hf(model, tmp_path / 'x', tokenizer='bytes')
    tokens = torch.randint(257, (2, 32))
    assert close(logits(automodel(tmp_path / 'x'), tokens), logits(model, tokens))
    again = load_model(tmp_path / 'x')
    assert close(logits(again, tokens), logits(model, tokens))
    assert again.order == [*range(len(model.order))]
    with pytest.raises(Refused, match='is there already, and a model'):
        save_hf(model, tmp_path / 'x')


def of_bytes():
    enc = get_tokenizer('bytes')
    return as_tokenizers(enc), enc.encode


def of_merges(special=264):
    pairs = b' a', b'an', b' an', b'  ', b'be', b' be', b'th', b'the'
    ranks = {bytes([i]): i for i in range(256)} | {pair: 256 + i for i, pair in enumerate(pairs)}
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    enc = tiktoken.Encoding('t', pat_str=words, mergeable_ranks=ranks,
                            special_tokens={'<|endoftext|>': special})
    return as_tokenizers(enc), enc.encode


def of_pieces():
    """TinyLlama's kind, which tiktoken cannot represent: pieces with a lower line for a space,
    bytes as a last resort, and a start that its template puts first."""
    tk = tokenizers
    file = tk.Tokenizer(tk.models.BPE(unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    file.normalizer = tk.normalizers.Sequence([tk.normalizers.Prepend('▁'),
                                               tk.normalizers.Replace(' ', '▁')])
    file.decoder = tk.decoders.Sequence([
        tk.decoders.Replace('▁', ' '), tk.decoders.ByteFallback(), tk.decoders.Fuse(),
        tk.decoders.Strip(' ', 1, 0)])
    file.train_from_iterator(['the depth of a model is a list of layers'] * 3,
                             tk.trainers.BpeTrainer(special_tokens=['<unk>', '<s>', '</s>']))
    file.post_processor = tk.processors.TemplateProcessing(single='<s> $A',
                                                           special_tokens=[('<s>', 1)])
    return file, lambda text: file.encode(text, add_special_tokens=False).ids


RANDOM, ALPHABET = random.Random(0), 'ab1 2\n\t.\'=é東½ \u00a0'
TEXTS = [*test_data.TEXTS, 'def f(x):\n\treturn  "ä東🙂"\r\n', "a , b . I 'm", *(
    ''.join(RANDOM.choice(ALPHABET) for _ in range(RANDOM.randint(1, 60))) for _ in range(300))]


@pytest.mark.parametrize('make, start, number, texts', [
    (of_bytes, '<|endoftext|>', 256, TEXTS), (of_merges, '<|endoftext|>', 264, TEXTS),
    (of_pieces, '<s>', 1, ['a list', 'a list of models'])])
def test_a_tokenizer_is_the_same_in_a_tokenizer_json(make, start, number, texts, tmp_path):
    file, encode = make()
    file.save(str(tmp_path / 'tokenizer.json'))
    again = get_tokenizer(tmp_path)
    for text in texts:
        ids = encode(text)
        assert file.encode(text, add_special_tokens=False).ids == again.encode(text) == ids, text
        assert file.encode(text).ids == [number, *ids]      # documents begin as in training
        assert again.decode(ids) == text
    assert start_of_document(again) == [number] == [again.encode_single_token(start)]
    assert number not in again.encode_ordinary(f'x{start}')     # there it is plain text
    assert again.n_vocab == file.get_vocab_size()


def test_a_tokenizer_with_a_hole_before_its_special_token_is_refused():
    with pytest.raises(Refused, match='would give other tokens'):
        of_merges(special=300)


def test_an_answer_is_tokens_of_the_text_that_it_continues(tmp_path):
    file, encode = of_pieces()
    file.save(str(tmp_path / 'tokenizer.json'))
    enc = get_tokenizer(tmp_path)
    whole, alone = encode('a list of'), enc.encode('of')        # on its own it begins with a space
    assert enc.encode('a list') + primitives.continuation(enc, 'a list', ' of') == whole
    assert whole[-len(alone):] == alone != primitives.continuation(enc, 'a zz', 'of')


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_head_that_still_equals_the_embedding_is_one_of_its_own(tmp_path, tiny):
    model = tiny(tie_embeddings=False)
    model.head.weight.data.copy_(model.embed.weight)
    save_hf(model, tmp_path / 'x', tokenizer='bytes')
    back = load_hf(tmp_path / 'x')
    assert not back.config.tie_embeddings and back.head.weight is not back.embed.weight


def test_weights_are_read_as_they_are_and_from_safetensors_alone(tmp_path):
    reference, tokens = theirs(tmp_path / 'x'), torch.arange(12)[None]
    edit(tmp_path / 'x/config.json', tie_word_embeddings=True)      # it has a head of its own
    assert close(logits(load_hf(tmp_path / 'x'), tokens), logits(reference, tokens))
    (tmp_path / 'x/model.safetensors').rename(tmp_path / 'x/pytorch_model.bin')
    with pytest.raises(Refused, match='no file named model.safetensors'):
        load_hf(tmp_path / 'x')
    edit(tmp_path / 'x/config.json', model_type='gpt2')
    with pytest.raises(Refused, match="asks for the family 'gpt2'"):
        load_hf(tmp_path / 'x')


RAVEN_SIZES = dict(prelude=1, core_block=2, coda=1)
RAVEN = dict(
    architectures=['RavenForCausalLM'], model_type='huginn_raven', n_embd=32, n_heads=4,
    num_key_value_heads=2, head_dim=8, intermediate_size=48, vocab_size=50, padded_vocab_size=50,
    block_size=4096, max_position_embeddings=64, norm_eps=1e-5, rope_base=50_000.0,
    rope_theta=10_000.0, n_layers_in_prelude=1, n_layers_in_recurrent_block=2, n_layers_in_coda=1,
    n_layers=4, mean_recurrence=3, mean_backprop_depth=8, injection_type='linear', bias=False,
    qk_bias=False, tie_embeddings=False, test_time_noise=0, block_class_name='SandwichBlock',
    init_values=dict(std=0.008703882797784892, embed_scale=1.0), torch_dtype='float32')


@pytest.fixture
def raven(tmp_path):
    "A raven as their conversion writes one: fused matrices, a buffer, Huginn's own leftovers."
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])
    tensors = {'transformer.wte.weight': draw(50, 32), 'transformer.ln_f.weight': 1 + draw(32),
               'transformer.adapter.weight': draw(32, 64), 'lm_head.weight': draw(50, 32),
               'freqs_cis': torch.zeros(1, 64, 1, 4, 2)}
    for part, n in RAVEN_SIZES.items():
        for i in range(n):
            layer = {'norm_1': 1 + draw(32), 'norm_2': 1 + draw(32), 'attn.Wqkv': draw(64, 32),
                     'attn.proj': draw(32, 32), 'mlp.fc': draw(96, 32), 'mlp.proj': draw(32, 48)}
            tensors |= {f'transformer.{part}.{i}.{name}.weight': t for name, t in layer.items()}
    path = tmp_path / 'raven'
    path.mkdir()
    save_file(tensors, path / 'model.safetensors')
    # of before, as transformers leaves it: read only without the other
    save_file({name: t + 1 for name, t in tensors.items()}, path / 'shard.safetensors')
    index = dict(weight_map=dict.fromkeys(tensors, 'shard.safetensors'))
    (path / 'model.safetensors.index.json').write_text(json.dumps(index))
    (path / 'config.json').write_text(json.dumps(RAVEN))
    return path


def as_the_format_says(t, tokens, r, s):
    "Logits of a raven's tensors, from the first state s."
    F, T = torch.nn.functional, tokens.shape[1]
    angles = torch.outer(torch.arange(T), 10_000.0 ** -(torch.arange(4) / 4))       # no rope_base
    turn = torch.polar(torch.ones(T, 4), angles)

    def turned(x):          # (B, H, T, 8): the pairs (i, i + 4)
        pairs = torch.complex(x[..., :4], x[..., 4:]) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    def layer(x, part, i):
        w = lambda name: t[f'transformer.{part}.{i}.{name}.weight']
        norm = lambda x, name: F.rms_norm(x, (32,), w(name), 1e-5)
        q, k, v = (h.unflatten(-1, (-1, 8)).transpose(1, 2) for h in (
            norm(x, 'norm_1') @ w('attn.Wqkv').T).split([32, 16, 16], -1))
        k, v = (h.repeat_interleave(2, 1) for h in (turned(k), v))
        scores = turned(q) @ k.mT / 8 ** 0.5 + torch.full((T, T), -math.inf).triu(1)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w('attn.proj').T
        gate, up = (norm(x, 'norm_2') @ w('mlp.fc').T).chunk(2, -1)
        return x + (F.silu(gate) * up) @ w('mlp.proj').T

    e = layer(t['transformer.wte.weight'][tokens], 'prelude', 0)
    for _ in range(r):
        s = torch.cat((s, e), -1) @ t['transformer.adapter.weight'].T
        s = layer(layer(s, 'core_block', 0), 'core_block', 1)
    x = layer(s, 'coda', 0)
    return F.rms_norm(x, (32,), t['transformer.ln_f.weight'], 1e-5) @ t['lm_head.weight'].T


@torch.no_grad()
def test_a_folder_of_theirs_opens_and_computes_what_the_format_means(raven):
    model = load_model(raven)
    core = core_of(model)
    assert (core.r, core.backprop_depth, model.config.context) == (3, 8, 64)
    assert parts_of(model) == ([0], [1, 2], [3])
    tensors = load_file(raven / 'model.safetensors')
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    state = core.first_state(Pass(model, 12), torch.zeros(2, 12, 32))
    assert state.abs().max() <= 3 * 0.0087039 and state.std() > 0.007
    for r in (1, 2, 5):
        core.r = r
        assert torch.allclose(model(tokens), as_the_format_says(tensors, tokens, r, state),
                              atol=1e-5)
    core.r = 3
    save_authors(model, raven.parent / 'again')         # and comes out as it came in
    again = load_file(raven.parent / 'again/model.safetensors')
    assert same(again, {name: tensors[name] for name in again})
    assert {*tensors} - {*again} == {'freqs_cis'}
    config = json.loads((raven.parent / 'again/config.json').read_text())
    assert all(config[key] == value for key, value in RAVEN.items() if key not in (
        'block_size', 'rope_base', 'head_dim', 'block_class_name', 'init_values'))
    assert torch.equal(load_model(raven.parent / 'again')(tokens), model(tokens))
    (raven / 'model.safetensors').rename(raven / 'other.safetensors')
    assert torch.equal(load_model(raven).embed.weight, model.embed.weight + 1)
    # what is left out stands for what they published: the first state of a model 5,280 wide
    left = {name: value for name, value in RAVEN.items()
            if name not in ('rope_base', 'rope_theta', 'mean_backprop_depth', 'head_dim')}
    (raven / 'config.json').write_text(json.dumps(left | dict(init_values=dict(embed_scale=1.0))))
    model = load_model(raven)
    assert (model.config.rope_theta, core_of(model).backprop_depth) == (50_000, 8)
    assert core_of(model).state_std == pytest.approx(math.sqrt(2 / (5 * 5280)), rel=1e-5)


@pytest.mark.parametrize('name, changes, message', [
    ('llama', dict(model_type='gpt2'), "the family 'gpt2' .known: llama, qwen2, qwen3., which"),
    ('llama', dict(attention_bias=True), 'linear layers with a bias, which is not supported'),
    ('llama', dict(layer_types=['full_attention', 'sliding_attention', 'full_attention']),
     'attention over a sliding window'),
    ('llama', dict(hidden_act='gelu'), "the activation 'gelu'"),
    ('llama', dict(is_causal=False), 'attention in both directions'),
    ('llama', dict(quantization_config=dict(bits=4)), 'quantized weights'),
    ('llama', dict(rope_parameters=dict(rope_type='yarn', factor=2.0)),
     "rope scaling of the kind 'yarn'"),
    ('llama', dict(num_hidden_layers=4), 'missing keys: model.layers.3.input_layernorm.weight'),
    ('llama', dict(num_hidden_layers=2), 'unexpected keys: model.layers.2.input_layernorm.weight'),
    ('raven', dict(init_values=dict(std=0.0087, embed_scale=5.6)), 'embed_scale=5.6'),
    ('raven', dict(test_time_noise=0.1), 'test_time_noise=0.1'),
    ('raven', dict(injection_type='add'), "injection_type='add'"),
    ('raven', dict(rope_scaling=dict(rope_type='yarn')), "rope scaling of the kind 'yarn'"),
    ('raven', 'norm_3.weight', 'norm_3.weight has no place'),
    ('raven', 'attn.q_norm.weight', 'q_norm.weight has no place')])
def test_what_would_be_read_wrongly_is_refused_by_name(raven, tmp_path, name, changes, message):
    if name == 'llama':
        theirs(tmp_path / 'llama')
    if isinstance(changes, dict):
        edit(tmp_path / name / 'config.json', **changes)
    else:
        file = raven / 'model.safetensors'
        save_file(load_file(file) | {f'transformer.prelude.0.{changes}': torch.ones(32)}, file)
    with pytest.raises(Refused, match=message):
        load_model(tmp_path / name)


def test_what_the_authors_format_cannot_hold(tiny, tmp_path):
    for fields, word in ((dict(ln_scaling=True), 'ln_scaling'), (dict(qk_norm=True), 'qk_norm'),
                         (dict(head_dim=16), 'head_dim')):
        with pytest.raises(Refused, match=f'their format has no .*{word}'):
            save_authors(surgery(tiny(n_layer=4, **fields), '1-2-1'), tmp_path / 'x')
    with pytest.raises(Refused, match='holds one Core and no other'):
        save_authors(tiny(order=[0, Window([1, 2]), 3]), tmp_path / 'x')
    assert not (tmp_path / 'x').exists()


class Faded(Span):
    "A Span of one's own: half of what its items add."

    def __init__(self, items, share=0.5):
        super().__init__(items)
        self.share = share

    def __call__(self, run, x):
        return torch.lerp(x, run(x, self.items), self.share)


def spanned(order, **fields):
    return lambda tiny: tiny(n_layer=4, context=128, order=order, **fields)


def cut(inject, kind=surgery, how={}, **fields):
    return lambda tiny: kind(tiny(n_layer=5, context=128, **fields), '1-2-1', inject, r=3, **how)


JOINED = dict(
    qwen3=cut('linear', authors_surgery, qk_norm=True, head_dim=24, n_kv_head=2),
    qwen2=cut('identity', qkv_bias=True, n_kv_head=2, tie_embeddings=True),
    llama3=cut('authors', authors_surgery, dict(start='authors'), rope_scaling=LLAMA3),
    scaled=cut('add', ln_scaling=True),
    window=spanned([0, Window([1, 2], K=2), 1, 3]),
    solver=spanned([0, Window([1, 2], 'anderson', K=2, cache='last'), 3]),
    faded=spanned([0, Faded([1, 2], share=0.25), Window([3], K=2)], tie_embeddings=True))


@pytest.mark.parametrize('name', JOINED)
def test_transformers_opens_any_order_by_the_book_in_the_folder(tiny, tmp_path, name, monkeypatch):
    monkeypatch.setattr(joined, 'where', lambda kind, real=joined.where: (
        own_file(tmp_path) if kind is Faded else real(kind)))
    model = JOINED[name](tiny).eval()
    for p in model.parameters():
        p.data += torch.randn_like(p) / 50
    save_joined(model, tmp_path / 'out')
    again = load_model(tmp_path / 'out')                # by its own classes
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / 'out', trust_remote_code=True).eval()
    tokens = torch.randint(50, (2, 70), generator=torch.Generator().manual_seed(3))
    ones, is_wrapped = torch.ones_like(tokens), 'Window' in str(model.order)
    core = core_of(model)
    with torch.no_grad():
        for r in (1, 5, 3) if core else (None,):
            if core:
                core.r = core_of(again).r = r
            want, text = model(tokens), model.generate(tokens, 8, temperature=0)
            assert torch.equal(theirs(tokens, num_steps=r).logits, want)
            assert torch.equal(again(tokens), want)
            said = theirs.generate(tokens, attention_mask=ones, max_new_tokens=8, do_sample=False,
                                   num_steps=r, pad_token_id=0)
            assert torch.equal(said, text)
        # what transformers calls its cache from 5.24 on is the cache, and nothing else is swallowed
        for cache_name in ('past_key_values', 'cache') if not is_wrapped else ():
            cache = transformers.DynamicCache()
            theirs(tokens[:, :9], **{cache_name: cache})
            assert torch.allclose(theirs(tokens[:, 9:10], **{cache_name: cache}).logits,
                                  model(tokens[:, :10])[:, 9:], atol=1e-5)
        for asked in (dict(kv_store=1), dict(return_dict=False), dict(output_hidden_states=True)):
            with pytest.raises(ValueError, match=f'{[*asked][0]}.* is not known here'):
                theirs(tokens, **asked)
        if core:
            with pytest.raises(ValueError, match='this cache does not hold all of the text'):
                theirs(tokens[:, 9:10], past_key_values=theirs(tokens[:, :9]).past_key_values,
                       num_steps=5)
        # padded on the left: the row that is not padded, and the padded one by itself
        mask = ones.clone()
        mask[1, :9] = 0
        said = theirs.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False,
                               pad_token_id=0)
        alone = model.generate(tokens[1:, 9:], 4, temperature=0)
        assert torch.equal(said[0, 70:], model.generate(tokens[:1], 4, temperature=0)[0, 70:])
        assert torch.equal(said[1, 70:], alone[0, 61:])
    loss = theirs(tokens, labels=tokens).loss
    assert torch.allclose(theirs(tokens, labels=tokens, num_items_in_batch=7).loss * 7, loss * 138)
    grads = []
    for how in (theirs.gradient_checkpointing_disable, theirs.gradient_checkpointing_enable):
        how()
        theirs.train().zero_grad()
        theirs(tokens, labels=tokens).loss.backward()
        grads.append([p.grad for p in theirs.parameters()])
    assert all(map(torch.equal, *grads))
    theirs.eval().resize_token_embeddings(53)
    theirs.save_pretrained(tmp_path / 'theirs')         # whose code goes along
    with torch.no_grad():
        bigger = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / 'theirs', trust_remote_code=True).eval()
        assert torch.allclose(bigger(tokens).logits[..., :50], want, atol=1e-5)


def own_file(folder):
    "Faded in a file of its own, with an import of the book and something to do as a script."
    path = folder / 'faded.py'
    path.write_text('import torch\nfrom nanodepth.model import Span\n\n'
                    + inspect.getsource(Faded) + "\nif __name__ == '__main__':\n    1 / 0\n")
    return path


def test_a_name_in_a_config_json_that_is_no_span_is_refused(tiny, tmp_path):
    save_joined(tiny(n_layer=4, order=[0, Window([1, 2], K=2), 3]), tmp_path)
    text = (tmp_path / 'config.json').read_text()
    (tmp_path / 'config.json').write_text(text.replace('"Window"', '"subprocess"'))
    with pytest.raises(Refused, match='the class subprocess of a Span is needed'):
        load_model(tmp_path)
    with pytest.raises(ValueError, match='subprocess: no Span'):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)


def test_an_export_that_is_another_model_is_none(tiny, tmp_path, capsys, monkeypatch):
    "Opened again it has other logits, or its code writes other text; or it was killed."
    core = save_run(tmp_path / 'core', authors_surgery(tiny(vocab_size=257, n_layer=5), '1-2-1'))
    run = save_run(tmp_path / 'run', tiny(vocab_size=257))
    for parent in (core, run):
        nanodepth('export', [parent, f'{parent}-good', '--dtype=bfloat16'])

    def damaged(model, folder, *how, key):
        (save_hf if key == 'rms_norm_eps' else save_joined)(model, folder, *how)
        path = folder / 'config.json'
        path.write_text(path.read_text().replace(f'"{key}": 1e-05', f'"{key}": 1e-03'))
    monkeypatch.setattr(export, 'save_hf', functools.partial(damaged, key='rms_norm_eps'))
    monkeypatch.setattr(export, 'save_joined', functools.partial(damaged, key='norm_eps'))
    for parent in (core, run):
        assert 'opened again, it is another model' in refused(
            capsys, 'export', parent, f'{parent}-bad')
    monkeypatch.setattr(export, 'compare', lambda *_: signal.default_int_handler(2, None))
    with pytest.raises(SystemExit):
        nanodepth('export', [run, f'{run}-bad'])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'core', 'core-good', 'run', 'run-good']


def test_a_run_is_exported_with_the_rules_of_its_tokenizer_json(tmp_path, tiny):
    "This class, as some of the hub have it, leaves the rule out that splits digits first."
    file = byte_level_bpe(['a  12', 'of  34  layers'] * 9, 270, ['<|endoftext|>'])
    save_run(tmp_path / 'run', tiny(vocab_size=270))
    file.save(str(tmp_path / 'run/tokenizer.json'))
    (tmp_path / 'run/tokenizer_config.json').write_text(json.dumps(
        dict(tokenizer_class='GPT2Tokenizer', eos_token='<|endoftext|>')))
    nanodepth('export', [str(tmp_path / 'run'), str(tmp_path / 'out')])
    words = [transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ('run', 'out')]
    text = 'a  12 of  3'
    trained = get_tokenizer(tmp_path / 'run').encode(text)
    assert words[0].encode(text) != trained == words[1].encode(text)
    assert words[1].eos_token == '<|endoftext|>'


@pytest.mark.parametrize('stored', [torch.bfloat16, torch.float32], ids=str)
def test_what_transformers_keeps_in_float32_stays_so(stored, tmp_path):
    family('ernie4_5_moe', moe_num_experts=4, moe_k=2, moe_intermediate_size=16,
           moe_layer_start_index=0).to(stored).save_pretrained(tmp_path)
    ours, theirs = ([p.dtype for p in model.parameters()] for model in (
        open_any(tmp_path, dtype='bfloat16')[1],
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype='bfloat16')))
    assert ours == theirs and torch.float32 in ours         # its routers


@pytest.mark.parametrize('name', ['gemma3_text', 'mistral'])
def test_a_widened_model_is_transformers_own_in_float32(name, tmp_path):
    "Gemma computes a scale of its embedding in the type of the weights: 16 bits would stay in it."
    model = family(name, hidden_size=40)
    model.bfloat16().save_pretrained(tmp_path)
    _, ours = open_any(tmp_path, dtype='float32')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs.eval()(tokens).logits)


def test_an_exported_folder_has_its_order_its_words_and_its_licence(tmp_path, tiny):
    model = tiny(vocab_size=257, n_layer=4)
    save_hf(model, tmp_path / 'in', tokenizer='bytes')
    (tmp_path / 'in/LICENSE.txt').write_text('Do as you like.')
    (tmp_path / 'in/chat_template.jinja').write_text('{{ messages[0].content }}')
    config = json.loads((tmp_path / 'in/config.json').read_text())
    (tmp_path / 'in/config.json').write_text(json.dumps(config | dict(eos_token_id=[256, 7])))
    nanodepth('export', [str(tmp_path / 'in'), str(tmp_path / 'out'), '--loop=1-2x2-1'])
    assert (tmp_path / 'out/LICENSE.txt').read_text() == 'Do as you like.'
    with safe_open(tmp_path / 'out/model.safetensors', 'pt') as file:
        assert file.metadata() == dict(format='pt', parent='in', order='0 1 2 1 2 3')
    said = json.loads((tmp_path / 'out/tokenizer_config.json').read_text())
    assert (said['tokenizer_class'], said['model_input_names']) == (        # for transformers 4
        'PreTrainedTokenizerFast', ['input_ids', 'attention_mask'])
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
    assert words.chat_template == '{{ messages[0].content }}'
    text = "a , b . I 'm \"ä東🙂\"\r\n"
    assert words.encode(text) == [256, *text.encode()] and words.decode([*text.encode()]) == text
    assert json.loads((tmp_path / 'out/config.json').read_text())['eos_token_id'] == [256, 7]
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
    assert opened.generation_config.eos_token_id == [256, 7]        # as its parent's text ended


def test_what_reads_ahead_is_no_model_from_left_to_right(tmp_path):
    family('bert', is_decoder=False).save_pretrained(tmp_path)
    with pytest.raises(Refused, match='reads ahead'):
        open_any(tmp_path)


def test_no_stranger_is_asked_in(tmp_path, monkeypatch, tiny, capsys):
    "Whoever answers y to transformers' question would run it."
    monkeypatch.setattr(builtins, 'input', lambda *_: 'y')
    code = f'open({str(tmp_path / "RAN")!r}, "w")\nclass X: pass\n'
    new = tmp_path / 'new'
    new.mkdir()
    (new / 'evil.py').write_text(code)
    (new / 'config.json').write_text(json.dumps(dict(
        model_type='my_new_family', auto_map=dict(AutoConfig='evil.X'))))
    assert 'transformers does not open it' in refused(capsys, 'evaluate', new, '--tasks=toy_copy')
    save_hf(tiny(vocab_size=257), tmp_path / 'chat', tokenizer='bytes')
    (tmp_path / 'chat/evil.py').write_text(code)
    edit(tmp_path / 'chat/tokenizer_config.json', tokenizer_class='X',
         auto_map=dict(AutoTokenizer=['evil.X', None]))
    refused(capsys, 'evaluate', tmp_path / 'chat', '--tasks=svamp', '--chat', '--limit=2',
            '--device=cpu')
    assert not (tmp_path / 'RAN').exists()


def test_an_export_keeps_what_was_trained_and_says_how_near_it_came(config, tiny, tmp_path, capsys):
    save_hf(tiny(vocab_size=257).bfloat16(), tmp_path / 'hf', tokenizer='bytes')
    edit(tmp_path / 'hf/config.json', eos_token_id=[256, 7])
    c = config(init_from=str(tmp_path / 'hf'))
    train(c, open_parent)
    assert generation_of(c.out_dir)['eos_token_id'] == [256, 7]     # its parent's, and no data's
    nanodepth('export', [c.out_dir, str(tmp_path / 'out')])
    assert 'opened again, its logits differ by at most 0;' in capsys.readouterr().out
    back = load_model(tmp_path / 'out').state_dict()
    assert all(torch.equal(t, back[name]) for name, t in weights_of(c).items())
