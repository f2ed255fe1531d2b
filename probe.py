"""See which layers a model uses: depth scores, interventions, norms, weight similarity, orders.

The idea: take a layer's contribution away, or put layers in another order, and look at what
changes. A `tap` sees and changes each sublayer's update, an order says which layers run, `run`
starts at any depth: each probe is a few lines on top of these three.

Papers: "Do Depth-Grown Models Overcome the Curse of Depth?", section 4 and appendix B; "From
Growing to Looping", section 4.1 and appendix E (after Csordas et al.).
Here, where they are silent or differ: a layer's contribution is removed for the tokens 0 to t, and
the effect measured at the later ones, for each t in rows of up to 32 tokens, else for 16 random t.

Usage:
    score, per_layer = depth_score(model, tokens)       # where does its work reach later tokens?
    matrix = future_effects(model, tokens, part='attn', propagate=False)    # (D, D)
    with running(model, order): score, _ = depth_score(model, tokens)       # in another order
    python probe.py out/baseline out/lidas      # the depth scores of runs, on data of their own
"""
import sys

import torch

from loop import running, split
from model import Refused, require, spans_in, unrolled


# ------------------------------------------------------------------ the idea: what moves without it

@torch.no_grad()
def depth_score(model, tokens, boundaries=None):
    """(the score, w (D,)). w[d]: when layer d is erased at the tokens up to t, how far do the
    probabilities of later tokens move? The largest move over t and tokens, a mean over the rows.
    (That of the last layer is 0.) The score is sum d w[d] / sum w[d]."""
    plain = record(model, tokens)
    D, B, T, _ = plain['input'].shape
    largest = torch.zeros(D, B, device=tokens.device)
    for d in range(D):
        for t in pick_boundaries(T, boundaries):
            out = run_from(model, plain, d, tokens, erase(d, t))
            moved = distance(model, out[:, t + 1:], plain['out'][:, t + 1:])
            largest[d] = torch.maximum(largest[d], moved.amax(1))
    w = largest.mean(1)
    depths = torch.arange(D, device=w.device)
    return (depths * w).sum().item() / max(w.sum().item(), 1e-30), w


def erase(erased, t, part='layer'):
    "A tap that takes away what a layer ('layer'), or its 'attn' or 'mlp', adds at tokens up to t."
    def tap(depth, sublayer, x, update):
        if depth == erased and part in ('layer', sublayer):
            update = update.clone()
            update[:, :t + 1] = 0
        return update
    return tap


def distance(model, a, b):
    "How far apart the probabilities are to which two last streams (B, T, C) lead: (B, T)."
    def probabilities(x):
        return model.head(model.norm(x)).float().softmax(-1)
    # a row at a time: the vocabulary may be large
    return torch.stack([(probabilities(x) - probabilities(y)).norm(dim=-1) for x, y in zip(a, b)])


@torch.no_grad()
def record(model, tokens):
    """What each layer got and what its sublayers added: {'input', 'attn', 'mlp'}, (D, B, T, C)
    each, and the last stream, 'out' (B, T, C)."""
    kept = dict(input=[], attn=[], mlp=[])

    def tap(depth, part, x, update):
        if part == 'attn':
            kept['input'].append(x)
        kept[part].append(update)
        return update
    out = model.hidden(tokens, tap=tap)
    require(len(kept['attn']) == len(unrolled(model.order)), 'a Window runs its layers several '
            'times at one depth, so there is no one update of them: look at the model without it')
    return {name: torch.stack(values) for name, values in kept.items()} | dict(out=out)


def plain_order(model):
    "Does a model run layers alone, no Span? Then a layer's input is the sum of earlier updates."
    return not spans_in(model.order)


def run_from(model, plain, d, tokens, tap):
    "The last stream, run again from a depth on. (An order with a Span is run from its start.)"
    if plain_order(model):
        return model.run(plain['input'][d], model.order[d:], d, tap=tap)
    require(not any(getattr(span, 'fresh', False) for span in spans_in(model.order)),
            'each forward begins with fresh noise, which would be measured: set core.fresh = False')
    return model.hidden(tokens, tap=tap)


def pick_boundaries(T, boundaries=None):
    "The tokens t: layers are erased at those up to t, and effects measured at those after it."
    if boundaries is None:
        drawn = torch.randperm(T - 1, generator=torch.Generator().manual_seed(0))[:16]
        boundaries = range(T - 1) if T <= 32 else drawn.sort().values.tolist()
    assert len(boundaries) and 0 <= min(boundaries) and max(boundaries) <= T - 2, (
        f'at least one of {T} tokens stands after each boundary, not {boundaries}')
    return boundaries


# ------------------------------------------------------------------------- the same on later layers

@torch.no_grad()
def future_effects(model, tokens, part='layer', propagate=True, future=True, boundaries=None):
    """(D, D) [erased, observed]: the largest relative change of a later layer's update, if an
    earlier layer's contribution is taken away.

    future      True: it is taken away at the tokens up to t, and later tokens are looked at.
                False: it is taken away at all tokens, and all are looked at
    propagate   True: all later layers run without it. False: it is missing only from the observed
                layer's own input, and the layers between are as they were
    """
    assert part in ('layer', 'attn', 'mlp')
    require(propagate or plain_order(model),
            "after an adapter a layer's input is no sum of updates: propagate=True")
    plain = record(model, tokens)
    updates = plain['attn'] + plain['mlp']                                      # (D, B, T, C)
    sizes = updates.norm(dim=-1).clamp(min=torch.finfo(updates.dtype).tiny)     # (D, B, T)
    D, T = len(updates), tokens.shape[1]
    matrix = torch.zeros(D, D, device=tokens.device)
    updates_without = rerun_without if propagate else directly_without
    for erased in range(D):
        for t in pick_boundaries(T, boundaries) if future else [T - 1]:
            new = updates_without(model, plain, erased, t, part, tokens)        # {depth: (B, T, C)}
            for d in range(erased + 1, D):
                moved = (new[d] - updates[d]).norm(dim=-1) / sizes[d]           # (B, T)
                later = moved[:, t + 1:] if future else moved
                matrix[erased, d] = torch.maximum(matrix[erased, d], later.max())
    return matrix


def rerun_without(model, plain, erased, t, part, tokens):
    "{depth: its update}, run again without what one layer adds at the tokens up to t."
    updates = {}
    without = erase(erased, t, part)

    def tap(depth, sublayer, x, update):
        update = without(depth, sublayer, x, update)
        updates[depth] = updates.get(depth, 0) + update
        return update
    run_from(model, plain, erased, tokens, tap)
    return updates


def directly_without(model, plain, erased, t, part, tokens):
    "The same, where it is missing only from each later layer's own input."
    added = sum(plain[name][erased] for name in ('attn', 'mlp') if part in ('layer', name))
    updates = {}

    def tap(depth, sublayer, x, update):
        updates[depth] = updates.get(depth, 0) + update
        return update
    for d in range(erased + 1, len(plain['input'])):
        x = plain['input'][d].clone()                                           # (B, T, C)
        x[:, :t + 1] -= added[:, :t + 1]
        model.run(x, [model.order[d]], d, tap=tap)
    return updates


# ---------------------------------------------------------------------------- streams and weights

@torch.no_grad()
def residual_norms(model, tokens):
    """{name: (D,)}, means over tokens: the stream's norm before each layer; what the layer and each
    sublayer add, as a share of that norm, and its cosine with the stream; and by how many degrees
    the layer turns the stream."""
    kept = record(model, tokens)
    x, attn, mlp = kept['input'], kept['attn'], kept['mlp']
    norms = dict(stream=x.norm(dim=-1).mean(dim=(1, 2)))
    parts = (('layer', attn + mlp, x), ('attn', attn, x), ('mlp', mlp, x + attn))
    for name, update, stream in parts:
        share = update.norm(dim=-1) / stream.norm(dim=-1).clamp(min=1e-12)      # (D, B, T)
        norms[f'{name} share'] = share.mean(dim=(1, 2))
        norms[f'{name} cosine'] = torch.cosine_similarity(update, stream, dim=-1).mean(dim=(1, 2))
    turned = torch.cosine_similarity(x.float(), (x + attn + mlp).float(), dim=-1)
    norms['layer angle'] = turned.clamp(-1, 1).arccos().rad2deg().mean(dim=(1, 2))
    return norms


@torch.no_grad()
def block_similarity(model, block=1):
    "Cosines between the MLP weights of blocks of layers, each as one vector: (blocks, blocks)."
    assert len(model.layers) % block == 0, f'{len(model.layers)} layers in blocks of {block}'
    flat = torch.stack([torch.cat([p.flatten().float() for p in layer.mlp.parameters()])
                        for layer in model.layers])                             # (L, N)
    blocks = torch.nn.functional.normalize(flat.view(-1, block * flat.shape[1]), dim=1)
    return blocks @ blocks.T


# ----------------------------------------------------------------------------------- other orders

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
    blocks = 2 if change is swap_blocks else 1          # so many it takes
    for length in lengths:
        for start in range(len(model.order) - blocks * length + 1):
            order = change(model.order, start, length)
            if order:                                   # at least one layer is left
                with running(model, order):
                    rows.append(dict(size=length, start=start) | score(model))
    return rows


if __name__ == '__main__':
    from training.checkpoint import load        # here: who imports a probe needs no training
    from training.loader import Loader
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for folder in sys.argv[1:]:
        try:
            model, saved = load(folder)
            data, context = saved['config']['data'], saved['config']['context']
            val = Loader(data, 20, context, 'val')              # as many rows as in the papers
            require(saved['data'].get('val') in (None, val.description()),
                    f'{data} is not what {folder} was trained on')
            score, w = depth_score(model.eval(), val.batch(0)[0])
        except Refused as error:
            sys.exit(f'probe: {error}')
        print(f'{folder}: depth score {score:.2f}; by layer', *(f'{each:.4f}' for each in w))
