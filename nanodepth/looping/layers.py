"""Other families' models in the wrapper: their list of layers, a window of it by name, pinned
experts, and what is refused. A decoder is a list of layers, each with a KV cache among its
arguments, and the wrapper needs to know no more than that.
Usage: a, b = pick_window('mid4', len(layers_of(model)))        # also '3-5', (3, 5), 0.5
"""
import contextlib
import inspect
import re
import threading

import torch
import torch.nn as nn

from nanodepth.common.errors import Refused
from nanodepth.common.whose import is_ours


INDICES = {'layer_idx', 'layer_id'}      # (GPT-Neo has the latter)


def arguments(layer):
    "(the names of a layer's arguments, which of them is the cache, which the mask)"
    layer = getattr(layer, '_orig_mod', layer)      # that of a torch.compile
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
            if type(layers) is Ordered or (type(layers) is nn.ModuleList and len(layers) == n
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
                      f"{depth - 1}, 'mid{min(4, depth)}' (the middle), or a fraction of the depth")
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
    for d, layer in enumerate(layers):
        for each, name in indices(layer):
            if vars(each)[name] not in (d, None):
                raise Refused(f'layer {d} says that it is number {vars(each)[name]}: where layers '
                              f'were exchanged by hand, set the {name} of each to its place')
    biases = {'alibi', 'position_bias'} & {*arguments(layers[min(window)])[0]}
    if cache == 'none' and biases and getattr(config, 'alibi', True):
        raise Refused(f'cache={cache!r} shows a layer other keys than those for which '
                      f"{type(model).__name__} makes its {min(biases)}: choose 'first' or 'exact'")
    attention = getattr(config, '_attn_implementation', None)
    if cache == 'none' and attention not in ('eager', 'sdpa'):
        raise Refused(f"cache={cache!r} changes the attention mask, which {attention!r} has not: "
                      "load the model with attn_implementation='sdpa'")


@torch.no_grad()
def calls_of(model, layers, numbers, **how):
    """[(arguments, answer) of each place of an order] in a forward of eight tokens. A model that
    does not call each place once, but goes through its list in a way of its own, such as a loop, is
    refused."""
    calls = [[] for _ in numbers]

    def note(place, x, kwargs):
        answer = place.run(x, **kwargs)
        calls[place.depth].append((kwargs | {place.names[0]: x}, answer))
        return answer
    tokens = torch.arange(1, 9, device=model.device) % model.config.get_text_config().vocab_size
    with without_dropout(model), ordered(layers, places_of(layers, numbers, note)):
        model(tokens[None], use_cache=False, **how)
    counts = sorted(map(len, calls))
    if {*counts} != {1}:
        raise Refused(f'{type(model).__name__} calls these layers {counts} times, and not each of '
                      'them once: it runs them in a way of its own, so nothing here can run them '
                      'otherwise')
    return [call for [call] in calls]


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


# ----------------------------------------------------------------------------- places of an order

class Ordered(nn.ModuleList):
    """A list of layers, in which who goes through it finds the places of an order. What it holds
    stays as it is, and so do the names of its weights."""

    def __iter__(self):
        return iter(self.places)

    def __len__(self):
        return len(self.places)

    def __getitem__(self, i):
        return self.places[i]

    def refuse(self, *_):
        raise Refused('the list of layers was changed inside the with: change the model first, and '
                      'then its order')
    __setitem__ = __delitem__ = append = extend = insert = refuse


@contextlib.contextmanager
def ordered(layers, places):
    "Inside a `with`, a list of layers is one of places."
    kind = type(layers)
    layers.places, layers.__class__ = places, Ordered
    try:
        yield
    finally:
        layers.__class__ = kind
        del layers.places


def places_of(layers, numbers, arrive=None):
    moved = numbers != [*range(len(layers))]
    return [Place(layers[i], d, moved, arrive) for d, i in enumerate(numbers)]


def indices(layer):
    "[(a module of a layer, what it calls its index in the KV cache)]"
    return [(each, name) for each in layer.modules() for name in INDICES & {*vars(each)}]


class Place:
    """A place in an order, which a model takes for the layer that stands there: what is asked of it
    or set on it, and what is hooked, is the layer's."""
    lock = threading.RLock()
    __class__ = property(lambda self: type(self.layer))     # to isinstance

    def __init__(self, layer, depth, moved, arrive=None):
        names, cache_name, mask_name = arguments(layer)
        vars(self).update(layer=layer, depth=depth, moved=moved, arrive=arrive, names=names,
                          cache_name=cache_name, mask_name=mask_name, refuse_cache=None)

    def __getattr__(self, name):
        if name.startswith('__'):           # a copy is asked for some before it has a layer
            raise AttributeError(name)
        return getattr(self.layer, name)

    def __setattr__(self, name, value):
        setattr(self.layer, name, value)

    def __delattr__(self, name):
        delattr(self.layer, name)

    def __repr__(self):
        return repr(self.layer)

    def __call__(self, *args, **kwargs):
        kwargs.update(zip(self.names, args))
        x = kwargs.pop(self.names[0])
        if self.cache_name != 'cache' and kwargs.get('cache') is not None:
            raise Refused('generate_batch keeps all texts in one paged cache, in which the layers '
                          'of an order have no place: use generate instead')
        if self.refuse_cache and kwargs.get(self.cache_name) is not None:
            self.refuse_cache(kwargs[self.cache_name])
        return self.arrive(self, x, kwargs) if self.arrive else self.run(x, **kwargs)

    def run(self, *args, **kwargs):
        """An ordinary call of the layer. Where layers were moved, it has its place as its index in
        the KV cache meanwhile, so one thread after the other runs it."""
        if not self.moved:
            return self.layer(*args, **kwargs)
        with contextlib.nullcontext() if torch.compiler.is_compiling() else self.lock:
            before = [(each, name, vars(each)[name]) for each, name in indices(self.layer)]
            try:
                for each, name, _ in before:
                    setattr(each, name, self.depth)
                return self.layer(*args, **kwargs)
            finally:
                for each, name, index in before:
                    setattr(each, name, index)


# ------------------------------------------------------------------------------------------ experts

def routers_of(layer):
    "The routers of a layer, which stand beside its experts as `gate` or `router`."
    beside = [getattr(m, name, None) for m in layer.modules() if hasattr(m, 'experts')
              for name in ('gate', 'router')]
    return [m for m in beside if isinstance(m, nn.Module)]


def pinned_routers(places, pin, unasked=False):
    "The routers of some places; none without a pin. unasked: pinned wherever there is a router."
    found = {router: None for place in places for router in routers_of(place)}
    if pin and not found:
        raise Refused(f'pin={pin!r}: the layers {places[0].depth} to {places[-1].depth} have no '
                      'router beside experts (a `gate` or `router`)')
    return [*found] if pin or unasked else []
