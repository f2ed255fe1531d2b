"""What a looped layer leaves in the KV cache, and what its evaluations see of it.

The idea: a later token looks back at keys and values, of which a looped layer has made one version
for each evaluation (K, for most methods); the cache has room for one.
- 'first' keeps those of evaluation 1, which are the unlooped model's (with mode='layer', the first
layer's only); 'last_eval' those of the last; 'last' runs the window once more on the result and
keeps that; 'none' shows the window no past at all.
- None of these continues a text as if all of it had been read at once. While a prompt is read,
evaluation k of a token sees evaluation k of the tokens before it; of what is in the cache, a new
token's evaluation k sees the one version kept there.
- 'exact' keeps all K versions, so evaluation k always sees evaluation k. It costs K times the
window's cache.
- 'frozen' reads a prompt by the cache's rule instead: evaluation k sees evaluation 1 of all other
tokens, and itself. That is what 'first' does token by token, so one version is enough, and reading,
continuing and recomputing agree token for token.

Paper: "Training-Free Looped Transformers", appendices C, G.2 and N: first, last (with its extra
pass) and none.
Here: an evaluation runs on copies of the cache's slots, put in for the time of one layer's forward.
A growing slot replaces its tensors when it is updated, so copying it costs nothing; one of a fixed
length writes into them, and is cloned.

Usage:
    memory = Memory('first', cache, (3, 5), evaluations=3)      # wrapper.py does it, once a forward
    with memory.slot(4, k=2, mask=mask, x=x) as mask: ...  # layer 4 runs: its second evaluation
    memory.settle()  # the forward is over: what stays in the cache
"""
import contextlib
import copy

import torch

from common.errors import Refused, check_choice
from model import KVCache

CACHES = ('first', 'last', 'last_eval', 'none', 'frozen', 'exact')


def check_cache(cache, decode, tol=None):
    check_choice('cache', cache, CACHES)
    steps = isinstance(decode, int) and not isinstance(decode, bool) and decode >= 0
    if decode not in ('full', 'bypass') and not steps:
        raise Refused(f"decode={decode!r}: 'full', 'bypass', or the number of decode steps that "
                      'are looped')
    if cache == 'exact' and (decode != 'full' or tol is not None):
        raise Refused("cache='exact' needs the same evaluations for every token: decode='full', "
                      'and no halting tolerance')


class Memory:
    """One forward's dealings with a cache, ours or transformers': either has a list `layers` of
    slots with update(k, v)."""

    def __init__(self, how, cache, window, evaluations, depth=0, first=None):
        self.how, self.cache, self.evaluations = how, cache, evaluations
        # exact: where the windows begin, if this is one of several
        self.first = window[0] if first is None else first
        # by depth: slots before this forward; of the last evaluation; evaluation 1's keys
        self.past, self.last, self.seen = {}, {}, {}
        layers = cache.layers
        # a DynamicCache may make its slots when they are used
        while len(layers) < (depth if how == 'exact' else window[1] + 1):
            layers.append(cache.layer_class_to_replicate())
        if (how in ('none', 'exact', 'frozen')
            and any(fixed(slot) for slot in layers[window[0]:window[1] + 1])):
            raise Refused(f'cache={how!r} needs a KV cache that grows; with one of a fixed length '
                          'there are: first, last, last_eval')
        if how == 'exact':
            self.provide(window)

    def provide(self, window):
        """The later evaluations' slots stand behind the model's own, where beam search and the
        like reach them too."""
        cache, layers = self.cache, self.cache.layers
        if not hasattr(cache, 'loop_slots'):
            cache.loop_slots, cache.loop_kind = len(layers), (self.first, self.evaluations)
        for d in range(window[0], window[1] + 1):
            for k in range(2, self.evaluations + 1):
                if self.place(d, k) == len(layers):
                    layers.append(copy.copy(layers[d]))
                if (cache.loop_kind != (self.first, self.evaluations)
                    or layers[self.place(d, k)].get_seq_length() != layers[d].get_seq_length()):
                    raise Refused(
                        "cache='exact': this KV cache was filled with another window or K, or "
                        "partly without a loop; begin with an empty one")

    def place(self, d, k):
        return self.cache.loop_slots + (d - self.first) * (self.evaluations - 1) + k - 2

    @contextlib.contextmanager
    def slot(self, d, k, mask, x):
        """Layer d's forward in evaluation k, on x (.., q, C): yields the mask that fits what it
        will see."""
        layers, real, q = self.cache.layers, self.cache.layers[d], x.shape[-2]
        if self.how == 'exact':
            taken = real if k == 1 else layers[self.place(d, k)]
        elif self.how == 'none':
            taken, mask = (stand_in(real, Alone(real if k == 1 else None)),
                           None if mask is None else mask[..., -q:])
        elif self.how == 'frozen' and q > 1 and k == 1:
            taken = stand_in(real, Seen(real, self.seen, d))
        # (one new token alone is served as by 'first')
        elif self.how == 'frozen' and q > 1:
            taken, mask = stand_in(real, Beside(*self.seen[d])), beside_mask(mask, q,
                    self.seen[d][0].shape[2], x.device)
        elif k == 1:
            self.past[d], taken = copy_slot(real), real
        else:
            taken = self.last[d] = copy_slot(self.past[d])
        layers[d] = taken
        try:
            yield mask
        finally:
            layers[d] = real

    def settle(self):
        "'last' and 'last_eval' leave what the last evaluation wrote."
        if self.how in ('last', 'last_eval'):
            for d, slot in self.last.items():
                self.cache.layers[d] = slot


class Slots(KVCache):
    """A cache for one forward without any: 'frozen' keeps evaluation 1 in it. Layers of ours and
    of transformers' know it."""

    def update(self, k, v, i, *_, **__):
        return self.layers[i].update(k, v)

    def get_seq_length(self, i=0):
        return 0


def fixed(slot):
    # transformers' StaticLayer and its like
    return getattr(slot, 'is_compileable', False)


def copy_slot(slot):
    new = copy.copy(slot)
    if fixed(slot):
        vars(new).update({name: t.clone() for name, t in vars(slot).items()
                          if isinstance(t, torch.Tensor)})
    return new


def stand_in(slot, update):
    "A slot of the same kind (transformers asks for that) with another update."
    new = copy.copy(slot)
    new.update = update
    return new


class Alone:
    """Shows a layer its new keys and values and nothing else. The cache gets them all the same: it
    counts the tokens."""

    def __init__(self, real):
        self.real = real

    def __call__(self, k, v, *args, **kwargs):
        if self.real is not None:
            self.real.update(k, v, *args, **kwargs)
        return k, v


class Seen:
    "Notes what evaluation 1 saw."

    def __init__(self, real, seen, d):
        self.real, self.seen, self.d = real, seen, d

    def __call__(self, k, v, *args, **kwargs):
        self.seen[self.d] = self.real.update(k, v, *args, **kwargs)
        return self.seen[self.d]


class Beside:
    "Shows a layer evaluation 1's keys and values, and behind them its own: (B, H, S + q, hd)."

    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    def __call__(self, k, v, *_, **__):
        return torch.cat((self.keys, k), dim=2), torch.cat((self.values, v), dim=2)


def beside_mask(mask, q, S, device):
    """The mask for it, (.., q, S + q). In evaluation k a token sees three things: the past, as it
    is in the cache; the other new tokens, as they were in evaluation 1; itself, as it is now. So
    the layer's own mask (.., q, S) becomes three pieces, side by side."""
    if mask is None:
        mask = torch.ones(1, 1, q, S, dtype=torch.bool, device=device).tril(S - q)
    never = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    own = torch.eye(q, dtype=torch.bool, device=device)  # (q, q)
    new = mask[..., S - q:]  # (.., q, q)
    past, others, itself = mask[..., :S - q], new.masked_fill(own, never), new.masked_fill(~own,
            never)
    return torch.cat((past, others, itself), dim=-1)
