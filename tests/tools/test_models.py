"""Test nanodepth/models: Hugging Face folders and the authors' format, in and out. An export is the
model that it was, a folder that would be read wrongly is refused, and no stranger's code runs."""
import builtins
import inspect
import json
import math
import random

import pytest
import tiktoken
import tokenizers as tk
import torch
import transformers
from families import LLAMA3, tiny as family
from helpers import ROOT, Times, logits, same, save_run, state_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from slow_forms import check_core, check_first_state
from tool_helpers import byte_level_bpe, refused

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import export
from nanodepth.commands.train import open_parent
from nanodepth.common.errors import Refused
from nanodepth.common.origin import is_ours
from nanodepth.model import Block, LM, ModelConfig, Pass
from nanodepth.models import joined
from nanodepth.models.authors import AuthorsCore, flops_paper, parts_of
from nanodepth.models.checkpoint import load_model, open_any
from nanodepth.models.hf import family_of, load_hf, save_hf
from nanodepth.models.joined import save_joined
from nanodepth.models.raven import save_authors
from nanodepth.retrofit import Core, core_of, ramp, surgery
from nanodepth.scoring import harness
from nanodepth.text import primitives
from nanodepth.text.tokenizer import as_tokenizers, generation_of, get_tokenizer, start_of_document
from nanodepth.train import train
from nanodepth.wrapper import Window


def edit(path, **changes):
    "Change values in a JSON file."
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def close(a, b):
    "Return whether logits are equal but for rounding."
    return (a - b).abs().max() <= 1e-5 * b.abs().max()


def automodel(folder, dtype='auto'):
    "Return the model of a folder as transformers opens it."
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=True).eval()


def greedy(model, tokens, **how):
    "Return the tokens and eight more."
    if is_ours(model):
        return model.generate(tokens, 8, temperature=0)
    how = dict(attention_mask=torch.ones_like(tokens)) | how
    return model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0, **how)


def published(name, says={}, **fields):
    """Return a function that writes a tiny random folder with transformers, and returns its model
    and ours of this folder. `says` are changes in its config.json."""
    def make(tiny, folder):
        model = family(name, **dict(num_hidden_layers=3, head_dim=None) | fields)
        for p in model.parameters():
            if p.dim() == 1:            # norms and biases matter, too
                torch.nn.init.uniform_(p, 0.5, 1.5)
        model.save_pretrained(folder)
        edit(folder / 'config.json', **says)
        return automodel(folder), load_hf(folder)
    return make


def ours(own_head=False, **fields):
    "Return a function that makes a model of ours."
    def make(tiny, folder):
        model = tiny(**fields)
        if own_head:
            model.head.weight.data.copy_(model.embed.weight)
        return model, model
    return make


def cut(how=dict(kind=AuthorsCore, inject='add'), **fields):
    "Return a function that makes a recurrent model."
    def make(tiny, folder):
        model = surgery(tiny(n_layer=5, context=128, **fields), '1-2-1', r=3, **how).eval()
        for p in model.parameters():
            p.data += torch.randn_like(p) / 50
        return model, model
    return make


HEADS = dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=36)
ROPE = dict(rope_type='llama3', rope_theta=5e5, **LLAMA3)
START = dict(kind=AuthorsCore, start='authors')
MODELS = {
    save_hf: {
        'llama, tied': published('llama', num_key_value_heads=1, tie_word_embeddings=True),
        'llama, untied but for its config': published('llama', dict(tie_word_embeddings=True)),
        # a length is in the rope's settings and next to them, where it counts
        'llama, rope': published('llama', dict(original_max_position_embeddings=20), **HEADS,
                                 head_dim=10, rope_parameters=ROPE),
        'qwen3': published('qwen3', **HEADS, head_dim=24, rms_norm_eps=1e-2),
        'qwen2': published('qwen2', head_dim=8, intermediate_size=50),
        'grouped queries': ours(n_kv_head=2),
        'a head that still equals the embedding': ours(own_head=True, tie_embeddings=False),
        'looped, biases': ours(qkv_bias=True, order=[0, 1, 1, 2, 3], rope_scaling=LLAMA3),
        'looped LN-scaling': ours(ln_scaling=True, order=[0, 1, 0, 1, 2, 3], norm_eps=1e-2),
        'QK-norm': ours(qk_norm=True, head_dim=12, rope_theta=5e5)},
    save_authors: {
        'their start': cut(START, n_kv_head=2, rope_scaling=LLAMA3),
        'add': cut(tie_embeddings=False)},
    save_joined: {
        'qwen3': cut(dict(kind=AuthorsCore), qk_norm=True, head_dim=24, n_kv_head=2),
        'qwen2': cut({}, qkv_bias=True, tie_embeddings=False),
        'their start': cut(START, rope_scaling=LLAMA3),
        'LN-scaling': cut(ln_scaling=True),
        'no family': ours(context=128, qk_norm=True, qkv_bias=True),
        'window': ours(context=128, order=[0, Window([1, 2], K=2), 1, 3]),
        'solver': ours(context=128, order=[0, Window([1, 2], 'anderson', K=2), 3]),
        'own Span': ours(context=128, order=[0, Times([1, 2], times=3), Window([3], K=2)])},
}


OPENERS = {save_hf: [load_model, automodel], save_authors: [load_model],
           save_joined: [load_model, automodel]}


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    "Times is in its own file, which imports the book, and does something as a script."
    path = tmp_path / 'times.py'
    path.write_text('import torch\nfrom nanodepth.model import Span\n\n'
                    + inspect.getsource(Times) + "\nif __name__ == '__main__':\n    1 / 0\n")
    real = joined.file_of_class
    monkeypatch.setattr(joined, 'file_of_class', lambda kind: path if kind is Times else real(kind))


@pytest.mark.parametrize('write, name', [
    (write, name) for write, models in MODELS.items() for name in models])
def test_an_export_computes_what_the_model_does(write, name, tiny, tmp_path, own_file):
    """However it is opened, it has the same logits and generates the same text. Opened and written
    again, it has the same bytes, in 32 bits and in 16."""
    source, model = MODELS[write][name](tiny, tmp_path / 'source')
    T = min(70, model.config.context)
    tokens = torch.randint(model.config.vocab_size, (2, T),
                           generator=torch.Generator().manual_seed(3))
    write(model, tmp_path / 'out')
    for opened in [model, *(open_it(tmp_path / 'out') for open_it in OPENERS[write])]:
        assert close(logits(opened, tokens), logits(source, tokens))
        assert torch.equal(greedy(opened, tokens[:, :-8]), greedy(source, tokens[:, :-8]))
        if not is_ours(opened):     # no token ends a text, and not token 2, as in a Llama
            assert opened.config.eos_token_id is None
    if source is not model:
        given, kept = (load_file(tmp_path / folder / 'model.safetensors')
                       for folder in ('source', 'out'))
        assert same(kept, {name: given[name] for name in kept})
    for dtype in (torch.float32, torch.bfloat16):
        once, twice = tmp_path / f'{dtype}', tmp_path / f'{dtype} again'
        write(model.to(dtype), once)
        again = load_model(once)
        assert {p.dtype for p in again.parameters()} == {dtype}
        half = open_any(once, dtype='bfloat16')[1]
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        tied = model.config.tie_embeddings and write is not save_authors
        assert again.config.tie_embeddings == tied == (again.head.weight is again.embed.weight)
        write(again, twice)
        assert ({path.name: path.read_bytes() for path in once.iterdir()}
                == {path.name: path.read_bytes() for path in twice.iterdir()})
    assert (once / 'model.safetensors').stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize('name', MODELS[save_joined])
def test_an_export_with_our_code_is_a_model_of_transformers(tiny, tmp_path, name, own_file):
    "Recurrences, caches, padding, the loss and checkpointing work as in transformers."
    model, _ = MODELS[save_joined][name](tiny, None)
    save_joined(model, tmp_path / 'out')
    theirs, core = automodel(tmp_path / 'out'), core_of(model)
    tokens = torch.randint(50, (2, 70), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for r in (1, 5, 3) if core else (None,):
            if core:
                core.r = r
            want = model(tokens)
            assert torch.equal(theirs(tokens, num_steps=r).logits, want)
            assert torch.equal(greedy(theirs, tokens, num_steps=r), greedy(model, tokens))
        # from 5.24 on transformers also calls it `cache`. An unknown argument is refused
        for cache_name in ('past_key_values', 'cache') if 'Window' not in str(model.order) else ():
            cache = transformers.DynamicCache()
            theirs(tokens[:, :9], **{cache_name: cache})
            assert torch.allclose(theirs(tokens[:, 9:10], **{cache_name: cache}).logits,
                                  model(tokens[:, :10])[:, 9:], atol=1e-5)
        for asked in (dict(return_dict=False), dict(output_hidden_states=True)):
            with pytest.raises(ValueError, match=f'{[*asked][0]}.* is not supported by this model'):
                theirs(tokens, **asked)
        if core:
            with pytest.raises(ValueError, match='this cache does not hold all of the text'):
                theirs(tokens[:, 9:10], past_key_values=theirs(tokens[:, :9]).past_key_values,
                       num_steps=5)
        # padding on the left changes neither the other row nor the padded one
        mask = torch.ones_like(tokens)
        mask[1, :9] = 0
        said = greedy(theirs, tokens, attention_mask=mask)
        assert torch.equal(said[:1], greedy(model, tokens[:1]))
        assert torch.equal(said[1:, 9:], greedy(model, tokens[1:, 9:]))
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
    theirs.save_pretrained(tmp_path / 'theirs')         # with the code
    bigger = automodel(tmp_path / 'theirs')
    assert torch.allclose(logits(bigger, tokens)[..., :50], want, atol=1e-5)


@pytest.mark.parametrize('name, stored, asked', [
    ('ernie4_5_moe', 'bfloat16', 'bfloat16'), ('ernie4_5_moe', 'float32', 'bfloat16'),
    ('gemma3_text', 'bfloat16', 'float32'), ('mistral', 'bfloat16', 'float32')])
def test_a_model_of_another_family_is_opened_with_the_dtypes_of_transformers(name, stored, asked,
                                                                              tmp_path):
    """Ernie's routers stay in float32. Gemma computes a scale of its embedding in the dtype of the
    stored weights, so 16 bits would stay in it."""
    experts = dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0)
    fields = experts if name == 'ernie4_5_moe' else dict(hidden_size=40)
    family(name, **fields).to(getattr(torch, stored)).save_pretrained(tmp_path)
    opened, theirs = open_any(tmp_path, dtype=asked)[1], automodel(tmp_path, asked)
    types = [p.dtype for p in opened.parameters()]
    assert types == [p.dtype for p in theirs.parameters()] and torch.float32 in types
    tokens = torch.arange(2, 12)[None]
    assert torch.equal(logits(opened, tokens), logits(theirs, tokens))


def of_bytes():
    "Return the tokenizer of bytes, and its encode."
    enc = get_tokenizer('bytes')
    return as_tokenizers(enc), enc.encode


def of_merges(special=264):
    "Return a small tokenizer of GPT-2's kind, and its encode."
    pairs = b' a', b'an', b' an', b'  ', b'be', b' be', b'th', b'the'
    ranks = {bytes([i]): i for i in range(256)} | {pair: 256 + i for i, pair in enumerate(pairs)}
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    enc = tiktoken.Encoding('t', pat_str=words, mergeable_ranks=ranks,
                            special_tokens={'<|endoftext|>': special})
    return as_tokenizers(enc), enc.encode


def of_pieces():
    """Return a tokenizer of TinyLlama's kind, which tiktoken cannot represent. It has pieces with ▁
    for a space, bytes for unknown letters, and a start token that its template adds."""
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
TEXTS = ['', ' ', '1 + 23 = 24', 'def f(x):\n\treturn  "ä東🙂"\r\n', "a , b . I 'm", *(
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
        assert file.encode(text).ids == [number, *ids]      # a document begins as in training
        assert again.decode(ids) == text
    assert start_of_document(again) == [number] == [again.encode_single_token(start)]
    assert number not in again.encode_ordinary(f'x{start}')     # here it is plain text
    assert again.n_vocab == file.get_vocab_size()


def test_an_answer_is_the_tokens_that_continue_the_prompt(tmp_path):
    file, encode = of_pieces()
    file.save(str(tmp_path / 'tokenizer.json'))
    enc = get_tokenizer(tmp_path)
    whole, alone = encode('a list of'), enc.encode('of')        # alone, it begins with a space
    assert enc.encode('a list') + primitives.continuation(enc, 'a list', ' of') == whole
    assert whole[-len(alone):] == alone != primitives.continuation(enc, 'a zz', 'of')


# a config.json as the authors' conversion writes it
RAVEN = dict(
    architectures=['RavenForCausalLM'], model_type='huginn_raven', n_embd=32, n_heads=4,
    num_key_value_heads=2, head_dim=8, intermediate_size=48, vocab_size=50, padded_vocab_size=50,
    block_size=4096, max_position_embeddings=64, norm_eps=1e-5, rope_base=50_000.0,
    rope_theta=10_000.0, n_layers_in_prelude=1, n_layers_in_recurrent_block=2, n_layers_in_coda=1,
    n_layers=4, mean_recurrence=3, mean_backprop_depth=8, injection_type='linear', bias=False,
    qk_bias=False, tie_embeddings=False, test_time_noise=0, block_class_name='SandwichBlock',
    init_values=dict(std=0.008703882797784892, embed_scale=1.0), torch_dtype='float32')


@pytest.fixture
def raven(tiny, tmp_path):
    "A folder of the authors, with a buffer, and with old shards, as transformers leaves them."
    parent = tiny(n_kv_head=2, ffn_dim=48, context=64, tie_embeddings=False)
    folder = tmp_path / 'raven'
    save_authors(surgery(parent, '1-2-1', AuthorsCore, start='authors', r=3), folder)
    tensors = load_file(folder / 'model.safetensors') | dict(freqs_cis=torch.zeros(1, 64, 1, 4, 2))
    save_file(tensors, folder / 'model.safetensors')
    save_file({name: t + 1 for name, t in tensors.items()}, folder / 'shard.safetensors')
    index = dict(weight_map=dict.fromkeys(tensors, 'shard.safetensors'))
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
    ours = json.loads((folder / 'config.json').read_text())
    assert all(ours[key] == value for key, value in RAVEN.items() if key not in (
        'block_size', 'rope_base', 'head_dim', 'block_class_name', 'init_values'))
    (folder / 'config.json').write_text(json.dumps(RAVEN))
    return folder


def as_the_format_says(t, tokens, r, s):
    "Return the logits of a raven's tensors from the first state s, as their format defines them."
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
def test_a_folder_of_the_authors_computes_what_their_format_defines(raven):
    model = load_model(raven)
    core = core_of(model)
    assert (core.r, core.backprop_depth, model.config.context) == (3, 8, 64)
    assert parts_of(model) == ([0], [1, 2], [3])
    tensors = load_file(raven / 'model.safetensors')
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    state = core.first_state(Pass(model, 12), torch.zeros(2, 12, 32))
    assert state.std() > 0.007
    for r in (1, 2, 5):
        core.r = r
        assert torch.allclose(model(tokens), as_the_format_says(tensors, tokens, r, state),
                              atol=1e-5)
    (raven / 'model.safetensors').rename(raven / 'other.safetensors')
    assert torch.equal(load_model(raven).embed.weight, model.embed.weight + 1)
    # a missing value means the published model, with a first state for a width of 5,280
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
    ('llama', dict(num_hidden_layers=2), 'unexpected keys: model.layers.2.input_layernorm.weight'),
    ('raven', dict(init_values=dict(std=0.0087, embed_scale=5.6)), 'embed_scale=5.6'),
    ('raven', dict(test_time_noise=0.1), 'test_time_noise=0.1'),
    ('raven', dict(injection_type='add'), "injection_type='add'"),
    ('raven', dict(rope_scaling=dict(rope_type='yarn')), "rope scaling of the kind 'yarn'"),
    ('raven', 'norm_3.weight', 'has no weight .*norm_3.weight'),
    ('bert', {}, 'reads ahead')])
def test_a_folder_that_would_be_read_wrongly_is_refused(raven, tmp_path, name, changes, message):
    folder = tmp_path / name
    if name == 'llama':
        published('llama')(None, folder)
    elif name == 'bert':
        family('bert', is_decoder=False).save_pretrained(folder)
    if isinstance(changes, dict):
        edit(folder / 'config.json', **changes)
    else:
        file = folder / 'model.safetensors'
        save_file(load_file(file) | {f'transformer.prelude.0.{changes}': torch.ones(32)}, file)
    with pytest.raises(Refused, match=message):
        load_model(folder, others=name == 'bert')


def test_an_unknown_span_in_a_config_json_is_refused(tiny, tmp_path):
    save_joined(tiny(order=[0, Window([1, 2], K=2), 3]), tmp_path)
    edit(tmp_path / 'config.json', order=[dict(step='subprocess', items=[1], settings={})])
    with pytest.raises(Refused, match='the class subprocess of a Span is needed'):
        load_model(tmp_path)
    with pytest.raises(ValueError, match='subprocess: no Span'):
        automodel(tmp_path)


@pytest.mark.parametrize('write, make, message', [
    (save_authors, cut(ln_scaling=True), 'format has no .*ln_scaling'),
    (save_authors, cut(qk_norm=True), 'format has no .*qk_norm'),
    (save_authors, cut(head_dim=16), 'format has no .*head_dim'),
    (save_authors, ours(order=[0, Window([1, 2]), 3]), 'has one Core and no other'),
    (save_authors, ours(order=[Window([0]), Core([1, 2]), 3]), 'and no other Span'),
    (save_hf, ours(order=[0, Window([1, 2]), 3]), 'no family of transformers has')])
def test_a_format_refuses_what_it_cannot_hold(write, make, message, tiny, tmp_path):
    with pytest.raises(Refused, match=message):
        write(make(tiny, None)[1], tmp_path / 'x')
    assert not (tmp_path / 'x').exists()


def test_a_model_with_ln_scaling_is_exported_as_a_llama():
    "The scales become part of the norms."
    assert family_of(ModelConfig(ln_scaling=True)) == family_of(ModelConfig()) == 'llama'


def test_tokenizer_with_a_hole_in_its_ids_is_refused():
    with pytest.raises(Refused, match='would give other tokens'):
        of_merges(special=300)


def test_a_strangers_code_is_never_run(tmp_path, monkeypatch, tiny, capsys, manager):
    "transformers would ask whether to run it, and a user may answer y."
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
    monkeypatch.setattr(harness, 'TaskManager', lambda **_: manager)
    harness.find.cache_clear()
    assert 'transformers does not open it' in refused(
        capsys, 'evaluate', tmp_path / 'chat', '--tasks=local_choice', '--chat', '--limit=2',
        '--measures=', '--device=cpu')
    assert not (tmp_path / 'RAN').exists()


def test_an_export_with_other_logits_is_removed(tiny, tmp_path, capsys, monkeypatch):
    "So is an export that transformers does not open."
    core = surgery(tiny(vocab_size=257, n_layer=5), '1-2-1', AuthorsCore)
    core = save_run(tmp_path / 'core', core)
    run = save_run(tmp_path / 'run', tiny(vocab_size=257))
    for parent in (core, run):
        nanodepth('export', [parent, f'{parent}-good', '--dtype=bfloat16'])

    def damage(run, folder):
        path = folder / 'config.json'
        path.write_text(path.read_text().replace('norm_eps": 1e-05', 'norm_eps": 1e-03'))
    monkeypatch.setattr(export, 'copy_licence', damage)
    assert 'of transformers computes other logits' in refused(capsys, 'export', run, f'{run}-bad')
    monkeypatch.setattr(export, 'OPEN', 'raise SystemExit("no")')
    assert 'transformers does not open it: no' in refused(capsys, 'export', core, f'{core}-bad')
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'core', 'core-good', 'run', 'run-good']


def test_a_model_with_an_edited_block_is_not_exported_as_a_llama(tiny, tmp_path, capsys,
                                                                 monkeypatch):
    "The Llama of transformers has no such edit, so its logits differ."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257))
    real = Block.forward
    monkeypatch.setattr(Block, 'forward', lambda self, x, *more: 1.1 * real(self, x, *more))
    line = refused(capsys, 'export', run, tmp_path / 'out')
    assert 'LlamaForCausalLM of transformers computes other logits' in line
    assert not (tmp_path / 'out').exists()


def test_an_export_encodes_text_as_in_training(tmp_path, tiny):
    "The class GPT2Tokenizer, which some folders on the hub name, would not split digits."
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


@pytest.fixture
def parent(tmp_path, tiny):
    "A published chat model, with a licence."
    save_hf(tiny(vocab_size=257, n_layer=4).bfloat16(), tmp_path / 'in', tokenizer='bytes')
    (tmp_path / 'in/LICENSE.txt').write_text('Do as you like.')
    (tmp_path / 'in/chat_template.jinja').write_text('{{ messages[0].content }}')
    edit(tmp_path / 'in/config.json', eos_token_id=[256, 7])
    return str(tmp_path / 'in')


def test_an_export_has_its_order_tokenizer_and_licence(parent, tmp_path, capsys):
    nanodepth('export', [parent, str(tmp_path / 'out'), '--loop=1-2x2-1'])
    assert 'opened with LlamaForCausalLM, its logits differ by at most ' in capsys.readouterr().out
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
    generation = automodel(tmp_path / 'out').generation_config
    assert generation.eos_token_id == [256, 7]          # as in the parent


def test_a_run_keeps_the_end_tokens_of_its_parent(parent, config):
    c = config(init_from=parent)
    train(c, open_parent)
    assert generation_of(c.out_dir)['eos_token_id'] == [256, 7]     # and not those of its data


TINYLLAMA = dict(vocab_size=32000, n_layer=22, n_embd=2048, n_head=32, n_kv_head=4, ffn_dim=5632,
                 context=1024, tie_embeddings=False)


LLAMA = dict(vocab_size=128256, n_layer=16, n_embd=2048, n_head=32, n_kv_head=8, ffn_dim=8192,
             context=1024, tie_embeddings=False)


@pytest.mark.parametrize('fields, shape, parts, share, flops, effective, curriculum', [
    (TINYLLAMA, '4-8-4', (176_177_152, 352_354_304, 176_177_152), 0.727,
     (10_570_629_120, 19_027_132_416, 24_664_801_280, 35_940_139_008),
     (1_761_771_520, 3_171_188_736, 5_990_023_168, 11_627_692_032), 0.915),
    (LLAMA, '4-6-4', (243_286_016, 364_929_024, 243_286_016), 0.875,
     (11_677_728_768, 20_436_025_344, 26_274_889_728, 37_952_618_496),
     (1_946_288_128, 3_406_004_224, 6_325_436_416, 12_164_300_800), 0.917)])
def test_surgery_gives_the_weights_and_flops_of_the_paper(fields, shape, parts, share, flops,
                                                          effective, curriculum):
    "The weights are those of Table 7, and the FLOPs follow section 3, for r = 4, 8, 16 and 32."
    with torch.device('meta'):
        parent = LM(ModelConfig(**fields))
        model = surgery(parent, shape)
    layer = sum(p.numel() for p in model.layers[0].parameters())
    prelude, core, coda = (len(part) * layer for part in parts_of(model))
    assert (prelude, core, coda) == parts and core_of(model).adapter.weight.numel() == 8_388_608
    whole = sum(p.numel() for p in parent.layers.parameters())
    assert round(sum(parts) / whole, 3) == share
    head = 2 * model.config.vocab_size * 2048 + 2048
    assert model.num_params() == sum(parts) + 8_388_608 + head
    assert tuple(flops_paper(model, r) for r in (4, 8, 16, 32)) == flops
    assert tuple(prelude + r * core + coda for r in (4, 8, 16, 32)) == effective
    kept = sum(flops_paper(model, ramp(t, 47_684, 32, 0.25))
               for t in range(0, 47_684, 7)) / 6_812 / flops_paper(model, 32)
    assert kept == pytest.approx(curriculum, abs=5e-4)


@pytest.mark.parametrize('inject', ['random', 'add'])
@pytest.mark.parametrize('r, most', [(3, 8), (5, 2)])
def test_authors_core_computes_the_equations_of_the_paper(tiny, inject, r, most):
    "Without noise, an adapter that adds gives the parent."
    parent, tokens = tiny(n_layer=6), torch.arange(24).view(2, 12)
    model = surgery(parent, '2-2-2', AuthorsCore, r=r, backprop_depth=most, inject=inject)
    check_core(model, tokens)
    if inject == 'add':
        same = surgery(parent, '2-2-2', AuthorsCore, inject='add', state_std=0, r=1)
        assert torch.equal(same(tokens), parent(tokens))
        layers = parent.flops_per_token([0, 1] + [2, 3] * 3 + [4, 5])
        same.order[2].r = 3
        assert same.flops_per_token() == layers
    with pytest.raises(Refused, match='inject=linear must'):
        surgery(parent, '1-2-1', AuthorsCore, inject='linear')


def test_first_state_of_the_authors_is_a_normal_cut_at_three_deviations():
    "It has the same width for any model."
    core = AuthorsCore([0], start='authors')
    check_first_state(core, 0.0087039 * 0.9866, 3 * 0.0087039)
    check_first_state(AuthorsCore([0]), math.sqrt(2 / (5 * 32)))


def test_weights_that_are_not_finite_are_refused(tiny, tmp_path):
    save_run(tmp_path, tiny())
    state = state_of(tmp_path)
    state['model']['norm.weight'][3] = math.inf
    torch.save(state, tmp_path / 'ckpt.pt')
    with pytest.raises(Refused, match='norm.weight has numbers that are not finite'):
        load_model(tmp_path)


STORED = ROOT / 'tests/stored/a78e6da'


@pytest.mark.parametrize('name', ['plain', 'grown', 'looped', 'window', 'recurrent', 'authors'])
def test_older_checkpoints_compute_what_they_did(name, config, tmp_path):
    "They were written by commit a78e6da. A new run may begin with them."
    drawn = torch.nn.init.trunc_normal_(torch.empty(1), a=-3, b=3,
                                        generator=torch.Generator().manual_seed(0))
    if name == 'authors' and abs(drawn.item() - 1.541) > 1e-3:
        pytest.skip('this version of torch draws other first states for AuthorsCore')
    expected = torch.load(STORED / 'expected.pt')[name]
    model = load_model(STORED / name)
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.allclose(model(tokens)[:, ::8], expected['logits'], atol=1e-5)
    assert torch.equal(model.generate(tokens[:, :6], 12, temperature=0), expected['text'])
    c = config(init_from=str(STORED / name), steps=1, warmup_steps=0, decay_steps=0)
    assert train(c) == 0
    first = torch.load(f'{c.out_dir}/ckpt.pt', weights_only=True)
    assert first['model'].keys() == model.state_dict().keys()
