"""The loss, in pieces where the vocabulary is large.

The idea: the logits of a large vocabulary are the largest tensor of a step, and the loss needs only
one number of each row. Computed in pieces of some hundred tokens, they never exist all at once: at
30M parameters and 49,152 words a step takes two thirds of the time and three fifths of the memory
(docs/bench.md).

Paper: none. On a CPU torch's linear_cross_entropy does the work (2.12 and later; before that, all
logits at once), on a GPU each piece is computed again in the backward pass.

Usage:
    loss = mean_loss(x, head.weight, targets)   # the mean cross-entropy of x @ weight.T
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# From this size of vocabulary on the loss is computed in pieces.
LARGE_VOCABULARY = 16_384
PIECE = 4096                # tokens of a piece
PIECE_ON_CPU = 512          # torch itself would choose a dozen, five times as slow


def loss_of_a_piece(x, weight, targets, ignore_index):
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=ignore_index,
                           reduction='sum')


compiled = {}           # {device: loss_of_a_piece, compiled}


def compile_piece(device):
    "One pass over a piece's logits instead of a dozen: on a GPU they cost as much as five layers."
    if device not in compiled:
        compiled[device] = torch.compile(loss_of_a_piece, dynamic=False)


def loss_by_recomputing(x, weight, targets, ignore_index):
    "The backward makes a piece's logits once more: with any torch, in the precision of autocast."
    loss_of = compiled.get(x.device.type, loss_of_a_piece)
    total = 0.0
    for some, right in zip(x.split(PIECE), targets.split(PIECE)):
        total = total + checkpoint(loss_of, some, weight, right, ignore_index,
                                   use_reentrant=False, preserve_rng_state=False)
    return total


def mean_loss(x, weight, targets, ignore_index=-1):
    """Mean cross-entropy over the targets that count, 0 if none does: x (B, T, C), weight (V, C),
    targets (B, T)."""
    x = x.flatten(0, -2)                # (B*T, C)
    targets = targets.flatten()         # (B*T,)
    options = dict(ignore_index=ignore_index, reduction='sum')
    can = x.is_cuda or hasattr(nn, 'LinearCrossEntropyOptions')
    if len(weight) < LARGE_VOCABULARY or not can:
        loss = F.cross_entropy(F.linear(x, weight).float(), targets, **options)
    elif x.is_cuda:
        loss = loss_by_recomputing(x, weight, targets, ignore_index)
    else:
        if torch.is_autocast_enabled(x.device.type):        # autocast does not know this function
            x, weight = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (x, weight))
        if x.dtype != torch.float32:
            # torch would sum in bfloat16 and lose half of it: we sum below
            options['reduction'] = 'none'
        pieces = nn.LinearCrossEntropyOptions(batch_chunk_size=PIECE_ON_CPU)
        loss = F.linear_cross_entropy(x, weight, targets, options=pieces, **options)
    return loss.float().sum() / (targets != ignore_index).sum().clamp(min=1)
