"""Recurrent checkpoints in the format of the authors of "Retrofitted Recurrence", in and out. Their
folder (`model_type: huginn_raven`) holds a Llama's layers as prelude, core_block and coda, and an
adapter. So what they have published opens here, and what is trained here opens with their code.
Usage: model = load_model('FOLDER')         # it finds out which family it is
"""
import inspect
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import torch

from nanodepth.common.errors import Refused
from nanodepth.common.files import read_json
from nanodepth.common.whose import file_of
from nanodepth.model import LM, ModelConfig, rope_tables, rotate, spans_in
from nanodepth.models import hf
from nanodepth.models.authors import AUTHORS_STD, AuthorsCore, parts_of
from nanodepth.retrofit import Adapter, Core, core_of

FAMILY = 'huginn_raven'
# The names are those that they have published. A published checkpoint itself was not at hand.
LAYER = {           # theirs: ours, whose rows it holds one after the other
    'norm_1': ['attn_norm'], 'norm_2': ['mlp_norm'],
    'attn.Wqkv': ['attn.q', 'attn.k', 'attn.v'], 'attn.proj': ['attn.o'],
    'mlp.fc': ['mlp.gate', 'mlp.up'], 'mlp.proj': ['mlp.down'],
    'attn.q_norm': ['attn.q_norm'], 'attn.k_norm': ['attn.k_norm'],         # these are ours
}
OUTSIDE = {'transformer.wte': 'embed', 'transformer.ln_f': 'norm', 'lm_head': 'head',
           'transformer.adapter': 'adapter'}
PARTS = dict(prelude='n_layers_in_prelude', core='n_layers_in_recurrent_block',
             coda='n_layers_in_coda')
CODE = 'modeling_recurrent'


def names_of(model):
    "{their name: our names}."
    names = {f'{theirs}.weight': [f'{ours}.weight'] for theirs, ours in OUTSIDE.items()}
    there = model.state_dict().keys()
    for part, layers in zip(('prelude', 'core_block', 'coda'), parts_of(model)):
        for place, i in enumerate(layers):
            for (theirs, ours), kind in itertools.product(LAYER.items(), ('weight', 'bias')):
                own = [f'layers.{i}.{name}.{kind}' for name in ours]
                if there >= {*own}:
                    names[f'transformer.{part}.{place}.{theirs}.{kind}'] = own
    return names


# what a config.json of theirs leaves out stands for these
DEFAULTS = dict(
    num_key_value_heads=None, head_dim=None, block_size=None, max_position_embeddings=None,
    rope_base=50_000.0, rope_theta=None, rope_scaling=None, rope_parameters=None,
    mean_backprop_depth=8, test_time_noise=0.0, init_values={},
    first_state=None) | dict.fromkeys(hf.FLAGS, False)      # these are ours


def load_raven(folder):
    """Their folder as a model of ours with a core. (They are the authors of "Teaching Pretrained
    Language Models to Think Deeper with Retrofitted Recurrence".)"""
    path = file_of(folder, 'config.json')
    c = SimpleNamespace(**DEFAULTS | read_json(path))
    if c.rope_parameters and c.rope_parameters.get('rope_type') != 'default':
        c.rope_scaling = c.rope_parameters          # as transformers 5 calls it
    tensors = read_tensors(folder)
    n_vocab = len(tensors['lm_head.weight'])
    refuse_foreign(c, path)
    sizes = {part: getattr(c, theirs) for part, theirs in PARTS.items()}
    config = ModelConfig(
        vocab_size=n_vocab, n_layer=sum(sizes.values()),
        n_embd=c.n_embd, n_head=c.n_heads, n_kv_head=c.num_key_value_heads,
        head_dim=c.head_dim if c.first_state else None,
        **{flag: getattr(c, flag) for flag in hf.FLAGS},
        ffn_dim=c.intermediate_size, context=c.max_position_embeddings or c.block_size,
        norm_eps=c.norm_eps, rope_theta=c.rope_theta or c.rope_base, tie_embeddings=False,
        rope_scaling=hf.llama3(c.rope_scaling) if c.rope_scaling else None)
    p, q = sizes['prelude'], sizes['prelude'] + sizes['core']
    cut = c.init_values.get('cut', True)
    with torch.device('meta'):      # no memory, no random numbers
        model = LM(config)
        core = AuthorsCore(range(p, q), c.mean_recurrence, c.mean_backprop_depth,
                           start='authors' if cut else 'normal',
                           fresh=c.first_state == 'fresh',
                           state_std=c.init_values.get('std', AUTHORS_STD))
        model.order = [*range(p), core, *range(q, config.n_layer)]
        model.adapter = Adapter(config.n_embd)
    shapes = {name: t.shape for name, t in model.state_dict().items()}
    tensors.pop('freqs_cis', None)
    weights = {}
    for theirs, ours in names_of(model).items():
        # one matrix of theirs holds the rows of several of ours
        rows = tensors.pop(theirs).split([shapes[name][0] for name in ours])
        weights |= zip(ours, rows)
    if tensors:
        raise Refused(f'{folder}: {min(tensors)} has no place in this model')
    model.load_state_dict(weights, assign=True)
    model.cos, model.sin = rope_tables(config)
    return model.eval()


def read_tensors(path):
    "{their name: tensor} of a checkpoint, mapped from its files."
    from safetensors.torch import load_file
    names = ['model.safetensors']       # and no other file that may lie beside it
    if not file_of(path, names[0]):
        index = read_json(file_of(path, 'model.safetensors.index.json'))
        names = sorted({*index['weight_map'].values()})
    tensors = {}
    for name in names:
        tensors |= load_file(file_of(path, name))
    return tensors


def refuse_foreign(c, path):
    "What their format may say, and our model does not have."
    scale = c.init_values.get('embed_scale', math.sqrt(c.n_embd))
    if scale != 1 or c.test_time_noise or c.injection_type != 'linear':
        raise Refused(f'{path}: embed_scale={scale}, test_time_noise={c.test_time_noise}, '
                      f'injection_type={c.injection_type!r}; 1, 0 and linear are supported')
    if not c.first_state and (c.head_dim or c.n_embd // c.n_heads) * c.n_heads != c.n_embd:
        raise Refused(f'{path}: head_dim is {c.head_dim}, but the format has n_embd / n_heads')
    if c.rope_scaling and c.rope_scaling.get('rope_type') != 'llama3':
        raise Refused(f'{path}: rope_scaling is {c.rope_scaling}; none and llama3 are '
                      'supported')


def in_their_format(model):
    "(tensors, config.json) of a model with a core."
    c, core = model.config, core_of(model)
    width = model.config.n_embd
    steps = spans_in(model.order)
    if type(core) not in (Core, AuthorsCore) or steps != [core]:
        raise Refused(f"the authors' format holds one Core and no other Span, not {steps}")
    if c.ln_scaling:
        raise Refused("LN-scaling: the authors' format cannot hold that")
    weights = model.state_dict()
    weights['head.weight'] = model.head.weight
    if 'adapter.weight' not in weights:     # inject='add': s + e, so the adapter is [I I]
        weights['adapter.weight'] = torch.eye(width).repeat(1, 2).to(model.norm.weight)
    tensors = {theirs: torch.cat([weights[name] for name in ours])
               for theirs, ours in names_of(model).items()}
    scaling = dict(c.rope_scaling, rope_type='llama3') if c.rope_scaling else None
    sizes = dict(zip(PARTS.values(), map(len, parts_of(model))))
    if type(core) is Core:      # the same with all that it says
        core = AuthorsCore(core.items, core.r, core.backprop_depth, start='normal')
    std = core.std(width)
    config_json = dict(
        architectures=['RavenForCausalLM'], model_type=FAMILY,
        **{flag: getattr(c, flag) for flag in hf.FLAGS},
        auto_map={'AutoConfig': f'{CODE}.RecurrentConfig',
                  'AutoModelForCausalLM': f'{CODE}.RavenForCausalLM'},
        first_state='fresh' if core.fresh else 'table', n_embd=width, n_heads=c.n_head,
        num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, intermediate_size=c.ffn_dim,
        vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size, block_size=c.context,
        max_position_embeddings=c.context, norm_eps=c.norm_eps, rope_base=c.rope_theta,
        rope_theta=c.rope_theta, rope_scaling=scaling, **sizes, n_layers=sum(sizes.values()),
        mean_recurrence=core.r, mean_backprop_depth=core.backprop_depth,
        injection_type='linear', bias=False, qk_bias=False, tie_embeddings=False,
        rotary=dict(head_dim=c.head_dim, rope_theta=c.rope_theta, rope_scaling=c.rope_scaling,
                    context=c.context), test_time_noise=0,
        init_values=dict(std=std, embed_scale=1.0, cut=core.start == 'authors'))
    return tensors, config_json


def as_raven(model):
    "A model with a core as transformers' own of the same weights, with its r of now."
    from nanodepth.models.modeling_recurrent import RavenForCausalLM, RecurrentConfig
    tensors, config_json = in_their_format(model)
    theirs = RavenForCausalLM(RecurrentConfig(**config_json)).to(model.norm.weight)
    theirs.load_state_dict(tensors)
    return theirs.eval()


def save_raven(model, folder, tokenizer=None, about=None):
    """Write a model with a core as a folder that transformers opens by the code in it; what of it
    the authors' own code would not understand is returned, as a list of words."""
    c, core = model.config, core_of(model)
    ours = {'norms of q and k': c.qk_norm, 'biases of q, k and v': c.qkv_bias,
            f'head_dim={c.head_dim}': c.head_dim * c.n_head != c.n_embd,
            'a fixed table of first states (--fresh draws new ones)':
                not (getattr(core, 'fresh', False) or getattr(core, 'state_std', None) == 0)}
    hf.write_checkpoint(model, folder, *in_their_format(model), tokenizer,
                        {f'{CODE}.py': modeling_code()}, about)
    return [feature for feature, is_used in ours.items() if is_used]


def modeling_code():
    "modeling_recurrent.py with the two functions of model.py that it uses: a file by itself."
    text = Path(__file__).with_name(f'{CODE}.py').read_text(encoding='utf-8')
    line = 'from nanodepth.model import rope_tables, rotate\n'
    assert line in text
    return text.replace(line, '\n' + '\n\n'.join(map(inspect.getsource, (rope_tables, rotate))))
