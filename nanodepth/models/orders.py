"""Another family's model of transformers with its layers in another order: left out, exchanged, or
run several times, without a layer of its own for each place. And layers that add less.

The idea: a decoder is a list of layers, which its forward goes through from first to last. So the
list is exchanged for one of shallow copies: each shares the weights of its layer, and has an index
of its own, by which it finds its slot in the KV cache. What a config says of each layer, such as
which attend over a window, moves with the layers. Afterwards everything is as it was.

A layer that runs k times adds k times to the stream, at states that it was not trained on. Damped,
each run adds a k-th: what the two halves of a layer write, `o_proj` and `down_proj`, is multiplied
by 1/k. That is k small Euler steps through each layer by itself, as the wrapper takes them, but for
each half of a layer by itself, and without the wrapper's share of the plain output. Since it is
only numbers in weights, it can be written into an ordinary checkpoint, which a loop cannot.

Here: families whose layers also depend on their place are refused: by keys that layers share, by
embeddings of a layer's own, or by a scale that is computed from the index. Damping is for
families that add `o_proj` and `down_proj` to the stream as they are, without a norm behind them.

Usage:
    with in_order(model, [0, 1, 2, 1, 2, 3]): model(tokens)     # as deep as the list is long
    with damped(model, [0, 1, 2, 1, 2, 3], True): ...           # layers 1 and 2 add half each time
"""
import contextlib
import copy
import itertools

import torch
import torch.nn as nn

from nanodepth.common.errors import Refused
from nanodepth.common.steps import check_order
from nanodepth.looping.layers import check_calls, is_ours, layers_of
from nanodepth.looping.patch import put_in, unpatch
from nanodepth.model import unrolled

# lists that a config has, an entry for each layer
EACH_LAYER = 'layer_types', 'layers_block_type', 'no_rope_layers', 'mlp_layer_types'
# settings by which a layer's place matters, beside its order
BY_PLACE = ('num_kv_shared_layers', 'hidden_size_per_layer_input',
            'scale_attn_by_inverse_layer_idx')
# the norms of a layer whose two halves go to the stream as they are
BEFORE_THE_HALVES = {'input_layernorm', 'post_attention_layernorm'}


@contextlib.contextmanager
def in_order(model, order):
    """The model with its layers in another order, inside a `with`: numbers, and windows of
    wrapper.py."""
    layers = layers_of(model)
    items = check_order(order, len(layers))
    order = unrolled(items)
    starts = itertools.accumulate((len(unrolled([item])) for item in items), initial=0)
    config = model.config.get_text_config()
    for name in BY_PLACE:
        if getattr(config, name, None):
            raise Refused(f'{type(model).__name__} has {name}={getattr(config, name)}: what a '
                          'layer of it does depends on its place, so it takes no other order')
    if any('forward' in vars(module) for module in layers.modules()):
        raise Refused("the layers' forward was replaced, by the wrapper or by accelerate (leave "
                      'its with, or open the model without device_map)')
    before = dict(layers._modules)
    lists = {name: list(value) for name in EACH_LAYER if (value := getattr(config, name, None))}
    try:
        layers._modules = {str(place): placed(layers[i], place) for place, i in enumerate(order)}
        config.num_hidden_layers = len(order)
        for name, value in lists.items():
            setattr(config, name, [value[i] for i in order])
        check_calls(model, dict.fromkeys(layers, 1))
        for a, item in zip(starts, items):
            if not isinstance(item, int):
                if not all(isinstance(i, int) for i in item.items):
                    raise Refused('a window in a window is for models of ours')
                put_in(model, layers, a, a + len(item.items) - 1, item)
        yield model
    finally:
        unpatch(model)
        layers._modules = before
        config.num_hidden_layers = len(before)
        for name, value in lists.items():
            setattr(config, name, value)


def placed(module, place):
    "A shallow copy of a layer: its weights are shared, its index in the cache is its place."
    new = copy.copy(module)
    new._modules = {name: child if child is None else placed(child, place)
                    for name, child in module._modules.items()}
    if hasattr(new, 'layer_idx'):
        new.layer_idx = place
    return new


@contextlib.contextmanager
def damped(model, order, factor):
    """Layers that the order runs more than once add `factor` times as much each time, inside a
    `with`. True: a k-th, for a layer that runs k times; None: as much as ever."""
    layers = layers_of(model)
    several = [] if factor is None else {i for i in order if order.count(i) > 1}
    before = {}         # the weights of what these layers add
    try:
        for i in several:
            for part in adds(model, layers[i]):
                before.update({p: p.data for p in part.parameters()})
        if several and not is_ours(model):
            for p, data in before.items():
                p.data = torch.zeros_like(data)
            check_nothing_added(model, order, several)
        for i in several:
            share = 1 / order.count(i) if factor is True else factor
            for part in adds(model, layers[i]):
                for p in part.parameters():
                    p.data = before[p] * share
        yield model
    finally:
        for p, data in before.items():
            p.data = data


@torch.no_grad()
def check_nothing_added(model, order, silent):
    """Layers that write nothing must change nothing, or damping them would change more than what
    they add: some families scale the stream, too."""
    tokens = torch.arange(1, 5, device=model.device)[None]
    rest = [i for i in order if i not in silent] or [order[0]]
    logits = []
    for each in ([*silent, *rest], rest):
        with in_order(model, each):
            logits.append(model(tokens, use_cache=False).logits.float())
    if (logits[0] - logits[1]).abs().max() > 1e-3 * logits[1].abs().max():
        raise Refused(f'{type(model).__name__}: its layers do more to the stream than to add to '
                      'it, so they cannot be damped')


def adds(model, layer):
    "The two linear maps of a layer whose outputs are added to the stream."
    if is_ours(model):
        return layer.attn.o, layer.mlp.down
    parts = [getattr(getattr(layer, half, None), name, None)
             for half, name in (('self_attn', 'o_proj'), ('mlp', 'down_proj'))]
    norms = {name for name, _ in layer.named_children() if 'norm' in name}
    if not all(isinstance(part, nn.Linear) for part in parts) or norms - BEFORE_THE_HALVES:
        raise Refused(f'{type(model).__name__}: damping is for layers that add o_proj and '
                      'down_proj to the stream as they are, as those of Llama, Mistral and Qwen do')
    return parts
