"""Extend wrapper.py's `wrapped` to most decoders of Hugging Face's transformers.

A Window needs an object `run` with run(x, items, depth), run.depth, run.start and run.cache, and
with the methods wrote and forget, which decide the evaluation that a cache keeps. For an LM that
object is a Pass. For a model of transformers it is a Replay. There, the model calls the layers of
the window itself, and this is the first evaluation. Inside the `with`, each of these calls is
recorded. After the last one, the Window computes all further evaluations by calling the layers
again.

Usage:
    with wrapped(llama, 'mid4', K=2): llama.generate(**inputs)
"""
import contextlib
import functools
import threading

import torch

from nanodepth import wrapper
from nanodepth.common.origin import is_ours
from nanodepth.model import Refused, require
from nanodepth.wrapper import make_windows, pick_window


@contextlib.contextmanager
def wrapped(model, window=None, solver='anchored', K=3, cache='first', mode='block', decode='full',
            pin=False, **options):
    """Inside this `with`, a window of a model's layers runs several times.

    window  the first and the last layer, (a, b) or 'a-b'; or 'mid4', the middle four, which None
            means, too; or a share of the depth, such as 0.5, for the four layers around it
    cache, decode   as in Window of wrapper.py
    mode    'block' repeats the window as a whole, and 'layer' repeats each of its layers in turn
    pin     in a mixture of experts, later evaluations keep the experts of the first one
    options are for the solver, such as beta and T
    """
    given, model = model, getattr(model, '_orig_mod', model)    # what torch.compile has wrapped
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
            # each module that contains the window refuses output_hidden_states and the like
            for module in model.modules():
                if module is not layers[a] and layers[a] in [*module.modules()]:
                    stack.callback(module.register_forward_pre_hook(
                        refuse_extra_outputs, with_kwargs=True).remove)
        yield given


# ------------------------------------------------------------------- a window in one forward pass

class Replay:
    "Calls the layers of a window as the model has called them in this forward pass."

    def __init__(self, x, cache, layers, window):
        self.x = x                  # the stream before the window
        self.plain = x              # the stream after the layers that the model has called so far
        self.calls = {}             # {layer: a function of x with the model's other arguments}
        self.routed = {}            # {router: its output in the first evaluation}
        self.cache, self.depth, self.start = cache, 0, 0
        self.is_forgotten = False   # True: the cache keeps the next evaluation, not the first
        self.slots = []
        if cache is not None:
            self.slots = slots_of(cache, [layers.index(layer) for layer in window.items])
            self.start = self.slots[layers.index(window.items[0])].get_seq_length()
        self.before = self.held()

    def __call__(self, x, layers, depth=None):
        "Return the stream after the window's layers."
        if x is self.x:
            return self.plain       # the first evaluation
        after = self.held()
        self.put_back(self.before)  # each evaluation sees the cache as it was at first
        for layer in layers:
            x = stream_of(self.calls[layer](x))
        if not self.is_forgotten:
            self.put_back(after)
        return x

    def wrote(self, depths):
        "Return False, because no window is inside another one here."
        return False

    def forget(self, depths):
        self.is_forgotten = True

    def held(self):
        """Return what the slots of the cache hold now. (A shallow copy is enough, because an update
        replaces the tensors of a slot, and does not change them.)"""
        return [dict(vars(slot)) for slot in self.slots]

    def put_back(self, held):
        "Restore what held() returned earlier."
        for slot, values in zip(self.slots, held):
            vars(slot).clear()
            vars(slot).update(values)


@contextlib.contextmanager
def replaying(window, layers, pin):
    "Inside this `with`, a Window runs its layers, which are layers of a model of transformers."
    now = threading.local()         # each thread that runs the model has its own Replay

    def call_layer(layer, ordinary, *args, **kwargs):
        x, *args = args or [kwargs.pop('hidden_states')]
        call = lambda x: ordinary(x, *args, **kwargs)
        if layer is window.items[0]:
            caches = [value for value in (*args, *kwargs.values())
                      if hasattr(value, 'get_seq_length')]
            now.run = Replay(x, caches[0] if caches else None, layers, window)
        run = getattr(now, 'run', None)
        require(run and x is run.plain, 'the model adds something to the stream between the layers '
                'of this window, as some do for images: choose another window')
        require(not (pin and layer.training and getattr(layer, 'gradient_checkpointing', False)),
                'pin does not work with gradient checkpointing, which computes again: turn it off')
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
        require(routers or not pin, 'pin: these layers have no router (`gate` or `router`) next to '
                'experts')
        for router in routers if pin else ():
            stack.enter_context(called_by(call_router, router))
        yield


@contextlib.contextmanager
def called_by(call, module):
    """Inside this `with`, module(...) becomes call(module, the ordinary call, ...). Python finds
    __call__ in the class of an object, so the module gets a temporary subclass as its class."""
    kind = type(module)
    require(not hasattr(kind, 'is_wrapped'), 'a layer of this window is wrapped already')

    @torch.compiler.disable         # it runs something else in each step of a solver
    def __call__(self, *args, **kwargs):
        return call(self, functools.partial(kind.__call__, self), *args, **kwargs)

    def __reduce_ex__(self, protocol):
        raise Refused('a wrapped model is not copied or pickled (torch.save): do so outside of the '
                      '`with`, or use save_pretrained')

    called = type(kind.__name__, (kind,), dict(
        __call__=__call__, __reduce_ex__=__reduce_ex__, __module__=kind.__module__,
        is_wrapped=True))
    called.forward = kind.forward       # transformers changes it when a subclass is made
    module.__class__ = called
    try:
        yield
    finally:
        module.__class__ = kind


# -------------------------------------------------------------------- what differs between families

def stream_of(output):
    "Return the stream in a layer's output, which may be a tuple."
    return output[0] if isinstance(output, tuple) else output


def layers_of(model):
    """Return the layers of a model. In a model of transformers they are the list of modules that is
    as long as the config's number of layers."""
    if is_ours(model):
        return list(model.layers)
    name = type(model).__name__
    require(hasattr(getattr(model, 'config', None), 'get_text_config'),
            f'{name} is neither an LM of model.py nor a decoder of transformers')
    config = model.config.get_text_config()
    n = getattr(config, 'num_hidden_layers', None)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)
             and len(module) == n]
    require(len(lists) == 1 and not config.is_encoder_decoder
            and not getattr(config, 'num_kv_shared_layers', 0),
            f'{name} is not a decoder with one list of {n} layers, each with its own keys and '
            'values')
    return list(lists[0])


ATTENTION = 'attention', 'full_attention', 'sliding_attention', 'chunked_attention'


def check_kinds(config, a, b):
    "Refuse a window with layers that are not attention layers."
    kinds = getattr(config, 'layer_types', None) or getattr(config, 'layers_block_type', None)
    for i in range(a, b + 1) if kinds else ():
        require(kinds[i] in ATTENTION, f'layer {i} is of the kind {kinds[i]}, whose state cannot '
                'run twice on one token: choose a window of attention layers')


def slots_of(cache, places):
    """Return the slots of a KV cache, and make those that are missing. A slot of a window's layer,
    which has one of these places, must be able to grow."""
    while len(cache.layers) <= max(places):     # a DynamicCache makes slots when it needs them
        cache.layers.append(cache.layer_class_to_replicate())
    for place in places:
        slot = cache.layers[place]
        require(hasattr(slot, 'keys') and not slot.is_compileable,
                f'{type(slot).__name__}: a wrapped model needs a KV cache that grows, such as '
                'DynamicCache()')
    return cache.layers


def routers_of(layer):
    "Return the routers of a layer: the modules `gate` or `router` next to `experts`."
    found = [getattr(module, name, None) for module in layer.modules()
             if hasattr(module, 'experts') for name in ('gate', 'router')]
    return [module for module in found if isinstance(module, torch.nn.Module)]


def refuse_extra_outputs(model, args, kwargs):
    "Refuse output_hidden_states and the like, because a wrapped layer runs several times."
    for name in ('output_hidden_states', 'output_attentions', 'output_router_logits'):
        is_wanted = kwargs.get(name)
        if is_wanted is None:
            is_wanted = getattr(model.config, name, False)
        require(not is_wanted, f'{name} is not possible here, because a wrapped layer runs several '
                'times: set it to False (also in model.config), or leave the `with` for it')
