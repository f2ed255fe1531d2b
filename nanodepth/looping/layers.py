"""Other families' models in the wrapper: their list of layers, a window of it by name, pinned
experts, and what is refused. A decoder is a list of layers, each with a KV cache among its
arguments, and the wrapper needs to know no more than that.
Usage: a, b = pick_window('mid4', len(layers_of(model)))        # also '3-5', (3, 5), 0.5
"""
import contextlib
import functools
import inspect
import re

import torch
import torch.nn as nn

from nanodepth.common.errors import Refused
from nanodepth.common.whose import is_ours


def arguments(layer):
    "(the names of a layer's arguments, which of them is the cache, which the mask)"
    names = list(inspect.signature(type(layer).forward).parameters)[1:]
    pick = lambda *known: next((name for name in known if name in names), None)
    return (names, pick('past_key_values', 'past_key_value', 'layer_past', 'cache'),
            pick('attention_mask', 'mask'))


def layers_of(model):
    "The list of a model's layers; another family's run in this order."
    if is_ours(model):
        return model.layers
    config = getattr(model, 'config', None)
    if getattr(config, 'is_encoder_decoder', False):
        raise Refused(f'{type(model).__name__} has an encoder and a decoder: only models with '
                      'one list of layers can be looped')
    if hasattr(config, 'get_text_config'):
        n = getattr(config.get_text_config(), 'num_hidden_layers', None)
        for layers in model.modules():
            if (isinstance(layers, nn.ModuleList) and len(layers) == n
                and all(arguments(layer)[1] for layer in layers)):
                return layers
    raise Refused(f'{type(model).__name__} has no list of layers with a KV cache: an LM of '
                  'ours or a Hugging Face decoder has')


# The authors' middle four are 12-15 of 28 layers, 15-18 of 36, 22-25 of 48: no rule gives all.
MIDDLE = {(36, 4): 15}


def pick_window(window, depth):
    """(a, b) of a window: (3, 5) or '3-5', 'mid4' (also None), or 0.5, the four layers whose
    centre is nearest to that fraction of the depth. See "Training-Free Looped Transformers",
    sections 3.1 and 3.2, Figure 6 and Table 2. Its good windows lie at 0.45 to 0.60 of the depth,
    and those of models with less than a billion weights at 0.25 to 0.56."""
    given = window
    window = f'mid{min(4, depth)}' if window is None else window
    if isinstance(window, str):
        if re.fullmatch(r'\d+-\d+', window):
            window = tuple(int(part) for part in window.split('-'))
        elif re.fullmatch(r'\d+\.\d*|\.\d+', window):
            window = float(window)
        elif re.fullmatch(r'mid\d+', window) and 1 <= (n := int(window[3:])) <= depth:
            a = MIDDLE.get((depth, n), depth // 2 - n // 2)
            window = a, a + n - 1
    if isinstance(window, float) and 0 <= window <= 1 and depth >= 4:
        a = min(range(depth - 3), key=lambda a: abs(a + 1.5 - window * depth))     # Figure 6
        window = a, a + 3
    if not (isinstance(window, (tuple, list)) and len(window) == 2
            and all(isinstance(i, int) for i in window) and 0 <= window[0] <= window[1] < depth):
        raise Refused(f"window={given!r}: give (first, last) or 'first-last' within 0 to "
                      f"{depth - 1}, 'mid4' for the middle four, or a fraction of the depth")
    return tuple(window)


def check_host(model, layers, window, cache):
    "What cannot be looped is refused before anything is touched."
    config = model.config.get_text_config()
    kinds = (getattr(config, 'layer_types', None) or getattr(config, 'layers_block_type', None)
             or ['attention'] * len(layers))
    known = ('attention', 'full_attention', 'sliding_attention', 'chunked_attention')
    for i in window:
        if kinds[i] not in known:
            raise Refused(f'layer {i} is of the kind {kinds[i]!r}, whose state cannot be run twice '
                          'on one token: choose a window of attention layers')
    biases = {'alibi', 'position_bias'} & {*arguments(layers[min(window)])[0]}
    if cache == 'none' and biases and getattr(config, 'alibi', True):
        raise Refused(f'cache={cache!r} shows a layer other keys than those for which '
                      f"{type(model).__name__} makes its {min(biases)}: choose 'first' or 'exact'")
    attention = getattr(config, '_attn_implementation', None)
    if cache == 'none' and attention not in ('eager', 'sdpa'):
        raise Refused(f"cache={cache!r} changes the attention mask, which {attention!r} has not: "
                      "load the model with attn_implementation='sdpa'")


@torch.no_grad()
def calls_of(model, layers, **how):
    """[(arguments, answer) of each layer] in a forward of eight tokens. A model that does not call
    each of them once, but goes through them in a way of its own, such as a loop, is refused."""
    calls = {layer: [] for layer in layers}

    def note(layer, args, kwargs, answer):
        calls[layer].append((kwargs | dict(zip(arguments(layer)[0], args)), answer))
    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        tokens = torch.arange(1, 9, device=model.device) % model.config.get_text_config().vocab_size
        model(tokens[None], use_cache=False, **how)
    finally:
        for hook in hooks:
            hook.remove()
    counts = sorted(map(len, calls.values()))
    if {*counts} != {1}:
        raise Refused(f'{type(model).__name__} calls these layers {counts} times, and not each of '
                      'them once: it runs them in a way of its own, so nothing here can run them '
                      'otherwise')
    return [call for [call] in calls.values()]


@torch.no_grad()
def run_by_hand(layers, calls, numbers):
    "The stream behind some layers, one after the other, each with the arguments of its own call."
    stream = lambda i: arguments(layers[i])[0][0]
    x = calls[0][0][stream(0)]
    for i in numbers:
        x = stream_of(layers[i](**calls[i][0] | {stream(i): x}))
    return x


def stream_of(answer):
    return answer[0] if isinstance(answer, tuple) else answer


@contextlib.contextmanager
def without_dropout(model):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# --------------------------------------------------------------------------------------- one layer

class Entered:
    "The model's call of a layer comes to its Entry. (This stands before the class of the layer.)"

    def __call__(self, *args, **kwargs):
        return self.entry(*args, **kwargs)


@functools.cache
def entered(kind):
    "A class of layers, whose calls come to their Entries."
    new = type(kind.__name__, (Entered, kind), {})
    new.forward = kind.forward      # (transformers has wrapped it once more, for checkpointing)
    return new


class Entry:
    "Of a layer within a window: an object, so that a deepcopy has its own."

    def __init__(self, layer, index, loop, tuples, pinned):
        self.layer, self.index, self.loop, self.pinned = layer, index, loop, pinned
        self.tuples = tuples
        self.names, self.cache_name, self.mask_name = arguments(layer)

    def forward(self, x, kwargs):
        "An evaluation: an ordinary call of the layer, with all hooks that it has."
        return stream_of(super(Entered, self.layer).__call__(x, **kwargs))

    def refuse_checkpointing(self):
        if self.layer.training and getattr(self.layer, 'gradient_checkpointing', False):
            raise Refused('gradient checkpointing runs a layer again on its own, without what pin '
                          'has noted: turn one of them off')

    def __call__(self, *args, **kwargs):
        kwargs.update(zip(self.names, args))
        x = kwargs.pop(self.names[0])
        return self.loop.arrive(self, self.index, x, kwargs)


# ------------------------------------------------------------------------------------------ experts

class Pin:
    """A hook on a router: later evaluations get the first one's answer, experts and weights.
    Otherwise each evaluation could be of another function ("Training-Free Looped Transformers",
    sections 2.2 and 3.3). The paper "computes the gating decision once", as this does, but its
    Algorithm 5 asks the router in every evaluation."""

    def __init__(self, loop):
        self.loop = loop

    def __call__(self, router, args, output):
        return self.loop.routed.setdefault(router, output)      # till the window is through


def routers_of(layer):
    "The routers of a layer, which stand beside its experts as `gate` or `router`."
    beside = [getattr(m, name, None) for m in layer.modules() if hasattr(m, 'experts')
              for name in ('gate', 'router')]
    return [m for m in beside if isinstance(m, nn.Module)]


def pinned_routers(layers, pin, unasked=False):
    """{layer: its routers} of {layer: module}; none without a pin. unasked: pinned wherever there
    is a router."""
    if unasked and any(map(routers_of, layers.values())):
        pin = 'mixture'
    routers = {i: routers_of(layer) if pin else [] for i, layer in layers.items()}
    if pin and not any(routers.values()):
        raise Refused(f'pin={pin!r}: the layers {min(layers)} to {max(layers)} have no router '
                      'beside experts (a `gate` or `router`)')
    return routers
