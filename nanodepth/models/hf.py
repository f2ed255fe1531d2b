"""Read and write Hugging Face checkpoints. A Llama, a Qwen 2 or a Qwen 3 becomes an LM of model.py,
because it is the same model under longer names. A model of any other family stays an object of
transformers, and is scored as a function from tokens to logits.
Usage: model = load_hf('out/smollm2'); save_hf(model, 'out/hf', tokenizer='out/smollm2')
"""
import inspect
import math
import os
from dataclasses import fields
from types import SimpleNamespace

import torch

from nanodepth.common.errors import as_refusal
from nanodepth.common.files import new_folder, write_json
from nanodepth.common.origin import is_ours
from nanodepth.grow import untie
from nanodepth.model import LM, ModelConfig, require, rope_tables, spans_in
from nanodepth.text.tokenizer import generation_of, get_tokenizer, bos_and_eos_of, write_tokenizer

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
    "Return transformers' name of a weight: 'layers.3...' becomes 'model.layers.3...'."
    if ours in OUTSIDE:
        return OUTSIDE[ours]
    name, _, ending = ours.rpartition('.')
    _, i, part = name.split('.', 2)
    return f'model.layers.{i}.{LAYER[part]}.{ending}'


# {transformers' name of a family: the settings in which it differs from a Llama}
FAMILIES = dict(qwen3=dict(qk_norm=True), qwen2=dict(qkv_bias=True), llama={})


def lacking(c):
    "Return in words what a config asks for that model.py does not have, or ''."
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
    "Return the four numbers of Llama 3's scaling of rotary frequencies."
    return {name: rope[name] for name in ROPE_LLAMA3}


def model_config(c):
    "Return the ModelConfig for transformers' config of a Llama or Qwen."
    rope = c.rope_parameters
    return ModelConfig(
        **{ours: getattr(c, theirs, None) for ours, theirs in OURS.items()},
        **FAMILIES[c.model_type], rope_theta=rope['rope_theta'],
        rope_scaling=llama3(rope) if rope.get('rope_type') == 'llama3' else None)


def beyond(config):
    "Return {name: value} of the settings in which a ModelConfig differs from a plain Llama."
    known = {*OURS, 'rope_theta', 'rope_scaling'}
    return {f.name: getattr(config, f.name) for f in fields(config)
            if f.name not in known and getattr(config, f.name) != f.default}


def family_of(config):
    """Return transformers' name for the family of a ModelConfig, or None. (LN-scaling does not
    matter, because it is multiplied into the norms.)"""
    has = {name: value for name, value in beyond(config).items() if name != 'ln_scaling'}
    return next((name for name in FAMILIES if FAMILIES[name] == has), None)


def config_json(config, depth):
    "Return the config.json of a ModelConfig, for a model of `depth` layers that share no weights."
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
    "Inside this `with`, an error of transformers becomes one line."
    return as_refusal(Exception, why=lambda error: f'{path}: transformers does not open it: '
                    f'{type(error).__name__}: {" ".join(str(error).split())[:300]}')


def config_of(path):
    "Return a folder's config.json as a config of transformers."
    from transformers import AutoConfig
    with not_opened(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def open_theirs(path, config=None, dtype='auto'):
    """Return transformers' model of a folder. dtype='auto' keeps the type in which the weights are
    stored. Only safetensors are read."""
    from transformers import AutoModelForCausalLM, utils
    config = config or config_of(path)
    config.dtype = None         # the config may name another type than the weights have
    utils.logging.disable_progress_bar()
    with not_opened(path):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, use_safetensors=True,
            output_loading_info=True, trust_remote_code=False)
    for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):     # such would be random
        require(not report[kind], f'{path}: transformers reports {kind.replace("_", " ")}: '
                f'{", ".join(map(str, sorted(report[kind])[:3]))}')
    return model.eval()


@torch.no_grad()
def reading_forwards(model, path):
    "Return the model, unless its tokens see later tokens, as in BERT: then it is refused."
    tokens = torch.arange(1, 5, device=model.device)[None]
    changed = torch.cat((tokens[:, :3], tokens[:, :1]), dim=1)
    a, b = (model(ids, use_cache=False).logits[:, :3].float() for ids in (tokens, changed))
    require((a - b).abs().max() <= 1e-3 * a.abs().max(), f'{path}: {type(model).__name__} reads '
            'ahead: a later token changes the logits of earlier ones')
    return model


def load_hf(path, others=False):
    """Open a Hugging Face checkpoint, which is a folder or a name on the hub. Return an LM for a
    Llama or a Qwen and, with `others`, transformers' model for any other family."""
    config = config_of(path)
    lacks = lacking(config)
    if lacks and others:
        return reading_forwards(open_theirs(path), path)
    require(not lacks, f'{path} asks for {lacks}, which is not supported here; nanodepth evaluate '
            'and sweep take any decoder of transformers, and nanodepth.wrapped what '
            'load_model(path, others=True) opens')
    theirs = open_theirs(path, config)
    tensors, config = theirs.state_dict(), theirs.config        # now with all defaults filled in
    # a config may say that the head is tied, although the file has weights of the head
    head, embedding = theirs.get_output_embeddings(), theirs.get_input_embeddings()
    config.tie_word_embeddings = head.weight is embedding.weight
    with torch.device('meta'):       # no memory, no random numbers
        model = LM(model_config(config))
    return filled(model, {ours: tensors[their_name(ours)] for ours in model.state_dict()})


def filled(model, weights):
    "Give a model that was made without memory its weights, and return it."
    model.load_state_dict(weights, assign=True)
    model.cos, model.sin = rope_tables(model.config)
    if model.config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model.eval()


# ------------------------------------------------------------------------- models of other families

def answer_of(model):
    "Return a model in the form that scoring needs: an LM, or a Hooked model of transformers."
    return model if is_ours(model) else Hooked(model)


class Hooked:
    "Wraps a model of transformers as a function from tokens to logits."

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
        """Return the logits of the last n positions (B, n, V). If the family allows it, the head
        computes no others."""
        keep = dict(logits_to_keep=n) if self.slices else {}
        return self.model(tokens, use_cache=False, **keep).logits[:, -n:]


# ---------------------------------------------------------------------------------------------- out

def in_their_format(model):
    """Return the tensors under transformers' names and the config.json of an LM. Its layers are
    written in the order in which they run."""
    require(not spans_in(model.order), f'{model.order} runs layers in a way that no family of '
            'transformers has: nanodepth export can write such models')
    model = fold_scales(model) if model.config.ln_scaling else model
    weights = model.state_dict()
    tensors = {theirs: weights[ours] for ours, theirs in OUTSIDE.items()}
    for place, i in enumerate(model.order):
        tensors |= {their_name(f'layers.{place}.{name}'): t
                    for name, t in model.layers[i].state_dict().items()}
    if model.config.tie_embeddings:
        tensors.pop('lm_head.weight')
    return tensors, config_json(model.config, len(model.order))


def fold_scales(model):
    """Return an LN-scaled model as an ordinary model: the scale of each depth is multiplied into
    the norms of its layer, and stays with the layer in any order."""
    untied = untie(model, model.order)
    for depth, layer in enumerate(untied.layers):
        for norm in (layer.attn_norm, layer.mlp_norm):
            scale = torch.tensor(depth + 1.0).rsqrt()
            norm.weight.data = (norm.weight.data.float() * scale).to(norm.weight.dtype)
    untied.config.ln_scaling = False
    return untied


def save_hf(model, folder, tokenizer=None, about=None):
    """Write a checkpoint that transformers opens, with the same logits. The order is written out,
    so a looped model becomes a deep one with equal layers. `tokenizer` is a name that get_tokenizer
    takes, whose tokenizer.json is copied. `about` is {name: text} for the metadata of the weights'
    file."""
    write_checkpoint(model, folder, *in_their_format(model), tokenizer, about=about)


def write_checkpoint(model, folder, tensors, config_json, tokenizer, files=None, about=None):
    """Write model.safetensors, the tokenizer's files, and config.json, which is `config_json` with
    the tokens that begin and end a text. `files` is {name: text} for further files. All weights get
    the type of the final norm."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    dtype = model.norm.weight.dtype
    with new_folder(folder) as folder:
        config_json |= dict(torch_dtype=str(dtype).removeprefix('torch.'), bos_token_id=None,
                            eos_token_id=None)
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder, model.config.context)
            begin, end = bos_and_eos_of(folder, get_tokenizer(folder))
            generation = generation_of(folder)
            config_json |= dict(bos_token_id=generation.get('bos_token_id', begin),
                                eos_token_id=generation.get('eos_token_id', end))
        # a looped layer has several names here, and each of them gets a copy of the weights
        copies = {name: t.detach().to('cpu', dtype, copy=True) for name, t in tensors.items()}
        with as_refusal(SafetensorError, why=lambda error: f'{folder}: {error}'):
            save_file(copies, folder / 'model.safetensors',
                      metadata=dict(format='pt') | (about or {}))
        os.chmod(folder / 'model.safetensors', 0o644)       # so that others may read it, too
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding='utf-8')
        write_json(folder / 'config.json', config_json)
