"""One forward of a model with a window: it comes through the window, and then the window runs. The
Loop notes the arguments of each call of a layer, and gives the stream back as it came. In the call
of the last layer all of the window runs, with the arguments that were noted.
Usage: loop = Loop((3, 5), Window([3, 4, 5], 'rk', 3), depth=8)     # in orders.py
"""
import copy
import threading

import torch

from nanodepth.common.errors import Refused
from nanodepth.looping.layers import routers_of, stream_of


class Loop(threading.local):
    """The positions a to b of the depth, run by a window. Each thread that calls the model has its
    own state: a threading.local runs __init__ again in each thread. It is the window's model, too:
    `run` is all that one asks of a model."""

    def __init__(self, window, span, depth, tuples=(), pinned=False):
        self.a, self.b = window
        self.span = copy.copy(span)
        self.span.items = [*range(self.a, self.b + 1)]
        self.depth = depth          # of the whole model
        self.tuples = tuples        # the depths whose layers answer with a tuple
        self.pinned = pinned
        self.forget()

    def forget(self):
        "Drop what a forward keeps, caches and masks: it must not outlive the forward."
        self.x = None           # the stream before the window
        self.cache = None
        self.calls = {}         # {depth: (place, arguments)}
        self.at = None          # the depth that runs
        self.routed = {}        # {(depth, router): its answer in evaluation 1}

    def __reduce__(self):       # a copy carries no forward's state
        return type(self), ((self.a, self.b), self.span, self.depth, self.tuples, self.pinned)

    def arrive(self, place, x, kwargs):
        """The model calls the window's layers one by one; in the call of the last all of them run.
        Compiled code may not see the hooks of a pin, so such a window runs as it is written."""
        enter = torch.compiler.disable(self.enter) if self.pinned else self.enter
        return enter(place, x, kwargs)

    def enter(self, place, x, kwargs):
        d = place.depth
        if self.pinned:
            self.refuse_unpinned(place.layer)
        if d == self.a:
            self.begin(place, x, kwargs)
        elif x is not self.x:
            raise Refused('the model adds something to the stream between the layers of this '
                          'window, as of an image, and a loop would drop it: choose another one')
        self.calls[d] = (place, kwargs)
        try:
            y = x if d < self.b else self.span(self, self.x, self.a, self.cache)
            return (y, None) if d in self.tuples else y
        except BaseException:
            self.forget()
            raise
        finally:
            if d == self.b:
                self.forget()

    def begin(self, place, x, kwargs):
        self.forget()
        self.x = x
        self.cache = kwargs.get(place.cache_name)
        if self.cache is not None:
            slots = self.cache.layers
            kind = getattr(self.cache, 'layer_class_to_replicate', None)
            last = self.depth if self.span.keeps == 'exact' else self.b + 1
            while len(slots) < last and kind:       # a DynamicCache may make them when needed
                slots.append(kind())

    def run(self, x, order, depth, cache=None, tap=None):
        "Layers of the window, with the arguments that the model gave them."
        for d in range(depth, depth + len(order)):
            (place, kwargs), self.at = self.calls[d], d
            mask = kwargs.get(place.mask_name)
            if mask is not None and self.cache is not None and self.span.keeps == 'none':
                kwargs = {**kwargs, place.mask_name: mask[..., -x.shape[-2]:]}
            x = stream_of(place.run(x, **kwargs))
        return x

    def refuse_unpinned(self, layer):
        "A layer that is run again on its own, or was compiled before, sees no hook of now."
        if (layer.training and getattr(layer, 'gradient_checkpointing', False)
                or any(each._compiled_call_impl or hasattr(each, '_orig_mod')
                       for each in layer.modules())):
            raise Refused('gradient checkpointing, and layers that are compiled one by one, run '
                          'without what pin has noted: turn one of them off')
        if any(self.pin not in router._forward_hooks.values() for router in routers_of(layer)):
            raise Refused('a router was exchanged inside the with, and would not be pinned: change '
                          'the model first')

    def pin(self, router, args, output):
        """A hook on a router: later evaluations get the first one's answer, experts and weights.
        Otherwise each evaluation could be of another function ("Training-Free Looped Transformers",
        sections 2.2 and 3.3). The paper "computes the gating decision once", as this does, but its
        Algorithm 5 asks the router in every evaluation."""
        if self.at is not None:         # in this thread
            return self.routed.setdefault((self.at, router), output)
