"""Which layers of a pretrained model are kept, and as what: prelude, core, coda.

The idea: a model's middle layers do similar things, so some can go. By the shape (4-8-4) the first layers become the prelude, the last
ones the coda, those before them the core, and what lies between is dropped. Or a measure says which layers matter: how far each
turns the residual stream, or the loss of every selection before any training.

Paper: "Retrofitted Recurrence", section 3 (model surgery), appendix C.1.1 (the search; ShortGPT's block influence of Men et al., 2024, as
the alternative) and E (the lists).
Here: the paper trains each selection of its search; `screen` only looks at the loss of the cut.

Usage:
    cut('4-8-4', 22)                            # ([0, 1, 2, 3], [10, ..., 17], [18, 19, 20, 21])
    by_influence(model, '4-8-4', tokens)        # the same shape of the layers that turn the stream most
    prune(model, [0, 1, 4, 5])                  # an LM of copies of some layers, each run once
"""
import copy
import dataclasses

import torch
import torch.nn as nn

from common.columns import columns
from common.errors import Refused
from model import LM


def cut(shape, n_layer):
    "'4-8-4' to three lists of layers."
    try:
        p, r, c = map(int, shape.split('-'))
    except ValueError:
        raise Refused(f'the shape {shape!r} is not three numbers of layers, such as 4-8-4') from None
    if min(p, c) < 0 or r < 1 or p + r + c > n_layer:
        raise Refused(f'the shape {shape!r} needs {p + r + c} layers and a core of at least one, but the model has {n_layer}')
    first = n_layer - c - r
    return [*range(p)], [*range(first, first + r)], [*range(n_layer - c, n_layer)]


def prune(model, kept):
    "An LM of copies of some of another's layers, each run once: what surgery cuts, and its dense partner."
    meta = dataclasses.replace(model.config, n_layer=len(kept), order=None)
    with torch.device('meta'):
        lm = LM(meta)
    lm.embed, lm.norm, lm.head = (copy.deepcopy(part) for part in (model.embed, model.norm, model.head))
    if model.config.tie_embeddings:
        lm.head.weight = lm.embed.weight
    lm.layers = nn.ModuleList(copy.deepcopy(model.layers[i]) for i in kept)
    lm.cos, lm.sin = model.cos.clone(), model.sin.clone()
    return lm.train(model.training)


@torch.no_grad()
def block_influence(model, tokens):
    "ShortGPT's: how far each layer turns the residual stream, 1 - cosine. The least influential layers can go first."
    x, found = model.embed(tokens), []
    for depth, i in enumerate(model.order):
        y = model.run(x, [i], depth=depth)
        found.append(1 - nn.functional.cosine_similarity(x, y, dim=-1).mean().item())
        x = y
    return found


def by_influence(model, shape, tokens):
    "The three lists of a shape when the layers that turn the stream least are dropped, wherever they are."
    p, r, c = (len(part) for part in cut(shape, len(model.layers)))
    influence = block_influence(model, tokens)
    kept = sorted(sorted(range(len(influence)), key=lambda i: -influence[i])[:p + r + c])
    return kept[:p], kept[p:p + r], kept[p + r:]


def selections(n_layer, shape):
    "Every way to take the first p layers, r neighbours after them, and c neighbours after those: what the paper searches."
    p, r, c = (len(part) for part in cut(shape, n_layer))
    return [([*range(p)], [*range(a, a + r)], [*range(b, b + c)]) for a in range(p, n_layer - r - c + 1)
            for b in (range(a + r, n_layer - c + 1) if c else [n_layer])]


@torch.no_grad()
def screen(parent, shape, tokens):
    "Every selection's loss before any training, each kept layer once, best first: a cheap look at what the paper trains for."
    rows = []
    for parts in selections(len(parent.layers), shape):
        order = [i for part in parts for i in part]
        rows.append([parent(tokens[:, :-1], tokens[:, 1:], order=order).item(), *(' '.join(map(str, part)) for part in parts)])
    return columns([['loss', 'prelude', 'core', 'coda'], *([f'{loss:.3f}', *parts] for loss, *parts in sorted(rows))])
