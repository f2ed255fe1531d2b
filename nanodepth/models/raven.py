"""Read and write the folders of the authors of "Retrofitted Recurrence", whose `model_type` is
huginn_raven. Such a folder has the layers of a Llama as prelude, core_block and coda, and an
adapter. So the models that the authors have published open here, and a model that was trained here
opens with the authors' code.
Usage: model = load_model('FOLDER')         # recognizes the format
"""
import itertools
import math
from types import SimpleNamespace

import torch

from nanodepth.common.files import read_json
from nanodepth.common.origin import file_of
from nanodepth.model import LM, ModelConfig, require, spans_in
from nanodepth.models.authors import AUTHORS_STD, AuthorsCore, parts_of
from nanodepth.models.hf import beyond, filled, llama3, write_checkpoint
from nanodepth.retrofit import Core, core_of

FAMILY = 'huginn_raven'
# The names are those in the authors' code. No published checkpoint was at hand to try them.
LAYER = {           # their name: our names, whose rows follow each other in one matrix
    'norm_1': ['attn_norm'], 'norm_2': ['mlp_norm'],
    'attn.Wqkv': ['attn.q', 'attn.k', 'attn.v'], 'attn.proj': ['attn.o'],
    'mlp.fc': ['mlp.gate', 'mlp.up'], 'mlp.proj': ['mlp.down'],
}
OUTSIDE = {'transformer.wte': 'embed', 'transformer.ln_f': 'norm', 'lm_head': 'head',
           'transformer.adapter': 'spans.0.adapter'}
SIZES = 'n_layers_in_prelude', 'n_layers_in_recurrent_block', 'n_layers_in_coda'
# the values of settings that a config.json of the authors leaves out
DEFAULTS = dict(
    num_key_value_heads=None, block_size=None, max_position_embeddings=None, rope_base=50_000.0,
    rope_theta=None, rope_scaling=None, rope_parameters=None, mean_backprop_depth=8,
    test_time_noise=0.0, init_values={})


def names_of(model):
    "Return {their name: [our names]} for all weights of a model."
    names = {f'{theirs}.weight': [f'{ours}.weight'] for theirs, ours in OUTSIDE.items()}
    for part, layers in zip(('prelude', 'core_block', 'coda'), parts_of(model)):
        for (place, i), (theirs, ours) in itertools.product(enumerate(layers), LAYER.items()):
            names[f'transformer.{part}.{place}.{theirs}.weight'] = [
                f'layers.{i}.{name}.weight' for name in ours]
    return names


def load_raven(path):
    "Return the LM, with a core, of an authors' folder or of a name on the hub."
    c = SimpleNamespace(**DEFAULTS | read_json(file_of(path, 'config.json')))
    scale = c.init_values.get('embed_scale', math.sqrt(c.n_embd))
    require(scale == 1 and not c.test_time_noise and c.injection_type == 'linear',
            f'{path}: embed_scale={scale}, test_time_noise={c.test_time_noise}, injection_type='
            f'{c.injection_type!r}; 1, 0 and linear are supported')
    rope = c.rope_scaling or c.rope_parameters or {}        # names in transformers 4 and 5
    kind = rope.get('rope_type', 'default')
    require(kind in ('default', 'llama3'), f'{path}: rope scaling of the kind {kind!r} is not '
            'supported')
    tensors = read_tensors(path)
    p, core, coda = (getattr(c, name) for name in SIZES)
    config = ModelConfig(
        vocab_size=len(tensors['lm_head.weight']), n_layer=p + core + coda, n_embd=c.n_embd,
        n_head=c.n_heads, n_kv_head=c.num_key_value_heads, ffn_dim=c.intermediate_size,
        context=c.max_position_embeddings or c.block_size, norm_eps=c.norm_eps,
        rope_theta=c.rope_theta or c.rope_base, tie_embeddings=False,
        rope_scaling=llama3(rope) if kind == 'llama3' else None)
    with torch.device('meta'):      # no memory, no random numbers
        model = LM(config)
        model.order = [*range(p), AuthorsCore(
            range(p, p + core), c.mean_recurrence, c.mean_backprop_depth,
            start='authors' if c.init_values.get('cut', True) else 'normal',
            state_std=c.init_values.get('std', AUTHORS_STD)), *range(p + core, config.n_layer)]
    rows = {name: len(t) for name, t in model.state_dict().items()}
    tensors.pop('freqs_cis', None)
    weights = {}
    for theirs, ours in names_of(model).items():
        # one matrix of the authors has the rows of several matrices of model.py
        weights |= zip(ours, tensors.pop(theirs).split([rows[name] for name in ours]))
    require(not tensors, f'{path}: this model has no weight {min(tensors, default="")}')
    return filled(model, weights)


def read_tensors(path):
    "Return {their name: tensor} of a checkpoint."
    from safetensors.torch import load_file
    names = ['model.safetensors']       # no other file next to it is read
    if not file_of(path, names[0]):
        index = read_json(file_of(path, 'model.safetensors.index.json'))
        names = sorted({*index['weight_map'].values()})
    tensors = {}
    for name in names:
        tensors |= load_file(file_of(path, name))
    return tensors


def save_authors(model, folder, tokenizer=None, about=None):
    """Write a model with a core in the authors' format, which the authors' code opens. That code
    draws new first states in each forward pass, so its losses vary."""
    c, core = model.config, core_of(model)
    require(core and spans_in(model.order) == [core], "the authors' format has one Core and no "
            f'other Span, and this model has {spans_in(model.order)}')
    absent = list(beyond(c))
    if c.head_dim * c.n_head != c.n_embd:
        absent.append('head_dim')
    require(not absent, f"the authors' format has no {', '.join(absent)}")
    weights = model.state_dict() | {'head.weight': model.head.weight}
    if 'spans.0.adapter.weight' not in weights:     # s + e, so the adapter is [I I]
        weights['spans.0.adapter.weight'] = torch.eye(c.n_embd).repeat(1, 2).to(model.norm.weight)
    tensors = {theirs: torch.cat([weights[name] for name in ours])
               for theirs, ours in names_of(model).items()}
    if type(core) is Core:      # for its settings
        core = AuthorsCore(core.items, core.r, core.backprop_depth)
    write_checkpoint(model, folder, tensors, dict(
        architectures=['RavenForCausalLM'], model_type=FAMILY, n_embd=c.n_embd, n_heads=c.n_head,
        num_key_value_heads=c.n_kv_head, intermediate_size=c.ffn_dim, vocab_size=c.vocab_size,
        padded_vocab_size=c.vocab_size, block_size=c.context, max_position_embeddings=c.context,
        norm_eps=c.norm_eps, rope_base=c.rope_theta, rope_theta=c.rope_theta,
        rope_scaling=dict(c.rope_scaling, rope_type='llama3') if c.rope_scaling else None,
        **dict(zip(SIZES, map(len, parts_of(model)))), n_layers=len(model.layers),
        mean_recurrence=core.r, mean_backprop_depth=core.backprop_depth, injection_type='linear',
        bias=False, qk_bias=False, tie_embeddings=False, test_time_noise=0,
        init_values=dict(std=core.std(c.n_embd), embed_scale=1.0, cut=core.start == 'authors')),
        tokenizer, about=about)
