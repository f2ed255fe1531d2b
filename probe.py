"""See which layers a model uses: depth scores, interventions, norms, weight similarity, orders.

The idea: take a layer's contribution away, or put layers in another order, and look at what
changes. A `tap` sees and changes each sublayer's update, an order says which layers run, `run`
starts at any depth: each probe is a few lines on top of these three.

Papers: "Do Depth-Grown Models Overcome the Curse of Depth?", section 4 and appendix B; "From
Growing to Looping", section 4.1 and appendix E (after Csordas et al.).
Here, where they are silent or differ: layers count from 0. A layer's contribution is removed for
the tokens 0 to t, and the effect measured at the later ones; t is every position of up to 32
tokens, else 16 random ones. What is observed is a whole layer's update, by its position in the
order. Reading a stream off early, with a lens or without, stands in variants/lens.py, and a core
that stops early in variants/exit.py.

Usage:
    score, per_layer = depth_score(model, tokens)       # where does its work reach later tokens?
    matrix = future_effects(model, tokens, part='attn', propagate=False)    # (D, D)
    python probe.py out/baseline out/lidas out/loop_2x4   # pictures: out/probe/index.html
"""
import contextlib
import itertools

import torch

from nanodepth.common.errors import Refused, check_choice
from nanodepth.loop import cut_out, running
from nanodepth.model import check_order

# ----------------------------------------------------------------------- the idea, one t at a time

@torch.no_grad()
def depth_score_by_hand(model, tokens, boundaries):
    """(the mean depth, weighted by how far the output at later tokens moves without a layer; these
    weights (D,)). `depth_score` below gives the same, with many runs in one batch."""
    plain = model(tokens).softmax(-1)                                               # (B, T, V)
    weights = []
    for erased in range(len(model.order)):
        largest = torch.zeros(len(tokens), device=tokens.device)
        for t in boundaries:
            def without(depth, part, x, update):        # part: 'attn' or 'mlp'
                if depth == erased:
                    update = update.clone()
                    update[:, :t + 1] = 0           # the tokens up to t do without this layer
                return update
            stream = model.hidden(tokens, tap=without)
            output = model.head(model.norm(stream)).softmax(-1)
            moved = (output - plain).norm(dim=-1)                                   # (B, T)
            largest = torch.maximum(largest, moved[:, t + 1:].amax(dim=1))
        weights.append(largest.mean())
    return score_of(torch.stack(weights)), torch.stack(weights)


PARTS = ('layer', 'attn', 'mlp')


def watch(change=lambda depth, part, update: update):
    """(tap, updates): a tap that puts every sublayer's update through `change`, and a dict that a
    forward pass with this tap fills, {depth: the update of the whole layer}."""
    updates = {}

    def tap(depth, part, x, update):
        update = change(depth, part, update)
        updates[depth] = updates[depth] + update if depth in updates else update
        return update
    return tap, updates


@torch.no_grad()
def record(model, tokens, order=None):
    """What each layer got and what its sublayers added: {'input', 'attn', 'mlp'}, (D, B, T, C)
    each, and the last stream, 'out' (B, T, C)."""
    if model.recurs and order is not None:
        raise Refused('a recurrent core runs in an order of its own: its probes take no other')
    if model.recurs and model.fresh and model.start != 'zero':
        raise Refused('each forward of this model begins with fresh noise, which would be measured '
                      'too: set model.fresh = False')
    kept = dict(input=[], attn=[], mlp=[])

    def tap(depth, part, x, update):
        if part == 'attn':
            kept['input'].append(x)
        kept[part].append(update)
        return update
    how = {} if order is None else dict(order=order)        # a Recurrent takes none
    out = model.hidden(tokens, tap=tap, **how)
    return {name: torch.stack(values) for name, values in kept.items()} | dict(out=out)


def pick_boundaries(T, boundaries=None):
    "The positions t: layers are erased at tokens up to t, and effects measured at those after it."
    if boundaries is None:
        drawn = torch.randperm(T - 1, generator=torch.Generator().manual_seed(0))[:16]
        boundaries = range(T - 1) if T <= 32 else drawn.sort().values
    boundaries = [int(t) for t in boundaries]
    if not boundaries or min(boundaries) < 0 or max(boundaries) > T - 2:
        raise Refused(f'boundaries={boundaries}: a boundary is a position from 0 to {T - 2} of '
                      f'{T} tokens, with others behind it')
    return boundaries


TOKENS_AT_ONCE = 2 ** 15
PROBABILITIES_AT_ONCE = 2 ** 27


class Erasure:
    """A model's pass over tokens (B, T), and how it changes when one layer's contribution is
    missing at the tokens up to t, for several t at once (future=False: at all tokens)."""

    def __init__(self, model, tokens, part='layer', future=True, boundaries=None, order=None):
        check_choice('part', part, PARTS)
        self.model, self.tokens, self.part = model, tokens, part
        self.order = model.order if order is None else list(order)
        B, T = tokens.shape
        self.plain = record(model, tokens, order)
        self.updates = self.plain['attn'] + self.plain['mlp']                   # (D, B, T, C)
        self.sizes = self.updates.norm(dim=-1).clamp(min=torch.finfo(self.updates.dtype).tiny)
        ts = torch.tensor(pick_boundaries(T, boundaries) if future else [T - 1])[:, None]
        # (boundaries, T): where the layer is erased, and where its effect is looked at
        self.gone = (torch.arange(T) <= ts).to(tokens.device)
        self.seen = ~self.gone if future else self.gone
        # slices of n boundaries, as many as fit at once
        n = max(1, min(TOKENS_AT_ONCE // (B * T),
                       PROBABILITIES_AT_ONCE // (T * model.config.vocab_size)))
        self.slices = [slice(i, i + n) for i in range(0, len(self.gone), n)]

    def zeros(self, n):
        return torch.zeros(len(self.order), n, device=self.tokens.device)

    def runs(self, progress=iter):
        """(layer s, a slice of the boundaries, the last stream, {depth: update}) of each pass that
        lacks layer s. note_effects and note_output take these four."""
        for s in progress(range(len(self.order))):
            for ts in self.slices:
                yield s, ts, *self.without(s, self.gone[ts][:, None, :, None])

    @torch.no_grad()
    def without(self, s, erase):
        n = len(erase)
        B, T = self.tokens.shape

        def change(depth, which, update):
            if depth == s and self.part in ('layer', which):
                update = update.view(n, B, T, -1).masked_fill(erase, 0).flatten(0, 1)
            return update
        tap, updates = watch(change)
        if self.model.recurs:
            x = self.model.hidden(self.tokens.repeat(n, 1), tap=tap)
        else:           # nothing before the layer changes
            x = self.plain['input'][s].repeat(n, 1, 1)
            x = self.model.run(x, self.order[s:], depth=s, tap=tap)
        return x.view(n, B, T, -1), {d: u.view(n, B, T, -1) for d, u in updates.items()}

    def moved(self, update, d, ts):
        "The largest relative change of layer d's update (n, B, T, C), at the tokens looked at."
        change = (update - self.updates[d]).norm(dim=-1) / self.sizes[d]    # (n, B, T)
        return change.masked_fill(~self.seen[ts][:, None], 0).max()

    def note_effects(self, matrix, s, ts, x, updates):
        for d in range(s + 1, len(self.order)):
            matrix[s, d] = torch.maximum(matrix[s, d], self.moved(updates[d], d, ts))

    @torch.no_grad()
    def note_output(self, outputs, s, ts, x, updates):
        "The largest L2 change of the output distribution of each example, some examples at once."
        def probabilities(x):
            return self.model.head(self.model.norm(x)).float().softmax(-1)              # (.., V)
        n, B, T, _ = x.shape
        V = self.model.config.vocab_size
        for some in torch.arange(B).split(max(1, PROBABILITIES_AT_ONCE // (n * T * V))):
            change = probabilities(x[:, some]) - probabilities(self.plain['out'][some])
            change = change.norm(dim=-1).masked_fill(~self.seen[ts][:, None], 0)        # (n, b, T)
            outputs[s, some] = torch.maximum(outputs[s, some], change.amax(dim=(0, 2)))


@torch.no_grad()
def local_effects(erasure, progress=iter):
    "(D, D): the contribution is missing only from the observed layer's own input."
    e, D = erasure, len(erasure.order)
    if e.model.recurs:
        raise Refused('local effects take a contribution out of a later input: behind an adapter '
                      'there is none to take; use propagate=True')
    contribution = e.updates if e.part == 'layer' else e.plain[e.part]        # (D, B, T, C)
    matrix = e.zeros(D)
    for s in progress(range(D)):
        for ts in e.slices:
            missing = contribution[s].masked_fill(~e.gone[ts][:, None, :, None], 0)
            for d in range(s + 1, D):
                x = e.plain['input'][d] - missing                             # (n, B, T, C)
                tap, updates = watch()
                e.model.run(x.flatten(0, 1), [e.order[d]], depth=d, tap=tap)
                moved = e.moved(updates[d].view(x.shape), d, ts)
                matrix[s, d] = torch.maximum(matrix[s, d], moved)
    return matrix


def future_effects(model, tokens, *, part='layer', propagate=True, future=True, boundaries=None,
                   order=None, progress=iter):
    """(D, D) [erased, observed]: the largest relative change of a later layer's update, at later
    tokens (future=False: at all tokens, and then it is erased at all of them too)."""
    erasure = Erasure(model, tokens, part, future, boundaries, order)
    if not propagate:
        return local_effects(erasure, progress)
    matrix = erasure.zeros(len(erasure.order))
    for run in erasure.runs(progress):
        erasure.note_effects(matrix, *run)
    return matrix


def depth_score(model, tokens, *, boundaries=None, order=None, progress=iter):
    """(the mean depth, from 0 on, weighted by how much a layer's contribution to earlier tokens
    matters for the output at later ones; those weights (D,))."""
    erasure = Erasure(model, tokens, boundaries=boundaries, order=order)
    outputs = erasure.zeros(len(tokens))
    for run in erasure.runs(progress):
        erasure.note_output(outputs, *run)
    return score_of(outputs.mean(1)), outputs.mean(1)


def score_of(per_layer):
    total = per_layer.sum()
    depths = torch.arange(len(per_layer), device=per_layer.device)
    return (depths * per_layer).sum().item() / total.item() if total > 0 else 0.0


@torch.no_grad()
def residual_norms(model, tokens, *, order=None):
    """{name: (D,)}, means over tokens: the stream's norm; the share of it that the layer and each
    sublayer add, and their cosine with it."""
    kept = record(model, tokens, order)
    x, attn, mlp = kept['input'], kept['attn'], kept['mlp']
    norms = dict(stream=x.norm(dim=-1).mean(dim=(1, 2)))
    adds = ('layer', attn + mlp, x), ('attn', attn, x), ('mlp', mlp, x + attn)
    for name, update, stream in adds:
        share = update.norm(dim=-1) / stream.norm(dim=-1).clamp(min=1e-12)  # (D, B, T)
        norms[f'{name} share'] = share.mean(dim=(1, 2))
        norms[f'{name} cosine'] = torch.cosine_similarity(update, stream, dim=-1).mean(dim=(1, 2))
    return norms


@torch.no_grad()
def block_similarity(model, block=1):
    "Cosines between the MLP weights of blocks of layers, each as one vector: (blocks, blocks)."
    layers = model.layers
    if len(layers) % block:
        raise Refused(f'{len(layers)} layers do not divide into blocks of {block}')
    flat = torch.stack([torch.cat([p.flatten().float() for p in layer.mlp.parameters()])
                        for layer in layers])                               # (L, N)
    flat = torch.nn.functional.normalize(flat.view(len(layers) // block, -1), dim=1)
    return flat @ flat.T


def swap_blocks(order, start, length):
    "Swap the `length` layers from `start` on with as many after them."
    before, both, after = cut_out(order, start, 2 * length)
    return before + both[length:] + both[:length] + after


def skip_blocks(order, start, length):
    before, _, after = cut_out(order, start, length)
    return before + after


def reverse_block(order, start, length):
    before, block, after = cut_out(order, start, length)
    return before + block[::-1] + after


def order_sweep(model, score, change, lengths, progress=iter):
    "[{'size', 'start', **score(model)}] with `change` made wherever it fits; size 0: unchanged."
    todo = [(0, 0, model.order)]
    for length, start in itertools.product(lengths, range(len(model.order))):
        with contextlib.suppress(Refused):          # it does not fit here, or leaves no layer
            new = check_order(change(model.order, start, length), len(model.layers))
            todo.append((length, start, new))
    rows = []
    for length, start, new in progress(todo):
        with running(model, new):
            rows.append(dict(size=length, start=start) | score(model))
    return rows


if __name__ == '__main__':
    from nanodepth.__main__ import main as nanodepth
    nanodepth('probe')
