"""Which layers: a model's list of layers whatever its family, a window of them by name, and what cannot be looped.

The idea: a decoder is a list of layers, each with a KV cache among its arguments; that is all the wrapper needs to know. The window is given by
its ends, by the middle n, or by where its centre lies, since good windows have lain at 0.45 to 0.60 of the depth whatever the size.

Paper: "Training-Free Looped Transformers", sections 3.1 and 3.2, Figure 6 (a window's centre is (a + b) / 2 of N layers), Table 2 (4 layers).
Here: the middle n layers begin at N // 2 - n // 2, which gives the paper's windows on its 28 layers. For our models a window counts
positions of the order.

Usage:
    layers, order = depth_of(model)
    a, b = pick_window('mid4', len(order))          # also '3-5', (3, 5), 0.5
"""
import inspect

import torch.nn as nn

from common.errors import Refused
from model import LM


def arguments(layer):
    "(the names of a layer's arguments, which of them is the cache, which the mask)"
    names = list(inspect.signature(type(layer).forward).parameters)[1:]
    pick = lambda known: next((name for name in known if name in names), None)
    return names, pick(('past_key_values', 'past_key_value', 'layer_past', 'cache')), pick(('attention_mask', 'mask'))


def depth_of(model):
    "(the list of a model's layers, the order in which they run)"
    if isinstance(model, LM):
        return model.layers, model.order
    config = getattr(model, 'config', None)
    if getattr(config, 'is_encoder_decoder', False):
        raise Refused(f'{type(model).__name__} has an encoder and a decoder: only models with one list of layers can be looped')
    if hasattr(config, 'get_text_config'):
        n = getattr(config.get_text_config(), 'num_hidden_layers', None)
        for layers in model.modules():
            if isinstance(layers, nn.ModuleList) and len(layers) == n and all(arguments(layer)[1] for layer in layers):
                return layers, list(range(n))
    raise Refused(f'{type(model).__name__} has no list of layers with a KV cache: an LM of ours or a Hugging Face decoder has')


def pick_window(window, depth):
    "(a, b) of a window: (3, 5) or '3-5', 'mid4' (also None), or 0.5, the four layers whose centre is nearest to that fraction of the depth."
    given, n = window, 4
    if isinstance(window, str) and window.replace('.', '', 1).isdecimal() and '.' in window:
        window = float(window)
    if window is None:
        window = 'mid4' if depth >= 4 else f'mid{depth}'
    if isinstance(window, str) and window.startswith('mid') and window[3:].isdecimal() and 1 <= int(window[3:]) <= depth:
        n = int(window[3:])
        window = (depth // 2 - n // 2, depth // 2 - n // 2 + n - 1)
    elif isinstance(window, float) and 0 <= window <= 1 and depth >= 4:
        # the window whose centre, (a + b) / 2 layers, is nearest to that part of the depth, as in the paper's Figure 6
        a = min(range(depth - 3), key=lambda a: abs(a + 1.5 - window * depth))
        window = (a, a + 3)
    elif isinstance(window, str) and window.count('-') == 1 and window.replace('-', '').isdecimal():
        window = tuple(int(part) for part in window.split('-') if part)
    if not (isinstance(window, (tuple, list)) and len(window) == 2 and all(isinstance(i, int) for i in window) and 0 <= window[0] <= window[1] < depth):
        raise Refused(f"window={given!r}: give (first, last) or 'first-last' within 0 to {depth - 1}, 'mid4' for the middle four, or a fraction of the depth")
    return tuple(window)


def refuse(model, layers, window, cache):
    "What cannot be looped is refused before anything is touched."
    if isinstance(model, LM):
        return
    config = model.config.get_text_config()
    if getattr(config, 'num_kv_shared_layers', None):
        raise Refused(f'{type(model).__name__} shares keys and values between layers, which a looped layer would overwrite')
    kinds = getattr(config, 'layer_types', None) or getattr(config, 'layers_block_type', None) or ['attention'] * len(layers)
    for i in window:
        if kinds[i] not in ('attention', 'full_attention', 'sliding_attention', 'chunked_attention'):
            raise Refused(f'layer {i} is of the kind {kinds[i]!r}, whose state cannot be run twice on one token: choose a window of attention layers')
    attention = getattr(config, '_attn_implementation', None)
    if cache in ('frozen', 'none') and attention not in ('eager', 'sdpa'):
        raise Refused(f"cache={cache!r} changes the attention mask, which {attention!r} has not: load the model with attn_implementation='sdpa'")
