"""The model every other file shares: a LLaMA-style decoder whose depth is a list.

The idea: a model owns its unique layers, and an *order* says which of them run, one after the
other. [0, 1, 2, 3] is an ordinary four-layer model, [0, 1, 2, 3, 0, 1, 2, 3] the same four layers
looped twice, [0, 1, 3] one with layer 2 skipped. An item of an order may also be a *step*, which
holds items of its own and says how they run: a Core of retrofit.py, a Window of wrapper.py. So
looping, growing, retrofitting and wrapping are four ways to write this list, and depth, cost and
cache are sums over it.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A (architecture, Table 2) and
E (LN-scaling: what a norm returns shrinks with depth). RMSNorm before each sublayer, rotary
positions, grouped-query attention, SwiGLU, tied embeddings.
Here: initial weights are normal with std 0.02 (an untied embedding: 1); the papers name none. GPT-2
divides those of the output matrices by sqrt(2 L). We do not, because growing changes L.

Usage:
    model = LM(ModelConfig(vocab_size=257, n_layer=4, n_embd=64, n_head=4))
    logits = model(tokens)                                   # (B, T) -> (B, T, V)
    loss = model(tokens, targets, order=[0, 1, 2, 3, 2, 3])     # the last two layers run twice
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanodepth.common.errors import Refused         # a ValueError, which commands print as one line
from nanodepth.common.losses import mean_loss       # F.cross_entropy, in pieces where it is large
from nanodepth.common.steps import CoreSettings, check_kinds, check_order, core_in, steps_of


@dataclass
class ModelConfig:
    vocab_size: int = 257               # 256 bytes and an end-of-text token
    n_layer: int = 8                    # unique layers, L
    n_embd: int = 128                   # width of the residual stream, C
    n_head: int = 4
    n_kv_head: int | None = None        # fewer than n_head: grouped-query attention; None: n_head
    ffn_dim: int | None = None          # None: 8/3 of the width, rounded up to a multiple of 32
    context: int = 256                  # the longest sequence, T
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True         # the unembedding is the embedding
    head_dim: int | None = None         # None: n_embd / n_head
    ln_scaling: bool = False            # the norms at position d are scaled by 1/sqrt(d + 1)
    order: list[int] | None = None      # which layers run; None: each once
    # for the checkpoints of other families, which models/hf.py opens
    rope_scaling: dict | None = None    # Llama 3's way to stretch a short context
    qk_norm: bool = False               # Qwen 3's RMSNorm on each head's queries and keys
    qkv_bias: bool = False              # Qwen 2's biases of queries, keys and values

    def __post_init__(self):
        if self.head_dim is None:
            if self.n_embd % self.n_head:
                raise Refused(f'n_embd={self.n_embd} does not divide into n_head={self.n_head}')
            self.head_dim = self.n_embd // self.n_head
        if self.head_dim % 2:
            raise Refused(f'head_dim={self.head_dim} is odd: rotary positions turn pairs')
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        if self.n_head % self.n_kv_head:
            raise Refused(f'n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}')
        if self.ffn_dim is None:
            self.ffn_dim = 32 * math.ceil(self.n_embd * 8 / 3 / 32)
        if self.order is not None:
            self.order = check_order(self.order, self.n_layer)
            if steps_of(self.order):
                raise Refused(f'a config holds numbers, and the order {self.order} has steps: set '
                              'model.order')


# ------------------------------------------------------------------------------------------ orders
# An order's item is a layer's number, or a step: an object such as retrofit.py's Core and
# wrapper.py's Window. `how` is what one forward asks of a Core beside its own settings: r,
# backprop_depth, generator. Without a Core it is empty. A step has
#   items                           an order of its own,
#   step(x, walk, position)         the stream behind it; walk.run sends one through its items,
#   unrolled(**how)                 the layer of each position that it takes, one after another (at
#                                   one position a Window evaluates its layer several times),
#   flops(model, context, **how)    their cost, in training,
#   enter(model, order, new=True)   called when a model gets the order, for good or (new=False) for
#                                   one call. A step may note the model's sizes. What it learns is
#                                   in modules that it gives to the model.

def unrolled(order, **how):
    "The layer of each position, one after another: as many as the model is deep."
    layers = []
    for item in order:
        layers += [item] if isinstance(item, int) else item.unrolled(**how)
    return layers


class Walk(NamedTuple):
    "What a forward tells its layers, and its steps, which send the stream through their own items."
    model: nn.Module            # whose weights they are, a step's too
    rope: tuple                 # cos and sin of the tokens' positions, (T, 1, hd/2) each
    scales: tuple               # LN-scaling's factor at each position of the order
    seen: int                   # tokens in the cache
    cache: object               # keys and values of these tokens, or None
    tap: object                 # a function that Block explains, or None
    how: dict                   # what it asks of a Core

    def run(self, x, order, position=0):
        "The stream x (B, T, C) behind these items, of which the first stands at a position."
        for item in order:
            if isinstance(item, int):
                layer = self.model.layers[item]
                x = layer(x, self.rope, self.scales[position], position, self.cache, self.tap)
                position += 1
            else:
                x = item(x, self, position)
                position += len(item.unrolled(**self.how))
        return x                                                                # (B, T, C)


def rope_tables(config):
    "cos and sin of every position's angles, (T, hd/2) each."
    # In transformers' order of operations: another is 0.01 radian off at position 100,000.
    channels = torch.arange(0, config.head_dim, 2).float()
    freq = 1.0 / config.rope_theta ** (channels / config.head_dim)              # (hd/2,)
    if config.rope_scaling is not None:     # Llama 3: slow the long waves down, keep the short ones
        s = config.rope_scaling
        low, high = s['low_freq_factor'], s['high_freq_factor']
        # how often each wave turned in the context that the model was first trained on
        turns = s['original_max_position_embeddings'] / (2 * math.pi / freq)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = (1 - keep) * freq / s['factor'] + keep * freq
    angles = torch.outer(torch.arange(config.context).float(), freq)            # (T, hd/2)
    return angles.cos(), angles.sin()


def rotate(x, rope):
    "Turn each pair of channels (i, i + hd/2) of x (..., hd) by its position's angle."
    cos, sin = rope                                                             # (T, 1, hd/2)
    a, b = x.chunk(2, dim=-1)                                                   # (..., hd/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class KVCache:
    """Keys and values of the tokens seen so far: one slot for each position of the *order*, not
    for each module, since a layer that runs twice sees two different streams."""

    class Slot:
        keys = values = None                                                    # (B, Hkv, S, hd)

        def update(self, k, v):
            self.keys = k if self.keys is None else torch.cat((self.keys, k), dim=2)
            self.values = v if self.values is None else torch.cat((self.values, v), dim=2)
            return self.keys, self.values

        def get_seq_length(self):       # what looping/caches.py asks ours and transformers'
            return 0 if self.keys is None else self.keys.shape[2]

    def __init__(self, positions):
        self.layers = [KVCache.Slot() for _ in range(positions)]
        self.positions = positions
        self.seen = 0           # tokens so far: `hidden` counts them, once per forward


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, hd = config.n_embd, config.head_dim
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.q = nn.Linear(C, self.n_head * hd, config.qkv_bias)
        self.k = nn.Linear(C, self.n_kv_head * hd, config.qkv_bias)
        self.v = nn.Linear(C, self.n_kv_head * hd, config.qkv_bias)
        self.o = nn.Linear(self.n_head * hd, C, bias=False)
        self.q_norm = nn.RMSNorm(hd, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(hd, config.norm_eps) if config.qk_norm else None

    def forward(self, x, rope, slot=None):
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.n_head, -1)                               # (B, T, H, hd)
        k = self.k(x).view(B, T, self.n_kv_head, -1)
        v = self.v(x).view(B, T, self.n_kv_head, -1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                        # (B, H, T, hd)
        if slot is not None:
            k, v = slot.update(k, v)                                            # (B, Hkv, S, hd)
        S, mask = k.shape[2], None
        if 1 < T < S:       # the last T of S tokens: is_causal would align them with the first T
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        group = self.n_head // self.n_kv_head
        if group > 1 and q.is_cuda and q.dtype == torch.float32:    # no kernel takes groups there
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=slot is None or T == S,
                                           enable_gqa=k.shape[1] < self.n_head)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))                      # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.n_embd, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))                     # (B, T, C)


class Block(nn.Module):
    """One layer: the residual stream in, the residual stream out. It knows neither its index nor
    the depth of the model, so what depends on its place in the order is passed in:

    scale      LN-scaling's factor: 1, or a tensor, so that one compiled Block serves all positions
    position   its place in the order, which picks the slot of the cache
    tap        tap(position, part, x, update) returns what a part ('attn' or 'mlp') adds to the
               stream x instead of `update`"""

    def __init__(self, config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rope, scale=1, position=0, cache=None, tap=None):
        slot = None if cache is None else cache.layers[position]
        update = self.attn(self.attn_norm(x) * scale, rope, slot)
        x = x + (update if tap is None else tap(position, 'attn', x, update))
        update = self.mlp(self.mlp_norm(x) * scale)
        return x + (update if tap is None else tap(position, 'mlp', x, update))    # (B, T, C)


class LM(CoreSettings, nn.Module):
    # CoreSettings: of an order with a Core in it, model.prelude, model.core and model.coda are the
    # items before, within and behind it, and model.recurrence and others are the Core's settings.

    def __init__(self, config):
        super().__init__()
        self.config = config
        # The order stands in config.order if it is numbers alone (None: each layer once). No config
        # can hold steps: an order with them stands here, and config.order does not count.
        self.order_with_steps = None
        self.unused_order = None    # what config.order was then, to notice if it is set later
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        cos, sin = rope_tables(config)                                          # (T, hd/2) each
        self.register_buffer('cos', cos, persistent=False)
        self.register_buffer('sin', sin, persistent=False)
        self.apply(self._init)
        if not config.tie_embeddings:
            # At 0.02, Adam's steps rewrite a token before attention has learned to match it
            # (docs/LOG.md).
            nn.init.normal_(self.embed.weight, std=1.0)

    @staticmethod
    def _init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if getattr(module, 'bias', None) is not None:
            nn.init.zeros_(module.bias)

    @property
    def order(self):
        "The order that runs when none is given."
        if self.order_with_steps and self.config.order != self.unused_order:
            raise Refused('config.order was set beside an order with steps, which it would not '
                          'change: set model.order')
        return list(self.order_with_steps or self.config.order or range(len(self.layers)))

    @order.setter
    def order(self, order):
        order = check_order(order, len(self.layers))
        for step in steps_of(order):
            step.enter(self, order)
        self.order_with_steps = self.unused_order = None
        if steps_of(order):
            self.order_with_steps, self.unused_order = order, self.config.order
        elif order != self.order:
            self.config.order = order

    def run(self, x, order, *, position=0, cache=None, tap=None, **how):
        """Run a segment of an order on the residual stream x (B, T, C). `position` is the place of
        its first layer in the whole order: of two orders of layers, run(run(x, a), b,
        position=len(a)) is run(x, a + b)."""
        seen = 0 if cache is None else cache.seen
        end = seen + x.shape[1]
        if end > self.config.context:
            raise Refused(f'{end} tokens are more than the context of {self.config.context}')
        if how and core_in(order) is None:
            raise Refused(f'{", ".join(how)}: such settings are for a recurrent core, and the '
                          f'order {order} has none')
        rope = self.cos[seen:end, None], self.sin[seen:end, None]               # (T, 1, hd/2) each
        depth = position + len(unrolled(order, **how))
        scales = [1] * depth
        if self.config.ln_scaling:
            scales = (torch.arange(depth, device=x.device) + 1).rsqrt().to(x.dtype).unbind()
        return Walk(self, rope, scales, seen, cache, tap, how).run(x, order, position)

    def hidden(self, tokens, *, order=None, cache=None, tap=None, **how):
        "The residual stream before the final norm: (B, T) -> (B, T, C)."
        order = self.order if order is None else self.check_steps(order)
        if cache is not None and len(unrolled(order, **how)) != cache.positions:
            raise Refused(f'this cache holds the keys of another r or order, {cache.positions} '
                          'positions deep: go on with that')
        x = self.run(self.embed(tokens), order, cache=cache, tap=tap, **how)
        if cache is not None:
            cache.seen += tokens.shape[1]
        return x

    def check_steps(self, order):
        "An order that runs in place of the model's own, in one call or for a while."
        order = check_order(order, len(self.layers))
        for step in steps_of(order):
            step.enter(self, order, new=False)
        check_kinds(self.order, order)
        return order

    def forward(self, tokens, targets=None, *, ignore_index=-1, **how):
        """Logits (B, T, V), or with targets (B, T) the mean loss over those that count. `how` is
        what `hidden` takes: order, cache and tap (of a core: r and others)."""
        x = self.norm(self.hidden(tokens, **how))                               # (B, T, C)
        if targets is None:
            return self.head(x)
        return mean_loss(x, self.head.weight, targets, ignore_index)

    def unrolled(self, order=None, **how):
        "The layers of all positions: what is D long."
        return unrolled(self.order if order is None else order, **how)

    def new_cache(self, order=None, **how):
        return KVCache(len(self.unrolled(order, **how)))

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, *, temperature=1.0, top_k=None, generator=None,
                 **how):
        """Continue tokens (B, T) by max_new_tokens. Temperature 0 takes the likeliest token. Past
        the context the window slides: each new token is drawn from the last `context` ones, as if
        none came before. `how` is an order (of a core: r)."""
        context = self.config.context
        cache = None
        for _ in range(max_new_tokens):
            if cache is None or cache.seen == context:      # full: the window slides, and all its
                cache = self.new_cache(**how)               # tokens are read again
                fresh = tokens[:, -context:]
            x = self.hidden(fresh, cache=cache, **how)[:, -1]                   # (B, C)
            logits = self.head(self.norm(x)).float()                            # (B, V)
            fresh = pick_token(logits, temperature, top_k, generator)           # (B, 1)
            tokens = torch.cat((tokens, fresh), dim=1)
        return tokens

    def num_params(self):
        return sum(p.numel() for p in self.parameters())        # a tied head counts once

    def flops_per_token(self, order=None, *, context=None, **how):
        """Training FLOPs of one token: 6 per weight that multiplies it (2 forward, 4 backward).
        The head counts, but not embedding and norms. Each layer run adds 12 T (heads x head_dim)
        for attention's two products, in rows of T = `context` tokens (None: the longest). This is
        the count that gives the paper's Table 7 to the last digit."""
        c = self.config
        order, context = self.order if order is None else order, context or c.context
        return 6 * c.vocab_size * c.n_embd + self.flops_of(order, context, **how)

    def flops_of(self, order, context, **how):
        "The same of a segment."
        c = self.config
        layer = sum(p.numel() for p in self.layers[0].parameters() if p.dim() == 2)
        once = 6 * layer + 12 * context * c.n_head * c.head_dim
        return sum(once if isinstance(item, int) else item.flops(self, context, **how)
                   for item in order)


def pick_token(logits, temperature, top_k, generator):
    "The next token of each row of logits (B, V): (B, 1)."
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
