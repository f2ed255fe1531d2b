"""A model of ours written as a GGUF file, as llama.cpp keeps models.

The idea: the package gguf does it, by its writer, its names and its eight bits. llama.cpp turns
neighbouring channels where transformers turns channel i with i + hd/2, so the rows of a Llama's q
and k change places in the file; Qwen's do not.

A stack of Llama's layers that runs several times as a whole is written once: llama.cpp's family
nanbeige runs it `num_loops` times. Any other order becomes copies of its layers.

Usage:
    nanodepth export out/smollm2 out/twice.gguf --loop=30x2
    nanodepth export out/smollm2 out/deeper.gguf --loop=13-4x2-13 --damp --dtype=q8_0
"""
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from nanodepth.common.errors import Refused
from nanodepth.common.files import replacing
from nanodepth.grow import untie
from nanodepth.model import rope_tables
from nanodepth.models.hf import plain_layers, their_name
from nanodepth.text.tokenizer import get_tokenizer, write_tokenizer

TURNED = '.attn.q.weight', '.attn.k.weight'     # whose rows change places


def write_gguf(model, path, dtype, tokenizer):
    """A model of ours, in the order in which it runs, as a GGUF file. dtype: float32, float16,
    bfloat16 or q8_0, of the matrices; norms keep 32 bits. tokenizer: what get_tokenizer takes."""
    import gguf
    if Path(path).exists():
        raise Refused(f'{path} is there already: choose another name')
    stack, times = shared_stack(model)
    if times > 1:
        model = untie(model, stack)
    else:
        model = plain_layers(model)
    c = model.config
    if c.qk_norm and c.head_dim != 128:
        raise Refused(f'{path}: heads of {c.head_dim} channels: transformers reads a Qwen 3 back '
                      'with 128, as all that are published have, so nothing would hold the file')
    kind = dict(float32='F32', float16='F16', bfloat16='BF16', q8_0='Q8_0')[dtype]
    kinds = gguf.GGMLQuantizationType
    family = 'qwen3' if c.qk_norm else 'qwen2' if c.qkv_bias else 'llama'
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), len(model.layers))
    with replacing(path) as new:
        file = gguf.GGUFWriter(new, 'nanbeige' if times > 1 else family)
        if times > 1:
            file.add_uint32('nanbeige.num_loops', times)
            file.add_bool('nanbeige.skip_loop_final_norm', True)    # no norm between the passes
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
            if family == 'llama' and name.endswith(TURNED):
                heads = t.unflatten(0, (-1, 2, c.head_dim // 2))        # (H, 2, hd/2, C)
                t = heads.transpose(1, 2).flatten(0, 2)
            small = t.dim() == 1 or kind == 'Q8_0' and t.shape[1] % 32
            form = kinds.F32 if small else kinds[kind]
            file.add_tensor(file_name(names, name), gguf.quants.quantize(t.float().numpy(), form),
                            raw_dtype=form)
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()


def file_name(names, ours):
    "'layers.3.attn.q.weight' to 'blk.3.attn_q.weight'."
    name, _, ending = their_name(ours).rpartition('.')
    return f'{names.get_name(name)}.{ending}'


def shared_stack(model):
    """(a stack of layers, how many times the order runs it), where llama.cpp can run that with
    shared weights, else (the order, 1)."""
    c, order = model.config, model.order
    if not (model.order_with_steps or c.qk_norm or c.qkv_bias or c.rope_scaling or c.ln_scaling):
        for n in range(1, len(order)):
            times = len(order) // n
            if order == order[:n] * times:
                return order[:n], times
    return order, 1


@torch.no_grad()
def read_loop(path, model):
    """The looped model with the weights of the file that was written of it. (transformers knows no
    family that loops in a GGUF file.)"""
    import gguf
    stack, times = shared_stack(model)
    again = untie(model, stack).float()
    again.order = [*range(len(stack))] * times
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, len(stack))
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type)
              for t in gguf.GGUFReader(path).tensors}
    for name, p in again.named_parameters():
        t = torch.tensor(stored[file_name(names, name)])
        if name.endswith(TURNED):
            t = t.unflatten(0, (-1, model.config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        p.copy_(t)
    return again


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
