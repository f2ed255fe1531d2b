"""Loop a frozen model's middle layers, ours or Hugging Face's, and undo it without a trace.

The idea: think of a window of layers as one step in time. Running it K times goes K steps too far,
to states that the later layers have never seen. So take K small steps instead, which end where the
one step ended, and go a part of the way back to the plain output. `looped_by_hand` below is all of
it, `patch_by_hand` does it to other people's models; the rest makes it work with a KV cache.

Paper: "Training-Free Looped Transformers", sections 2 and 3, appendices D and P (which settings).
Here: the model's own pass through the window is the first evaluation; the others run after the
window's last layer (looping/window.py).

Usage:
    with looped(model, window=(3, 5), method='rk', K=3, beta=0.5) as m: m.generate(tokens, 20)
    handle = patch(model, 'mid4', cache='exact'); handle.unpatch()
    python wrapper.py HF_FOLDER --window=mid4 --K=3 --tasks=arc_easy    # plain and looped, scored
"""
import contextlib
from typing import NamedTuple

from nanodepth.common.errors import Refused, check_choice
from nanodepth.looping.caches import check_cache
from nanodepth.looping.layers import (FORWARDS, Entry, Guard, Pin, check_host, depth_of,
                                      pick_window, pinned_routers)
from nanodepth.looping.solvers import (MORE, bind, by_tableau, check_K, check_share, euler, lerp,
                                       step_length)
from nanodepth.looping.window import How, Loop

# --------------------------------------------------------------------------- the idea, by hand

def looped_by_hand(model, tokens, a, b, K, beta=0.5):
    "Logits of a model of ours with its layers a to b looped."
    def g(x):                               # one pass through the window
        return model.run(x, model.order[a:b + 1], depth=a)
    x = model.run(model.embed(tokens), model.order[:a])
    plain = g(x)
    x = x + (plain - x) / K                 # the first of K small steps reuses `plain`
    for _ in range(K - 1):
        x = x + (g(x) - x) / K
    x = beta * plain + (1 - beta) * x       # a part of the way back to the plain output
    x = model.run(x, model.order[b + 1:], depth=b + 1)
    return model.head(model.norm(x))


def patch_by_hand(layers, a, b, solver):
    """The same for a list of anybody's layers, without a KV cache: each layer of the window notes
    the arguments it is called with, and in the call of the last one the solver makes the other
    passes. Returns a function that undoes it."""
    plain = {i: layers[i].forward for i in range(a, b + 1)}
    calls = {}                              # {layer: the arguments beside x}

    def forward_of(i):
        def forward(x, *args, **kwargs):
            if i == a:
                calls['x'] = x
            calls[i] = args, kwargs
            y = plain[i](x, *args, **kwargs)
            if i < b:
                return y
            own = [y]                       # the model's own pass is the first evaluation

            def g(x):
                if own:
                    return own.pop()
                for j in range(a, b + 1):
                    args, kwargs = calls[j]
                    x = plain[j](x, *args, **kwargs)
                return x
            return solver(g, calls['x'])
        return forward

    def undo():
        for i in plain:
            del layers[i].forward
    for i in plain:
        layers[i].forward = forward_of(i)
    return undo


# ------------------------------------------------------------------ ways to run a window K times
# lerp(x, y, h) is x + h (y - x), rounded so that h = 1 gives y itself: K = 1 is the plain window.

def naive(g, x, K):
    "The window K times: Euler with steps of length 1, to time K."
    for _ in range(check_K(K)):
        x = g(x)
    return x


def rk(g, x, K, beta=0.5, T=1):
    """K Euler steps of length T/K, then back towards the plain output: looped_by_hand's. All of it
    is one Runge-Kutta step of K stages (Eq. 13 to 16), hence the name."""
    h = step_length(T, check_K(K))
    plain = g(x)
    x = lerp(x, plain, h)                           # x + h (plain - x)
    for _ in range(K - 1):
        x = lerp(x, g(x), h)                        # x + h (g(x) - x)
    return lerp(x, plain, check_share(beta))        # beta plain + (1 - beta) x


def butcher(g, x, K, a=None, b=None, beta=None, T=1):
    "K Runge-Kutta steps by a table of coefficients, a Butcher tableau (a, b); without one, rk."
    if a is None and b is None:
        return rk(g, x, K, 0.5 if beta is None else beta, T)
    if beta is not None:
        raise Refused(f'beta={beta} has no effect beside a tableau: there is no plain output to go '
                      'back to')
    return by_tableau(g, x, K, a, b, T)


SOLVERS = dict(naive=naive, euler=euler, rk=rk, butcher=butcher, **MORE)    # looping/solvers.py
# These combine the states of each token by itself. A solver that a script adds may not.
PER_TOKEN = {*SOLVERS} - {'anderson'}


def pick_solver(method, K, beta=None, **options):
    "(solver(g, x), how often it evaluates g), or an error in one line."
    check_choice('method', method, list(SOLVERS))
    return bind(method, SOLVERS[method], K, beta, **options)


# ----------------------------------------------------------------------------------------- patching

class Handle(NamedTuple):
    model: object
    window: tuple
    added: int              # layers that run more for each token

    def unpatch(self):
        unpatch(self.model)


BY_LAYER = {'layer_anchored_frozen'}        # methods that work layer by layer, and pin experts


def patch(model, window=None, method='rk', K=3, beta=None, cache=None, decode='full', mode=None,
          pin=None, **options):
    """Loop a window of a model's layers from now on.

    beta    depends on the method: for rk, how far the result goes back towards the plain output
            (0.5); for heavy_ball the momentum; for anderson the mixing towards the newest image
    T       for rk, euler and the tableaux: the time at which the K steps end (1)
    cache   what later tokens see of a looped layer: its 'first' or 'last' evaluation's keys, or
            others of looping/caches.py
    decode  'full' loops at each new token; 'bypass' loops only while a prompt is read; a number
            loops at so many new tokens
    mode    the window as one 'block', or 'layer' by layer
    pin     keep the experts of the first evaluation (looping/layers.py)
    others  a method's own options (looping/solvers.py)"""
    layers, order = depth_of(model)
    a, b = pick_window(window, len(order))
    solver, evaluations = pick_solver(method, K, beta, **options)
    modes = ['layer'] if method in BY_LAYER else ['block', 'layer']
    mode = mode or modes[0]
    cache = cache or ('natural' if method in BY_LAYER else 'first')
    check_choice('mode', mode, modes)
    check_cache(cache, decode, options.get('tol'))
    looped_layers = {order[d]: layers[order[d]] for d in range(a, b + 1)}
    check_host(model, layers, order[a:b + 1], cache)
    routers = pinned_routers(looped_layers, pin, unasked=method in BY_LAYER)

    # From here on nothing can fail. An Entry takes the place of each layer's forward and hands its
    # calls to the window's Loop, which runs the layer and notes its arguments; in the last layer's
    # call the solver makes the other evaluations: patch_by_hand, with a cache. A layer of ours may
    # stand at several places of the order, and is told which (so it needs no index).
    loop = Loop((a, b), How(solver=solver, evaluations=evaluations, mode=mode, cache=cache,
                            decode=decode, depth=len(order),
                            mixes_tokens=method not in PER_TOKEN))
    ours = hasattr(model, 'recurs')
    entries = {i: Entry(layer, index=None if ours else i, pinned=any(routers.values()))
               for i, layer in looped_layers.items()}
    for d in range(a, b + 1):
        entry = entries[order[d]]
        entry.loops[d] = loop
        for router in routers[order[d]]:
            router.register_forward_hook(Pin(loop))
    for entry in entries.values():
        entry.enter()
    if ours:
        model.hidden = Guard(model, range(a, b + 1), order)     # refuses any other order
    extra = evaluations - 1
    if cache == 'last' or (mode, cache) == ('layer', 'first'):  # one more, to fill the cache
        extra += 1
    return Handle(model, (a, b), added=extra * (b - a + 1))


def unpatch(model):
    "Restore a patched model, or a copy of one, to the last bit."
    for module in model.modules():
        if isinstance(vars(module).get('hidden'), Guard):
            del module.hidden
        for name in FORWARDS:       # accelerate may have moved ours to _old_forward
            if isinstance(entry := vars(module).get(name), Entry):
                entry.leave(module, name)
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, Pin):
                del module._forward_hooks[key]


@contextlib.contextmanager
def looped(model, window=None, method='rk', K=3, beta=None, **options):
    "patch inside a `with`."
    handle = patch(model, window, method, K, beta, **options)
    try:
        yield model
    finally:
        handle.unpatch()


if __name__ == '__main__':
    from nanodepth.__main__ import main as nanodepth
    nanodepth('evaluate')
