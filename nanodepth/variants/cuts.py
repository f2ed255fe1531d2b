"""Which layers of a pretrained model to keep, if no shape says it: those that matter most.

The idea: a model's middle layers do similar things, so some can go. A measure says which: how far
each turns the residual stream, or the loss of every selection before any training.

Paper: "Retrofitted Recurrence", appendix C.1.1 (the search; ShortGPT's block influence of Men et
al., 2024, as the alternative).
Here: the paper trains each selection of its search; `screen` only looks at the loss of the cut.

Usage:
    prelude, core, coda = by_influence(model, (4, 8, 4), tokens)
    loss, (prelude, core, coda) = screen(model, (4, 8, 4), tokens, targets)[0]      # the lowest
"""
import torch
import torch.nn as nn


@torch.no_grad()
def block_influence(model, tokens):
    "ShortGPT's: how far each layer turns the residual stream, 1 - cosine."
    x = model.embed(tokens)
    distances = []
    for depth, i in enumerate(model.order):
        y = model.run(x, [i], depth=depth)
        distances.append(1 - nn.functional.cosine_similarity(x, y, dim=-1).mean().item())
        x = y
    return distances


def by_influence(model, sizes, tokens):
    "(prelude, core, coda) of these sizes without the layers that turn the stream least."
    p, r, c = sizes
    influence = block_influence(model, tokens)
    kept = sorted(sorted(range(len(influence)), key=lambda i: -influence[i])[:p + r + c])
    return kept[:p], kept[p:p + r], kept[p + r:]


def selections(n_layer, sizes):
    "The first p layers, r neighbours after them, and c neighbours after those, in every way."
    p, r, c = sizes
    return [([*range(p)], [*range(a, a + r)], [*range(b, b + c)])
            for a in range(p, n_layer - r - c + 1)
            for b in (range(a + r, n_layer - c + 1) if c else [n_layer])]


@torch.no_grad()
def screen(parent, sizes, tokens, targets):
    """[(loss, (prelude, core, coda))] of every selection, each kept layer once, best first. The
    targets say which tokens count: the loss is the one that training would have."""
    tried = [(parent(tokens, targets, order=sum(parts, [])).item(), parts)
             for parts in selections(len(parent.layers), sizes)]
    return sorted(tried, key=lambda row: row[0])
