"""See which layers a model uses: depth scores, interventions, norms, weight similarity, orders.

The idea: take a layer's contribution away, or put layers in another order, and look at what
changes. A `tap` sees and changes each sublayer's update, an order says which layers run, `run`
starts at any depth: each probe is a few lines on top of these three.

Papers: "Do Depth-Grown Models Overcome the Curse of Depth?", section 4 and appendix B; "From
Growing to Looping", section 4.1 and appendix E (after Csordas et al.).
Here, where they are silent or differ: layers count from 0. A layer's contribution is removed for
the tokens 0 to t, and the effect measured at the later ones; t is every position of up to 32
tokens, else 16 random ones. What is observed is a whole layer's update, by its position in the
order. Reading a stream off early, with a lens or without, stands in variants/lens.py.

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
    """(the mean position, weighted by how far the output at later tokens moves without a layer;
    these weights (D,)). `depth_score` below gives the same from passes that begin at the layer."""
    plain = model(tokens).softmax(-1)                                               # (B, T, V)
    weights = []
    for erased in range(len(model.order)):
        largest = torch.zeros(len(tokens), device=tokens.device)
        for t in boundaries:
            def without(position, part, x, update):     # part: 'attn' or 'mlp'
                if position == erased:
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


def watch(change=None):
    """(tap, updates): a tap that goes through another one, `change`, and a dict that a forward pass
    with it fills, {position: the update of the whole layer}."""
    updates = {}

    def tap(position, part, x, update):
        update = change(position, part, x, update) if change else update
        updates[position] = updates[position] + update if position in updates else update
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

    def tap(position, part, x, update):
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


class Erasure:
    """A model's pass over tokens (B, T), and how it changes when one layer's contribution is
    missing at the tokens up to a boundary t (future=False: at all tokens)."""

    def __init__(self, model, tokens, part='layer', future=True, boundaries=None, order=None):
        check_choice('part', part, PARTS)
        self.model, self.tokens, self.part, self.future = model, tokens, part, future
        self.order = model.order if order is None else list(order)
        self.plain = record(model, tokens, order)
        self.updates = self.plain['attn'] + self.plain['mlp']                   # (D, B, T, C)
        self.sizes = self.updates.norm(dim=-1).clamp(min=torch.finfo(self.updates.dtype).tiny)
        last = tokens.shape[1] - 1
        self.boundaries = pick_boundaries(last + 1, boundaries) if future else [last]

    def zeros(self, n):
        return torch.zeros(len(self.order), n, device=self.tokens.device)

    def later(self, t):
        "Where the effect of an erasure up to t is looked at."
        return slice(t + 1 if self.future else 0, None)

    def runs(self, progress=iter):
        "(layer s, t, the last stream, {position: update}) of each pass that lacks s up to t."
        for s in progress(range(len(self.order))):
            for t in self.boundaries:
                yield s, t, *self.without(s, t)

    @torch.no_grad()
    def without(self, s, t):
        def erase(position, part, x, update):
            if position == s and self.part in ('layer', part):
                update = update.clone()
                update[:, :t + 1] = 0
            return update
        tap, updates = watch(erase)
        if self.model.recurs:
            return self.model.hidden(self.tokens, tap=tap), updates
        # nothing before the layer changes
        return self.model.run(self.plain['input'][s], self.order[s:], depth=s, tap=tap), updates

    def moved(self, update, d, t):
        "The largest relative change of layer d's update (B, T, C)."
        change = (update - self.updates[d]).norm(dim=-1) / self.sizes[d]                # (B, T)
        return change[:, self.later(t)].max()

    def note_effects(self, matrix, s, t, updates):
        for d in range(s + 1, len(self.order)):
            matrix[s, d] = torch.maximum(matrix[s, d], self.moved(updates[d], d, t))

    @torch.no_grad()
    def note_output(self, outputs, s, t, x):
        "The largest L2 change of the output distribution of each example."
        def probabilities(x):
            return self.model.head(self.model.norm(x)).float().softmax(-1)              # (T, V)
        for b, (now, plain) in enumerate(zip(x, self.plain['out'])):    # one at a time: V is large
            later = self.later(t)
            change = (probabilities(now[later]) - probabilities(plain[later])).norm(dim=-1)
            outputs[s, b] = torch.maximum(outputs[s, b], change.max())


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
        for t in e.boundaries:
            for d in range(s + 1, D):
                x = e.plain['input'][d].clone()                               # (B, T, C)
                x[:, :t + 1] -= contribution[s][:, :t + 1]
                tap, updates = watch()
                e.model.run(x, [e.order[d]], depth=d, tap=tap)
                matrix[s, d] = torch.maximum(matrix[s, d], e.moved(updates[d], d, t))
    return matrix


def future_effects(model, tokens, *, part='layer', propagate=True, future=True, boundaries=None,
                   order=None, progress=iter):
    """(D, D) [erased, observed]: the largest relative change of a later layer's update, at later
    tokens (future=False: at all tokens, and then it is erased at all of them too)."""
    erasure = Erasure(model, tokens, part, future, boundaries, order)
    if not propagate:
        return local_effects(erasure, progress)
    matrix = erasure.zeros(len(erasure.order))
    for s, t, _, updates in erasure.runs(progress):
        erasure.note_effects(matrix, s, t, updates)
    return matrix


def depth_score(model, tokens, *, boundaries=None, order=None, progress=iter):
    """(the mean position, from 0 on, weighted by how much a layer's contribution to earlier tokens
    matters for the output at later ones; those weights (D,))."""
    erasure = Erasure(model, tokens, boundaries=boundaries, order=order)
    outputs = erasure.zeros(len(tokens))
    for s, t, x, _ in erasure.runs(progress):
        erasure.note_output(outputs, s, t, x)
    return score_of(outputs.mean(1)), outputs.mean(1)


def score_of(per_layer):
    total = per_layer.sum()
    positions = torch.arange(len(per_layer), device=per_layer.device)
    return (positions * per_layer).sum().item() / total.item() if total > 0 else 0.0


@torch.no_grad()
def residual_norms(model, tokens, *, order=None):
    """{name: (D,)}, means over tokens: the stream's norm; the share of it that the layer and each
    sublayer add, and their cosine with it; by how many degrees the layer turns it."""
    kept = record(model, tokens, order)
    x, attn, mlp = kept['input'], kept['attn'], kept['mlp']
    norms = dict(stream=x.norm(dim=-1).mean(dim=(1, 2)))
    adds = ('layer', attn + mlp, x), ('attn', attn, x), ('mlp', mlp, x + attn)
    for name, update, stream in adds:
        share = update.norm(dim=-1) / stream.norm(dim=-1).clamp(min=1e-12)  # (D, B, T)
        norms[f'{name} share'] = share.mean(dim=(1, 2))
        norms[f'{name} cosine'] = torch.cosine_similarity(update, stream, dim=-1).mean(dim=(1, 2))
    turned = torch.cosine_similarity(x.float(), (x + attn + mlp).float(), dim=-1)
    norms['layer angle'] = turned.clamp(-1, 1).arccos().rad2deg().mean(dim=(1, 2))
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
