"""wrapper.py's `wrapped` for any decoder of transformers, and for a model of ours.

A Window asks this of what runs it: run(x, items, depth), run.depth, .start and .cache, and the
methods wrote and forget, which decide which evaluation a cache keeps. For layers of ours that is a
Pass. For layers of another family it is a Replay: the model calls the window's layers itself, which
is the first evaluation. Inside the `with` each call is noted on its way, and after the last one the
Window runs all others by calling the layers again.

Usage:
    with wrapped(llama, 'mid4', K=2): llama.generate(**inputs)
"""
import contextlib
import functools
import threading

import torch

from nanodepth import wrapper
from nanodepth.common.whose import is_ours
from nanodepth.model import Refused, require
from nanodepth.wrapper import make_windows, pick_window


@contextlib.contextmanager
def wrapped(model, window=None, solver='anchored', K=3, cache='first', mode='block', decode='full',
            pin=False, **options):
    """Inside a `with`, a window of a model's layers runs several times.

    window  (a, b) or 'a-b', both included; 'mid4', the middle four, or None; a share of the depth,
            such as 0.5: the four around it
    cache, decode   a Window of wrapper.py explains them
    mode    the window as one 'block', or 'layer' by layer
    pin     in a mixture of experts, later evaluations keep the experts of the first
    others  the solver's options, such as beta and T
    """
    given, model = model, getattr(model, '_orig_mod', model)    # torch.compile's has it within
    with contextlib.ExitStack() as stack:
        if is_ours(model):
            require(not pin, 'pin: this model has no mixture of experts')
            stack.enter_context(wrapper.wrapped(model, window, solver, K, cache, mode, decode,
                                                **options))
        else:
            layers = layers_of(model)
            a, b = pick_window(window, len(layers))
            check_kinds(model.config.get_text_config(), a, b)
            for each in make_windows(layers[a:b + 1], mode, solver, K, cache, decode, options):
                stack.enter_context(replaying(each, layers, pin))
            for module in model.modules():
                if module is not layers[a] and layers[a] in [*module.modules()]:
                    stack.callback(module.register_forward_pre_hook(
                        refuse_insights, with_kwargs=True).remove)
        yield given


# ----------------------------------------------------------------------------- one forward's window

class Replay:
    "A window of layers in one forward, which calls them as the model has just called them."

    def __init__(self, x, cache, layers, window):
        self.x = x                  # the stream before the window
        self.plain = x              # what the model itself has made of it so far
        self.calls = {}             # {layer: a function of x, its call with all other arguments}
        self.routed = {}            # {router: its answer in the first evaluation}
        self.cache, self.depth, self.start = cache, 0, 0
        self.is_forgotten = False   # does the cache keep the next evaluation, and not the first?
        self.slots = []
        if cache is not None:
            self.slots = slots_of(cache, [layers.index(layer) for layer in window.items])
            self.start = self.slots[layers.index(window.items[0])].get_seq_length()
        self.before = self.held()

    def __call__(self, x, layers, depth=None):
        "The stream after the window's layers."
        if x is self.x:
            return self.plain       # the first evaluation
        after = self.held()
        self.put_back(self.before)  # each evaluation sees the cache as this forward found it
        for layer in layers:
            x = stream_of(self.calls[layer](x))
        if not self.is_forgotten:
            self.put_back(after)
        return x

    def wrote(self, depths):
        return False

    def forget(self, depths):
        self.is_forgotten = True

    def held(self):
        "What the slots of the cache hold now. (An update gives a slot other tensors.)"
        return [dict(vars(slot)) for slot in self.slots]

    def put_back(self, held):
        for slot, values in zip(self.slots, held):
            vars(slot).clear()
            vars(slot).update(values)


@contextlib.contextmanager
def replaying(window, layers, pin):
    "Inside a `with`, the window's layers are run by it."
    now = threading.local()         # each thread that runs the model has a Replay of its own

    def call_layer(layer, ordinary, *args, **kwargs):
        x, *args = args or [kwargs.pop('hidden_states')]
        call = lambda x: ordinary(x, *args, **kwargs)
        if layer is window.items[0]:
            caches = [each for each in (*args, *kwargs.values()) if hasattr(each, 'get_seq_length')]
            now.run = Replay(x, caches[0] if caches else None, layers, window)
        run = getattr(now, 'run', None)
        require(run and x is run.plain, 'the model changes the stream between the layers of this '
                'window, as for an image: choose another window')
        require(not (pin and layer.training and getattr(layer, 'gradient_checkpointing', False)),
                'pin: what gradient checkpointing computes again is not pinned: turn it off')
        run.calls[layer] = call
        output = call(x)
        run.plain = stream_of(output)
        if layer is not window.items[-1]:
            return output
        try:
            x = window(run, run.x)
        finally:
            now.run = None
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def call_router(router, ordinary, *args, **kwargs):
        run = getattr(now, 'run', None)
        if run is None:
            return ordinary(*args, **kwargs)
        if router not in run.routed:
            run.routed[router] = ordinary(*args, **kwargs)
        return run.routed[router]

    with contextlib.ExitStack() as stack:
        for layer in window.items:
            stack.enter_context(called_by(call_layer, layer))
        routers = [router for layer in window.items for router in routers_of(layer)]
        require(routers or not pin, 'pin: no router (`gate` or `router`) stands beside experts')
        for router in routers if pin else ():
            stack.enter_context(called_by(call_router, router))
        yield


@contextlib.contextmanager
def called_by(call, module):
    """Inside a `with`, module(...) is call(module, its ordinary call, ...). Python looks up what a
    call does in an object's class, so meanwhile the module is of a subclass."""
    kind = type(module)
    require(not hasattr(kind, 'is_wrapped'), 'a layer of this window is wrapped already')

    @torch.compiler.disable         # what it runs depends on the step of a solver
    def __call__(self, *args, **kwargs):
        return call(self, functools.partial(kind.__call__, self), *args, **kwargs)

    def __reduce_ex__(self, protocol):
        raise Refused('a wrapped model is not copied or pickled (torch.save): do so outside of the '
                      '`with`, or use save_pretrained')

    called = type(kind.__name__, (kind,), dict(
        __call__=__call__, __reduce_ex__=__reduce_ex__, __module__=kind.__module__,
        is_wrapped=True))
    called.forward = kind.forward       # transformers gives a new class another one
    module.__class__ = called
    try:
        yield
    finally:
        module.__class__ = kind


# -------------------------------------------------------------------- what differs between families

def stream_of(output):
    return output[0] if isinstance(output, tuple) else output


def layers_of(model):
    "The layers of a model: of ours, or the list of modules that is as long as the config says."
    if is_ours(model):
        return list(model.layers)
    name = type(model).__name__
    require(hasattr(getattr(model, 'config', None), 'get_text_config'),
            f'{name} is neither a model of ours nor a decoder of transformers')
    config = model.config.get_text_config()
    n = getattr(config, 'num_hidden_layers', None)
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)
             and len(each) == n]
    require(len(lists) == 1 and not config.is_encoder_decoder
            and not getattr(config, 'num_kv_shared_layers', 0),
            f'{name} is no decoder with one list of {n} layers, each with its own keys and values')
    return list(lists[0])


ATTENTION = 'attention', 'full_attention', 'sliding_attention', 'chunked_attention'


def check_kinds(config, a, b):
    kinds = getattr(config, 'layer_types', None) or getattr(config, 'layers_block_type', None)
    for i in range(a, b + 1) if kinds else ():
        require(kinds[i] in ATTENTION, f'layer {i} is of the kind {kinds[i]}, whose state cannot '
                'be run twice on one token: choose a window of attention layers')


def slots_of(cache, places):
    "The list of slots of a KV cache, in which a window's layers have these places."
    while len(cache.layers) <= max(places):     # a DynamicCache makes them when needed
        cache.layers.append(cache.layer_class_to_replicate())
    for place in places:
        slot = cache.layers[place]
        require(hasattr(slot, 'keys') and not slot.is_compileable,
                f'{type(slot).__name__}: a wrapped model needs a KV cache that grows')
    return cache.layers


def routers_of(layer):
    "The routers of a layer, which stand beside its experts as `gate` or `router`."
    beside = [getattr(module, name, None) for module in layer.modules()
              if hasattr(module, 'experts') for name in ('gate', 'router')]
    return [each for each in beside if isinstance(each, torch.nn.Module)]


def refuse_insights(model, args, kwargs):
    for name in ('output_hidden_states', 'output_attentions', 'output_router_logits'):
        asked = kwargs.get(name)
        asked = getattr(model.config, name, False) if asked is None else asked
        require(not asked, f'{name}: a wrapped layer has several: ask the model as it is')
