"""Which layers of a pretrained model to keep, if no shape says it: those that matter most.

The idea: a model's middle layers do similar things, so some can go: those that turn the residual
stream least.

Paper: "Retrofitted Recurrence", appendix C.1.1 (ShortGPT's block influence, Men et al., 2024, which
the authors' own choice beats).

Usage:
    prelude, core, coda = by_influence(model, (4, 8, 4), tokens)
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
