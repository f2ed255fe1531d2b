"""Hugging Face checkpoints in and out: a folder of config.json, weights and tokenizer becomes an
`LM`, and an `LM` such a folder.

The idea: Llama and Qwen 3, which are all that the papers use, are our model under longer names:
opening one takes a table of names and a list of what this model lacks, refused before anything is
loaded. On export, an order becomes plain depth, and LN-scaling is multiplied into the norms.

Here: weights are mapped from the file, so a model takes no more memory than its file, and bfloat16
stays bfloat16. Needs `safetensors`; a name on the hub needs `huggingface_hub` and a network too.

Usage:
    model = load_hf('SmolLM-360M')              # or load_model, which opens our own checkpoints too
    save_hf(model, 'out/hf', tokenizer='out/lidas')
    # the same from the shell; with one folder it says what is in it
    nanodepth export out/lidas out/lidas_hf
"""
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from nanodepth.common.errors import Refused, refusing
from nanodepth.common.files import new_model, read_json, reading, replace, replacing, write_json
from nanodepth.common.options import only_fields
from nanodepth.data.tokenizer import get_tokenizer, local_folder, write_tokenizer
from nanodepth.grow import untie
from nanodepth.model import LM, ModelConfig, rope_tables
from nanodepth.variants.key_offset import refuse_offset

# -------------------------------------------------------------------------------------------- names

LAYER = {
    'attn_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm',
    **{f'attn.{x}': f'self_attn.{x}_proj' for x in 'qkvo'}, 'attn.q_norm': 'self_attn.q_norm',
    'attn.k_norm': 'self_attn.k_norm',
    **{f'mlp.{x}': f'mlp.{x}_proj' for x in ('gate', 'up', 'down')},
}
OUTSIDE = {'embed.weight': 'model.embed_tokens.weight', 'norm.weight': 'model.norm.weight',
           'head.weight': 'lm_head.weight'}


def their_name(ours):
    "'layers.3.attn.q.weight' to 'model.layers.3.self_attn.q_proj.weight'."
    if ours in OUTSIDE:
        return OUTSIDE[ours]
    _, i, part = ours.removesuffix('.weight').split('.', 2)
    return f'model.layers.{i}.{LAYER[part]}.weight'


# -------------------------------------------------------------------------------------- config.json

@dataclass
class Theirs:
    "What a config.json says, as far as it concerns our model; or what it may not say."
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None
    rope_parameters: dict | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool | None = False
    mlp_bias: bool | None = False
    use_sliding_window: bool | None = False
    layer_types: list[str] | None = None
    hidden_act: str | None = 'silu'
    quantization_config: dict | None = None
    partial_rotary_factor: float | None = None


OURS = dict(vocab_size='vocab_size', n_embd='hidden_size', ffn_dim='intermediate_size',
            n_layer='num_hidden_layers', n_head='num_attention_heads',
            n_kv_head='num_key_value_heads', head_dim='head_dim',
            context='max_position_embeddings', norm_eps='rms_norm_eps',
            tie_embeddings='tie_word_embeddings')
ROPE_LLAMA3 = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'


def llama3(scaling, path):
    "Llama 3's scaling of the rotary frequencies, by its four numbers."
    with reading(path):
        return {name: scaling[name] for name in ROPE_LLAMA3}


def model_config(path):
    "A config.json as our ModelConfig, or an error that names what this model does not have."
    if not path.exists():
        raise Refused(f'{path.parent} has no config.json: it is no Hugging Face checkpoint')
    with reading(path):
        c = Theirs(**only_fields(Theirs, read_json(path)))
    # where a config has both, as one that a user extended, transformers goes by rope_scaling
    older = c.rope_scaling or {}
    rope = {**(c.rope_parameters or {}), **older}
    rope_kind = older.get('type') or rope.get('rope_type', rope.get('type', 'default'))
    part = rope.get('partial_rotary_factor', c.partial_rotary_factor)
    for lacks, feature in (
            (c.model_type not in ('llama', 'qwen3'),
             f'the family {c.model_type!r} (known: llama, qwen3)'),
            (c.attention_bias or c.mlp_bias, 'linear layers with a bias'),
            (c.use_sliding_window or {*(c.layer_types or ['full_attention'])} != {'full_attention'},
             'attention over a sliding window'),
            (c.hidden_act not in ('silu', None), f'the activation {c.hidden_act!r} (known: silu)'),
            (c.quantization_config, 'quantized weights'),
            (rope_kind not in ('default', 'llama3'),
             f'rope scaling of the kind {rope_kind!r} (known: llama3)'),
            (part not in (None, 1), 'rotary positions on a part of each head')):
        if lacks:
            raise Refused(f'{path} asks for {feature}, which is not supported; '
                          'wrapper.py loops other families too')
    values = {ours: getattr(c, theirs) for ours, theirs in OURS.items()}
    if c.model_type == 'qwen3' and c.head_dim is None:
        values['head_dim'] = 128
    values['rope_theta'] = rope.get('rope_theta') or c.rope_theta
    values['rope_scaling'] = llama3(rope, path) if rope_kind == 'llama3' else None
    with reading(path):
        return ModelConfig(**values, qk_norm=c.model_type == 'qwen3')


def config_json(config, depth):
    "Our ModelConfig as a config.json, for a model of `depth` layers of their own."
    theirs = {theirs: getattr(config, ours) for ours, theirs in OURS.items()}
    family = 'Qwen3' if config.qk_norm else 'Llama'
    scaling = dict(config.rope_scaling, rope_type='llama3') if config.rope_scaling else None
    return theirs | dict(
        architectures=[f'{family}ForCausalLM'], model_type=family.lower(), num_hidden_layers=depth,
        rope_theta=config.rope_theta, rope_scaling=scaling, hidden_act='silu',
        attention_bias=False, attention_dropout=0.0)


# ---------------------------------------------------------------------------------------------- in

def read_tensors(folder):
    "{their name: tensor} of a checkpoint, mapped from the files in which its index says they are."
    with refusing(ImportError, why=lambda error: f'{folder}: Hugging Face checkpoints need '
                  'safetensors (pip install safetensors)'):
        from safetensors.torch import load_file
    index = folder / 'model.safetensors.index.json'
    if not index.exists():
        path = folder / 'model.safetensors'
        others = sorted(other.name for other in folder.glob('*.bin'))
        if others and not path.exists():
            raise Refused(f'{folder} has no {path.name}, but {others[0]}: only safetensors is read')
        with reading(path):
            return load_file(path)
    with reading(index):
        where = read_json(index)['weight_map']
    tensors = {}
    for file in sorted(set(where.values())):
        path = folder / file
        if not path.exists():
            raise Refused(f'{path} is missing: {index.name} names it')
        with reading(path):
            stored = load_file(path)
            tensors |= {name: stored[name] for name in where if where[name] == file}
    return tensors


def load_weights(model, tensors, names, folder, leave):
    """Put a checkpoint's tensors into a model without weights. `names`: {their name: our names,
    whose rows it holds one after the other}; `leave`: the endings of names that say nothing."""
    shapes = {name: t.shape for name, t in model.state_dict().items()}
    weights = {}
    for name, t in tensors.items():
        if name not in names and not name.endswith(tuple(leave)):
            raise Refused(f'{folder}: {name} has no place in this model')
    for name, ours in names.items():
        if name not in tensors:
            raise Refused(f'{folder}: {name} is in none of its files, though config.json asks for '
                          'it')
        rows = [shapes[each][0] for each in ours]
        wanted = (sum(rows), *shapes[ours[0]][1:])
        t = tensors[name]
        if t.shape != wanted:
            raise Refused(f'{folder}: {name} has the shape {tuple(t.shape)}, but by config.json it '
                          f'is {wanted}')
        weights |= zip(ours, t.split(rows))
    kinds = {str(t.dtype).removeprefix('torch.') for t in weights.values()}
    if len(kinds) > 1 or not kinds <= {'float64', 'float32', 'float16', 'bfloat16'}:
        raise Refused(f'{folder}: its weights must be of one type, float32, float16 or bfloat16, '
                      f'not {" and ".join(sorted(kinds))}')
    model.load_state_dict(weights, strict=False, assign=True)
    model.cos, model.sin = rope_tables(model.config)
    model.config.stored_as = kinds.pop()


def load_hf(folder):
    "A Hugging Face checkpoint, a folder or a name on the hub, as an LM."
    folder = local_folder(folder)
    config = model_config(folder / 'config.json')
    tensors = read_tensors(folder)
    with torch.device('meta'):      # no memory, no random numbers
        model = LM(config)
    names = {their_name(ours): [ours] for ours in model.state_dict()}
    leave = ['rotary_emb.inv_freq']
    if config.tie_embeddings:
        names.pop('lm_head.weight')
        leave.append('lm_head.weight')
    load_weights(model, tensors, names, folder, leave)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model.eval()


# ---------------------------------------------------------------------------------------------- out

def fold_scales(model):
    """An LN-scaled model as an ordinary one: each layer takes its depth's scale into its norms, and
    keeps it wherever an order puts it."""
    if model.recurs:
        raise Refused('a recurrent core runs at several depths: its scales cannot become weights')
    free = untie(model, model.order)
    for depth, layer in enumerate(free.layers):
        for norm in (layer.attn_norm, layer.mlp_norm):
            scale = torch.tensor(depth + 1.0).rsqrt()
            norm.weight.data = (norm.weight.data.float() * scale).to(norm.weight.dtype)
    free.config.ln_scaling = False
    return free


def save_hf(model, folder, tokenizer=None):
    """Write a checkpoint that transformers loads, with the same logits. The order is unrolled: a
    looped model becomes a deep one with equal layers. `tokenizer` is what get_tokenizer takes; its
    tokenizer.json is copied."""
    if model.recurs:
        raise Refused('a model with a recurrent core has no family that transformers knows: '
                      'only ordinary and looped models are exported')
    refuse_offset(model)
    model = fold_scales(model) if model.config.ln_scaling else model
    config = model.config
    weights = model.state_dict()
    tensors = {their_name(name): t for name, t in weights.items() if not name.startswith('layers.')}
    if config.tie_embeddings:
        tensors.pop('lm_head.weight')
    for depth, i in enumerate(model.order):
        for name, t in weights.items():
            if name.startswith(f'layers.{i}.'):
                tensors[their_name(name.replace(f'layers.{i}.', f'layers.{depth}.', 1))] = t
    write_checkpoint(model, folder, tensors, config_json(config, len(model.order)), tokenizer)


def write_checkpoint(model, folder, tensors, config_json, tokenizer, files=None):
    """model.safetensors, the tokenizer's files, and `config_json` with its tokens as config.json.
    `files`: {name: text} of others. Training turned a published parent into float32; this turns it
    back."""
    folder = Path(folder)
    dtype = model.norm.weight.dtype
    if dtype == torch.float32 and model.config.stored_as:
        dtype = getattr(torch, model.config.stored_as)
    with new_model(folder):
        config_json |= dict(torch_dtype=str(dtype).removeprefix('torch.'), bos_token_id=None,
                            eos_token_id=None)
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder, model.config.context)
            known = get_tokenizer(tokenizer)
            tokenizer_config = read_json(folder / 'tokenizer_config.json')
            for key in ('bos', 'eos'):
                token = tokenizer_config.get(f'{key}_token')
                name = token.get('content') if isinstance(token, dict) else token
                config_json[f'{key}_token_id'] = (known.encode_single_token(name)
                                                  if name in known.special_tokens_set else None)
        write_tensors(folder, {name: t.to(dtype) for name, t in tensors.items()})
        for name, text in (files or {}).items():
            replace(folder / name, text.encode())
        write_json(folder / 'config.json', config_json)     # last: without it, it is no checkpoint


def write_tensors(folder, tensors):
    "model.safetensors of a folder."
    with refusing(ImportError, why=lambda error: 'an export needs safetensors (pip install '
                  'safetensors)'):
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    with replacing(folder / 'model.safetensors') as new:
        whole = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
        with refusing(SafetensorError, why=lambda error: f'{folder}: {error}'):
            save_file(whole, new, metadata=dict(format='pt'))
        os.chmod(new, 0o644)        # else only its owner can read it
