"""What a model's losses and answers are on data: each batch's sums, and each row's own.

Usage:
    loss, kinds = measure(model, loader, batches=8)     # of a Loader of validation rows
"""
import math

import torch
import torch.nn.functional as F

from nanodepth.looping.layers import device_of, is_ours, width_of
from nanodepth.train import BEGINS, answers_of, losses_of as our_losses

LOGITS_AT_ONCE = 2 ** 26    # numbers: three copies of them are less than 1 GiB


def measure(model, loader, batches=None):
    """(loss, {kind: {'loss', 'accuracy'}}) over the first batches (None: until a dataset ends), the
    kinds being the marks that the data carries. Instead of a model, any function from tokens to
    logits will do."""
    sums = torch.zeros(1 + len(loader.kinds), 4, dtype=torch.float64)
    for of_batch, *_ in measured(model, loader, batches):
        sums += of_batch
    loss, n, right, total = sums.unbind(1)
    return (loss[0] / n[0].clamp(min=1)).item(), {
        kind: dict(loss=(loss[k] / n[k]).item(), accuracy=(right[k] / total[k]).item())
        for k, kind in enumerate(loader.kinds, 1) if total[k]}


@torch.no_grad()
def measured(model, loader, batches=None, pieces=1):
    """Of each batch: the sums of (loss, tokens, answers right, answers) over all tokens and then
    over each kind, [(loss, tokens) of each row], and {kind: which answers are right}."""
    is_model = isinstance(model, torch.nn.Module)
    was_training = is_model and model.training
    if is_model:
        model.eval()
    steps = len(loader) if batches is None else min(batches, len(loader))
    for step in range(steps):
        sums = torch.zeros(1 + len(loader.kinds), 4, dtype=torch.float64)
        rows = []
        right_of = {kind: [] for kind in loader.kinds}
        for tokens, targets, marks in zip(*(t.chunk(pieces) for t in loader.batch(step, False))):
            if not len(tokens):
                continue
            counts = targets != -1
            losses, wrong = losses_of(model, tokens, targets)
            kind_of, right = answers(marks, wrong, losses.isnan())
            rows += torch.stack([losses.where(counts, 0).sum(1), counts.sum(1).double()], dim=1)
            for k, kind in enumerate(loader.kinds, 1):
                here = marks % BEGINS == k
                hits = right[kind_of == k]          # (B, T), (answers,)
                sums[k] += torch.tensor([losses[here].sum(), here.sum(), hits.sum(), len(hits)])
                right_of[kind] += hits.tolist()
        sums[0, :2] = sum(rows, torch.zeros(2, dtype=torch.float64))
        yield sums, rows, right_of
    if is_model:
        model.train(was_training)


def losses_of(model, tokens, targets):
    "(the loss of each target, is another token likelier), (B, T) each: any model's."
    if is_ours(model):
        return our_losses(model, tokens, targets)
    rows = max(1, LOGITS_AT_ONCE // (tokens.shape[1] * width_of(model)))
    device, losses, wrong = device_of(model), [], []
    for x, y in zip(tokens.to(device).split(rows), targets.to(device).split(rows)):
        logits = model(x)                                                       # (B, T, V)
        # flat: over transposed logits torch sums a large vocabulary less exactly
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-1,
                                      reduction='none').view_as(y).cpu().double())
        wrong.append((logits.argmax(-1) != y).cpu())
    return torch.cat(losses), torch.cat(wrong)


def answers(marks, wrong, unknown=None):
    "Each answer's kind, and whether all of it is right; nan where a loss of it is not a number."
    kinds, right = answers_of(marks, wrong)
    if unknown is not None and unknown.any():
        _, is_known = answers_of(marks, unknown)
        right = torch.where(is_known, right.double(), math.nan)
    return kinds, right
