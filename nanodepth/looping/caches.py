"""What a looped layer leaves in the KV cache, and what its evaluations see of it. The cache has
room for one version of a token's keys and values, but a looped layer makes one in each evaluation.
CACHES names the ways to choose among them.
Usage: y = solver(memory.window(items, position), x); memory.settle(x, y)   # in a Window
"""
import contextlib
import copy
import itertools

import torch

from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.steps import steps_of
from nanodepth.model import unrolled

# Which keys and values of a looped layer stay for later tokens. Only `exact` continues a text as if
# all of it had been read at once. With the others, evaluation k of a token in the prompt sees
# evaluation k of the tokens before it, but later tokens see the one version that was kept.
CACHES = (
    'first',        # the unlooped model's: evaluation 1, or an extra pass where mode='layer'
    'natural',      # those of each layer's evaluation 1, on its real input
    'last',         # those of an extra pass over the window's result
    'last_eval',    # those of the last evaluation
    'none',         # the window sees no past at all
    'exact')        # all K versions, at K times the window's cache: evaluation k sees evaluation k


def check_cache(window, tol=None):
    check_choice('cache', window.cache, CACHES)
    check_choice('decode', window.decode, ('full', 'bypass'))
    if window.cache != 'exact':
        return
    if window.decode != 'full' or tol is not None:
        raise Refused("cache='exact' needs the same evaluations for every token: decode='full', "
                      'and no halting tolerance')
    if any(hasattr(step, 'solver') for step in steps_of(window.items)):
        raise Refused("cache='exact' keeps a slot for each position and evaluation, and so takes "
                      'no window in a window')


def extra_pass(window):
    "Of what the window runs once more, to fill the cache: its 'input', its 'output', or None."
    if window.cache == 'last':
        return 'output'
    if window.cache == 'first' and window.mode == 'layer':
        return 'input'      # layer by layer, first evaluations of later layers saw looped streams
    return None


class Memory:
    """One forward of a window, and what it does with a cache, ours or transformers': either has a
    list `layers` of slots with update(k, v). `first`, `last` and `none` are those of "Training-Free
    Looped Transformers", appendices C, G.2 and N."""

    def __init__(self, window, walk, position):
        self.step, self.walk = window, walk
        self.how, self.evaluations = window.cache, window.evaluations
        self.first, self.end = position, position + len(unrolled(window.items, **walk.how))
        self.cache = walk.cache
        self.past = {}          # {depth: its slot before this forward}
        self.last = {}          # {depth: its slot after the last evaluation}
        if self.cache is None:
            return
        if (self.how in ('none', 'exact')
                and any(fixed(slot) for slot in self.cache.layers[self.first:self.end])):
            raise Refused(f'cache={self.how!r} needs a KV cache that grows; with one of a fixed '
                          'length there are: first, last, last_eval')
        if self.how == 'exact':
            self.add_slots()

    def window(self, items, position):
        "A solver's g: each call is the next evaluation of these items, from a position on."
        number = itertools.count(1)
        return lambda x: self.evaluate(x, items, position, next(number))

    def evaluate(self, x, items, position, k):
        "Evaluation k."
        if self.cache is None:
            return self.walk.run(x, items, position)
        with contextlib.ExitStack() as lent:
            for d in range(position, position + len(unrolled(items, **self.walk.how))):
                lent.enter_context(self.slot(d, k))
            return self.walk.run(x, items, position)

    def settle(self, x, y):
        "The window has made y of x. What of it stays in the cache?"
        extra = extra_pass(self.step)
        if self.cache is None:
            return
        if extra:
            stream = x if extra == 'input' else y
            self.evaluate(stream, self.step.items, self.first, self.evaluations + 1)
        if extra or self.how == 'last_eval':
            for d, slot in self.last.items():
                self.cache.layers[d] = slot

    def add_slots(self):
        "Slots for the later evaluations, behind the model's own: beam search reaches them there."
        cache, layers = self.cache, self.cache.layers
        loops = vars(cache).setdefault('loops', {})     # {a window's first: (its slots, K)}
        self.slots, K = loops.setdefault(self.first, (len(layers), self.evaluations))
        # [(the real slot, where its copy for one of the later evaluations stands)]
        places = [(layers[d], self.place(d, k)) for d in range(self.first, self.end)
                  for k in range(2, self.evaluations + 1)]
        for real, place in places:
            if place == len(layers) and not real.get_seq_length():
                layers.append(copy.copy(real))
        if K != self.evaluations or any(
                place >= len(layers) or layers[place].get_seq_length() != real.get_seq_length()
                for real, place in places):
            raise Refused("cache='exact': this KV cache was filled with another window or K, or "
                          'partly without a loop; begin with an empty one')

    def place(self, d, k):
        "Where layer d's slot for evaluation k = 2, 3, ... stands."
        return self.slots + (d - self.first) * (self.evaluations - 1) + k - 2

    @contextlib.contextmanager
    def slot(self, d, k):
        "Layer d's forward in evaluation k."
        layers = self.cache.layers
        real = layers[d]
        if self.how == 'exact':
            taken = real if k == 1 else layers[self.place(d, k)]
        elif self.how == 'none':
            taken = alone(real, keep=k == 1)
        elif k == 1:
            self.past[d] = copy_slot(real)
            taken = real
        else:
            taken = self.last[d] = copy_slot(self.past[d])
        layers[d] = taken
        try:
            yield
        finally:
            layers[d] = real


def fixed(slot):
    return getattr(slot, 'is_compileable', False)       # transformers' StaticLayer and its like


def copy_slot(slot):
    new = copy.copy(slot)       # a slot that grows replaces its tensors when it is updated
    if fixed(slot):             # and one of a fixed length writes into them
        vars(new).update({name: t.clone() for name, t in vars(slot).items()
                          if isinstance(t, torch.Tensor)})
    return new


def alone(real, keep):
    """A slot of the same kind (transformers asks for that) that shows a layer its new keys and
    values alone. keep: the real one still gets them, because it counts the tokens."""
    def update(k, v, *args, **kwargs):
        if keep:
            real.update(k, v, *args, **kwargs)
        return k, v
    new = copy.copy(real)
    new.update = update
    return new
