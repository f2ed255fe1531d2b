"""Hugging Face checkpoints, in and out. A Llama, a Qwen 2 or a Qwen 3 becomes a model of ours,
because it is our model under longer names. Any other family's model stays transformers' own, and is
scored as a function from tokens to logits.
Usage: model = load_hf('out/smollm2'); save_hf(model, 'out/hf', tokenizer='out/lidas')
"""
import inspect
import math
import os
from dataclasses import fields
from types import SimpleNamespace

import torch

from nanodepth.common.errors import as_refusal
from nanodepth.common.files import new_folder, write_json
from nanodepth.common.whose import is_ours
from nanodepth.grow import untie
from nanodepth.model import LM, ModelConfig, require, rope_tables, spans_in
from nanodepth.text.tokenizer import generation_of, get_tokenizer, marks_of, write_tokenizer

LAYER = {           # ours: theirs
    'attn_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm',
    **{f'attn.{x}': f'self_attn.{x}_proj' for x in 'qkvo'}, 'attn.q_norm': 'self_attn.q_norm',
    'attn.k_norm': 'self_attn.k_norm',
    **{f'mlp.{x}': f'mlp.{x}_proj' for x in ('gate', 'up', 'down')},
}
OUTSIDE = {'embed.weight': 'model.embed_tokens.weight', 'norm.weight': 'model.norm.weight',
           'head.weight': 'lm_head.weight'}
OURS = dict(vocab_size='vocab_size', n_embd='hidden_size', ffn_dim='intermediate_size',
            n_layer='num_hidden_layers', n_head='num_attention_heads',
            n_kv_head='num_key_value_heads', head_dim='head_dim',
            context='max_position_embeddings', norm_eps='rms_norm_eps',
            tie_embeddings='tie_word_embeddings')
ROPE_LLAMA3 = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'


def their_name(ours):
    "'layers.3.attn.q.weight' to 'model.layers.3.self_attn.q_proj.weight'."
    if ours in OUTSIDE:
        return OUTSIDE[ours]
    name, _, ending = ours.rpartition('.')
    _, i, part = name.split('.', 2)
    return f'model.layers.{i}.{LAYER[part]}.{ending}'


# {what transformers calls a family: what our model has beside a Llama's}
FAMILIES = dict(qwen3=dict(qk_norm=True), qwen2=dict(qkv_bias=True), llama={})


def lacking(c):
    "What a config asks for that our model does not have, in words; or nothing."
    if c.model_type not in FAMILIES:
        return f'the family {c.model_type!r} (known: {", ".join(sorted(FAMILIES))})'
    says = lambda name: getattr(c, name, None)
    rope = c.rope_parameters or {}
    kind = rope.get('rope_type', 'default')
    asks = {'attention in both directions': says('is_causal') is False,
            'linear layers with a bias': says('attention_bias') or says('mlp_bias'),
            'attention over a sliding window': says('sliding_window')
            or {*(says('layer_types') or ['full_attention'])} != {'full_attention'},
            f'the activation {c.hidden_act!r} (known: silu)': c.hidden_act != 'silu',
            'quantized weights': says('quantization_config'),
            f'rope scaling of the kind {kind!r} (known: llama3)':
            kind not in ('default', 'llama3'),
            'rotary positions on a part of each head':
            rope.get('partial_rotary_factor') not in (None, 1)}
    return ', '.join(feature for feature, it_does in asks.items() if it_does)


def llama3(rope):
    "Llama 3's scaling of the rotary frequencies, by its four numbers."
    return {name: rope[name] for name in ROPE_LLAMA3}


def model_config(c):
    "transformers' config of a Llama or Qwen as our ModelConfig."
    rope = c.rope_parameters
    return ModelConfig(
        **{ours: getattr(c, theirs, None) for ours, theirs in OURS.items()},
        **FAMILIES[c.model_type], rope_theta=rope['rope_theta'],
        rope_scaling=llama3(rope) if rope.get('rope_type') == 'llama3' else None)


def beyond(config):
    "{name: value} of what a ModelConfig has beside a plain Llama's shape."
    known = {*OURS, 'rope_theta', 'rope_scaling'}
    return {f.name: getattr(config, f.name) for f in fields(config)
            if f.name not in known and getattr(config, f.name) != f.default}


def family_of(config):
    "What transformers calls the family of a ModelConfig, or None. LN-scaling goes into the norms."
    has = {name: value for name, value in beyond(config).items() if name != 'ln_scaling'}
    return next((name for name in FAMILIES if FAMILIES[name] == has), None)


def config_json(config, depth):
    "Our ModelConfig as a config.json, for a model of `depth` layers of their own."
    theirs = {theirs: getattr(config, ours) for ours, theirs in OURS.items()}
    family = family_of(config)
    require(family, f'no family of transformers has {" and ".join(beyond(config))}')
    scaling = dict(config.rope_scaling, rope_type='llama3') if config.rope_scaling else None
    return theirs | dict(
        architectures=[f'{family.title()}ForCausalLM'], model_type=family, num_hidden_layers=depth,
        rope_theta=config.rope_theta, rope_scaling=scaling, hidden_act='silu',
        attention_dropout=0.0) | ({} if config.qkv_bias else dict(attention_bias=False))


# ---------------------------------------------------------------------------------------------- in

def not_opened(path):
    "In here what goes wrong in transformers is a line."
    return as_refusal(Exception, why=lambda error: f'{path}: transformers does not open it: '
                    f'{type(error).__name__}: {" ".join(str(error).split())[:300]}')


def config_of(path):
    "A folder's config.json, as transformers has it."
    from transformers import AutoConfig
    with not_opened(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def open_theirs(path, config=None, dtype='auto'):
    """transformers' own model of a folder; auto: in the type in which its weights are stored. They
    are read from safetensors only."""
    from transformers import AutoModelForCausalLM, utils
    config = config or config_of(path)
    config.dtype = None         # what it says of the weights may not be true
    utils.logging.disable_progress_bar()
    with not_opened(path):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, use_safetensors=True,
            output_loading_info=True, trust_remote_code=False)
    for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):     # else they are random
        require(not report[kind], f'{path}: transformers reports {kind.replace("_", " ")}: '
                f'{", ".join(map(str, sorted(report[kind])[:3]))}')
    return model.eval()


@torch.no_grad()
def reading_forwards(model, path):
    "Another family's model, if no token sees those after it: BERT's do."
    tokens = torch.arange(1, 5, device=model.device)[None]
    changed = torch.cat((tokens[:, :3], tokens[:, :1]), dim=1)
    a, b = (model(each, use_cache=False).logits[:, :3].float() for each in (tokens, changed))
    require((a - b).abs().max() <= 1e-3 * a.abs().max(), f'{path}: {type(model).__name__} reads '
            'ahead: a later token changes what it says of earlier ones')
    return model


def load_hf(path, others=False):
    """A Hugging Face checkpoint, a folder or a name on the hub: a Llama or Qwen as an LM. With
    `others`, of any other family the model of transformers."""
    config = config_of(path)
    lacks = lacking(config)
    if lacks and others:
        return reading_forwards(open_theirs(path), path)
    require(not lacks, f'{path} asks for {lacks}, which is not supported here; nanodepth evaluate '
            'and sweep take any decoder of transformers, and nanodepth.wrapped what '
            'load_model(path, others=True) opens')
    theirs = open_theirs(path, config)
    tensors, config = theirs.state_dict(), theirs.config        # which settles what it leaves open
    # a config may say that the head is tied, beside a head of its own
    head, embedding = theirs.get_output_embeddings(), theirs.get_input_embeddings()
    config.tie_word_embeddings = head.weight is embedding.weight
    with torch.device('meta'):       # no memory, no random numbers
        model = LM(model_config(config))
    return filled(model, {ours: tensors[their_name(ours)] for ours in model.state_dict()})


def filled(model, weights):
    "A model that was made without memory, with its weights."
    model.load_state_dict(weights, assign=True)
    model.cos, model.sin = rope_tables(model.config)
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model.eval()


# ------------------------------------------------------------------------- models of other families

def answer_of(model):
    "A model as the scorer wants it: one of ours is it already."
    return model if is_ours(model) else Hooked(model)


class Hooked:
    "Another family's model as a function from tokens to logits."

    def __init__(self, model):
        self.model = model
        about = model.config.get_text_config()
        context = (getattr(about, 'max_position_embeddings', None)
                   or getattr(about, 'max_seq_len', None) or math.inf)      # (MPT's)
        self.config = SimpleNamespace(vocab_size=about.vocab_size, context=context)
        self.parameters = model.parameters
        self.slices = 'logits_to_keep' in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def __call__(self, tokens):
        return self.model(tokens, use_cache=False).logits

    @torch.no_grad()
    def last_logits(self, tokens, n):
        "(B, n, V): the head, where the family can be asked so, reads only the last n positions."
        keep = dict(logits_to_keep=n) if self.slices else {}
        return self.model(tokens, use_cache=False, **keep).logits[:, -n:]


# ---------------------------------------------------------------------------------------------- out

def in_their_format(model):
    "(tensors, config.json) of a model of ours in the order in which it runs, under their names."
    require(not spans_in(model.order), f'{model.order} runs layers in a way that no family of '
            'transformers knows: nanodepth export writes it, too')
    model = fold_scales(model) if model.config.ln_scaling else model
    own = model.state_dict()
    tensors = {theirs: own[ours] for ours, theirs in OUTSIDE.items()}
    for place, i in enumerate(model.order):
        tensors |= {their_name(f'layers.{place}.{name}'): t
                    for name, t in model.layers[i].state_dict().items()}
    if model.config.tie_embeddings:
        tensors.pop('lm_head.weight')
    return tensors, config_json(model.config, len(model.order))


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


def save_hf(model, folder, tokenizer=None, about=None):
    """Write a checkpoint that transformers loads, with the same logits. The order is unrolled: a
    looped model becomes a deep one with equal layers. `tokenizer` is what get_tokenizer takes; its
    tokenizer.json is copied. `about`: {name: text} for the metadata of the weights' file."""
    write_checkpoint(model, folder, *in_their_format(model), tokenizer, about=about)


def write_checkpoint(model, folder, tensors, config_json, tokenizer, files=None, about=None):
    """model.safetensors, the tokenizer's files, and `config_json` with its tokens as config.json.
    `files`: {name: text} of others. Weights keep their type."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    dtype = model.norm.weight.dtype
    with new_folder(folder) as folder:
        config_json |= dict(torch_dtype=str(dtype).removeprefix('torch.'), bos_token_id=None,
                            eos_token_id=None)
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder, model.config.context)
            begin, end = marks_of(folder, get_tokenizer(folder))
            asks = generation_of(folder)        # which says more, if it is there
            config_json |= dict(bos_token_id=asks.get('bos_token_id', begin),
                                eos_token_id=asks.get('eos_token_id', end))
        # (a looped layer stands under several names: each gets weights of its own)
        whole = {name: t.detach().to('cpu', dtype, copy=True) for name, t in tensors.items()}
        with as_refusal(SafetensorError, why=lambda error: f'{folder}: {error}'):
            save_file(whole, folder / 'model.safetensors',
                      metadata=dict(format='pt') | (about or {}))
        os.chmod(folder / 'model.safetensors', 0o644)       # else only its owner can read it
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding='utf-8')
        write_json(folder / 'config.json', config_json)
