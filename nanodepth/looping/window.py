"""One forward of a patched model: its own pass through the window, and then the other evaluations.

The idea: the model calls its layers as always. Each layer of the window has an Entry
(looping/layers.py), which hands the call to a Loop. The Loop runs the layer, and notes the
arguments (every layer has its own mask and rotary table). With the window's last layer that pass is
evaluation 1. Then the solver makes the others, with the same arguments, and what it returns is what
the model gets from that layer.

Usage:
    loop = Loop((3, 5), How(solver, 3, 'block', 'first', 'full', 8, False))     # in patch.py
    x = loop.arrive(entry, 5, x, kwargs)                                # an Entry calls it
"""
import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

from nanodepth.common.errors import Refused
from nanodepth.looping.caches import Memory


class How(NamedTuple):
    solver: Callable        # (g, x) -> x
    evaluations: int        # of g, that it makes
    mode: str               # the window as one, or layer by layer
    cache: str
    decode: str
    depth: int              # of the whole model
    mixes_tokens: bool      # the solver looks at all tokens of a row


class Loop(threading.local):
    """The positions a to b of the depth, run by a solver. Each thread that calls the model has its
    own state: a threading.local runs __init__ again in each thread."""

    def __init__(self, window, how):
        self.a, self.b = window
        self.how = how
        self.forget()

    def forget(self):
        "Drop what a forward keeps, caches and masks: it must not outlive the forward."
        self.k = 1              # the evaluation that runs now
        self.off = False        # this forward is left unlooped
        self.x = None           # the stream before the window
        self.memory = None      # what handles the cache (looping/caches.py)
        self.rest = None        # what a layer returns beside the stream: attention maps
        self.calls = {}         # {depth: (entry, arguments)} of the model's own pass
        self.routed = {}        # {router: its answer in evaluation 1}

    def __reduce__(self):       # copies and pickles carry no forward's state
        return type(self), ((self.a, self.b), self.how)

    def arrive(self, entry, d, x, kwargs):
        """The model calls the window's layers one by one: evaluation 1. In the call of the last (in
        mode 'layer', of each) the others run, and what they lead to is returned."""
        if d == self.a:
            self.begin(entry, x, kwargs)
        elif d - 1 not in self.calls:
            raise Refused(f'the window {self.a}-{self.b} is entered at {d}: a looped window runs '
                          'from its first layer on')
        self.calls[d] = (entry, kwargs)
        self.k = 1
        try:
            if self.off:
                return entry.forward(x, kwargs)
            y = self.run_layer(d, x)
            if self.how.mode == 'layer':
                y = self.solve(d, x, y)
            elif d == self.b:
                y = self.solve(self.a, self.x, y)
            answer = y if self.rest is None else (y, *self.rest)
            if d == self.b:
                self.settle(y)
            return answer
        except BaseException:
            self.forget()
            raise
        finally:
            if d == self.b:
                self.forget()

    def begin(self, entry, x, kwargs):
        self.forget()
        self.x = x
        new_tokens = x.shape[-2]
        if entry.cache_name != 'cache' and kwargs.get('cache') is not None:
            raise Refused('generate_batch keeps all texts in one paged cache, in which a looped '
                          'layer has no place: use generate instead')
        how = self.how
        cache = kwargs.get(entry.cache_name)
        if entry.pinned:
            entry.refuse_checkpointing()
        if cache is not None:
            slots = cache.layers
            # transformers drafts tokens with the first layers (assistant_early_exit), by a cache
            # that gets no slot for the others, and then looks at them with all
            drafts = len(slots) <= self.b and getattr(cache, 'layer_class_to_replicate', 1) is None
            past = slots[self.a].get_seq_length() if self.a < len(slots) else 0
            self.off = drafts or (how.decode == 'bypass' and new_tokens == 1 and bool(past > 0))
            if not self.off:
                self.memory = Memory(how.cache, cache, (self.a, self.b), how.evaluations, how.depth)

    def solve(self, a, x, first):
        "The solver on the layers from a to this one. It begins with g(x), which the model has run."
        b = max(self.calls)         # the layer that is being called
        evaluations = itertools.count(1)

        def g(x):
            made = next(evaluations)
            return self.run_layers(a, b, x, made) if made > 1 else first
        return self.how.solver(g, x)

    @property
    def plain_again(self):
        "Layer by layer, the first evaluations of later layers have seen looped streams."
        return (self.how.cache, self.how.mode) == ('first', 'layer')

    @property
    def runs_once_more(self):
        "Does the window run once more, to fill the cache?"
        return self.plain_again or self.how.cache == 'last'

    def settle(self, y):
        "What stays in the cache."
        if self.memory is None:
            return
        if self.runs_once_more:
            x = self.x if self.plain_again else y
            self.run_layers(self.a, self.b, x, self.how.evaluations + 1)
        self.memory.settle(self.runs_once_more or self.how.cache == 'last_eval')

    def run_layers(self, a, b, x, k):
        self.k = k
        for d in range(a, b + 1):
            x = self.run_layer(d, x)
        return x

    def run_layer(self, d, x):
        "Run one layer in evaluation k, with the arguments that the model gave it."
        entry, kwargs = self.calls[d]
        if self.memory is None:
            answer = entry.forward(x, kwargs)
        else:
            mask = kwargs.get(entry.mask_name)
            with self.memory.slot(d, self.k, mask, x) as seen:
                answer = entry.forward(x, kwargs if mask is None else
                                       {**kwargs, entry.mask_name: seen})
        if isinstance(answer, tuple):
            answer, *self.rest = answer
        return answer
