"""The model every other file shares: a LLaMA-style decoder whose depth is a list.

The idea: a model owns its unique layers, and an *order* says which of them run, one after the
other. [0, 1, 2, 3] is an ordinary four-layer model, [0, 1, 2, 3, 0, 1, 2, 3] the same four layers
looped twice, [0, 1, 3] one with layer 2 skipped. An item of an order may also be a Span, which
holds an order of its own and says how that runs: a Core of retrofit.py, a Window of wrapper.py. So
looping, growing, retrofitting and wrapping are four ways to write this list. A model's depth, its
cost and its cache follow from it.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A (architecture, Table 2) and
E (LN-scaling: what a norm returns shrinks with depth).
Here: initial weights are normal with std 0.02 (an untied embedding: 1); the papers name none. GPT-2
divides those of the output matrices by sqrt(2 L). We do not, because growing changes L.

Usage:
    model = LM(ModelConfig(vocab_size=257, n_layer=4, n_embd=64, n_head=4))
    logits = model(tokens)                                      # (B, T) -> (B, T, V)
    loss = model(tokens, targets, order=[0, 1, 2, 3, 2, 3])     # the last two layers run twice
    model.order = [0, 1, 2, 3, 2, 3]                            # from now on
"""
import hashlib
import inspect
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Refused(ValueError):
    "A user's mistake, as one line. (What a programmer gets wrong ends in an assert.)"


def require(condition, line):
    "An assert of what a user may get wrong."
    if not condition:
        raise Refused(line)


def seed_for(seed, purpose, step=0):
    "63 bits. Each draw of training is a function of these three, so no generator is ever saved."
    digest = hashlib.blake2b(f'{seed} {purpose} {step}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') >> 1


@dataclass
class ModelConfig:
    vocab_size: int = 257               # 256 bytes and an end-of-text token
    n_layer: int = 8                    # unique layers, L
    n_embd: int = 128                   # width of the residual stream, C
    n_head: int = 4
    n_kv_head: int | None = None        # fewer than n_head: grouped-query attention; None: n_head
    ffn_dim: int | None = None          # None: 8/3 of the width, rounded up to a multiple of 32
    context: int = 256                  # the longest sequence
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True         # the unembedding is the embedding
    head_dim: int | None = None         # None: n_embd / n_head
    ln_scaling: bool = False            # the norms at depth d are scaled by 1/sqrt(d + 1)
    # what checkpoints of other families need
    rope_scaling: dict | None = None    # Llama 3's way to stretch a short context
    qk_norm: bool = False               # Qwen 3's RMSNorm on each head's queries and keys
    qkv_bias: bool = False              # Qwen 2's biases of queries, keys and values

    def __post_init__(self):
        require(self.head_dim or self.n_embd % self.n_head == 0,
                'n_head does not divide n_embd: give head_dim')
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.n_kv_head = self.n_kv_head or self.n_head
        self.ffn_dim = self.ffn_dim or 32 * math.ceil(self.n_embd * 8 / 3 / 32)
        require(self.head_dim % 2 == 0, f'head_dim={self.head_dim}: rotary positions turn pairs')
        require(self.n_head % self.n_kv_head == 0, 'n_kv_head does not divide n_head')


class Span:
    """An item of an order that holds an order of its own. This one runs it as if it were not there;
    a subclass says otherwise. What it needs stands on it, and its weights are the model's."""

    def __init__(self, items):
        self.items = list(items)

    def __call__(self, model, x, depth, cache=None, tap=None):
        "The stream x (B, T, C) after it. Its first layer stands at `depth`."
        return model.run(x, self.items, depth, cache, tap)

    def unrolled(self):
        "The numbers of its layers, in the order in which they run."
        return unrolled(self.items)

    def flops(self, model, context):
        return model.flops_of(self.items, context)

    def settings(self):
        """What a checkpoint keeps: type(self)(items, **settings) is this span again. These are the
        arguments of its class, each of which stands on it by its name."""
        names = [*inspect.signature(type(self)).parameters][1:]
        return {name: getattr(self, name) for name in names}


def unrolled(order):
    "The numbers of an order's layers as they run, Spans written out. A depth is a place in this."
    layers = []
    for item in order:
        layers += [item] if isinstance(item, int) else item.unrolled()
    return layers


def spans_in(order):
    "The Spans of an order, also those within others."
    spans = []
    for item in order:
        if not isinstance(item, int):
            spans += [item, *spans_in(item.items)]
    return spans


def seen(cache, depth=0):
    """How many tokens a cache holds at a depth. A cache begins as {} and becomes a dict {depth:
    (keys, values)}. Its keys are depths and not layers, because a layer that runs twice sees
    another stream each time. Under 'layers' stands the order that filled it."""
    return cache[depth][0].shape[2] if cache and depth in cache else 0


def rope_tables(config):
    "cos and sin of every token's angles, (T, hd/2) each."
    # This order of operations is Hugging Face's. Others are up to 0.01 radian off at token 100,000.
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
    "Turn each pair of channels (i, i + hd/2) of x (..., hd) by its token's angle."
    cos, sin = rope                                                             # (T, 1, hd/2)
    a, b = x.chunk(2, dim=-1)                                                   # (..., hd/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, hd = config.n_embd, config.head_dim
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.q = nn.Linear(C, self.n_head * hd, config.qkv_bias)
        self.k = nn.Linear(C, self.n_kv_head * hd, config.qkv_bias)
        self.v = nn.Linear(C, self.n_kv_head * hd, config.qkv_bias)
        self.o = nn.Linear(self.n_head * hd, C, bias=False)
        self.q_norm = nn.RMSNorm(hd, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(hd, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x, rope, depth=0, cache=None):
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.n_head, -1)                               # (B, T, H, hd)
        k = self.k(x).view(B, T, self.n_kv_head, -1)
        v = self.v(x).view(B, T, self.n_kv_head, -1)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                        # (B, H, T, hd)
        if cache is not None:
            if depth in cache:
                k = torch.cat((cache[depth][0], k), dim=2)                      # (B, Hkv, S, hd)
                v = torch.cat((cache[depth][1], v), dim=2)
            cache[depth] = k, v
        S = k.shape[2]
        # Causal, unless these tokens continue a cache. (`T == S` says the same, but with that alone
        # torch.compile would write a graph for each length.)
        is_causal = cache is None or T == S
        mask = None
        if not is_causal and T > 1:         # the last T of S tokens, which see all before them
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal,
                                           enable_gqa=self.n_kv_head < self.n_head)
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
    """One layer: the residual stream in, the residual stream out. Its depth is for a cache and a
    tap alone. `scale` is LN-scaling's factor, a tensor, so that one compiled Block serves all
    depths. tap(depth, part, x, update), where part is 'attn' or 'mlp', returns what is added to the
    stream x instead of the update."""

    def __init__(self, config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rope, scale=None, depth=0, cache=None, tap=None):
        h = self.attn_norm(x)
        update = self.attn(h if scale is None else h * scale, rope, depth, cache)
        x = x + (update if tap is None else tap(depth, 'attn', x, update))
        h = self.mlp_norm(x)
        update = self.mlp(h if scale is None else h * scale)
        return x + (update if tap is None else tap(depth, 'mlp', x, update))    # (B, T, C)


def memory_of(device):
    is_cuda = device.type == 'cuda'
    # elsewhere as if it were 4 GiB
    return torch.cuda.get_device_properties(device).total_memory if is_cuda else 2 ** 32


class LM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.order = list(range(config.n_layer))        # what runs: yours to set
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        cos, sin = rope_tables(config)                                          # (T, hd/2) each
        self.register_buffer('cos', cos, persistent=False)
        self.register_buffer('sin', sin, persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if not config.tie_embeddings:
            # at 0.02, Adam's steps would rewrite a token before attention has learned to match it
            nn.init.normal_(self.embed.weight, std=1.0)

    def run(self, x, order, depth=0, cache=None, tap=None):
        "The stream x (B, T, C) after an order's items, of which the first stands at `depth`."
        start = seen(cache, depth)
        end = start + x.shape[1]
        require(end <= self.config.context,
                f'{end} tokens are more than the context of {self.config.context}')
        rope = self.cos[start:end, None], self.sin[start:end, None]             # (T, 1, hd/2) each
        for item in order:
            if isinstance(item, int):
                require(seen(cache, depth) == start, 'a Span runs more than its unrolled() says')
                scale = None
                if self.config.ln_scaling:      # a tensor: a number would compile for each depth
                    scale = torch.full((), depth + 1.0, device=x.device).rsqrt().to(x.dtype)
                x = self.layers[item](x, rope, scale, depth, cache, tap)
                depth += 1
            else:
                x = item(self, x, depth, cache, tap)
                depth += len(item.unrolled())
        return x                                                                # (B, T, C)

    def hidden(self, tokens, order=None, cache=None, tap=None):
        "The stream before the final norm: (B, T) -> (B, T, C)."
        order = self.order if order is None else order
        layers = unrolled(order)
        if not layers or not {*layers} <= {*range(len(self.layers))}:
            raise Refused(f'the order {order} names layers that this model of {len(self.layers)} '
                          'has not')
        if cache is not None:
            cache.setdefault('layers', layers)
            require(cache['layers'] == layers,
                    'this cache was filled by another order or r: use that one, or a new cache')
        return self.run(self.embed(tokens), order, 0, cache, tap)

    def forward(self, tokens, targets=None, order=None, cache=None, tap=None):
        """Logits (B, T, V); or, given targets (B, T), the mean loss over those that are not -1, or
        0 without any."""
        x = self.norm(self.hidden(tokens, order, cache, tap))                   # (B, T, C)
        if targets is None:
            return self.head(x)
        n = (targets != -1).sum().clamp(min=1)
        return self.sum_of_losses(x.flatten(0, 1), targets.flatten()) / n

    def sum_of_losses(self, x, targets):
        "The cross-entropies of the logits of x (n, C) over the targets that are not -1, added up."
        weight = self.head.weight
        # Logits that would fill over a tenth of the memory (at two bytes each) are made in pieces,
        # and made again in the backward pass.
        if 2 * len(x) * len(weight) <= memory_of(x.device) // 10:
            return self.cross_entropy(x, weight, targets)
        return sum(checkpoint(self.cross_entropy, part, weight, answers, use_reentrant=False)
                   for part, answers in zip(x.split(4096), targets.split(4096)))

    @staticmethod
    def cross_entropy(x, weight, targets):      # (a run on a GPU compiles it)
        logits = F.linear(x, weight).float()
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum')

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=None, generator=None,
                 order=None):
        """Continue tokens (B, T). Temperature 0 takes the likeliest one. Past the context the
        window slides: each token is drawn from the last `context` ones, as if none came before."""
        cache = None
        for _ in range(max_new_tokens):
            if not cache or seen(cache) == self.config.context:     # full: all of it is read again
                cache, inputs = {}, tokens[:, -self.config.context:]
            x = self.norm(self.hidden(inputs, order, cache)[:, -1])             # (B, C)
            logits = self.head(x).float()                                       # (B, V)
            if top_k:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature == 0:
                inputs = logits.argmax(-1, keepdim=True)                        # (B, 1)
            else:
                probabilities = (logits / temperature).softmax(-1)
                inputs = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat((tokens, inputs), dim=1)
        return tokens

    def num_params(self):
        return sum(p.numel() for p in self.parameters())        # a tied head counts once

    def flops_per_token(self, order=None, context=None):
        """Training FLOPs of one token: 6 for each weight that multiplies it, and for each layer run
        12 T (heads x head_dim) for attention's two products, in rows of T = `context` tokens (None:
        the longest). The head counts, embedding and norms do not, as in the paper's Table 7."""
        order = self.order if order is None else order
        context = context or self.config.context
        return 6 * self.head.weight.numel() + self.flops_of(order, context)

    def flops_of(self, order, context):
        "The same of a part of an order, without the head."
        weights = sum(p.numel() for p in self.layers[0].parameters() if p.dim() == 2)
        of_layer = 6 * weights + 12 * context * self.config.n_head * self.config.head_dim
        return sum(of_layer if isinstance(item, int) else item.flops(self, context)
                   for item in order)
