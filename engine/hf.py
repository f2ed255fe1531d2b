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
    python nanodepth.py export out/lidas out/lidas_hf
"""
import json
import os
import re
from pathlib import Path

import torch

from common.errors import Refused, refusing
from common.files import must_be_free, read_json, write_json
from data.tokenizer import from_hub, get_tokenizer, write_tokenizer
from grow import untie
from model import LM, ModelConfig, rope_tables

# -------------------------------------------------------------------------------------------- names

LAYER = {
    'attn_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm',
    **{f'attn.{x}': f'self_attn.{x}_proj' for x in 'qkvo'}, 'attn.q_norm': 'self_attn.q_norm',
    'attn.k_norm': 'self_attn.k_norm',
    **{f'mlp.{x}': f'mlp.{x}_proj' for x in ('gate', 'up', 'down')},
}
OUTSIDE = {'embed.weight': 'model.embed_tokens.weight', 'norm.weight': 'model.norm.weight',
           'head.weight': 'lm_head.weight'}
DTYPES = {'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16, 'F64': torch.float64}


def their_name(ours):
    "'layers.3.attn.q.weight' to 'model.layers.3.self_attn.q_proj.weight'."
    if ours in OUTSIDE:
        return OUTSIDE[ours]
    _, i, part = ours.removesuffix('.weight').split('.', 2)
    return f'model.layers.{i}.{LAYER[part]}.weight'


# -------------------------------------------------------------------------------------- config.json

SIZES = {                           # theirs: (ours, what it is if it is not named)
    'vocab_size': ('vocab_size', None), 'hidden_size': ('n_embd', None),
    'intermediate_size': ('ffn_dim', None),
    'num_hidden_layers': ('n_layer', None), 'num_attention_heads': ('n_head', None),
    'num_key_value_heads': ('n_kv_head', None),
    'head_dim': ('head_dim', None), 'max_position_embeddings': ('context', 2048),
}
OPTIONAL = ('num_key_value_heads', 'head_dim')
ROPE_LLAMA3 = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')


def number(path, about, name, kind=int, least=None, default=None):
    "A value of a config.json: positive, or from `least` on."
    value = about.get(name)
    value = default if value is None else value
    fits = (isinstance(value, (int, float)) and not isinstance(value, bool)
            and abs(value) < 2 ** 31 and kind(value) == value
            and (value > 0 if least is None else value >= least))
    if not fits:
        whole = 'whole number' if kind is int else 'number'
        raise Refused(f'{path}: {name} is {value!r}, but must be a '
                      + (f'positive {whole}' if least is None else f'{whole} from {least} on'))
    return kind(value)


def llama3(path, about):
    "Llama 3's scaling of the rotary frequencies; transformers wants its last number whole."
    *floats, last = ROPE_LLAMA3
    return {name: number(path, about, name, float) for name in floats} | {
        last: number(path, about, last)}


def model_config(path):
    "A config.json as our ModelConfig, or an error that names what this model does not have."
    if not path.exists():
        raise Refused(f'{path.parent} has no config.json: it is no Hugging Face checkpoint')
    with refusing(TypeError, AttributeError, ValueError,
                  why=lambda error: f'{path} is damaged, or of an unknown form: {error}'):
        return described(path, read_json(path))


def described(path, c):
    # where a config has both, as one that a user extended, transformers goes by rope_scaling
    older = c.get('rope_scaling') or {}
    rope = {**(c.get('rope_parameters') or {}), **older}
    kind = c.get('model_type')
    rope_kind = older.get('type') or rope.get('rope_type', rope.get('type', 'default'))
    refused = [
        (kind not in ('llama', 'qwen3'), f'the family {kind!r} (known: llama, qwen3)'),
        (c.get('attention_bias') or c.get('mlp_bias'), 'linear layers with a bias'),
        (c.get('use_sliding_window') or set(c.get('layer_types') or ['full_attention'])
         != {'full_attention'}, 'attention over a sliding window'),
        (c.get('hidden_act', 'silu') != 'silu',
         f'the activation {c.get("hidden_act")!r} (known: silu)'),
        (c.get('quantization_config'), 'quantized weights'),
        (rope_kind not in ('default', 'llama3'),
         f'rope scaling of the kind {rope_kind!r} (known: llama3)'),
        (rope.get('partial_rotary_factor', c.get('partial_rotary_factor', 1)) != 1,
         'rotary positions on a part of each head'),
    ]
    for found, what in refused:
        if found:
            raise Refused(f'{path} asks for {what}, which is not supported; '
                          'wrapper.py loops other families too')

    sizes = {ours: number(path, c, theirs, default=usual)
             for theirs, (ours, usual) in SIZES.items()
             if not (theirs in OPTIONAL and c.get(theirs) is None)}
    if kind == 'qwen3':
        sizes.setdefault('head_dim', 128)
    scaling = llama3(path, rope) if rope_kind == 'llama3' else None
    theta = number(path, rope, 'rope_theta', float, default=c.get('rope_theta', 10_000.0))
    eps = number(path, c, 'rms_norm_eps', float, default=1e-6)
    try:
        return ModelConfig(**sizes, rope_scaling=scaling, rope_theta=theta, norm_eps=eps,
                           tie_embeddings=bool(c.get('tie_word_embeddings', False)),
                           qk_norm=kind == 'qwen3')
    except Refused as error:
        raise Refused(f'{path}: {error}') from None


def config_json(config, depth, dtype):
    "Our ModelConfig as a config.json, for a model of `depth` layers of their own."
    theirs = {theirs: getattr(config, ours) for theirs, (ours, _) in SIZES.items()} | dict(
        num_hidden_layers=depth)
    family = 'Qwen3' if config.qk_norm else 'Llama'
    scaling = dict(config.rope_scaling, rope_type='llama3') if config.rope_scaling else None
    return dict(architectures=[f'{family}ForCausalLM'], model_type=family.lower(), **theirs,
                rms_norm_eps=config.norm_eps,
                rope_theta=config.rope_theta, rope_scaling=scaling,
                tie_word_embeddings=config.tie_embeddings, hidden_act='silu',
                attention_bias=False, attention_dropout=0.0,
                torch_dtype=str(dtype).removeprefix('torch.'))


# ---------------------------------------------------------------------------------------------- in

def weight_files(folder):
    "A checkpoint's safetensors files; all must exist."
    index = folder / 'model.safetensors.index.json'
    if not index.exists():
        file = folder / 'model.safetensors'
        if not file.exists():
            others = sorted(path.name for path in folder.glob('*.bin'))
            raise Refused(f'{folder} has no {file.name}'
                          + (f', but {others[0]}: only safetensors is read' if others else ''))
        return [file]
    where = read_json(index).get('weight_map', {})
    names = sorted(set(where.values()))
    if not names or any(Path(name).name != name for name in names):
        raise Refused(f'{index} does not say in which files of its folder the tensors are')
    for name in names:
        if not (folder / name).exists():
            tensor = next(t for t, file in where.items() if file == name)
            raise Refused(f'{folder / name} is missing: {index.name} says that it holds {tensor}')
    return [folder / name for name in names]


def read_header(path):
    """{tensor: (shape, dtype)} of a safetensors file, which must be complete. A header says
    where each tensor is; its length comes first."""
    size = path.stat().st_size
    with open(path, 'rb') as file:
        length = int.from_bytes(file.read(8), 'little')
        if size < 8 or length > min(size - 8, 100_000_000):
            raise Refused(f'{path} ({size:,} bytes) is cut short or no safetensors file: its '
                          f'header would take {length:,} bytes')
        try:
            header = json.loads(file.read(length))
            tensors = {name: (tuple(t['shape']), t['dtype'], t['data_offsets'][1])
                       for name, t in header.items() if name != '__metadata__'}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Refused(f'{path} has a header that cannot be read: {error}') from None
    for name, (_, dtype, end) in tensors.items():
        if dtype not in DTYPES:
            raise Refused(f'{path}: {name} is of the type {dtype}; {", ".join(DTYPES)} are read')
        if not isinstance(end, int) or 8 + length + end > size:
            raise Refused(f'{path} is cut short: {name} would end at byte {8 + length + end:,} of '
                          f'{size:,}')
    return {name: (shape, DTYPES[dtype]) for name, (shape, dtype, _) in tensors.items()}


def read_weights(folder, model, names, leave=()):
    """{our name: tensor} of a checkpoint, mapped from its files, for a model without weights.
    `names`: {their name: our names, whose rows it holds one after the other}; `leave`: the endings
    of names that say nothing."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise Refused(f"{folder}: Hugging Face checkpoints need safetensors (pip install "
                      "safetensors)") from None
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    headers = {path: read_header(path) for path in weight_files(folder)}
    where = {name: path for path, header in headers.items() for name in header
             if not name.endswith(tuple(leave))}
    kinds = {}
    for name in [*names, *where]:
        if name not in where:
            raise Refused(f'{folder}: {name} is in none of its files')
        shape, dtype = headers[where[name]][name]
        if name not in names:
            raise Refused(f'{where[name]}: {name} has no place in this model')
        rows = [shapes[ours][0] for ours in names[name]]
        wanted = sum(rows), *shapes[names[name][0]][1:]
        if shape != wanted:
            raise Refused(f'{where[name]}: {name} has the shape {shape}, but by config.json it is '
                          f'{wanted}')
        kinds.setdefault(dtype, name)
        if len(kinds) > 1:
            raise Refused(f'{where[name]}: {name} is of another type ({dtype}) than '
                          f'{next(iter(kinds.values()))}')
    state = {}
    for path in headers:
        try:
            # mapped: a tensor's pages are read when they are used, and never written back
            with safe_open(path, 'pt') as file:
                for name in (name for name in names if where[name] == path):
                    rows = [shapes[ours][0] for ours in names[name]]
                    state |= zip(names[name], file.get_tensor(name).split(rows))
        except SafetensorError as error:
            raise Refused(f'{path} cannot be read: {error}') from None
    return state


def load_hf(folder):
    "A Hugging Face checkpoint, a folder or a name on the hub, as an LM."
    folder = Path(folder) if Path(folder).is_dir() else from_hub(folder)
    config = model_config(folder / 'config.json')
    layers = re.compile(r'^model\.layers\.(\d+)\.')
    stored = [name for path in weight_files(folder) for name in read_header(path)]
    n = len({layers.match(name)[1] for name in stored if layers.match(name)})
    if config.n_layer != n:         # said before a model of so many layers is made
        raise Refused(f'{folder / "config.json"}: num_hidden_layers is {config.n_layer}, but the '
                      f'files hold {n} layers')
    with torch.device('meta'):                      # no memory, no random weights
        model = LM(config)
    names = {their_name(ours): [ours] for ours in model.state_dict()}
    leave = ['rotary_emb.inv_freq']
    if config.tie_embeddings:
        names.pop('lm_head.weight')
        leave.append('lm_head.weight')
    model.load_state_dict(read_weights(folder, model, names, leave), strict=False, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    model.cos, model.sin = rope_tables(config)
    return model.eval()


# ---------------------------------------------------------------------------------------------- out

def fold_scales(model):
    """An LN-scaled model as an ordinary one: each layer takes its depth's scale into its norms, and
    keeps it wherever an order puts it."""
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
    if not isinstance(model, LM):
        raise Refused('a model with a recurrent core has no family that transformers knows: '
                      'only ordinary and looped models are exported')
    model = fold_scales(model) if model.config.ln_scaling else model
    config, weights = model.config, model.state_dict()
    tensors = {their_name(name): t for name, t in weights.items() if not name.startswith('layers.')}
    if config.tie_embeddings:
        tensors.pop('lm_head.weight')
    for depth, i in enumerate(model.order):
        for name, t in weights.items():
            if name.startswith(f'layers.{i}.'):
                tensors[their_name(name.replace(f'layers.{i}.', f'layers.{depth}.', 1))] = t
    about = config_json(config, len(model.order), model.norm.weight.dtype)
    write_checkpoint(folder, tensors, about, tokenizer, config.context)


def write_checkpoint(folder, tensors, about, tokenizer, context):
    "model.safetensors, the tokenizer's files, and `about` with its tokens as config.json."
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    folder = Path(folder)
    must_be_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    bos = end = None
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder, context)
        known, said = get_tokenizer(tokenizer), read_json(folder / 'tokenizer_config.json')
        names = [said[key].get('content') if isinstance(said.get(key), dict) else said.get(key)
                 for key in ('bos_token', 'eos_token')]
        bos, end = (known.encode_single_token(name) if name in known.special_tokens_set else None
                    for name in names)
    beside = folder / 'model.safetensors.tmp'
    try:
        with refusing(SafetensorError, why=lambda error: f'{beside} cannot be written: {error}'):
            save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()},
                      beside, metadata=dict(format='pt'))
        os.chmod(beside, 0o644)         # else only its owner can read it
        os.replace(beside, folder / 'model.safetensors')
    finally:
        beside.unlink(missing_ok=True)
    # last: a folder without it is no checkpoint
    write_json(folder / 'config.json', about | dict(bos_token_id=bos, eos_token_id=end))
