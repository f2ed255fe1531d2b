"""A GGUF file, as llama.cpp keeps models, written as an ordinary Hugging Face folder; and a model
of ours written as such a file.

The idea: transformers reads the file of any family that it knows, and gives back full numbers where
the file has four or eight bits each. What is left is to write that down, so that every command
opens it: weights, config, tokenizer and chat template. The other way the package gguf does: its
writer, its names, its eight bits.

Here: SmolLM's tokenizer (and a few others) splits digits off before anything else. transformers
does not know that kind and takes GPT-2's, which gives other tokens where blanks stand before a
digit, so the kind is put right here. llama.cpp turns neighbouring channels where transformers turns
channel i with i + hd/2, so the rows of a Llama's q and k change places in the file; Qwen's do not.

Usage:
    nanodepth export MODEL.gguf out/model --dtype=bfloat16
    nanodepth export out/smollm2 out/deeper.gguf --loop=13-4x2-13 --damp --dtype=q8_0
"""
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nanodepth.common.errors import Refused
from nanodepth.common.files import reading, replacing
from nanodepth.model import rope_tables
from nanodepth.models.hf import (plain_layers, refuse_reported, their_name, using_transformers)
from nanodepth.text.tokenizer import get_tokenizer, write_tokenizer

# kinds that split every digit off, by their names in llama.cpp
SPLIT_DIGITS = 'smollm', 'starcoder', 'refact', 'command-r', 'codeshell', 'exaone', 'minerva-7b'
AS_GPT2 = 'gpt-2', 'olmo', 'mpt', 'phi-2'       # kinds that split as GPT-2 does


def header_of(path):
    """(the file's name for its way to split a text into words, its kind of rotary scaling, by what
    it divides the rotary frequencies): None where it does not say."""
    from gguf import GGUFReader
    with reading(path):
        reader = GGUFReader(path)
        said = {name: field.contents() for name, field in reader.fields.items()
                if name.endswith(('.rope.scaling.type', '.ggml.pre'))}
        kind = next((said[name] for name in said if name.endswith('.type')), None)
        divisors = next((t.data for t in reader.tensors if t.name == 'rope_freqs.weight'), None)
        return said.get('tokenizer.ggml.pre'), kind, divisors


def llama3_scaling(divisors, head_dim, theta):
    """Llama 3's rotary scaling, of which llama.cpp's files have only what it does to each
    frequency; None, if no such scaling does that. The bounds 1 and 4 are those of every Llama 3."""
    wave = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)       # each one's length
    divisors = np.asarray(divisors, dtype=float)
    factor = divisors.max()
    if factor == 1 or len(divisors) != len(wave):
        return None
    kept = (1 / divisors - 1 / factor) / (1 - 1 / factor)   # 1: a short wave, as it was; 0: slowed
    between = (kept > 1e-6) & (kept < 1 - 1e-6)
    if between.any():
        original = float(np.median(wave[between] * (1 + 3 * kept[between])))
    else:       # any length does that separates the kept waves from the slowed ones
        kept_waves, slowed_waves = wave[kept > 0.5], wave[kept < 0.5]
        middle = math.sqrt(4 * kept_waves.max(initial=1e-9) * slowed_waves.min())
        original = 2 ** round(math.log2(middle))
    expected = np.clip((original / wave - 1) / 3, 0, 1)
    if np.abs(expected - kept).max() > 1e-3:
        return None
    return dict(rope_type='llama3', rope_theta=theta, factor=round(float(factor), 3),
                low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=round(original))


def scale_positions(path, model, kind, divisors):
    "What transformers does not read of a file's rotary positions goes into the model's config."
    config = model.config
    rope = config.get_text_config().rope_parameters or {}
    if rope.get('rope_type', 'default') != 'default':
        return                          # it has read it
    scaling = None
    if divisors is not None and config.model_type == 'llama':
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        scaling = llama3_scaling(divisors, head_dim, rope['rope_theta'])
    if scaling:
        config.rope_parameters = scaling
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    elif kind not in (None, 'none') or divisors is not None and not (divisors == 1).all():
        raise Refused(f'{path}: its rotary positions are scaled ({kind or "rope_freqs.weight"}) in '
                      'a way that is not known here: take the original checkpoint')


def open_gguf(path):
    "(transformers' model of the file, its tokenizer)."
    path = Path(path)
    kind, scaling, divisors = header_of(path)
    with using_transformers(path) as package:
        source = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name,
                      trust_remote_code=False)
        tokenizer = package.AutoTokenizer.from_pretrained(**source)
        model, report = package.AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, output_loading_info=True)
    refuse_reported(path, report)
    scale_positions(path, model, scaling, divisors)
    from tokenizers import pre_tokenizers
    inner = tokenizer.backend_tokenizer
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind in SPLIT_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        inner.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    elif kind not in AS_GPT2 and repr(inner.pre_tokenizer) == repr(plain):
        raise Refused(f'{path}: its tokenizer is of the kind {kind!r}, which nothing here knows, '
                      'so its tokens would be wrong without a word: take the original checkpoint')
    del model.config.quantization_config        # as it was in the file, but not here
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


# ---------------------------------------------------------------------------------------------- out

def write_gguf(model, path, dtype, tokenizer):
    """A model of ours, in the order in which it runs, as a GGUF file. dtype: float32, float16,
    bfloat16 or q8_0, of the matrices; norms keep 32 bits. tokenizer: what get_tokenizer takes."""
    import gguf
    if Path(path).exists():
        raise Refused(f'{path} is there already: choose another name')
    model = plain_layers(model)
    c = model.config
    if c.qk_norm and c.head_dim != 128:
        raise Refused(f'{path}: heads of {c.head_dim} channels: transformers reads a Qwen 3 back '
                      'with 128, as all that are published have, so nothing would hold the file')
    kind = dict(float32='F32', float16='F16', bfloat16='BF16', q8_0='Q8_0')[dtype]
    kinds = gguf.GGMLQuantizationType
    family = 'qwen3' if c.qk_norm else 'llama'
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), len(model.layers))
    with replacing(path) as new:
        file = gguf.GGUFWriter(new, family)
        for name, value in dict(
                block_count=len(model.layers), context_length=c.context, embedding_length=c.n_embd,
                feed_forward_length=c.ffn_dim, head_count=c.n_head, head_count_kv=c.n_kv_head,
                key_length=c.head_dim, value_length=c.head_dim, rope_dimension_count=c.head_dim,
                rope_freq_base=c.rope_theta, layer_norm_rms_eps=c.norm_eps, vocab_size=c.vocab_size,
                file_type=gguf.LlamaFileType['ALL_F32' if kind == 'F32' else f'MOSTLY_{kind}'],
                ).items():
            getattr(file, f'add_{name}')(value)
        add_words(file, tokenizer, c)
        if c.rope_scaling:
            file.add_tensor('rope_freqs.weight', slowed_by(model))
        for name, t in model.state_dict().items():
            if name == 'head.weight' and c.tie_embeddings:
                continue
            if family == 'llama' and name.endswith(('.attn.q.weight', '.attn.k.weight')):
                heads = t.unflatten(0, (-1, 2, c.head_dim // 2))        # (H, 2, hd/2, C)
                t = heads.transpose(1, 2).flatten(0, 2)
            small = t.dim() == 1 or kind == 'Q8_0' and t.shape[1] % 32
            form = kinds.F32 if small else kinds[kind]
            name, _, ending = their_name(name).rpartition('.')
            file.add_tensor(f'{names.get_name(name)}.{ending}',
                            gguf.quants.quantize(t.float().numpy(), form), raw_dtype=form)
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()


def slowed_by(model):
    "By what Llama 3's scaling divides each rotary frequency."
    plain = rope_tables(replace(model.config, rope_scaling=None, context=2))
    # a frequency is the angle from position 0 to 1
    turn = lambda cos, sin: torch.atan2(sin[1].double(), cos[1].double())
    return (turn(*plain) / turn(*rope_tables(model.config))).float().numpy()


def add_words(file, name, config):
    "The tokenizer of that name: words, merges, kind, the marks of a text, and the chat template."
    import gguf
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(name, folder, config.context)
        said = json.loads((Path(folder) / 'tokenizer.json').read_text(encoding='utf-8'))
        marks = gguf.SpecialVocab(folder, load_merges=True, n_vocab=config.vocab_size)
        begins = bool(get_tokenizer(folder).starts)
    if not said['model'].get('merges'):
        raise Refused(f'{name}: llama.cpp knows tokenizers that merge pairs, and this one has no '
                      'merges (a text in bytes, as the toy data)')
    added = {word['id']: word for word in said['added_tokens']}
    words = {i: word for word, i in said['model']['vocab'].items()}
    words |= {i: word['content'] for i, word in added.items()}
    kinds = gguf.TokenType
    kind_of_word = lambda i: (kinds.UNUSED if i not in words else kinds.NORMAL if i not in added
                              else kinds.CONTROL if added[i]['special'] else kinds.USER_DEFINED)
    every = range(config.vocab_size)
    file.add_tokenizer_model('gpt2')
    file.add_tokenizer_pre(splits_as(name, said['pre_tokenizer']))
    file.add_token_list([words.get(i, f'[PAD{i}]') for i in every])
    file.add_token_types([kind_of_word(i) for i in every])
    marks.add_special_token = dict(bos=begins)
    marks.add_to_gguf(file, quiet=True)


def splits_as(name, splitter):
    "llama.cpp's name for how a tokenizer.json splits a text into words."
    parts = splitter.get('pretokenizers', [splitter])
    kinds = [part['type'] for part in parts]
    if kinds == ['ByteLevel'] and parts[0]['use_regex']:
        return 'gpt-2'
    if kinds == ['Digits', 'ByteLevel'] and parts[0]['individual_digits']:
        return 'smollm'
    pattern = parts[0]['pattern'].get('Regex') if kinds == ['Split', 'ByteLevel'] else None
    for kind, digits in (('llama-bpe', r'\p{N}{1,3}'), ('qwen2', r'\p{N}')):
        if pattern == (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
                       r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'):
            return kind
    raise Refused(f'{name}: its tokenizer splits texts in a way for which llama.cpp has no name '
                  'here (known: those of GPT-2, SmolLM, Llama 3 and Qwen)')
