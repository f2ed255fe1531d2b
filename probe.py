"""See which layers a model uses: depth scores, interventions, norms, weight similarity, early
exits.

The idea: take a layer's contribution away, or put layers in another order, and look at what
changes. A `tap` sees and changes each sublayer's update, an order says which layers run, `run` goes
on from any depth: every probe here is a few lines over these three.

Papers: "Do Depth-Grown Models Overcome the Curse of Depth?", section 4 and appendix B; "From
Growing to Looping", section 4.1 and appendix E (after Csordas et al.).
Here, where they are silent or differ: layers are counted from 0. For tokens 0 to t a layer's
contribution is removed, and the effect is measured at the later tokens, t + 1 and on (their first
paper; the second's text leaves this out); t is every position of up to 32 tokens, else 16 drawn
ones. What is observed is the update of a whole layer. Everything before an erased layer stays as it
was, so only the rest is run, for all boundaries at once. A looped model is probed by its unrolled
depth, a retrofitted one with the number of recurrences it has.

Usage:
    score, per_layer = depth_score(model, tokens)  # where does its work reach later tokens?
    # (D, D): [erased, observed]
    matrix = future_effects(model, tokens, part='attn', propagate=False)
    python probe.py out/baseline out/lidas out/loop_2x4  # a page of pictures: out/probe/index.html
"""
import torch

from common.errors import Refused
from loop import repeat_block, running
from model import check_order
from retrofit import Recurrent

# of the probes' definitions: what an older one has measured is not taken from the cache
VERSION = 1
PARTS = ('layer', 'attn', 'mlp')


# ------------------------------------------------------------------------------ what a forward does

def order_of(model, order=None):
    if isinstance(model, Recurrent):
        if order is not None:
            raise Refused('a recurrent core runs in an order of its own: its probes take no other')
        return model.order
    return model.order if order is None else check_order(order, len(model.layers))


def watch(change=lambda depth, part, update: update):
    "(a tap that may change updates, {depth: the whole layer's update} that it fills)"
    found = {}

    def tap(depth, part, x, update):
        update = change(depth, part, update)
        found[depth] = found[depth] + update if depth in found else update
        return update
    return tap, found


def hidden(model, tokens, order, tap):
    return (model.hidden(tokens, tap=tap) if isinstance(model, Recurrent) else model.hidden(tokens,
            order=order, tap=tap))


@torch.no_grad()
def record(model, tokens, order=None):
    """What each layer got and what its sublayers added: {'input', 'attn', 'mlp'}, (D, B, T, C)
    each, and the last stream, 'out' (B, T, C)."""
    kept = dict(input=[], attn=[], mlp=[])

    def tap(depth, part, x, update):
        if part == 'attn':
            kept['input'].append(x)
        kept[part].append(update)
        return update
    out = hidden(model, tokens, order_of(model, order), tap)
    return {name: torch.stack(values) for name, values in kept.items()} | dict(out=out)


def pick_boundaries(T, boundaries=None, seed=0):
    """The positions t: layers are erased at tokens up to t, and effects measured at the tokens
    after it."""
    if boundaries is None:
        some = torch.randperm(T - 1,
                              generator=torch.Generator().manual_seed(seed))[:16].sort().values
        boundaries = range(T - 1) if T <= 32 else some.tolist()
    boundaries = [int(t) for t in boundaries]
    if not boundaries or min(boundaries) < 0 or max(boundaries) > T - 2:
        raise Refused(f'boundaries={boundaries}: a boundary is a position from 0 to {T - 2} of '
                      f'{T} tokens, with others behind it')
    return boundaries


# ------------------------------------------------------------------------------ taking a layer away

# tokens that are run at once; probabilities that are held at once
ROWS, NUMBERS = 2 ** 15, 2 ** 27


@torch.no_grad()
def effects(model, tokens, *, part='layer', propagate=True, future=True, boundaries=None,
            order=None, output=False, progress=lambda it: it):
    """(matrix (D, D): the largest relative change of a later layer's update when an earlier one is
    erased; with `output`, the (D, B) largest L2 changes of the output distribution, else None).
    future=False erases at all tokens and looks at all."""
    if part not in PARTS:
        raise Refused(f'part={part!r} must be one of {", ".join(PARTS)}')
    order, (B, T) = order_of(model, order), tokens.shape
    D, lm, was = len(order), getattr(model, 'lm', model), record(model, tokens,
            order if not isinstance(model, Recurrent) else None)
    updates = was['attn'] + was['mlp']  # (D, B, T, C)
    contribution = updates if part == 'layer' else was[part]
    ts = pick_boundaries(T, boundaries) if future else [T - 1]
    # (n, T): erased here,
    gone = torch.arange(T, device=tokens.device) <= torch.tensor(ts, device=tokens.device)[:, None]
    seen = ~gone if future else gone  # (n, T): looked at here
    matrix, outputs = torch.zeros(D, D, device=tokens.device), torch.zeros(D, B,
            device=tokens.device)
    sizes = updates.norm(dim=-1).clamp(min=torch.finfo(updates.dtype).tiny)  # (D, B, T)
    says = lambda x: model.head(model.norm(x)).float().softmax(-1)  # (.., V)

    def largest(new, d, rows):
        """The largest relative change of layer d's update, new (n, B, T, C), at the positions
        looked at."""
        change = (new - updates[d]).norm(dim=-1) / sizes[d]  # (n, B, T)
        return change.masked_fill(~seen[rows][:, None], 0).max()

    if not propagate and isinstance(model, Recurrent):
        raise Refused('local effects take a contribution out of a later input: behind an '
                      'adapter there is none to take; use propagate=True')
    at_once = max(1,
                  min(ROWS // (B * T), NUMBERS // (T * model.config.vocab_size) if output
                      else ROWS))
    for s in progress(range(D)):
        for first in range(0, len(ts), at_once):
            rows = slice(first, first + at_once)
            erase = gone[rows][:, None, :, None]  # (n, 1, T, 1)
            n = len(erase)
            if propagate:
                tap, found = watch(lambda depth, which,
                                   update: update if depth != s or part not in ('layer', which)
                                   else update.view(n, B, T, -1).masked_fill(erase, 0).flatten(0,
                                           1))
                if isinstance(model, Recurrent):
                    x = model.hidden(tokens.repeat(n, 1), tap=tap)
                else:
                    x = lm.run(was['input'][s].repeat(n, 1, 1), order[s:], depth=s, tap=tap)
                for d in range(s + 1, D):
                    matrix[s, d] = torch.maximum(matrix[s, d],
                                                 largest(found[d].view(n, B, T, -1), d, rows))
                if output:
                    x = x.view(n, B, T, -1)
                    # a large vocabulary: some examples at once
                    few = max(1, NUMBERS // (n * T * model.config.vocab_size))
                    for some in torch.arange(B).split(few):
                        # (n, b, T)
                        change = (says(x[:, some]) - says(was['out'][some])).norm(
                            dim=-1).masked_fill(~seen[rows][:, None], 0)
                        outputs[s, some] = torch.maximum(outputs[s, some], change.amax(dim=(0, 2)))
            else:
                for d in range(s + 1, D):
                    # (n B, T, C)
                    x = (was['input'][d] - contribution[s].masked_fill(~erase, 0)).flatten(0, 1)
                    tap, found = watch()
                    lm.run(x, [order[d]], depth=d, tap=tap)
                    matrix[s, d] = torch.maximum(matrix[s, d],
                                                 largest(found[d].view(n, B, T, -1), d, rows))
    return matrix, outputs if output else None


def depth_score(model, tokens, *, boundaries=None, order=None, progress=lambda it: it):
    """(the mean depth, from 0 on, weighted by how much each layer's contribution to earlier tokens
    matters for the output at later ones; those weights (D,), the mean over examples of the largest
    change)."""
    _, outputs = effects(model, tokens, boundaries=boundaries, order=order, output=True,
                         progress=progress)
    return score_of(outputs.mean(1)), outputs.mean(1)


def score_of(per_layer):
    total = per_layer.sum()
    return ((torch.arange(len(per_layer), device=per_layer.device) * per_layer).sum().item()
            / total.item() if total > 0 else 0.0)


def future_effects(model, tokens, *, part='layer', propagate=True, future=True, boundaries=None,
                   order=None):
    """(D, D) [erased, observed]: the largest relative change of a later layer's update.
    propagate=False: each later layer sees the erased contribution missing from its own input, and
    nothing else changes."""
    return effects(model, tokens, part=part, propagate=propagate, future=future,
                   boundaries=boundaries, order=order)[0]


# ------------------------------------------------------------------------------------------ looking

@torch.no_grad()
def residual_norms(model, tokens, *, order=None):
    """{name: (D,)}, means over tokens: the stream's norm; of the layer and of each sublayer, its
    share of the stream it adds to, and their cosine."""
    was = record(model, tokens, order)
    adds = dict(layer=(was['attn'] + was['mlp'], was['input']), attn=(was['attn'], was['input']),
                mlp=(was['mlp'], was['input'] + was['attn']))
    found = dict(stream=was['input'].norm(dim=-1).mean(dim=(1, 2)))
    for name, (update, stream) in adds.items():
        found[f'{name} share'] = (update.norm(dim=-1) / stream.norm(dim=-1).clamp(min=1e-12)).mean(
            dim=(1, 2))
        found[f'{name} cosine'] = torch.cosine_similarity(update, stream, dim=-1).mean(dim=(1, 2))
    return found


@torch.no_grad()
def block_similarity(model, block=1):
    """Cosines between the MLP weights of the model's blocks of layers, all their matrices as one
    vector: (blocks, blocks)."""
    layers = getattr(model, 'lm', model).layers
    if len(layers) % block:
        raise Refused(f'{len(layers)} layers do not divide into blocks of {block}')
    # (L, N)
    flat = torch.stack([torch.cat([p.flatten().float() for p in layer.mlp.parameters()])
                        for layer in layers])
    flat = flat.view(len(layers) // block, -1)
    return torch.nn.functional.normalize(flat, dim=1) @ torch.nn.functional.normalize(flat, dim=1).T


def by_lag(similarity):
    "The mean of a (n, n) similarity at each distance of two blocks: (n,)."
    return torch.stack([similarity.diagonal(lag).mean() for lag in range(len(similarity))])


# ------------------------------------------------------------------------------------------- orders

def place(order, start, length, needed):
    order = list(order)
    if not (0 <= start and 1 <= length and start + needed <= len(order)):
        raise Refused(f'{needed} layers from position {start} on do not lie within an order of '
                      f'{len(order)} positions')
    return order


def swap_blocks(order, start, length):
    "The `length` layers from `start` on change places with as many behind them."
    order = place(order, start, length, 2 * length)
    return order[:start] + order[start + length:start + 2 * length] + order[start:start
            + length] + order[start + 2 * length:]


def skip_blocks(order, start, length):
    order = place(order, start, length, length)
    return order[:start] + order[start + length:]


def reverse_block(order, start, length):
    order = place(order, start, length, length)
    return order[:start] + order[start:start + length][::-1] + order[start + length:]


def permute_block(order, start, length, seed=0):
    "The `length` layers from `start` on in another order, drawn."
    order = place(order, start, length, length)
    turns = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    return order[:start] + [order[start + i] for i in turns] + order[start + length:]


def order_sweep(model, look, change, lengths, progress=lambda it: it):
    """[{'size', 'start', **look(model)}] with `change` made at every place where it fits; first, as
    size 0, the model as it is. `look` says how good a model is."""
    todo, order = [(0, 0, order_of(model))], order_of(model)
    for length in lengths:
        for start in range(len(order)):
            try:
                todo.append((length, start,
                             check_order(change(order, start, length), len(model.layers))))
            except ValueError:          # it does not fit here, or leaves no layer
                continue
    rows = []
    for length, start, new in progress(todo):
        with running(model, new):
            rows.append(dict(size=length, start=start) | look(model))
    return rows


def repeat_sweep(model, look, lengths=(1, 2, 4), times=2, **options):
    "order_sweep with every block run several times."
    return order_sweep(model, look, lambda order, start,
                       length: repeat_block(order, start, length, times), lengths, **options)


if __name__ == '__main__':
    from nanodepth import main; main('probe')        # noqa: E702
