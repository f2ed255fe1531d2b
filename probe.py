"""See which layers a model uses: depth scores, interventions, norms, weight similarity, orders.

The idea: take a layer's contribution away, or put layers in another order, and look at what
changes. A `tap` sees and changes each sublayer's update, an order says which layers run, `run`
starts at any depth: each probe is a few lines on top of these three.

Papers: "Do Depth-Grown Models Overcome the Curse of Depth?", section 4 and appendix B; "From
Growing to Looping", section 4.1 and appendix E (after Csordas et al.).
Here, where they are silent or differ: layers count from 0. A layer's contribution is removed for
the tokens 0 to t, and the effect measured at the later ones: for every t if there are no more than
32 tokens, else for 16 random ones. What is observed is a whole layer's update, by its position in
the order. Reading a stream off early, with a lens or without, stands in scoring/lens.py.

Usage:
    score, per_layer = depth_score(model, tokens)       # where does its work reach later tokens?
    matrix = future_effects(model, tokens, part='attn', propagate=False)    # (D, D)
    python probe.py out/baseline out/lidas out/loop_2x4   # pictures: out/probe/index.html
"""
import itertools

import torch

from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.steps import steps_of
from nanodepth.loop import running, split

# ------------------------------------------------------------------ the idea: what moves without it

@torch.no_grad()
def depth_score(model, tokens, *, boundaries=None, order=None):
    """(the score, w (D,)). w[d]: when layer d is erased at the tokens up to t, how far do the
    probabilities of later tokens move? The largest move over t and tokens, a mean over the rows.
    The score is sum d w[d] / sum w[d]."""
    plain = record(model, tokens, order)
    D, B, T, _ = plain['input'].shape
    largest = torch.zeros(D, B, device=tokens.device)
    for d in range(D):
        for t in pick_boundaries(T, boundaries):
            out = run_from(model, plain, d, tokens, order, erase(d, t))
            moved = distance(model, out[:, t + 1:], plain['out'][:, t + 1:])
            largest[d] = torch.maximum(largest[d], moved.amax(1))
    w = largest.mean(1)
    positions = torch.arange(D, device=w.device)
    return (positions * w).sum().item() / w.sum().item() if w.sum() > 0 else 0.0, w


def erase(position, t, part='layer'):
    "A tap that takes away what a layer, or a part of it, adds at the tokens up to t."
    def tap(at, name, x, update):               # name: 'attn' or 'mlp'
        if at == position and part in ('layer', name):
            update = update.clone()
            update[:, :t + 1] = 0
        return update
    return tap


def distance(model, a, b):
    "Of the probabilities that two last streams (B, T, C) lead to: (B, T)."
    def probabilities(x):
        return model.head(model.norm(x)).float().softmax(-1)
    # a row at a time: the vocabulary may be large
    return torch.stack([(probabilities(x) - probabilities(y)).norm(dim=-1) for x, y in zip(a, b)])


@torch.no_grad()
def record(model, tokens, order=None):
    """What each layer got and what its sublayers added: {'input', 'attn', 'mlp'}, (D, B, T, C)
    each, the last stream, 'out' (B, T, C), and the 'order' in which they ran."""
    kept = dict(input=[], attn=[], mlp=[])

    def tap(position, part, x, update):
        if part == 'attn':
            kept['input'].append(x)
        kept[part].append(update)
        return update
    out = model.hidden(tokens, order=order, tap=tap)
    order = model.unrolled(order)
    if len(kept['attn']) != len(order):
        raise Refused('a looped window runs its layers several times at one place, so there is no '
                      'one update of them: look at the model without it')
    return {name: torch.stack(values) for name, values in kept.items()} | dict(out=out, order=order)


def run_from(model, plain, position, tokens, order, tap):
    "The last stream, run again from a position on. (An order with steps is run from its start.)"
    steps = steps_of(model.order if order is None else order)
    if steps:
        if any(getattr(step, 'fresh', False) for step in steps):
            raise Refused('each forward of this model begins with fresh noise, which would be '
                          'measured too: set its core.fresh = False')
        return model.hidden(tokens, order=order, tap=tap)
    rest = plain['order'][position:]
    return model.run(plain['input'][position], rest, position=position, tap=tap)


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


# ------------------------------------------------------------------------- the same on later layers

PARTS = ('layer', 'attn', 'mlp')


@torch.no_grad()
def future_effects(model, tokens, *, part='layer', propagate=True, future=True, boundaries=None,
                   order=None):
    """(D, D) [erased, observed]: the largest relative change of a later layer's update, at later
    tokens (future=False: at all tokens, and then it is erased at all of them too). propagate=False:
    the contribution is missing only from the observed layer's own input."""
    check_choice('part', part, PARTS)
    if steps_of(model.order if order is None else order) and not propagate:
        raise Refused('local effects take a contribution out of a later input: behind an adapter '
                      'there is none to take; use propagate=True')
    plain = record(model, tokens, order)
    updates = plain['attn'] + plain['mlp']                                      # (D, B, T, C)
    sizes = updates.norm(dim=-1).clamp(min=torch.finfo(updates.dtype).tiny)     # (D, B, T)
    D, T = len(updates), tokens.shape[1]
    matrix = torch.zeros(D, D, device=tokens.device)
    for s in range(D):
        for t in pick_boundaries(T, boundaries) if future else [T - 1]:
            if propagate:
                without = updates_after(model, plain, s, t, part, tokens, order)
            else:
                without = updates_one_by_one(model, plain, s, t, part)
            for d in range(s + 1, D):
                moved = (without[d] - updates[d]).norm(dim=-1) / sizes[d]       # (B, T)
                later = moved[:, t + 1:] if future else moved
                matrix[s, d] = torch.maximum(matrix[s, d], later.max())
    return matrix


def updates_after(model, plain, s, t, part, tokens, order):
    "{position: its update}, run again without what position s adds at the tokens up to t."
    updates = {}
    erased = erase(s, t, part)

    def tap(position, name, x, update):
        update = erased(position, name, x, update)
        updates[position] = updates.get(position, 0) + update
        return update
    run_from(model, plain, s, tokens, order, tap)
    return updates


def updates_one_by_one(model, plain, s, t, part):
    "The same, where it is missing only from each later position's own input."
    added = plain['attn'][s] + plain['mlp'][s] if part == 'layer' else plain[part][s]
    updates = {}

    def tap(position, name, x, update):
        updates[position] = updates.get(position, 0) + update
        return update
    for d in range(s + 1, len(plain['input'])):
        x = plain['input'][d].clone()                                           # (B, T, C)
        x[:, :t + 1] -= added[:, :t + 1]
        model.run(x, [plain['order'][d]], position=d, tap=tap)
    return updates


@torch.no_grad()
def residual_norms(model, tokens, *, order=None):
    """{name: (D,)}, means over tokens: the stream's norm; the share of it that the layer and each
    sublayer add, and their cosine with it; by how many degrees the layer turns it."""
    kept = record(model, tokens, order)
    x, attn, mlp = kept['input'], kept['attn'], kept['mlp']
    norms = dict(stream=x.norm(dim=-1).mean(dim=(1, 2)))

    def compare(name, update, stream):
        share = update.norm(dim=-1) / stream.norm(dim=-1).clamp(min=1e-12)      # (D, B, T)
        norms[f'{name} share'] = share.mean(dim=(1, 2))
        norms[f'{name} cosine'] = torch.cosine_similarity(update, stream, dim=-1).mean(dim=(1, 2))
    compare('layer', attn + mlp, x)
    compare('attn', attn, x)
    compare('mlp', mlp, x + attn)
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
    before, both, after = split(order, start, 2 * length)
    return before + both[length:] + both[:length] + after


def skip_blocks(order, start, length):
    before, _, after = split(order, start, length)
    return before + after


def reverse_block(order, start, length):
    before, block, after = split(order, start, length)
    return before + block[::-1] + after


def order_sweep(model, score, change, lengths):
    "[{'size', 'start', **score(model)}] with `change` made wherever it fits; size 0: unchanged."
    rows = [dict(size=0, start=0) | score(model)]
    for length, start in itertools.product(lengths, range(len(model.order))):
        try:
            new = model.check_steps(change(model.order, start, length))
        except Refused:     # it does not fit here, or leaves no layer or not the core
            continue
        with running(model, new):
            rows.append(dict(size=length, start=start) | score(model))
    return rows


if __name__ == '__main__':
    from nanodepth.__main__ import main as nanodepth
    nanodepth('probe')
