"""The model every other file shares: a LLaMA-style decoder whose depth is a list.

The idea: a model owns its unique layers, and a list, the *order*, decides which of them run, one
after the other. [0, 1, 2, 3] is an ordinary model of four layers. [0, 1, 2, 3, 0, 1, 2, 3] runs the
same four layers twice, and [0, 1, 3] skips layer 2. Looping, growing, retrofitting and wrapping are
four ways to write this list. A model's depth, its cost and its cache follow from the list.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A (architecture, Table 2) and
E (LN-scaling: the output of a norm shrinks with depth). The end of docs/FIGURES.md lists everything
in which this repository differs from the papers.

Usage:
    model = LM(ModelConfig(vocab_size=257, n_layer=4, n_embd=64, n_head=4))
    logits = model(tokens)                                      # (B, T) -> (B, T, V)
    loss = model(tokens, targets, order=[0, 1, 2, 3, 2, 3])     # the last two layers run twice
    model.order = [0, 1, 2, 3, 2, 3]                            # from now on
"""
import functools
import inspect
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


class Refused(ValueError):
    "A user's mistake, which the commands print as one line. (Mistakes in the code are asserts.)"


def require(condition, line):
    "Raise Refused with this line, unless the condition is true."
    if not condition:
        raise Refused(line)


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
    tie_embeddings: bool = True         # the head has the weights of the embedding
    head_dim: int | None = None         # None: n_embd / n_head
    ln_scaling: bool = False            # scale the norms at depth d by 1/sqrt(d + 1)
    rope_scaling: dict | None = None    # Llama 3's way to stretch a short context
    qk_norm: bool = False               # Qwen 3's RMSNorm on each head's queries and keys
    qkv_bias: bool = False              # Qwen 2's biases of queries, keys and values

    def __post_init__(self):
        require(self.head_dim or self.n_embd % self.n_head == 0,
                'n_head does not divide n_embd: give head_dim')
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.n_kv_head = self.n_kv_head or self.n_head
        self.ffn_dim = self.ffn_dim or 32 * math.ceil(self.n_embd * 8 / 3 / 32)
        require(self.head_dim % 2 == 0, f'head_dim={self.head_dim} must be even, because rotary '
                'positions turn pairs of channels')
        require(self.n_head % self.n_kv_head == 0, 'n_kv_head does not divide n_head')


def rope_tables(config):
    "Return cos and sin of the angles of all positions: (T, hd/2) each."
    # In float32, as Hugging Face computes it. In float64, the angles of token 100,000 would differ
    # by up to 0.01 radian.
    channels = torch.arange(0, config.head_dim, 2).float()
    freq = 1.0 / config.rope_theta ** (channels / config.head_dim)              # (hd/2,)
    if config.rope_scaling is not None:     # Llama 3: slow the long waves down, keep the short ones
        s = config.rope_scaling
        low, high = s['low_freq_factor'], s['high_freq_factor']
        # how often each wave turns within the context that the model was first trained on
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

    def forward(self, x, rope, with_past=None):
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.n_head, -1)                               # (B, T, H, hd)
        k = self.k(x).view(B, T, self.n_kv_head, -1)
        v = self.v(x).view(B, T, self.n_kv_head, -1)
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                        # (B, H, T, hd)
        is_causal, mask = True, None
        if with_past is not None:       # these T tokens are the last of S, and see all before them
            k, v = with_past(k, v)                                              # (B, Hkv, S, hd)
            S = k.shape[2]
            is_causal = T == S
            if 1 < T < S:
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
    """One layer, from residual stream to residual stream. A Pass (below) gives it whatever depends
    on its depth: the factor of LN-scaling, the keys and values of earlier tokens, and a tap."""

    def __init__(self, config):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rope, scale=None, with_past=None, tap=None):
        h = self.attn_norm(x)
        update = self.attn(h if scale is None else h * scale, rope, with_past)
        x = x + (tap('attn', x, update) if tap else update)
        h = self.mlp_norm(x)
        update = self.mlp(h if scale is None else h * scale)
        return x + (tap('mlp', x, update) if tap else update)                   # (B, T, C)


class Pass:
    """One forward pass of a model: run(x, items) is the stream x after these items of an order.

    cache   a dict, which is {} for a new text. LM.hidden adds the keys and values of the new tokens
            after the pass, and the next pass continues after them. The cache is {(depth, layer):
            (keys, values)}, because a layer that runs twice reads another stream each time. Under
            'order', LM.hidden stores the order that filled the cache
    tap     a function tap(depth, part, x, update), where part is 'attn' or 'mlp'. It sees the
            update that a sublayer adds to the stream x, and returns what is added instead
    notes   a dict in which a Span leaves what your own loss reads, such as the stream after each
            iteration
    """

    def __init__(self, model, n_tokens, cache=None, tap=None, notes=None):
        self.model, self.cache, self.tap = model, cache, tap
        self.layers = model.layers          # layers[i] runs as layer i; a Span may exchange it
        self.notes = {} if notes is None else notes
        self.depth = 0                      # of the next layer
        self.start = seen(cache)            # the position of the first token in its text
        self.new = {}                       # for the cache: {(depth, layer): (keys, values)}
        end = self.start + n_tokens
        require(end <= model.config.context,
                f'{end} tokens are more than the context of {model.config.context}')
        self.rope = model.cos[self.start:end, None], model.sin[self.start:end, None]

    def __call__(self, x, items, depth=None):
        """Return the stream (B, T, C) after some items. The first of them runs at `depth` (None:
        after the depth of the layer that ran last)."""
        if depth is not None:
            self.depth = depth
        for item in items:
            if isinstance(item, Span):
                end = self.depth + len(item.unrolled())
                x = item(self, x)
                require(self.depth <= end, f'{item} runs more layers than its unrolled() says')
                self.depth = end            # even if the Span has left early
            else:
                x = self.layer(item, x)
        return x

    def layer(self, i, x):
        "Return the stream after layer i, which runs at self.depth."
        scale = with_past = tap = None
        if self.model.config.ln_scaling:    # a tensor, or torch.compile would compile each depth
            scale = torch.full((), self.depth + 1.0, device=x.device).rsqrt().to(x.dtype)
        if self.cache is not None:
            with_past = functools.partial(self.with_past, (self.depth, i))
        if self.tap is not None:
            tap = functools.partial(self.tap, self.depth)
        x = self.layers[i](x, self.rope, scale, with_past, tap)
        self.depth += 1
        return x

    def with_past(self, place, k, v):
        """Return the keys and values of all tokens so far: those in the cache, followed by k and v
        of the new tokens: (B, Hkv, S, hd). If a layer runs several times at one depth, as in a
        Window, the cache gets the keys and values of its first run."""
        if self.start:
            require(place in self.cache and self.cache[place][0].shape[2] == self.start,
                    f'at depth {place[0]} this cache does not hold all of the text: begin again '
                    'with an empty one')
            k, v = (torch.cat(both, dim=2) for both in zip(self.cache[place], (k, v)))
        self.new.setdefault(place, (k, v))
        return k, v

    def wrote(self, depths):
        "Return whether a layer at one of these depths has already written keys and values."
        return any(depth in depths for depth, _ in self.new)

    def forget(self, depths):
        "Drop what was written at these depths, so that the next run of the layers is kept."
        self.new = {place: kv for place, kv in self.new.items() if place[0] not in depths}


def seen(cache):
    "Return how many tokens a cache holds."
    places = [place for place in cache or () if place != 'order']
    return cache[places[0]][0].shape[2] if places else 0


class Span(nn.Module):
    """An order within an order: an item that holds items itself, and runs them `times` times.

    A subclass may set `times`, or override forward. It may also have weights. make_weights makes
    them when the Span first gets into a model's order, because only then is the width known. While
    the Span is in the model's order, its weights are the model's.

    Keep each argument of __init__ as an attribute of the same name, because a checkpoint stores
    these arguments to make the Span again. If forward does not run the items `times` times,
    override unrolled and flops. docs/EXTEND.md has examples.
    """
    times = 1
    has_made_weights = False

    def __init__(self, items, times=None):
        super().__init__()
        self.items = list(items)
        if times is not None:
            self.times = times

    def make_weights(self, model):
        "Make the Span's Parameters and Modules, if it has any. The model calls this once."

    def muon_weights(self):
        "Return the matrices that Muon may train. AdamW trains all other weights of the Span."
        return []

    def forward(self, run, x):
        """Return the stream (B, T, C) after the Span. run is a Pass: run(x, items) is the stream
        after some items, run.layers are the layers, and run.notes is a dict for the loss."""
        return run(x, self.items * self.times)

    def unrolled(self):
        "Return the numbers of the layers that run, one for each depth that the Span takes."
        return unrolled(self.items) * self.times

    def flops(self, model, context):
        "Return the training FLOPs of one token. Each nn.Linear of the Span counts once."
        return model.flops_of(self.items, context) * self.times + self.flops_of_linears()

    def flops_of_linears(self):
        "Return the training FLOPs of the Span's nn.Linears for one token."
        linears = [module for module in self.modules() if isinstance(module, nn.Linear)]
        return 6 * sum(linear.weight.numel() for linear in linears)

    def settings(self):
        "Return the arguments with which type(self)(items, **settings) makes this Span again."
        names = [name for name in inspect.signature(type(self)).parameters if name != 'items']
        # `times` may be an attribute of the class, which then needs no storing
        return {name: getattr(self, name) for name in names
                if name in vars(self) or not hasattr(type(self), name)}

    def __repr__(self):
        return f'{type(self).__name__}({self.items}, {self.settings()})'


def unrolled(order):
    "Return the layers of an order as they run, with its Spans written out. Index d is depth d."
    layers = []
    for item in order:
        layers += item.unrolled() if isinstance(item, Span) else [item]
    return layers


def spans_in(order):
    "Return all Spans of an order, including those inside other Spans."
    spans = []
    for item in order:
        if isinstance(item, Span):
            spans += [item, *spans_in(item.items)]
    return spans


class LM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
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
            # at 0.02, Adam's first steps would be as large as the embedding itself
            nn.init.normal_(self.embed.weight, std=1.0)
        self.spans = nn.ModuleList()
        self.order = range(config.n_layer)      # you may assign another list at any time

    @property
    def order(self):
        return self._order

    @order.setter
    def order(self, order):
        """Set what the model runs. The Spans that have weights become submodules: spans.0 is the
        first of them, spans.1 the second, in the order in which spans_in lists them."""
        self._order = self.prepared(order)
        with_weights = [span for span in spans_in(self._order) if span.state_dict()]
        if [*self.spans] != with_weights:
            self.spans = nn.ModuleList(with_weights)

    def prepared(self, order):
        "Return an order as a list that this model can run, with the weights of its Spans made."
        order = list(order)
        self.check(order)
        self.make_weights(order)
        self.set_mode(order)
        return order

    def check(self, order):
        "Refuse an order that is not made of this model's layers, or that holds a Span twice."
        layers, spans, n = unrolled(order), spans_in(order), len(self.layers)
        require(layers and {*layers} <= {*range(n)},
                f'the order {order} is not made of the layers 0 to {n - 1}')
        require(len({*spans}) == len(spans), f'the order {order} holds one Span twice: use '
                'copy.deepcopy(span) for the second place')

    def make_weights(self, order):
        "Let each Span that is new make its weights, with the device and dtype of the model."
        for span in spans_in(order):
            if not span.has_made_weights:
                span.make_weights(self)
                span.to(self.embed.weight)
                span.has_made_weights = True

    def set_mode(self, order):
        "Set the Spans to training or evaluation, as the model is set."
        for span in spans_in(order):
            span.train(self.training)

    def train(self, mode=True):
        """Do what nn.Module.train does, including for Spans without weights, which are not
        submodules."""
        super().train(mode)
        self.set_mode(self.order)
        return self

    def hidden(self, tokens, order=None, cache=None, tap=None, notes=None):
        "Return the stream before the final norm: (B, T) -> (B, T, C)."
        order = self.order if order is None else self.prepared(order)
        run = Pass(self, tokens.shape[1], cache, tap, notes)
        if cache is None:
            return run(self.embed(tokens), order)
        in_words = repr(order)          # with the settings of its Spans, such as r
        require(cache.get('order', in_words) == in_words, f'this cache was filled in the order '
                f'{cache.get("order")}, and not in {in_words}: begin with an empty one')
        x = run(self.embed(tokens), order)
        cache.update(run.new | {'order': in_words})
        return x

    def forward(self, tokens, targets=None, order=None, cache=None, tap=None, loss=None):
        """Return the logits (B, T, V). With targets (B, T), return the mean loss instead, or
        loss(model, tokens, targets) if you give a loss of your own."""
        if loss is not None:            # called in here, because DDP sees only what forward does
            assert order is cache is tap is None, 'with loss=, leave out order, cache and tap'
            return loss(self, tokens, targets)
        x = self.hidden(tokens, order, cache, tap)                              # (B, T, C)
        return self.head(self.norm(x)) if targets is None else self.mean_loss(x, targets)

    def mean_loss(self, x, targets):
        """Return the ordinary loss of a stream x (B, T, C) before the final norm: the mean over the
        targets (B, T) that are not -1, or 0.0 if all targets are -1."""
        total = self.cross_entropy(self.norm(x).flatten(0, 1), self.head.weight, targets.flatten())
        return total / (targets != -1).sum().clamp(min=1)

    @staticmethod                       # so machine.py can put a compiled one in its place
    def cross_entropy(x, weight, targets):
        "Return the loss of normed streams x (n, C), summed over the targets that are not -1."
        logits = F.linear(x, weight).float()                                    # (n, V)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum')

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=None, generator=None,
                 order=None):
        """Continue tokens (B, T). Temperature 0 takes the likeliest token each time. When the text
        is longer than the context, the model reads its last `context` tokens alone."""
        require(tokens.shape[1] >= 1, 'there must be at least one token to continue')
        cache, new = {}, tokens
        for _ in range(max_new_tokens):
            if not cache or seen(cache) == self.config.context:     # read everything
                cache, new = {}, tokens[:, -self.config.context:]
            x = self.hidden(new, order, cache)[:, -1]                           # (B, C)
            logits = self.head(self.norm(x)).float()                            # (B, V)
            if top_k:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)                           # (B, 1)
            else:
                probabilities = (logits / temperature).softmax(-1)
                new = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat((tokens, new), dim=1)
        return tokens

    def num_params(self):
        "Return the number of parameters. A tied head counts once."
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, order=None, context=None):
        """Return the training FLOPs of one token: 6 for each weight that multiplies it, plus 12 x T
        x heads x head_dim for the two products of attention in each layer that runs, in rows of T =
        `context` tokens (None: the longest). The head counts, but embedding and norms do not, as in
        the paper's Table 7."""
        order = self.order if order is None else order
        return 6 * self.head.weight.numel() + self.flops_of(order, context or self.config.context)

    def flops_of(self, order, context):
        "Return the training FLOPs of one token in a part of an order. (All layers have one size.)"
        weights = sum(p.numel() for p in self.layers[0].parameters() if p.dim() == 2)
        per_layer = 6 * weights + 12 * context * self.config.n_head * self.config.head_dim
        return sum(item.flops(self, context) if isinstance(item, Span) else per_layer
                   for item in order)


if __name__ == '__main__':
    print(__doc__)
