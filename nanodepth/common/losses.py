"""The loss of each token, in pieces: the logits of a large vocabulary would be the largest tensor.
Usage: losses, likeliest = each_loss(x, head.weight, targets)      # to measure with
"""
import torch
import torch.nn.functional as F

LARGE_VOCABULARY = 16_384
PIECE = 4096                # tokens of a piece on a GPU
LOGITS_AT_ONCE = 2 ** 26    # numbers: three copies of them are less than 1 GiB


def each_loss(x, weight, targets, ignore_index=-1):
    "(the loss of each target, the likeliest token at its place), (B, T) each, without a backward."
    size = PIECE if x.is_cuda else max(1, LOGITS_AT_ONCE // len(weight))
    losses, likeliest = [], []
    for some, right in zip(x.flatten(0, -2).split(size), targets.flatten().split(size)):
        logits = F.linear(some, weight)
        losses.append(F.cross_entropy(logits.float(), right, ignore_index=ignore_index,
                                      reduction='none'))
        likeliest.append(logits.argmax(-1))
    return [torch.cat(part).view_as(targets) for part in (losses, likeliest)]
