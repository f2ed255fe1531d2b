"""Recurrent checkpoints in the format of "Retrofitted Recurrence"'s authors, in and out.

The idea: their folder (`model_type: huginn_raven`) holds what a Recurrent is: a Llama's layers as
prelude, core_block and coda, an adapter on (state, prelude's output), and the numbers beside. So
what they have published opens here, and what is trained here opens with their code.

Paper: "Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence".
Here: q, k, v and gate, up are one matrix each there; `add` is written as the adapter [I I], a tied
head as a copy. Refused by name: Huginn's own sandwich norms and OLMo's norms behind the sublayers,
which our Block does not have, and what the format cannot hold: LN-scaling, norms of q and k, a
head_dim of its own, and a fixed table of first states. The names are theirs as published; a
published checkpoint itself was not at hand.

Usage:
    model = load_model('FOLDER')                        # it finds out which family it is
    python nanodepth.py export out/retrofit out/retrofit_raven --fresh      # ours in their format
"""
import math
from pathlib import Path

import torch

from common.errors import Refused
from common.files import read_json
from data.tokenizer import from_hub
from engine import hf
from engine.hf import number
from model import LM, ModelConfig, rope_tables
from retrofit import AUTHORS_STD, Recurrent

FAMILY = 'huginn_raven'
LAYER = {           # theirs: ours, whose rows it holds one after the other
    'norm_1': ['attn_norm'], 'norm_2': ['mlp_norm'],
    'attn.Wqkv': ['attn.q', 'attn.k', 'attn.v'], 'attn.proj': ['attn.o'],
    'mlp.fc': ['mlp.gate', 'mlp.up'], 'mlp.proj': ['mlp.down'],
}
OUTSIDE = {'transformer.wte': 'lm.embed', 'transformer.ln_f': 'lm.norm', 'lm_head': 'lm.head',
           'transformer.adapter': 'adapter'}
PARTS = dict(prelude='n_layers_in_prelude', core='n_layers_in_recurrent_block',
             coda='n_layers_in_coda')
FOREIGN = {'norm_3.weight': "Huginn's sandwich norms", 'attn.qk_bias': "Huginn's bias on q and k",
           'attn.q_norm.weight': "OLMo's norms of q and k, and behind the sublayers"}


def open_hf(folder):
    "Any Hugging Face folder, or a name on the hub."
    folder = Path(folder) if Path(folder).is_dir() else from_hub(folder)
    path = folder / 'config.json'
    about = read_json(path) if path.exists() else None
    if about and about.get('model_type') == FAMILY:
        return load_raven(folder, about)
    return hf.load_hf(folder)


def names_of(model):
    "{their name: our names}."
    names = {f'{theirs}.weight': [f'{ours}.weight'] for theirs, ours in OUTSIDE.items()}
    parts = dict(prelude=model.prelude, core_block=model.core, coda=model.coda)
    for part, layers in parts.items():
        for place, i in enumerate(layers):
            for theirs, ours in LAYER.items():
                names[f'transformer.{part}.{place}.{theirs}.weight'] = [
                    f'lm.layers.{i}.{name}.weight' for name in ours]
    return names


def load_raven(folder, about):
    "Their folder as a Recurrent."
    path = folder / 'config.json'
    for weights in hf.weight_files(folder):
        for name in hf.read_header(weights):
            for ending, what in FOREIGN.items():
                if name.endswith(ending):
                    raise Refused(f'{weights}: {name}: {what} are not supported; retrofitted '
                                  'Llamas and TinyLlamas are')
    sizes = {part: number(path, about, key, least=0) for part, key in PARTS.items()}
    width, heads = (number(path, about, key) for key in ('n_embd', 'n_heads'))
    values = about.get('init_values') if isinstance(about.get('init_values'), dict) else {}
    scale = values.get('embed_scale', math.sqrt(width))
    if scale != 1 or about.get('test_time_noise') or about.get('injection_type') != 'linear':
        raise Refused(f'{path}: embed_scale={scale}, test_time_noise='
                      f'{about.get("test_time_noise", 0)}, injection_type='
                      f'{about.get("injection_type")!r}; 1, 0 and linear are supported')
    head_dim = number(path, about, 'head_dim', default=width // heads)
    if head_dim * heads != width:
        raise Refused(f'{path}: head_dim is {about.get("head_dim")}, but the format has n_embd / '
                      'n_heads')
    theta = about.get('rope_theta')
    config = ModelConfig(
        vocab_size=number(path, about, 'padded_vocab_size', default=about.get('vocab_size')),
        n_layer=sum(sizes.values()), n_embd=width, n_head=heads, head_dim=head_dim,
        n_kv_head=number(path, about, 'num_key_value_heads', default=heads),
        ffn_dim=number(path, about, 'intermediate_size'),
        context=number(path, about, 'max_position_embeddings', least=2,
                       default=about.get('block_size')),
        norm_eps=number(path, about, 'norm_eps', float, least=0),
        rope_theta=(number(path, about, 'rope_base', float, least=1, default=50_000.0)
                    if theta is None else theta),
        rope_scaling=scaling(path, about.get('rope_scaling')), tie_embeddings=False)
    with torch.device('meta'):
        lm, first = LM(config), 0
        parts = {}
        for part, n in sizes.items():
            parts[part], first = list(range(first, first + n)), first + n
        model = Recurrent(lm, **parts, inject='authors', start='authors',
                          state_std=number(path, values, 'std', float, 0, AUTHORS_STD),
                          mean=number(path, about, 'mean_recurrence'),
                          backprop_depth=number(path, about, 'mean_backprop_depth', default=8))
    state = hf.read_weights(folder, model, names_of(model), ['freqs_cis'])
    model.load_state_dict(state, strict=False, assign=True)
    model.lm.cos, model.lm.sin = rope_tables(config)
    return model.eval()


def scaling(path, about):
    "Llama 3's scaling of the rotary frequencies, or none."
    if not about:
        return None
    if not isinstance(about, dict) or about.get('rope_type') != 'llama3':
        raise Refused(f'{path}: rope_scaling is {about}; none and llama3 are supported')
    return hf.llama3(path, about)


def save_raven(model, folder, tokenizer=None):
    "Write a Recurrent as a folder that the authors' code opens."
    c, width = model.config, model.config.n_embd
    reasons = {'LN-scaling': c.ln_scaling, 'norms of q and k': c.qk_norm,
               f'head_dim={c.head_dim}': c.head_dim * c.n_head != width,
               "a fixed table of first states (--fresh draws new ones)":
                   not (model.fresh or model.start == 'zero')}
    for what, there in reasons.items():
        if there:
            raise Refused(f"{what}: the authors' format cannot hold that")
    weights = model.state_dict()
    weights['lm.head.weight'] = model.head.weight
    if model.adapter is None:
        weights['adapter.weight'] = torch.eye(width).repeat(1, 2).to(model.norm.weight)
    tensors = {theirs: torch.cat([weights[name] for name in ours])
               for theirs, ours in names_of(model).items()}
    scaling = dict(c.rope_scaling, rope_type='llama3') if c.rope_scaling else None
    sizes = {key: len(getattr(model, part)) for part, key in PARTS.items()}
    std = 0.0 if model.start == 'zero' else model.state_std
    about = dict(
        architectures=['RavenForCausalLM'], model_type=FAMILY, n_embd=width, n_heads=c.n_head,
        num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, intermediate_size=c.ffn_dim,
        vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size, block_size=c.context,
        max_position_embeddings=c.context, norm_eps=c.norm_eps, rope_base=c.rope_theta,
        rope_theta=c.rope_theta, rope_scaling=scaling, **sizes, n_layers=sum(sizes.values()),
        mean_recurrence=model.mean, mean_backprop_depth=model.backprop_depth,
        injection_type='linear', bias=False, qk_bias=False, tie_embeddings=False,
        test_time_noise=0, init_values=dict(std=std, embed_scale=1.0),
        torch_dtype=str(model.norm.weight.dtype).removeprefix('torch.'))
    hf.write_checkpoint(folder, tensors, about, tokenizer, c.context)
