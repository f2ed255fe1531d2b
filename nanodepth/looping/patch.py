"""Put a window into a model, ours or of another family, and take it out again. A model of ours gets
another order. In another family's model, an Entry (layers.py) takes the place of each layer's
forward, and hands its calls to the window's Loop (window.py).
Usage: with looped(model, window=(3, 5), method='rk', K=3, beta=0.5): model.generate(tokens, 20)
"""
import contextlib
import copy
from typing import NamedTuple

from nanodepth.common.errors import Refused, check_choice
from nanodepth.looping.caches import Window
from nanodepth.looping.layers import (FORWARDS, Entry, Pin, check_calls, check_host, is_ours,
                                      layers_of, loop_of, pick_window, pinned_routers)
from nanodepth.looping.window import Loop
from nanodepth.model import steps_in, unrolled
from nanodepth.wrapper import Window as PlainWindow


class Handle(NamedTuple):
    model: object
    window: tuple
    added_at_once: int      # runs of layers more for each token, where no pass fills a cache

    def unpatch(self):
        unpatch(self.model)


def patch(model, window=None, method='rk', K=3, beta=None, pin=None, **how):
    """Loop a window of a model's layers from now on; unpatch(model) undoes it.

    window   (3, 5), both included; 'mid4', the middle four, if none is given; 0.5, the four centred
             on that fraction of the depth
    K, beta  rk's, whose beta is 0.5 if none is given; others' options are in looping/solvers.py
    cache    which pass later tokens see in the KV cache: 'first', the plain one, or as Window says
    pin      'mixture': in a mixture of experts, later evaluations keep the experts of the first
    others   rarely needed: Window explains decode and mode

    One of ours gets another order; of another family the layers get Entries."""
    layers = None if is_ours(model) else layers_of(model)
    if loop_of(model) is not None or windows_of(model):
        raise Refused('this model is looped already: unpatch it first')
    a, b = pick_window(window, len(layers or model.unrolled()))
    if layers is None:
        order = model.order
        starts = [len(unrolled(order[:i])) for i in range(len(order) + 1)]
        check_choice('pin', pin, (None, 'mixture'))
        if pin:
            raise Refused(f'pin={pin!r}: the layers have no router beside experts')
        if not {a, b + 1} <= {*starts}:
            raise Refused(f'the window {a}-{b} begins or ends within a recurrent core')
        first, end = starts.index(a), starts.index(b + 1)
        step = Window(order[first:end], method, K, beta, **how)
        model.order = [*order[:first], step, *order[end:]]
    else:
        step = Window(range(a, b + 1), method, K, beta, **how)
        put_in(model, layers, a, b, step, pin)
    return Handle(model, (a, b), added_at_once=(step.evaluations() - 1) * (b - a + 1))


@contextlib.contextmanager
def looped(model, window=None, method='rk', K=3, beta=None, **how):
    "patch inside a `with`."
    patch(model, window, method, K, beta, **how)
    try:
        yield model
    finally:
        unpatch(model)


def windows_of(model):
    "Those in the order of a model of ours; none of others."
    return [step for step in steps_in(getattr(model, 'order', ())) if isinstance(step, PlainWindow)]


def opened(order):
    "The order with the items of its windows in their place."
    new = []
    for item in order:
        if not isinstance(item, int) and (inside := opened(item.items)) != item.items:
            item = copy.copy(item)
            item.items = inside
        new += item.items if isinstance(item, PlainWindow) else [item]
    return new


def put_in(model, layers, a, b, how, pin=None):
    "A window at the positions a to b of another family's list of layers."
    in_window = {d: layers[d] for d in range(a, b + 1)}
    check_host(model, layers, in_window, how.cache)
    routers = pinned_routers(in_window, pin, unasked=how.by_layer)
    tuples = check_calls(model, in_window.values())
    # From here on nothing can fail.
    loop = Loop((a, b), how, len(layers))
    for module in model.modules():
        if module is not layers and any(each is layers for each in module.modules()):
            module.register_forward_pre_hook(refuse_insights, with_kwargs=True)
    for d, layer in in_window.items():
        layer.forward = Entry(layer, d, loop, layer in tuples, pinned=any(routers.values()))
        for router in routers[d]:
            router.register_forward_hook(Pin(loop))


def refuse_insights(module, args, kwargs):
    "A hook on what holds the layers, which would show a layer several times, or before its loop."
    config = getattr(module, 'config', None)
    for name in ('output_hidden_states', 'output_attentions', 'output_router_logits'):
        asked = kwargs.get(name)
        if asked or asked is None and getattr(config, name, False):
            raise Refused(f'{name}: a looped layer has one for each evaluation, and not one for '
                          'all: ask the model as it is, or in another order')


def unpatch(model):
    "Restore a patched model, or a copy of one, to the last bit."
    if is_ours(model):
        model.order = opened(model.order)
        return
    for module in model.modules():
        for name in FORWARDS:       # accelerate may have moved ours to _old_forward
            entry = vars(module).get(name)
            if isinstance(entry, Entry):
                entry.leave(module, name)
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, Pin):
                del module._forward_hooks[key]
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is refuse_insights:
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
