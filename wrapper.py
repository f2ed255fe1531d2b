"""Loop a frozen model's middle layers, ours or Hugging Face's, and undo it without a trace.

The idea: think of a window of layers as one step in time. Running it K times goes K steps too far,
to states that the later layers have never seen. So take K small steps instead, which end where the
one step ended, and go a part of the way back to the plain output. `looped_by_hand` below is all of
it; the rest makes it work with other people's models and with a KV cache.

Paper: "Training-Free Looped Transformers", sections 2 and 3, appendices D and P (which settings).
Here: nothing is evaluated twice, because the model's own pass through the window is the first
evaluation. Each layer of the window gets an Entry, which notes the arguments of that pass (every
layer has its own mask and rotary table). The other evaluations run after the window's last layer.

Usage:
    with looped(model, window=(3, 5), method='rk', K=3, beta=0.5) as m: m.generate(tokens, 20)
    handle = patch(model, 'mid4', cache='frozen'); handle.unpatch()
    python wrapper.py HF_FOLDER --method=rk --K=3 --tasks=arc_easy      # plain and looped, scored
    python wrapper.py --toy         # why naive looping explodes, on a network small enough to plot
"""
import common  # noqa: F401 (from here on Ctrl-C ends in a line)

# isort: split
import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from common.errors import Refused, check_choice, suggest
from model import LM
from variants.caches import Memory, check_cache, ends_before, left_out, with_slots
from variants.hosts import FORWARDS, Entry, Pin, depth_of, pick_window, pinned_routers, refuse
from variants.solvers import MORE, bind, by_tableau, check_K, check_share, lerp, step_length

# ------------------------------------------------------------------------- the idea, in ten lines

def looped_by_hand(model, tokens, a, b, K, beta=0.5):
    """Logits of a model of ours with its layers a to b looped. All that follows does the same with
    other people's models, with other methods, and with a KV cache."""
    g = lambda x: model.run(x, model.order[a:b + 1], depth=a)       # one pass through the window
    x = model.run(model.embed(tokens), model.order[:a])
    plain = g(x)
    x = x + (plain - x) / K                 # the first of K small steps needs no other pass
    for _ in range(K - 1):
        x = x + (g(x) - x) / K
    x = beta * plain + (1 - beta) * x       # a part of the way back to the plain output
    x = model.run(x, model.order[b + 1:], depth=b + 1)
    return model.head(model.norm(x))


# --------------------------------------------------------------- three ways to run a window K times

def naive(g, x, K):
    "The window K times: Euler with steps of length 1, to time K."
    for _ in check_K(K):
        x = g(x)
    return x


def euler(g, x, K, alphas=None, tol=None, T=1):
    """K steps of length T/K (Eq. 10), or of the lengths `alphas` (a number: all alike). With `tol`,
    a token whose state has moved by less than this share of its length stays where it is, and when
    all do, no more evaluations are made."""
    if not isinstance(alphas, (list, tuple)):
        alphas = [step_length(T, K) if alphas is None else alphas] * K
    if len(alphas) != K:
        raise Refused(f'alphas={alphas}: K={K} steps need {K} lengths')
    moving = None
    for _, alpha in zip(check_K(K), alphas):
        y = g(x)
        new = lerp(x, y, alpha)
        if tol is not None:
            new = new if moving is None else torch.where(moving, new, x)
            moving = (new - x).norm(dim=-1, keepdim=True) > tol * x.norm(dim=-1, keepdim=True)
        x = new
        if tol is not None and not moving.any():
            break
    return x


def rk(g, x, K, beta=0.5, T=1):
    """Runge-Kutta with K stages, anchored (Eq. 13 to 16): K steps of length T/K, then back towards
    the plain output, beta g(x) + (1 - beta) (where the steps ended)."""
    others = check_K(K)[1:]
    anchor = g(x)
    h = step_length(T, K)
    x = lerp(x, anchor, h)                   # the first step reuses the anchor's evaluation
    for _ in others:
        x = lerp(x, g(x), h)
    return lerp(x, anchor, check_share(beta))


def butcher(g, x, K, a=None, b=None, beta=0.5, T=1):
    "K steps by any explicit tableau; without one, rk."
    return rk(g, x, K, beta, T) if a is None and b is None else by_tableau(g, x, K, a, b, T)


SOLVERS = dict(naive=naive, euler=euler, rk=rk, butcher=butcher, **MORE)


def pick_solver(method, K, beta=None, **options):
    "(solver(g, x), how often it evaluates g), or an error in one line."
    if not isinstance(method, str) or method not in SOLVERS:
        raise Refused(f'the method {method!r} is not known{suggest(method, SOLVERS)}')
    return bind(method, SOLVERS[method], K, beta, **options)


# -------------------------------------------------------------------------------------- one forward

class How(NamedTuple):
    solver: Callable        # (g, x) -> x
    evaluations: int        # of g, that it makes
    mode: str               # the window as one, or layer by layer
    cache: str
    decode: str | int
    depth: int              # of the whole model


class Loop(threading.local):
    """The positions a to b of the depth, run by a solver. Each thread that calls the model has its
    own state: a threading.local runs __init__ again in each thread."""

    def __init__(self, window, how):
        self.a, self.b = window
        self.how = how
        self.forget()

    def forget(self):
        "Drop what a forward keeps, caches and masks: it must not outlive the forward."
        self.k, self.off, self.x, self.memory = 1, False, None, None
        self.rest = None        # what a layer returns beside the stream: attention maps
        self.calls, self.routed = {}, {}

    def __reduce__(self):       # copies and pickles carry no forward's state
        return type(self), ((self.a, self.b), self.how)

    def arrive(self, entry, d, x, kwargs):
        "The model calls a layer of the window: evaluation 1. After the last, the others run."
        if d == self.a:
            self.begin(entry, x, kwargs)
        elif d - 1 not in self.calls:
            raise Refused(f'the window {self.a}-{self.b} is entered at {d}: a looped window runs '
                          'from its first layer on')
        if self.memory is not None:
            kwargs[entry.cache] = self.memory.cache
        self.calls[d] = (entry, kwargs)
        self.k = 1
        try:
            if self.off:
                return entry.forward(x, kwargs)
            y = self.call(d, x)
            if self.how.mode == 'layer':
                y = self.solve(d, x, y)
            elif d == self.b:
                y = self.solve(self.a, self.x, y)
            if d == self.b:
                self.settle(y)
            return y if self.rest is None else (y, *self.rest)
        except BaseException:
            self.forget()
            raise
        finally:
            if d == self.b:
                self.forget()

    def begin(self, entry, x, kwargs):
        self.forget()
        self.x = x
        q = x.shape[-2]
        if entry.cache != 'cache' and kwargs.get('cache') is not None:
            raise Refused('generate_batch keeps all texts in one paged cache, in which a looped '
                          'layer has no place: use generate instead')
        how = self.how
        cache = with_slots(kwargs.get(entry.cache), how.cache, q, self.b + 1)
        if how.cache == 'frozen' or entry.pinned:
            entry.refuse_checkpointing()
        self.off = cache is not None and (ends_before(cache, self.b)
                                          or left_out(cache, self.a, q, how.decode))
        if cache is not None and not self.off:
            self.memory = Memory(how.cache, cache, (self.a, self.b), how.evaluations, how.depth)

    def solve(self, a, x, first):
        "The solver on the layers from a to this one. It begins with g(x), which the model has run."
        b = max(self.calls)
        evaluations = itertools.count(1)

        def g(x):
            made = next(evaluations)
            return self.run(a, b, x, made) if made > 1 else first
        return self.how.solver(g, x)

    def settle(self, y):
        "What stays in the cache: 'last', and 'first' layer by layer, take one more pass for it."
        if self.memory is None:
            return
        cache = self.how.cache
        chain = cache == 'first' and self.how.mode == 'layer'
        if chain or cache == 'last':
            self.run(self.a, self.b, self.x if chain else y, self.how.evaluations + 1)
        self.memory.settle(chain or cache in ('last', 'last_eval'))

    def run(self, a, b, x, k):
        self.k = k
        for d in range(a, b + 1):
            x = self.call(d, x)
        return x

    def call(self, d, x):
        "Run one layer in evaluation k, with the arguments that the model gave it."
        entry, kwargs = self.calls[d]
        if self.memory is None:
            answer = entry.forward(x, kwargs)
        else:
            with self.memory.slot(d, self.k, kwargs.get(entry.mask), x) as mask:
                answer = entry.forward(x, {**kwargs, entry.mask: mask})
        if isinstance(answer, tuple):
            answer, *self.rest = answer
        return answer


# ----------------------------------------------------------------------------------------- patching

class Handle(NamedTuple):
    model: object
    window: tuple
    evaluations: int

    def unpatch(self):
        unpatch(self.model)


LAYERWISE = 'layer_anchored_frozen'     # by itself it goes layer by layer, each on its real input


def patch(model, window=None, method='rk', K=3, beta=None, cache=None, decode='full', mode=None,
          pin=None, **options):
    """Loop a window of a model's layers from now on.

    beta    depends on the method: for rk, how far the result goes back towards the plain output
            (0.5); for heavy_ball the momentum; for anderson the mixing towards the newest image
    T       for rk, euler and the tableaux: the time at which the K steps end (1)
    cache   what later tokens see of a looped layer (variants/caches.py)
    decode  'full' loops at each new token; 'bypass' loops only while a prompt is read; a number
            loops at so many new tokens
    mode    the window as one 'block', or 'layer' by layer
    pin     keep the experts of the first evaluation (variants/hosts.py)
    others  a method's own options (variants/solvers.py)"""
    layers, order = depth_of(model)
    a, b = pick_window(window, len(order))
    solver, evaluations = pick_solver(method, K, beta, **options)
    mode = mode or ('layer' if method == LAYERWISE else 'block')
    cache = cache or ('natural' if method == LAYERWISE else 'first')
    check_choice('mode', mode, ('layer',) if method == LAYERWISE else ('block', 'layer'))
    check_cache(cache, decode, options.get('tol'))
    looped_layers = {order[d]: layers[order[d]] for d in range(a, b + 1)}
    refuse(model, layers, order[a:b + 1], cache)
    pin, routers = pinned_routers(looped_layers, pin, frozen=method == LAYERWISE)
    # From here on nothing can fail.
    loop = Loop((a, b), How(solver, evaluations, mode, cache, decode, len(order)))
    entries = {i: Entry(layer, None if isinstance(model, LM) else i, bool(pin))
               for i, layer in looped_layers.items()}
    for d in range(a, b + 1):
        entry = entries[order[d]]
        entry.loops[d] = loop
        entry.window = range(a, b + 1)
        for router in routers[order[d]]:
            router.register_forward_hook(Pin(loop, pin))
    for entry in entries.values():
        entry.enter()
    return Handle(model, (a, b), evaluations)


def unpatch(model):
    "Restore a patched model, or a copy of one, to the last bit."
    for module in model.modules():
        for name in FORWARDS:
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
    # the command stands in tools/wrapper.py
    import nanodepth
    nanodepth.main('wrap')
