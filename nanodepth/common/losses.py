"""The loss, in pieces where the vocabulary is large. The logits of a large vocabulary are the
largest tensor of a step, but the loss needs only one number of each row. Computed in pieces, they
never exist all at once, which saves time and memory.
Usage: loss = mean_loss(x, head.weight, targets)    # the mean cross-entropy of x @ weight.T
"""
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# From this size of vocabulary on the loss is computed in pieces.
LARGE_VOCABULARY = 16_384
PIECE = 4096                # tokens of a piece whose logits are made once more
PIECE_KEPT = 16_384         # tokens of a piece whose logits are kept
PIECE_ON_CPU = 512          # torch itself would choose a dozen, five times as slow
LOGITS_AT_ONCE = 2 ** 26    # numbers: three copies of them are less than 1 GiB


def loss_of_a_piece(x, weight, targets, ignore_index):
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=ignore_index,
                           reduction='sum')


def losses_of_a_piece(x, weight, targets, ignore_index):
    logits = F.linear(x, weight)
    return (F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction='none'),
            logits.argmax(-1))


compiled = {}           # {device: {a function of a piece: the same, compiled}}


def compile_piece(device):
    "One pass over a piece's logits instead of a dozen: on a GPU they cost as much as five layers."
    if device not in compiled:
        compiled[device] = {each: torch.compile(each, dynamic=False)
                            for each in (loss_of_a_piece, losses_of_a_piece)}


def picked(function, x):
    return compiled.get(x.device.type, {}).get(function, function)


def has_room(x, weight):
    """Would all logits, in bfloat16, fit into a tenth of the GPU? Only a compiled piece keeps no
    more than those."""
    tenth = torch.cuda.get_device_properties(x.device).total_memory // 10
    return x.device.type in compiled and 2 * len(x) * len(weight) <= tenth


def loss_in_pieces(x, weight, targets, ignore_index, keep):
    """The pieces' losses together. What is not kept the backward makes once more: with any torch,
    in the precision of autocast."""
    loss_of = picked(loss_of_a_piece, x)
    if not keep:
        loss_of = functools.partial(checkpoint, loss_of, use_reentrant=False,
                                    preserve_rng_state=False)
    size = PIECE_KEPT if keep else PIECE
    return sum(loss_of(some, weight, right, ignore_index)
               for some, right in zip(x.split(size), targets.split(size)))


def mean_loss(x, weight, targets, ignore_index=-1):
    """Mean cross-entropy over the targets that count, 0 if none does: x (B, T, C), weight (V, C),
    targets (B, T)."""
    x = x.flatten(0, -2)                # (B*T, C)
    targets = targets.flatten()         # (B*T,)
    options = dict(ignore_index=ignore_index, reduction='sum')
    can = x.is_cuda or hasattr(nn, 'LinearCrossEntropyOptions')     # on a CPU from torch 2.12 on
    if len(weight) < LARGE_VOCABULARY or not can:
        loss = F.cross_entropy(F.linear(x, weight).float(), targets, **options)
    elif x.is_cuda:
        loss = loss_in_pieces(x, weight, targets, ignore_index, has_room(x, weight))
    else:
        if torch.is_autocast_enabled(x.device.type):        # autocast does not know this function
            x, weight = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (x, weight))
        if x.dtype != torch.float32:
            # torch would sum in bfloat16 and lose half of it: we sum below
            options['reduction'] = 'none'
        pieces = nn.LinearCrossEntropyOptions(batch_chunk_size=PIECE_ON_CPU)
        loss = F.linear_cross_entropy(x, weight, targets, options=pieces, **options)
    return loss.float().sum() / (targets != ignore_index).sum().clamp(min=1)


def each_loss(x, weight, targets, ignore_index=-1):
    "(the loss of each target, the likeliest token at its place), (B, T) each, without a backward."
    losses_of = picked(losses_of_a_piece, x)
    size = PIECE if x.is_cuda else max(1, LOGITS_AT_ONCE // len(weight))
    pieces = [losses_of(some, weight, right, ignore_index)
              for some, right in zip(x.flatten(0, -2).split(size), targets.flatten().split(size))]
    return [torch.cat(part).view_as(targets) for part in zip(*pieces)]
