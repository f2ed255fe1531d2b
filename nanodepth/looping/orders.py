"""Run any model in another order inside a `with`: its layers exchanged, left out, repeated, or a
window of them looped. One of ours has an order already. In another family's model the list of
layers gives places of the order to who goes through it. A place calls its layer as that is, with a
slot of its own in the KV cache, or brings it to its window.
Usage:
    with in_order(model, [0, 1, 2, 1, 2, 3]): model(tokens)         # as deep as the list is long
    with looped(model, window=(3, 5), solver='rk', K=3, beta=0.5): model.generate(tokens, 20)
"""
import contextlib
import copy
import functools
import inspect
import itertools
import operator
import weakref

import torch

from nanodepth.common.errors import Refused, refusing
from nanodepth.common.whose import is_ours
from nanodepth.looping.caches import Window
from nanodepth.looping.layers import (Ordered, calls_of, check_host, layers_of, ordered,
                                      pick_window, pinned_routers, places_of, run_by_hand,
                                      stream_of, without_dropout)
from nanodepth.looping.window import Loop
from nanodepth.model import spans_in, unrolled
from nanodepth.wrapper import Window as PlainWindow, around

# {a model of ours: {each with that is open, in the order of entering: the order that it found}}
BEFORE = weakref.WeakKeyDictionary()
# lists that a config has, an entry for each layer
EACH_LAYER = ('layer_types', 'layers_block_type', 'no_rope_layers', 'mlp_layer_types',
              'layer_rope_theta')


def order_of(model):
    "What a model runs; another family's, unless it was told otherwise, each of its layers once."
    return getattr(model, 'order', None) or [*range(len(layers_of(model)))]


def depth_of(model):
    "How many layers a model runs as it is now."
    return len(unrolled(order_of(model)))


def layers_run(order):
    "How many layers run for each token where no cache is filled."
    layers = 0
    for item in order:
        if isinstance(item, int):
            layers += 1
        else:
            times = item.evaluations() if hasattr(item, 'evaluations') else 1
            within = layers_run(item.items) * len(item.unrolled()) // len(unrolled(item.items))
            layers += times * within
    return layers


def with_window(order, window=None, solver='rk', K=3, cache=None, **options):
    """The order with the items at some of its depths as one Window.

    window   (3, 5), both included; 'mid4', the middle four, if none is given; 0.5, the four centred
             on that fraction of the depth
    solver   and its options, such as beta and T: looping/solvers.py
    others   Window explains cache, pin, decode and mode"""
    return put(Window([], solver, K, cache, **options), order, window)


def put(span, order, window):
    "The order with the items at some of its depths as one Window like this one."
    before, items, after = around(order, *pick_window(window, len(unrolled(order))))
    span = copy.copy(span)
    span.items = items
    return [*before, span, *after]


@contextlib.contextmanager
def looped(model, window=None, solver='rk', K=3, cache=None, **options):
    "Inside a `with`, the model with one window of its depths looped."
    with in_order(model, with_window(order_of(model), window, solver, K, cache, **options)):
        yield model


@contextlib.contextmanager
def in_order(model, order):
    """Inside a `with` the model runs an order: numbers, and Spans; of those others know Windows.
    Another family's model is first held to its layers, run by hand in this order."""
    order = [operator.index(item) if hasattr(item, '__index__') else item for item in order]
    given, model = model, getattr(model, '_orig_mod', model)    # torch.compile's has it within
    if is_ours(model):
        for span in spans_in(order):
            if getattr(span, 'pin', None):
                raise Refused(f'pin={span.pin!r}: the layers have no router beside experts')
        before, this = BEFORE.setdefault(model, {}), object()
        before[this], model.order = model.order, order
        try:
            yield given
        finally:
            entered = [*before]
            later = entered[entered.index(this) + 1:]
            if later:           # in a notebook an earlier one may be closed first
                before[later[0]] = before.pop(this)
            else:
                model.order = before.pop(this)
    else:
        with exchanged(model, [*map(as_ours, order)]):
            yield given


@contextlib.contextmanager
def exchanged(model, order):
    "Inside a `with` another family's model runs an order, some of it in windows."
    layers = layers_of(model)
    numbers = unrolled(order)
    check_order(model, layers, numbers)
    starts = itertools.accumulate((len(unrolled([item])) for item in order), initial=0)
    windows = [(first, item) for first, item in zip(starts, order) if not isinstance(item, int)]
    for first, window in windows:
        check_host(model, layers, window.items, window.keeps)
    own = [*range(len(layers))]
    calls = calls_of(model, layers, own)
    tuples = {d for d, i in enumerate(numbers) if isinstance(calls[i][1], tuple)}
    with contextlib.ExitStack() as stack:
        if numbers != own:
            with without_dropout(model):
                want = run_by_hand(layers, calls, numbers)
            stack.enter_context(config_of_order(model, layers, numbers, want))
        places = places_of(layers, numbers)
        if numbers != own:
            config = model.config.get_text_config()
            vars(places[0]).update(refuse_cache=functools.partial(refuse_cache, numbers, config))
        for first, window in windows:
            within = places[first:first + len(window.items)]
            routers = pinned_routers(within, window.pin, unasked=window.by_layer)
            loop = Loop((first, within[-1].depth), window, len(numbers), tuples, bool(routers))
            for router in routers:
                stack.callback(router.register_forward_hook(loop.pin).remove)
            for place in within:
                vars(place).update(arrive=loop.arrive)
        holder, name = next((module, name) for module in model.modules()
                            for name, child in module._modules.items() if child is layers)
        refuse = functools.partial(refuse_changed, name, layers, [*layers])
        stack.callback(holder.register_forward_pre_hook(refuse).remove)
        for module in model.modules() if windows else ():
            if module is not layers and any(each is layers for each in module.modules()):
                hook = module.register_forward_pre_hook(refuse_insights, with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(ordered(layers, places))
        stack.callback(vars(model).pop, 'order', None)
        model.order = order
        yield


@contextlib.contextmanager
def config_of_order(model, layers, numbers, want):
    """Inside a `with`, the model's config counts the layers of an order. want: the stream behind
    these layers, run by hand."""
    config = model.config.get_text_config()
    uses = [(each, name, value) for each in (*model.modules(), model.config)
            for name, value in vars(each).items()       # (a config may be there twice)
            if type(value) is type(config) and vars(value) == vars(config)]
    try:
        with refusing(Exception, why=lambda error: f'{by_place(model)} ({error})'):
            views = {id(value): view_of(value, numbers) for *_, value in uses}
            for each, name, value in uses:
                setattr(each, name, views[id(value)])
            refuse_another_stream(model, layers, numbers, want)
        yield
    finally:
        for each, name, value in uses:
            if vars(getattr(each, name)) is vars(value):        # no other was put there
                setattr(each, name, value)


def view_of(config, numbers):
    """A config that counts the layers of an order, and shares all else with the model's own: what
    is set on one is set on both, and what is saved of either is the model's own. (Other models may
    have been made with that one.)"""
    kind = type(config)
    values = dict(num_hidden_layers=len(numbers))
    for name in EACH_LAYER:
        if of_layers := getattr(config, name, None):
            values[name] = [of_layers[i] for i in numbers]

    def own(name):
        def change(view, value):
            if vars(view) is vars(config):
                values[name] = value
            else:               # a copy, which counts for itself from now on
                view.__class__ = kind
                setattr(view, name, value)
        return property(lambda view: values[name], change)
    fields = {config.attribute_map.get(name, name): own(name) for name in values}
    view = object.__new__(type(kind.__name__, (kind,), fields))
    object.__setattr__(view, '__dict__', vars(config))
    return view


def as_ours(item):
    "A number, or a window of numbers; one of wrapper.py with all that ours says of a cache."
    if isinstance(item, int) or isinstance(item, Window) and not spans_in(item.items):
        return item
    if not isinstance(item, PlainWindow) or spans_in(item.items):
        raise Refused(f'{item} is for models of ours')
    return Window(item.items, item.solver, item.K, item.keeps, **item.options)


def check_order(model, layers, numbers):
    "What cannot run in this order is refused before anything is touched."
    if isinstance(layers, Ordered):
        raise Refused('this model runs in another order already: leave its with')
    if not numbers or not {*numbers} <= {*range(len(layers))}:
        raise Refused(f'the order {numbers} must name layers from 0 to {len(layers) - 1}')
    if getattr(model.config.get_text_config(), 'num_kv_shared_layers', None):
        raise Refused(f'{type(model).__name__} shares keys and values between layers, which a '
                      'layer in another place would overwrite')
    for i in {i for i in numbers if numbers.count(i) > 1}:
        if any(hasattr(each, 'recurrent_states') for each in layers[i].modules()):
            raise Refused(f'layer {i} of {type(model).__name__} keeps a state in itself, and in no '
                          'cache, so it cannot run twice')


def refuse_cache(numbers, config, cache):
    """A KV cache keeps the order that fills it: in another, its keys are of others. Nor can one be
    filled that was made for other layers."""
    from transformers import DynamicCache
    if vars(cache).get('order') != numbers and (cache.get_seq_length() or kinds_in(cache) not in (
            [], kinds_in(DynamicCache(config=config)))):
        raise Refused('this cache was filled in another order, or made for one: begin a new one, '
                      'or change the order of the model that generates')
    cache.order = numbers


def kinds_in(cache):
    return [getattr(slot, 'is_sliding', False) for slot in cache.layers]


def by_place(model):
    return (f'{type(model).__name__} takes no other order here: what a layer of it does depends on '
            'its place')


def refuse_another_stream(model, layers, numbers, want):
    """Is the stream behind the last layer that of the layers run by hand? Also where logits are
    asked for of the last token alone, for which Gemma 4 shortens the stream at some place."""
    takes = inspect.signature(model.forward).parameters
    last = dict(logits_to_keep=1) if 'logits_to_keep' in takes else {}
    got = stream_of(calls_of(model, layers, numbers, **last)[-1][1])
    got, want = got.nan_to_num(), want.nan_to_num()         # float16 may overflow, in both
    least = max(1e-4, 4 * torch.finfo(want.dtype).eps) * want.abs().max()
    if got.shape != want.shape or not (got - want).abs().max() <= least:
        raise Refused(by_place(model))


def refuse_changed(name, layers, before, holder, _):
    if getattr(holder, name) is not layers or [*layers._modules.values()] != before:
        layers.refuse()


def refuse_insights(module, args, kwargs):
    "A hook on what holds the layers, which would show a layer several times, or before its loop."
    config = getattr(module, 'config', None)
    for name in ('output_hidden_states', 'output_attentions', 'output_router_logits'):
        asked = kwargs.get(name)
        if asked or asked is None and getattr(config, name, False):
            raise Refused(f'{name}: a looped layer has one for each evaluation, and not one for '
                          'all: ask the model as it is, or in another order')
