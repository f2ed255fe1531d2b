"""A GGUF file, as llama.cpp keeps models, written as an ordinary Hugging Face folder.

The idea: transformers reads the file of any family that it knows, and gives back full numbers where
the file has four or eight bits each. What is left is to write that down, so that every command
opens it: weights, config, tokenizer and chat template.

Here: SmolLM's tokenizer (and a few others) splits digits off before anything else. transformers
does not know that kind and takes GPT-2's, which gives other tokens where blanks stand before a
digit, so the kind is put right here.

Usage:
    nanodepth export MODEL.gguf out/model --dtype=bfloat16
"""
import math
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from nanodepth.common.errors import Refused, refusing
from nanodepth.common.files import new_model, reading
from nanodepth.models.hf import refuse_reported, using_transformers

# kinds that split every digit off, by their names in llama.cpp
SPLIT_DIGITS = 'smollm', 'starcoder', 'refact', 'command-r', 'codeshell', 'exaone', 'minerva-7b'
AS_GPT2 = 'gpt-2', 'olmo', 'mpt', 'phi-2'       # kinds that split as GPT-2 does


def header_of(path):
    """(the file's name for its way to split a text into words, its kind of rotary scaling, by what
    it divides the rotary frequencies): None where it does not say."""
    with refusing(ImportError, why=lambda error: f'{path}: this needs gguf (pip install gguf)'):
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
    return dict(rope_type='llama3', rope_theta=theta, factor=round(float(factor), 3), low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=round(original))


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
    return model, tokenizer


def write_gguf(path, folder, dtype=torch.float32):
    "The file as a Hugging Face folder. Returns transformers' model of the file."
    with new_model(folder):
        model, tokenizer = open_gguf(path)
        del model.config.quantization_config        # as it was in the file, but not here
        with torch.device('meta'):      # the loaded one cannot be saved: it remembers its file
            plain = type(model)(model.config)
        plain.load_state_dict({name: t.to(dtype) for name, t in model.state_dict().items()},
                              assign=True)
        plain.config.dtype = dtype
        plain.generation_config = model.generation_config
        tokenizer.model_max_length = model.config.max_position_embeddings
        plain.tie_weights()             # else a tied head would be written once more
        with tempfile.TemporaryDirectory(dir=folder, prefix='unfinished') as unfinished:
            tokenizer.save_pretrained(unfinished)
            plain.save_pretrained(unfinished)
            # config.json comes last: without it, the folder is no checkpoint
            for path in sorted(Path(unfinished).iterdir(), key=lambda p: p.name == 'config.json'):
                path.chmod(0o644)       # else only its owner could read the weights
                os.replace(path, Path(folder) / path.name)
    return model
