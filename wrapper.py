"""Loop a frozen model's middle layers, ours or Hugging Face's, and take it back without a trace.

The idea: a window of layers is run K times, and a solver mixes the results so that the layers
behind it get what they were trained to get: not g(g(g(x))), but a finer step to where g(x) was
going. An order says where layers run; this file says how the results of a window are mixed.

Paper: "Training-Free Looped Transformers", sections 2 and 3, appendices D and P (which settings).
Here: the first evaluation of a window is the model's own pass through it, so nothing is evaluated
twice, and its keys and values are the unlooped model's (looping layer by layer: those of the first
layer). An Entry before each layer of the window notes its arguments, since each layer has its own
mask and rotary table; behind the window's last layer come the other evaluations. Attention maps and
router logits, which transformers collects by hooks, come once for each evaluation.

Usage:
    with looped(model, window=(3, 5), method='rk', K=3, beta=0.5) as m: m.generate(tokens, 20)
    handle = patch(model, 'mid4', cache='frozen'); handle.unpatch()
    python wrapper.py HF_FOLDER --method=rk --K=3 --tasks=arc_easy      # plain and looped, scored
    python wrapper.py --toy         # why naive looping explodes, on a network that fits a picture
"""
import contextlib
import threading
import types
from collections.abc import Callable
from typing import NamedTuple

import torch

from common.errors import Refused, check_choice, suggest
from model import LM
from variants.caches import Memory, Slots, check_cache
from variants.hosts import FORWARDS, Entry, Pin, depth_of, pick_window, pinned_routers, refuse
from variants.solvers import MORE, bind, by_tableau, mix, share, steps

# --------------------------------------------------------------- three ways to run a window K times

def naive(g, x, K):
    "The window K times: Euler with steps of length 1, to time K."
    for _ in steps(K):
        x = g(x)
    return x


def euler(g, x, K, alphas=None, tol=None):
    """K steps of length 1/K (Eq. 10), or of the lengths `alphas` (a number: all alike). With `tol`,
    a token whose state has moved by less than this share of its length stays where it is, and when
    all do, no more evaluations are made."""
    if not isinstance(alphas, (list, tuple)):
        alphas = [1 / K if alphas is None else alphas] * K
    if len(alphas) != K:
        raise Refused(f'alphas={alphas}: K={K} steps need {K} lengths')
    moving = None
    for _, alpha in zip(steps(K), alphas):
        y = g(x)
        new = mix(x, y, alpha)
        if tol is not None:
            new = new if moving is None else torch.where(moving, new, x)
            moving = (new - x).norm(dim=-1, keepdim=True) > tol * x.norm(dim=-1, keepdim=True)
        x = new
        if tol is not None and not moving.any():
            break
    return x


def rk(g, x, K, beta=0.5):
    """Runge-Kutta with K stages, anchored (Eq. 13 to 16): K steps of length 1/K, then back towards
    the plain output, beta g(x) + (1 - beta) (where the steps ended)."""
    others, anchor = steps(K)[1:], g(x)
    x = mix(x, anchor, 1 / K)               # the first step needs the anchor's evaluation, no other
    for _ in others:
        x = mix(x, g(x), 1 / K)
    return mix(x, anchor, share(beta))


def butcher(g, x, K, a=None, b=None, beta=0.5):
    "K steps by any explicit tableau; without one, rk."
    return rk(g, x, K, beta) if a is None and b is None else by_tableau(g, x, K, a, b)


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
    cache: str
    decode: str | int
    depth: int              # of the whole model
    first: int              # where the windows begin, if this is one of several


class Loop(threading.local):
    """The positions a to b of the depth, run by a solver. Each thread that calls the model has its
    own forward under way: a threading.local makes its attributes anew in each, by __init__."""

    def __init__(self, window, how):
        (self.a, self.b), self.how = window, how
        self.forget()

    def forget(self):
        "What a forward leaves behind holds caches and masks: it must not outlive the forward."
        self.k, self.off, self.x, self.memory = 1, False, None, None
        self.calls, self.routed = {}, {}

    def __reduce__(self):       # copies and pickles are between two forwards
        return type(self), ((self.a, self.b), self.how)

    def arrive(self, entry, d, x, kwargs):
        "The model calls a layer of the window: evaluation 1. Behind the last come the others."
        if d == self.a:
            self.begin(entry, x, kwargs)
        elif d - 1 not in self.calls:
            raise Refused(f'the window {self.a}-{self.b} is entered at {d}: a looped window runs '
                          'from its first layer on')
        if self.memory is not None:
            kwargs[entry.cache] = self.memory.cache
        self.calls[d] = entry, kwargs
        try:
            y = entry.forward(x, kwargs) if self.off else self.call(d, x)
            return y if d < self.b or self.off else self.finish(y)
        except BaseException:
            self.forget()
            raise
        finally:
            if d == self.b:
                self.forget()

    def begin(self, entry, x, kwargs):
        self.forget()
        self.x, cache, how = x, kwargs.get(entry.cache), self.how
        if cache is not None and not hasattr(cache, 'layers'):
            raise Refused(f'a KV cache of the kind {type(cache).__name__} has no list of layers: '
                          'it cannot be looped')
        noted = entry.pinned or how.cache == 'frozen'
        if noted and entry.layer.training and getattr(entry.layer, 'gradient_checkpointing', False):
            raise Refused("gradient checkpointing runs a layer again on its own, without what pin "
                          "and cache='frozen' have noted: turn one of them off")
        self.off = cache is not None and how.decode != 'full' and self.skips(cache, x.shape[-2])
        if cache is None and how.cache == 'frozen' and x.shape[-2] > 1:
            cache = Slots(self.b + 1)
        if cache is not None and not self.off:
            self.memory = Memory(how.cache, cache, (self.a, self.b), how.evaluations, how.depth,
                                 how.first)

    def skips(self, cache, q):
        """Is the window left as it is for this token? cache.prompt is how many tokens there were
        behind the last prompt (on the cache, so that texts can be continued in turns), past -
        prompt the number of decode steps so far."""
        past = cache.layers[self.a].get_seq_length() if self.a < len(cache.layers) else 0
        if q > 1 or past == 0:
            cache.prompt = past + q
            return False
        if getattr(cache, 'prompt', past + 1) > past:       # filled before it was looped, or cut
            cache.prompt = past + 0         # a copy: a cache of a fixed length counts in place
        return self.how.decode == 'bypass' or bool(past - cache.prompt >= self.how.decode)

    def finish(self, first):
        def g(x):
            nonlocal made
            made += 1       # a solver begins with g(x), which the model itself has run
            return self.run(x, made) if made > 1 else first

        made = 0
        x = self.how.solver(g, self.x)
        if self.memory is not None:
            if self.how.cache == 'last':
                self.run(x, made + 1)
            self.memory.settle()
        return x

    def run(self, x, k):
        self.k = k
        for d in range(self.a, self.b + 1):
            x = self.call(d, x)
        return x

    def call(self, d, x):
        "One layer in evaluation k, with the arguments that the model gave to this very layer."
        entry, kwargs = self.calls[d]
        if self.memory is None:
            return entry.forward(x, kwargs)
        with self.memory.slot(d, self.k, kwargs.get(entry.mask), x) as mask:
            return entry.forward(x, {**kwargs, entry.mask: mask})


# ----------------------------------------------------------------------------------------- patching

class Handle(NamedTuple):
    model: object
    window: tuple
    evaluations: int
    unpatch = lambda self: unpatch(self.model)


def patch(model, window=None, method='rk', K=3, beta=0.5, cache='first', decode='full',
          mode='block', pin=None, **options):
    """Loop a window of a model's layers from now on. variants/ has the methods' options
    (solvers.py), the caches (caches.py) and the pins (hosts.py).
    beta: rk's share of the plain output, heavy_ball's of the step before, anderson's towards the
    image. decode: 'full' loops at each new token, 'bypass' only where several are read at once (a
    prompt), a number in the first so many steps. mode: the window as one, or 'layer' by layer."""
    layers, order = depth_of(model)
    a, b = pick_window(window, len(order))
    solver, evaluations = pick_solver(method, K, beta, **options)
    check_choice('mode', mode, ('block', 'layer'))
    check_cache(cache, decode, options.get('tol'))
    looped_layers = {order[d]: layers[order[d]] for d in range(a, b + 1)}
    refuse(model, layers, order[a:b + 1], cache)
    routers = pinned_routers(looped_layers, pin)
    # From here on nothing can fail.
    ours, how = isinstance(model, LM), How(solver, evaluations, cache, decode, len(order), a)
    entries = {i: Entry(layer, None if ours else i, bool(pin))
               for i, layer in looped_layers.items()}
    whole = Loop((a, b), how)
    for d in range(a, b + 1):
        entry, loop = entries[order[d]], whole if mode == 'block' else Loop((d, d), how)
        entry.loops[d], entry.window = loop, range(a, b + 1)
        for router in routers[order[d]]:
            router.register_forward_hook(Pin(loop, pin))
    for entry in entries.values():
        entry.layer.forward = entry
    return Handle(model, (a, b), evaluations)


def unpatch(model):
    "The model as it was, to the last bit; also a copy of a patched one."
    for module in model.modules():
        for name in FORWARDS:
            entry = vars(module).get(name)
            if isinstance(entry, Entry) and entry.before is None and name == 'forward':
                del module.forward
            elif isinstance(entry, Entry):
                own = types.MethodType(type(module).forward, module)
                setattr(module, name, entry.before or own)
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, Pin):
                del module._forward_hooks[key]


@contextlib.contextmanager
def looped(model, window=None, method='rk', K=3, beta=0.5, cache='first', decode='full',
           mode='block', pin=None, **options):
    "patch for a while."
    handle = patch(model, window, method, K, beta, cache, decode, mode, pin, **options)
    try:
        yield model
    finally:
        handle.unpatch()


if __name__ == '__main__':
    from nanodepth import main; main('wrap')        # noqa: E702
