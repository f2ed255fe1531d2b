"""Put a loop into a model, ours or anybody's, and take it out again.

The idea: an Entry (layers.py) takes the place of each layer's forward, and hands its calls to the
window's Loop (window.py). The Loop runs the layer and notes its arguments, so the model's own pass
is the first evaluation. In the last layer's call the solver makes the others, with the arguments
that were noted. An Entry is an object and no function, so that a patched model can be copied and
pickled.

Usage:
    solver, evaluations = pick_solver('rk', K=3)                # wrapper.py
    handle = install(model, 'mid4', 'rk', solver, evaluations)  # or wrapper.patch, which does both
    handle.unpatch()
"""
from typing import NamedTuple

from nanodepth.common.errors import check_choice
from nanodepth.looping.caches import check_cache
from nanodepth.looping.layers import (FORWARDS, Entry, Guard, Pin, check_calls, check_host,
                                      depth_of, is_ours, pick_window, pinned_routers)
from nanodepth.looping.solvers import BY_LAYER, PER_TOKEN
from nanodepth.looping.window import How, Loop


class Handle(NamedTuple):
    model: object
    window: tuple
    added: int              # layers that run more often for each token, counted by their runs,
    added_at_once: int      # and where a row is read at once, so that no pass fills a cache

    def unpatch(self):
        unpatch(self.model)


def install(model, window, method, solver, evaluations, cache=None, decode='full', mode=None,
            pin=None):
    """Loop a window of a model's layers from now on, by a solver(g, x) that evaluates g so often.

    cache   what later tokens see of a looped layer: its 'first' or 'last' evaluation's keys, or
            others of caches.py
    decode  'full' loops at each new token; 'bypass' loops only while a prompt is read
    mode    the window as one 'block', or 'layer' by layer
    pin     'mixture': in a mixture of experts, later evaluations keep the experts of the first
            (layers.py)
    The paper runs mixtures of experts by mode='layer' with pin='mixture'. Here that is asked for,
    so that one default means the same for every family."""
    layers, order = depth_of(model)
    a, b = pick_window(window, len(order))
    by_layer = method in BY_LAYER
    modes = ['layer'] if by_layer else ['block', 'layer']
    mode = mode or modes[0]
    cache = cache or ('natural' if by_layer else 'first')
    check_choice('mode', mode, modes)
    check_cache(cache, decode, solver.keywords.get('tol'))
    in_window = {order[d]: layers[order[d]] for d in range(a, b + 1)}
    check_host(model, layers, order[a:b + 1], cache)
    routers = pinned_routers(in_window, pin, unasked=by_layer)

    if not is_ours(model):
        check_calls(model, dict.fromkeys(in_window.values(), 1))
    # From here on nothing can fail.
    loop = Loop((a, b), How(solver=solver, evaluations=evaluations, mode=mode, cache=cache,
                            decode=decode, depth=len(order),
                            mixes_tokens=method not in PER_TOKEN))
    # a layer of ours may stand at several places of the order, and is told which
    entries = {i: Entry(layer, index=None if is_ours(model) else i, pinned=any(routers.values()))
               for i, layer in in_window.items()}
    for d in range(a, b + 1):
        entries[order[d]].loops[d] = loop
        for router in routers[order[d]]:
            router.register_forward_hook(Pin(loop))
    for entry in entries.values():
        entry.layer.forward = entry
    if is_ours(model):
        model.hidden = Guard(model, range(a, b + 1), order)     # refuses any other order
    again = evaluations - 1
    return Handle(model, (a, b), added=(again + loop.runs_once_more) * (b - a + 1),
                  added_at_once=again * (b - a + 1))


def unpatch(model):
    "Restore a patched model, or a copy of one, to the last bit."
    for module in model.modules():
        if isinstance(vars(module).get('hidden'), Guard):
            del module.hidden
        for name in FORWARDS:       # accelerate may have moved ours to _old_forward
            entry = vars(module).get(name)
            if isinstance(entry, Entry):
                entry.leave(module, name)
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, Pin):
                del module._forward_hooks[key]
