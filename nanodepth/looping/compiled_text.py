"""Text by a compiled step: one token through all layers, without Python between the operations.

The idea: a token is hundreds of small operations, and Python starts each one. A compiled step
starts them all at once, but then every token must look alike to it. So the cache has its full
length from the beginning, it is written in place, and a mask hides what has not been written.

Paper: none. The model reads the prompt as ever. A step takes an order, but no window and no core.

Usage:
    tokens = generate(model, tokens, 100, temperature=0)        # as LM.generate
"""
import math
from types import SimpleNamespace

import torch

from nanodepth.common.errors import Refused
from nanodepth.model import pick_token

ROUND = 128             # a cache's length, so that texts of about one length share a compiled step


class FixedSlot:
    "A slot of KVCache with room for all tokens to come. `at` (1,) is where the next one stands."

    def __init__(self, slot, length, at):
        B, H, S, hd = slot.keys.shape
        self.keys, self.values = (torch.cat((t, t.new_zeros(B, H, length - S, hd)), dim=2)
                                  for t in (slot.keys, slot.values))
        self.at = at
        for t in (self.keys, self.values):      # CUDA graphs write there again and again
            torch._dynamo.mark_static_address(t)

    def update(self, k, v):
        self.keys.index_copy_(2, self.at, k)
        self.values.index_copy_(2, self.at, v)
        self.mask = (torch.arange(self.keys.shape[2], device=k.device) <= self.at)[None]    # (1, S)
        return self.keys, self.values


def step(model, token, at, cache):
    "The logits (B, V) after one token (B, 1)."
    x = model.embed(token)
    rope = model.cos[at, None], model.sin[at, None]                             # (1, 1, hd/2) each
    for place, i in enumerate(model.order):
        scale = (place + 1) ** -0.5 if model.config.ln_scaling else 1
        x = model.layers[i](x, rope, scale, place, cache)
    return model.head(model.norm(x[:, -1])).float()


@torch.no_grad()
def generate(model, tokens, max_new_tokens, *, compile=True, **how):
    """What LM.generate returns, but for the rounding of a compiled step. `how` is how a token is
    picked."""
    if model.recurs:
        raise Refused('a compiled step is for a model without a recurrent core')
    here = max(0, min(max_new_tokens, model.config.context - tokens.shape[1]))
    if here:
        tokens = fill_context(model, tokens, here, compile, **how)
    return model.generate(tokens, max_new_tokens - here, **how)         # the context slides


def fill_context(model, tokens, n, compile, temperature=1.0, top_k=None, generator=None):
    "Add n tokens, for which the context has room."
    prompt = model.new_cache()
    logits = model.head(model.norm(model.hidden(tokens, cache=prompt)[:, -1])).float()
    at = torch.tensor([prompt.seen], device=tokens.device)
    end = prompt.seen + n
    length = math.ceil(end / ROUND) * ROUND
    cache = SimpleNamespace(layers=[FixedSlot(slot, length, at) for slot in prompt.layers])
    on = dict(mode='reduce-overhead') if tokens.is_cuda else {}
    once = torch.compile(step, dynamic=False, **on) if compile else step
    while True:
        token = pick_token(logits, temperature, top_k, generator)
        tokens = torch.cat((tokens, token), dim=1)
        if tokens.shape[1] == end:
            return tokens
        logits = once(model, token, at, cache)
        at += 1
