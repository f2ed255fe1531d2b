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
from pathlib import Path

import torch

from nanodepth.common.errors import Refused, refusing
from nanodepth.common.files import new_model, reading
from nanodepth.models.hf import refuse_reported, using_transformers

# kinds that split every digit off, by their names in llama.cpp
SPLIT_DIGITS = 'smollm', 'starcoder', 'refact', 'command-r', 'codeshell', 'exaone', 'minerva-7b'
AS_GPT2 = 'gpt-2', 'olmo', 'mpt', 'phi-2'       # kinds that split as GPT-2 does


def kind_of_tokens(path):
    "What the file calls its way to split a text into words; None: it does not say."
    with refusing(ImportError, why=lambda error: f'{path}: this needs gguf (pip install gguf)'):
        from gguf import GGUFReader
    with reading(path):
        field = GGUFReader(path).fields.get('tokenizer.ggml.pre')
        return field and field.contents()


def open_gguf(path):
    "(transformers' model of the file, its tokenizer)."
    path = Path(path)
    kind = kind_of_tokens(path)
    with using_transformers(path) as package:
        source = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
        tokenizer = package.AutoTokenizer.from_pretrained(**source)
        model, report = package.AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, output_loading_info=True)
    refuse_reported(path, report)
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
    "The file as a Hugging Face folder. Returns the model in it."
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
        tokenizer.save_pretrained(folder)
        plain.save_pretrained(folder)
        for path in Path(folder).glob('*.safetensors'):
            path.chmod(0o644)           # else only its owner can read it
    return plain
