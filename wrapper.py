"""Loop the middle layers of a frozen model, ours or a Hugging Face decoder, and take it back
without a trace. No training.

The idea: a window of layers is run K times, and a solver mixes the results so that the layers
behind it get what they were trained to get: not g(g(g(x))), but a finer step to where g(x) was
going (solvers.py). An order says where layers run; this file says how the results of a window are
mixed, and caches.py what later tokens see of them.

Paper: "Training-Free Looped Transformers", sections 2 and 3, appendices D and P (which settings).
Here: the first evaluation of a window is simply the model's own pass through it, so nothing is
evaluated twice, and its keys and values are the unlooped model's (looping layer by layer: those of
the first layer). Where a layer of the window runs, an Entry before its forward notes its arguments,
since each layer has its own mask and rotary table; when the window's last layer is through, the
solver has all it needs for the other evaluations. Hidden states are the model's own; attention maps
and router logits, which transformers collects by hooks, come once for each evaluation.

Usage:
    with looped(model, window=(3, 5), method='rk', K=3, beta=0.5) as m: m.generate(tokens, max_new_tokens=20)
    handle = patch(model, 'mid4', cache='frozen'); handle.unpatch()
    python wrapper.py HF_FOLDER --method=rk --K=3 --tasks=arc_easy  # plain and looped, side by side
    python wrapper.py --toy  # why naive looping explodes, on a network that fits into a picture
"""
import contextlib
import threading
import types

import torch

from common.errors import Refused, suggest
from model import LM
from variants.caches import CACHES, Memory, Slots
from variants.hosts import PINS, Pin, arguments, depth_of, pick_window, refuse, routers_of
from variants.solvers import MORE, bind, by_tableau, mix, share, steps

MODES = ('block', 'layer')


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
    others = steps(K)[1:]
    anchor = g(x)
    # the first step needs the anchor's evaluation, and no other
    x = mix(x, anchor, 1 / K)
    for _ in others:
        x = mix(x, g(x), 1 / K)
    return mix(x, anchor, share(beta))


def butcher(g, x, K, a=None, b=None, beta=0.5):
    "K steps by any explicit tableau; without one, rk."
    return rk(g, x, K, beta) if a is None and b is None else by_tableau(g, x, K, a, b)


SOLVERS = dict(naive=naive, euler=euler, rk=rk, butcher=butcher, **MORE)


def pick_solver(method, K, beta=None, **options):
    """(solver(g, x), how often it evaluates g), or an error in one line. `beta` goes to the
    methods that have one."""
    if not isinstance(method, str) or method not in SOLVERS:
        raise Refused(f'the method {method!r} is not known{suggest(method, SOLVERS)}')
    return bind(method, SOLVERS[method], K, beta, **options)


# -------------------------------------------------------------------------------------- one forward

class Loop(threading.local):
    """The positions a to b of the depth, run by a solver. It knows nothing of layers but that they
    map a stream to a stream. Each thread that calls the model has its own forward under way: a
    threading.local makes its attributes anew in each, by __init__."""

    def __init__(self, window, solver, evaluations, cache, decode, depth, first):
        self.a, self.b = window
        self.solver, self.evaluations, self.how, self.decode, self.depth, self.first = (solver,
                evaluations, cache, decode, depth, first)
        self.forget()

    def forget(self):
        """What a forward leaves behind holds caches and masks: it must not live on until the next
        one."""
        self.k, self.off, self.x, self.calls, self.routed, self.memory = (1, False, None, {}, {},
                None)

    def __reduce__(self):       # copies and pickles: a loop between two forwards
        return type(self), ((self.a, self.b), self.solver, self.evaluations, self.how, self.decode,
                            self.depth, self.first)

    def arrive(self, entry, d, x, kwargs):
        """The model calls a layer of the window: that is evaluation 1. Behind the last layer come
        the others."""
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
        self.x, cache = x, kwargs.get(entry.cache)
        if cache is not None and not hasattr(cache, 'layers'):
            raise Refused(
                f'a KV cache of the kind {type(cache).__name__} has no list of layers: it '
                'cannot be looped')
        if ((entry.pinned or self.how == 'frozen') and entry.layer.training and getattr(entry.layer,
                'gradient_checkpointing', False)):
            raise Refused("gradient checkpointing runs a layer again on its own, without what pin "
                          "and cache='frozen' have noted: turn one of them off")
        self.off = cache is not None and self.decode != 'full' and self.skips(cache, x.shape[-2])
        if cache is None and self.how == 'frozen' and x.shape[-2] > 1:
            cache = Slots(self.b + 1)
        if cache is not None and not self.off:
            self.memory = Memory(self.how, cache, (self.a, self.b), self.evaluations, self.depth,
                                 self.first)

    def skips(self, cache, q):
        """True: leave the window as it is for this token. cache.prompt is how many tokens there
        were behind the last prompt (on the cache, so that texts can be continued in turns), past -
        prompt the number of decode steps so far."""
        past = cache.layers[self.a].get_seq_length() if self.a < len(cache.layers) else 0
        if q > 1 or past == 0:
            cache.prompt = past + q
            return False
        if getattr(cache, 'prompt', past + 1) > past:       # filled before it was looped, or cut
            # (a copy: a cache of a fixed length counts in place)
            cache.prompt = past + 0
        return self.decode == 'bypass' or bool(past - cache.prompt >= self.decode)

    def finish(self, first):
        def g(x):
            nonlocal made
            made += 1
            # a solver begins with g(x), which the model itself has run
            return self.run(x, made) if made > 1 else first

        made = 0
        x = self.solver(g, self.x)
        if self.memory is not None:
            if self.how == 'last':
                self.run(x, made + 1)
            self.memory.settle()
        return x

    def run(self, x, k):
        self.k = k
        for d in range(self.a, self.b + 1):
            x = self.call(d, x)
        return x

    def call(self, d, x):
        """One layer in evaluation k, with the arguments that the model gave to this layer: its own
        mask, its own rotary table."""
        entry, kwargs = self.calls[d]
        if self.memory is None:
            return entry.forward(x, kwargs)
        with self.memory.slot(d, self.k, kwargs.get(entry.mask), x) as mask:
            return entry.forward(x, {**kwargs, entry.mask: mask})


class Entry:
    """Stands where a layer's forward stands. An object and not a closure, so that a patched model
    can be copied and pickled."""

    def __init__(self, layer, index, pinned=False):
        # index None: the layer is told its depth, being ours
        self.layer, self.index, self.loops, self.pinned = layer, index, {}, pinned
        # before: accelerate puts one there
        self.window, self.before = range(0), vars(layer).get('forward')
        self.names, self.cache, self.mask = arguments(layer)

    def forward(self, x, kwargs):
        x = (type(self.layer).forward(self.layer, x, **kwargs) if self.before is None
             else self.before(x, **kwargs))
        if not isinstance(x, torch.Tensor):
            raise Refused(f'{type(self.layer).__name__} returns a {type(x).__name__}: only layers '
                          'that map a stream to a stream can be looped')
        return x

    def __call__(self, *args, **kwargs):
        kwargs.update(zip(self.names, args))
        x = kwargs.pop(self.names[0])
        d = kwargs['depth'] if self.index is None else self.index
        if d not in self.loops and d in self.window and self.index is None:
            raise Refused(
                f'position {d} of the looped window holds another layer now: this order is '
                'not the one that was patched')
        return (self.loops[d].arrive(self, d, x, kwargs) if d in self.loops else self.forward(x,
                kwargs))


# ----------------------------------------------------------------------------------------- patching

class Handle:
    def __init__(self, model, window, evaluations):
        self.model, self.window, self.evaluations = model, window, evaluations

    def unpatch(self):
        unpatch(self.model)


def patch(model, window=None, method='rk', K=3, beta=0.5, cache='first', decode='full',
          mode='block', pin=None, **options):
    """Loop a window of a model's layers from now on: see solvers.py for the methods and their
    options, caches.py for the caches. decode: 'full' loops at each new token, 'bypass' only where
    several are read at once (a prompt), a number in the first so many steps. beta: rk's share of
    the plain output, heavy_ball's of the step before, anderson's towards the image; others have
    none. mode: 'block' loops the window as one, 'layer' each of its layers by itself. pin:
    'mixture' or 'indices', see experts.py."""
    layers, order = depth_of(model)
    a, b = pick_window(window, len(order))
    solver, evaluations = pick_solver(method, K, beta, **options)
    for name, value, known in (('cache', cache, CACHES), ('mode', mode, MODES), ('pin', pin, PINS)):
        if value not in known:
            raise Refused(f'{name}={value!r} is not known{suggest(value, known)}')
    if (decode not in ('full', 'bypass')
        and (isinstance(decode, bool) or not isinstance(decode, int) or decode < 0)):
        raise Refused(
            f"decode={decode!r}: 'full', 'bypass', or the number of decode steps that are looped")
    if cache == 'exact' and (decode != 'full' or options.get('tol') is not None):
        raise Refused("cache='exact' needs the same evaluations for every token: decode='full', "
                      "and no halting tolerance")
    window_layers = {order[d]: layers[order[d]] for d in range(a, b + 1)}
    if any(isinstance(vars(m).get(name), Entry) for m in layers.modules() for name in ('forward',
            '_old_forward')):
        raise Refused('this model is looped already: unpatch it first')
    refuse(model, layers, order[a:b + 1], cache)
    routers = {i: routers_of(layer, pin) if pin else [] for i, layer in window_layers.items()}
    if pin and not any(routers.values()):
        raise Refused(
            f'pin={pin!r}: the layers {a} to {b} have no router that is known here (a TopKRouter)')
    # From here on nothing can fail.
    ours = isinstance(model, LM)
    entries = {i: Entry(layer, None if ours else i, bool(pin))
               for i, layer in window_layers.items()}
    loops = {d: Loop((d, d), solver, evaluations, cache, decode, len(order), a)
             for d in range(a, b + 1)}
    if mode == 'block':
        loops = dict.fromkeys(loops, Loop((a, b), solver, evaluations, cache, decode, len(order),
                                          a))
    for d, loop in loops.items():
        entries[order[d]].loops[d], entries[order[d]].window = loop, range(a, b + 1)
        for router in routers[order[d]]:
            router.register_forward_hook(Pin(loop, pin))
    for entry in entries.values():
        entry.layer.forward = entry
    return Handle(model, (a, b), evaluations)


def unpatch(model):
    "The model as it was, to the last bit; also a copy of a patched one."
    for module in model.modules():
        # the second: accelerate came after us, and stands before us
        for name in ('forward', '_old_forward'):
            entry = vars(module).get(name)
            if isinstance(entry, Entry) and entry.before is None and name == 'forward':
                del module.forward
            elif isinstance(entry, Entry):
                setattr(module, name, entry.before or types.MethodType(type(module).forward,
                        module))
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
