"""wrapper.py's Window with everything else that a looped layer can leave in a KV cache, by names.
Usage: model.order = [0, 1, Window([2, 3], 'rk', K=3, cache='last'), 4]
"""
import copy
import itertools

import torch

from nanodepth.common.errors import Refused, check_choice
from nanodepth.looping.solvers import BY_LAYER, pick_solver
from nanodepth.model import LM, seen, spans_in, unrolled
from nanodepth.retrofit import Core
from nanodepth.wrapper import Window as PlainWindow

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


class Window(PlainWindow):
    """A later token looks back at keys and values, of which a looped layer has made one version for
    each evaluation (K, for most solvers); the cache has room for one.

    solver  a name of SOLVERS, with its options if it has some, as 'euler(tol=0.1)'; or a function
    cache   which version stays: CACHES (the paper's appendices C, G.2 and N)
    pin     'mixture': in a mixture of experts, later evaluations keep the experts of the first
    decode  'full' loops at each new token; 'bypass' loops only while a prompt is read
    mode    the items as one 'block', or 'layer' by layer"""

    def __init__(self, items, solver='rk', K=3, cache=None, pin=None, decode='full', mode=None,
                 **options):
        self.decode, self.pin = decode, pin
        self.bound, self.most = pick_solver(solver, K, **options)
        super().__init__(items, self.bound.func, **self.bound.keywords)
        name = self.solver.__name__
        self.by_layer = name in BY_LAYER                    # a solver for each layer by itself
        self.mode = mode or ('layer' if self.by_layer else 'block')
        self.keeps = cache or ('natural' if self.by_layer else 'first')
        check_choice('mode', self.mode, ['layer'] if self.by_layer else ['block', 'layer'])
        check_choice('cache', self.keeps, CACHES)
        check_choice('decode', decode, ('full', 'bypass'))
        check_choice('pin', pin, (None, 'mixture'))
        # what they keep or hide is of each evaluation, so all tokens must have the same ones
        if (decode != 'full' and self.keeps in ('exact', 'none')
                or 'tol' in self.options and self.keeps in ('exact', 'last_eval')):
            raise Refused(f'cache={self.keeps!r} needs the same evaluations for every token: '
                          "decode='full', and no halting tolerance")

    def settings(self):
        "A checkpoint is read by wrapper.py's Window, which does not take what is not its own."
        usual = dict(mode='block', decode='full', pin=None)
        return super().settings() | {name: getattr(self, name) for name, value in usual.items()
                                     if getattr(self, name) != value}

    def evaluations(self):
        return self.most                    # with a tolerance it may stop before

    def extra_pass(self):
        "Of what the window runs once more, to fill the cache: its 'input', its 'output', or None."
        if self.keeps == 'last':
            return 'output'
        if self.keeps == 'first' and self.mode == 'layer':
            return 'input'      # layer by layer, first evaluations of later layers saw looped ones
        return None

    def __call__(self, model, x, depth, cache=None, tap=None):
        if self.decode == 'bypass' and x.shape[-2] == 1 and tokens_in(cache, depth) > 0:
            return model.run(x, self.items, depth, cache, tap)
        parts = [self.items] if self.mode == 'block' else [[item] for item in self.items]
        memory = Memory(self, model, cache, depth, tap)
        y = x
        for part in parts:
            if self.keeps == 'exact' and isinstance(cache, dict):       # wrapper.py's own
                span = PlainWindow(part, self.solver, self.K, 'exact', **self.options)
                y = span(model, y, depth, cache, tap)
            else:
                y = self.bound(memory.window(part, depth), y)   # each call of g is one evaluation
            depth += len(unrolled(part))
        memory.settle(x, y)
        return y


class Slots:
    "A cache of ours, a dict, as the list of slots that transformers' caches have."

    def __init__(self, cache):
        self.cache = cache

    def __getitem__(self, d):
        return self.cache.get(d)

    def __setitem__(self, d, slot):
        self.cache.pop(d, None)
        if slot is not None:
            self.cache[d] = slot


class Memory:
    """One forward of a window, and what it does with a cache, ours or transformers'. An evaluation
    runs on copies of the cache's slots. One that grows gets new tensors when it is updated, so that
    copying it costs nothing; one of a fixed length is written into, and is cloned."""

    def __init__(self, window, model, cache, depth, tap):
        self.span, self.model, self.cache, self.tap = window, model, cache, tap
        self.kind, self.K = window.keeps, window.evaluations()
        self.first, self.end = depth, depth + len(unrolled(window.items))
        self.ours = isinstance(cache, dict)
        within = spans_in(window.items)
        if (self.ours and self.kind != 'exact'
                and any(getattr(span, 'keeps', None) == 'exact' for span in within)):
            raise Refused("a window within this one has cache='exact', so to generate this one "
                          'needs it, too')
        if self.ours and self.kind == 'none':
            if any(isinstance(span, Core) for span in within):
                raise Refused("cache='none' hides from a core where it stands in the text: choose "
                              'another')
            self.model = WithoutPast(model, seen(cache, depth))
        self.past = {}          # {depth: its slot before this forward}
        self.last = {}          # {depth: its slot after the last evaluation}
        if cache is None:
            return
        self.layers = Slots(cache) if self.ours else cache.layers
        if (self.kind in ('none', 'exact') and not self.ours
                and any(fixed(slot) for slot in self.layers[self.first:self.end])):
            raise Refused(f'cache={self.kind!r} needs a KV cache that grows; with one of a fixed '
                          'length there are: first, natural, last, last_eval')
        if self.kind == 'exact' and not self.ours:
            self.add_slots()

    def window(self, items, depth):
        "A solver's g: each call is the next evaluation of these items, from a depth on."
        number = itertools.count(1)
        return lambda x: self.evaluate(x, items, depth, next(number))

    def evaluate(self, x, items, depth, k):
        "Evaluation k."
        if self.cache is None:
            return self.model.run(x, items, depth, None, self.tap)
        layers = self.layers
        depths = range(depth, depth + len(unrolled(items)))
        before = {d: layers[d] for d in depths}
        for d, slot in before.items():
            layers[d] = self.lent(d, slot, k)
        after = before              # when a layer fails, the cache is as it was
        try:
            y = self.model.run(x, items, depth, self.cache, self.tap)
            after = {d: self.kept(d, before[d], layers[d], k) for d in depths}
            return y
        finally:
            for d in depths:
                layers[d] = after[d]

    def lent(self, d, slot, k):
        "The slot that a layer gets for evaluation k, in place of the cache's own."
        if self.kind == 'exact':
            return slot if k == 1 else self.layers[self.place(d, k)]
        if self.kind == 'none':
            return None if self.ours else alone(slot, keep=k == 1)
        if k == 1:
            self.past[d] = copy_slot(slot)
            return slot
        return copy_slot(self.past[d])

    def kept(self, d, before, used, k):
        "The slot that the cache has after it."
        if self.kind == 'none' and self.ours and k == 1 and before is not None:
            return tuple(torch.cat(both, dim=2) for both in zip(before, used))
        if k == 1 and self.ours:
            return used             # transformers' slot has changed itself
        self.last[d] = used
        return before

    def settle(self, x, y):
        "The window has made y of x. What of it stays in the cache?"
        extra = self.span.extra_pass()
        if self.cache is None:
            return
        if extra:
            if extra == 'input':        # of the unlooped model are its experts, too
                getattr(self.model, 'routed', {}).clear()
            stream = x if extra == 'input' else y
            self.evaluate(stream, self.span.items, self.first, self.K + 1)
        if extra or self.kind == 'last_eval':
            for d, slot in self.last.items():
                self.layers[d] = slot

    def add_slots(self):
        "Slots for the later evaluations, behind the model's own: beam search reaches them there."
        layers = self.layers
        loops = vars(self.cache).setdefault('loops', {})    # {a window's first: (its slots, K)}
        self.slots, K = loops.setdefault(self.first, (len(layers), self.K))
        # [(the real slot, where its copy for one of the later evaluations stands)]
        places = [(layers[d], self.place(d, k)) for d in range(self.first, self.end)
                  for k in range(2, self.K + 1)]
        for real, place in places:
            if place == len(layers) and not real.get_seq_length():
                layers.append(copy.copy(real))
        if K != self.K or any(
                place >= len(layers) or layers[place].get_seq_length() != real.get_seq_length()
                for real, place in places):
            raise Refused("cache='exact': this KV cache was filled with another window or K, or "
                          'partly without a loop; begin with an empty one')

    def place(self, d, k):
        "Where layer d's slot for evaluation k = 2, 3, ... stands."
        return self.slots + (d - self.first) * (self.K - 1) + k - 2


class WithoutPast:
    "A model of ours whose tokens come after others that it does not see."

    def __init__(self, model, past):
        self.model, self.cos, self.sin = model, model.cos[past:], model.sin[past:]

    def __getattr__(self, name):
        return getattr(self.model, name)

    def run(self, *args):
        return LM.run(self, *args)


def tokens_in(cache, depth):
    "How many a cache holds, ours or transformers'."
    if cache is None or isinstance(cache, dict):
        return seen(cache, depth)
    return cache.layers[depth].get_seq_length()


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
