"""See which layers a model uses: depth scores, interventions, norms, weight similarity, orders.

The idea: take a layer's contribution away, or put layers in another order, and see what changes.
All probes are made of two things: a `tap`, which sees and changes each sublayer's update, and an
order, which decides the layers that run.

Papers: "Do Depth-Grown Models Overcome the Curse of Depth?", section 4 and appendix B; "From
Growing to Looping", section 4.1 and appendix E (after Csordas et al.).
What the papers leave open or do in two ways: here, a layer's contribution is removed for the tokens
0 to t, and the effect is measured at later tokens. In rows of up to 32 tokens this is done for each
t, and in longer rows for 16 random t.

Usage:
    score, per_layer = depth_score(model, tokens)       # which layers work for later tokens?
    matrix = future_effects(model, tokens, part='attn', propagate=False)    # (D, D)
    with in_order(model, order): score, _ = depth_score(model, tokens)       # in another order
    python probe.py out/baseline out/lidas      # prints depth scores, on each run's own data
"""
import sys

import torch

from loop import in_order, three_parts
from model import Pass, Refused, require, spans_in, unrolled

ROWS = 20       # as many prompts as in Figure 1B of the first paper


# ------------------------------------------------------------------ the idea: what moves without it

@torch.no_grad()
def depth_score(model, tokens, boundaries=None):
    """Return the depth score and w, (D,). For w[d], the layer at depth d is erased at the tokens up
    to t, and the predicted probabilities of later tokens move. w[d] is the largest move over all t
    and all later tokens, averaged over the rows. (w of the last layer is 0, because no attention
    follows it.) The score is the mean of the depths d, weighted by w[d]."""
    plain = as_it_is(model, tokens)
    D = len(unrolled(model.order))
    B, T = tokens.shape
    largest = torch.zeros(D, B, device=tokens.device)
    for d in range(D):
        for t in pick_boundaries(T, boundaries):
            without = model.hidden(tokens, tap=erase(d, t))
            moved = distance(model, without[:, t + 1:], plain[:, t + 1:])
            largest[d] = torch.maximum(largest[d], moved.amax(1))
    w = largest.mean(1)
    depths = torch.arange(D, device=w.device)
    return (depths * w).sum().item() / max(w.sum().item(), 1e-30), w


def erase(erased, t, what='layer'):
    """Return a tap that removes what a layer ('layer'), or its 'attn' or 'mlp', adds at the tokens
    up to t."""
    def tap(depth, part, x, update):
        if depth == erased and what in ('layer', part):
            update = update.clone()
            update[:, :t + 1] = 0
        return update
    return tap


def distance(model, a, b):
    """Return how far apart the predicted probabilities are that follow from two last streams a and
    b, (B, T, C) each: (B, T)."""
    def probabilities(x):
        return model.head(model.norm(x)).float().softmax(-1)

    rows = zip(a, b)                # one row at a time, because the vocabulary may be large
    return torch.stack([(probabilities(x) - probabilities(y)).norm(dim=-1) for x, y in rows])


def pick_boundaries(T, boundaries=None):
    """Return the tokens t: layers are erased at the tokens up to t, and effects are measured at the
    tokens after t."""
    require(T >= 2, 'rows need at least two tokens, so that one of them is a later one')
    if boundaries is None and T <= 32:
        boundaries = range(T - 1)
    elif boundaries is None:
        drawn = torch.randperm(T - 1, generator=torch.Generator().manual_seed(0))[:16]
        boundaries = drawn.sort().values.tolist()
    require(len(boundaries) and 0 <= min(boundaries) and max(boundaries) <= T - 2,
            f'boundaries={boundaries}: after each, at least one of the {T} tokens must follow')
    return boundaries


def as_it_is(model, tokens, see=lambda depth, part, x, update: None):
    """Return the last stream (B, T, C) of the unchanged model. `see` is called with what each
    sublayer adds. A model is refused if a depth runs more than once, or if a second forward pass
    returns another stream."""
    shown = []

    def tap(depth, part, x, update):
        shown.append((depth, part))
        see(depth, part, x, update)
        return update

    out = model.hidden(tokens, tap=tap)
    depths = range(len(unrolled(model.order)))
    require(shown == [(d, part) for d in depths for part in ('attn', 'mlp')],
            'a probe needs a model that runs each depth once, and a Window runs it several times: '
            'probe the model without a Window')
    require(torch.equal(out, model.hidden(tokens)), 'two forward passes of this model differ, as a '
            'Span draws noise or numbers are not finite, so no effect can be measured')
    return out


# ------------------------------------------------------------------------- the same on later layers

@torch.no_grad()
def future_effects(model, tokens, part='layer', propagate=True, future=True, boundaries=None):
    """Return a matrix (D, D) [erased, observed]: the largest relative change of a later layer's
    update if an earlier layer's contribution is erased.

    future      True: the contribution is erased at the tokens up to t, and changes are observed at
                later tokens. False: both at all tokens
    propagate   True: all later layers run without the contribution. False: it is missing only from
                the input of the observed layer, and the layers in between are unchanged
    """
    require(part in ('layer', 'attn', 'mlp'), f'part={part} must be layer, attn or mlp')
    require(propagate or not spans_in(model.order), 'propagate=False is for an order of layers '
            'alone, because a Span, such as a Core, changes the input of its layers')
    recorded = record(model, tokens)
    plain = recorded['attn'] + recorded['mlp']                                  # (D, B, T, C)
    sizes = plain.norm(dim=-1).clamp(min=torch.finfo(plain.dtype).tiny)         # (D, B, T)
    D, T = len(plain), tokens.shape[1]
    boundaries = pick_boundaries(T, boundaries) if future else [T - 1]
    matrix = torch.zeros(D, D, device=tokens.device)
    for erased in range(D):
        for t in boundaries:
            if propagate:
                updates = {}
                model.hidden(tokens, tap=add_to(updates, erase(erased, t, part)))
            else:
                updates = directly_without(model, recorded, erased, t, part)
            for d in range(erased + 1, D):
                moved = (updates[d] - plain[d]).norm(dim=-1) / sizes[d]         # (B, T)
                later = moved[:, t + 1:] if future else moved
                matrix[erased, d] = torch.maximum(matrix[erased, d], later.max())
    return matrix


def add_to(updates, first=None):
    """Return a tap that fills `updates` with {depth: what its layer adds (B, T, C)}. `first` is a
    tap that is applied before."""
    def tap(depth, part, x, update):
        if first is not None:
            update = first(depth, part, x, update)
        updates[depth] = updates.get(depth, 0) + update
        return update
    return tap


def directly_without(model, recorded, erased, t, part):
    """Return {later depth: its update}, where the contribution is missing from the input of that
    layer alone."""
    parts = ('attn', 'mlp') if part == 'layer' else (part,)
    added = sum(recorded[name][erased] for name in parts)
    updates = {}
    for d in range(erased + 1, len(recorded['input'])):
        x = recorded['input'][d].clone()                                        # (B, T, C)
        x[:, :t + 1] -= added[:, :t + 1]
        run = Pass(model, x.shape[1], tap=add_to(updates))
        run(x, [model.order[d]], d)
    return updates


@torch.no_grad()
def record(model, tokens):
    """Return the inputs of all layers and what their sublayers add: {'input', 'attn', 'mlp'},
    (D, B, T, C) each."""
    kept = dict(input=[], attn=[], mlp=[])

    def see(depth, part, x, update):
        if part == 'attn':
            kept['input'].append(x)
        kept[part].append(update)

    as_it_is(model, tokens, see)
    return {name: torch.stack(values) for name, values in kept.items()}


# ---------------------------------------------------------------------------- streams and weights

@torch.no_grad()
def residual_norms(model, tokens):
    """Return {name: (D,)}, means over all tokens: the norm of the stream before each layer; the
    norm of what the layer and each sublayer add, as a share of the stream's; the cosine of what
    they add with the stream; and by how many degrees the layer turns the stream."""
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
    """Return the cosines between the MLP weights of blocks of layers, each block as one vector:
    (blocks, blocks)."""
    assert len(model.layers) % block == 0, f'{len(model.layers)} layers in blocks of {block}'
    flat = torch.stack([torch.cat([p.flatten().float() for p in layer.mlp.parameters()])
                        for layer in model.layers])                             # (L, N)
    blocks = torch.nn.functional.normalize(flat.view(-1, block * flat.shape[1]), dim=1)
    return blocks @ blocks.T


# ----------------------------------------------------------------------------------- other orders

def swap_blocks(order, start, length):
    "Swap `length` layers, from `start` on, with the `length` layers after them."
    before, both, after = three_parts(order, start, 2 * length)
    return before + both[length:] + both[:length] + after


def skip_blocks(order, start, length):
    "Leave out `length` layers, from `start` on."
    before, _, after = three_parts(order, start, length)
    return before + after


def reverse_block(order, start, length):
    "Reverse `length` layers, from `start` on."
    before, block, after = three_parts(order, start, length)
    return before + block[::-1] + after


swap_blocks.blocks = 2      # how many blocks a change needs, if this is not one


def order_sweep(model, score, change, lengths):
    """Return [{'size', 'start', **score(model)}, ...] with `change` made at each start where its
    blocks fit. The row of size 0 is the model as it is."""
    rows = [dict(size=0, start=0) | score(model)]
    for length in lengths:
        needed = length * getattr(change, 'blocks', 1)
        for start in range(len(model.order) - needed + 1):
            order = change(model.order, start, length)
            if order:               # at least one layer is left
                with in_order(model, order):
                    rows.append(dict(size=length, start=start) | score(model))
    return rows


if __name__ == '__main__':
    from training.checkpoint import load        # only here: importing a probe needs no training
    from training.loader import Loader
    if len(sys.argv) < 2 or sys.argv[1].startswith('-'):
        raise SystemExit(__doc__)
    for folder in sys.argv[1:]:
        try:
            model, saved = load(folder)
            data, context = saved['config']['data'], saved['config']['context']
            val = Loader(data, ROWS, context, 'val')
            require(saved['data'].get('val') in (None, val.description()),
                    f'{data} has changed since {folder} was trained')
            score, w = depth_score(model.eval(), val.batch(0)[0])
        except Refused as error:
            sys.exit(f'probe: {error}')
        print(f'{folder}: depth score {score:.2f}; by layer', *(f'{each:.4f}' for each in w))
