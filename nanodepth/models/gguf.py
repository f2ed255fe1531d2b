"""A GGUF file, as llama.cpp keeps models, written as an ordinary Hugging Face folder.

The idea: transformers reads the file of any family that it knows, and gives back full numbers where
the file has four or eight bits each. What is left is to write that down, so that every command
opens it, and to say what transformers would lose without a word: a scaling of the rotary positions
(as of Llama 3.1), and a tokenizer's way to split a text. SmolLM's splits digits off before anything
else, which is put right here.

Usage:
    nanodepth export MODEL.gguf out/model --dtype=bfloat16
"""
from pathlib import Path

import torch

from nanodepth.common.errors import Refused
from nanodepth.common.files import new_model, reading
from nanodepth.models.hf import refuse_reported, using_transformers

# kinds that split every digit off, by their names in llama.cpp
SPLIT_DIGITS = 'smollm', 'starcoder', 'refact', 'command-r', 'codeshell', 'exaone', 'minerva-7b'
AS_GPT2 = 'gpt-2', 'olmo', 'mpt', 'phi-2'       # kinds that split as GPT-2 does


def open_gguf(path, rope=None):
    """(transformers' model of the file, its tokenizer). rope: the scaling of its positions, by whom
    has just written it."""
    from gguf import GGUFReader
    path = Path(path)
    with reading(path):
        reader = GGUFReader(path)
        said = {name: field.contents() for name, field in reader.fields.items()
                if name.endswith(('.rope.scaling.type', '.ggml.pre'))}
        scaled = [t for t in reader.tensors if t.name == 'rope_freqs.weight'
                  and (t.data != 1).any()] or [kind for name, kind in said.items()
                                               if name.endswith('.type') and kind != 'none']
    if scaled and not rope:
        raise Refused(f'{path}: its rotary positions are scaled, which transformers does not read '
                      'from such a file: take the original checkpoint')
    with using_transformers(path) as package:
        source = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name,
                      trust_remote_code=False)
        tokenizer = package.AutoTokenizer.from_pretrained(**source)
        model, report = package.AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, output_loading_info=True)
    refuse_reported(path, report)
    if scaled:
        model.config.rope_parameters = rope
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    from tokenizers import pre_tokenizers
    inner = tokenizer.backend_tokenizer
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    kind = said.get('tokenizer.ggml.pre')
    if kind in SPLIT_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        inner.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    elif kind not in AS_GPT2 and repr(inner.pre_tokenizer) == repr(plain):
        raise Refused(f'{path}: its tokenizer is of the kind {kind!r}, which nothing here knows, '
                      'so its tokens would be wrong without a word: take the original checkpoint')
    del model.config.quantization_config        # as it was in the file, but not here
    model.hf_quantizer = None
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def save_opened(model, tokenizer, folder):
    "What open_gguf has given, as a folder."
    with new_model(folder):
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        for path in Path(folder).iterdir():
            path.chmod(0o644)           # else only its owner could read the weights
