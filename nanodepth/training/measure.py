"""The loss of a model on data, which training and scoring both measure. Of each token one needs its
loss, and whether the likeliest token was the right one. Anything that maps tokens to logits can be
measured.
Usage: loss, kinds = measure(model, Loader('data/toy', 32, 64, split='val'), batches=8)
"""
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodepth.common.errors import refusing
from nanodepth.common.losses import LOGITS_AT_ONCE, each_loss
from nanodepth.looping.layers import device_of, is_ours, width_of
from nanodepth.text.loader import START

LAYERS_AT_ONCE = 2 ** 16     # tokens: more rows of a batch than these are read one after the other


def evaluate(model, loader, batches=None):
    "The mean loss over the first batches (None: until a dataset ends), over all ranks."
    return measure(model, loader, batches)[0]


def measure(model, loader, batches=None, pieces=1):
    """(loss, {kind: {'loss', 'accuracy'}}) over the first batches, the kinds being the marks that
    the data carries. A batch is computed in `pieces`, as in training. Instead of a model, any
    function from tokens to logits will do."""
    sums = torch.zeros(1 + len(loader.kinds), 4, dtype=torch.float64)
    for of_batch, *_ in measured(model, loader, batches, pieces):
        sums += of_batch
    if loader.world_size > 1:
        sums = sums.to(device_of(model))
        dist.all_reduce(sums)
    loss, n, right, total = sums.cpu().unbind(1)
    return (loss[0] / n[0].clamp(min=1)).item(), {
        kind: dict(loss=(loss[k] / n[k]).item(), accuracy=(right[k] / total[k]).item())
        for k, kind in enumerate(loader.kinds, 1) if total[k]}


def numbers_of(metric, model, loader):
    "{name: number} of what a config's own `metric` measures; {} without one."
    if metric is None:
        return {}
    model.eval()
    with torch.no_grad():
        numbers = metric(model, loader)
    model.train()
    with refusing(AttributeError, TypeError, ValueError, why=lambda error: 'metric must give '
                  f'{{name: number}}, and it gave {numbers!r}'):
        return {name: float(value) for name, value in numbers.items()}


@torch.no_grad()
def measured(model, loader, batches, pieces):
    """Of each batch: the sums of (loss, tokens, answers right, answers) over all tokens and then
    over each kind, [(loss, tokens) of each row], and {kind: which answers are right}."""
    is_model = isinstance(model, torch.nn.Module)
    was_training = is_model and model.training
    if is_model:
        model.eval()
    device = device_of(model)
    steps = len(loader) if batches is None else min(batches, len(loader))
    for step in range(steps):
        sums = torch.zeros(1 + len(loader.kinds), 4, dtype=torch.float64)
        rows = []
        right_of = {kind: [] for kind in loader.kinds}
        batch = loader.marked_batch(step, again=False)
        for tokens, targets, marks in zip(*(t.chunk(pieces) for t in batch)):
            if not len(tokens):
                continue
            counts = targets != -1
            losses, best = losses_of(model, tokens.to(device), targets.to(device))
            kind_of, right = answers(marks, best != targets, losses.isnan())
            rows += torch.stack([losses.double().where(counts, 0).sum(1), counts.sum(1).double()],
                                dim=1)
            for k, kind in enumerate(loader.kinds, 1):
                here = marks % START == k
                hits = right[kind_of == k]          # (B, T), (answers,)
                sums[k] += torch.tensor([losses[here].double().sum(), here.sum(), hits.sum(),
                                         len(hits)])
                right_of[kind] += hits.tolist()
        sums[0, :2] = sum(rows, torch.zeros(2, dtype=torch.float64))
        yield sums, rows, right_of
    if is_model:
        model.train(was_training)


def losses_of(model, tokens, targets):
    """(the loss of each target, the likeliest token at its place), (B, T) each. Of ours the layers
    read many rows together and the head makes logits in pieces; of others some rows at once."""
    ours = is_ours(model)
    rows = max(1, LAYERS_AT_ONCE // tokens.shape[1] if ours else
               LOGITS_AT_ONCE // (tokens.shape[1] * width_of(model)))
    parts = []
    for x, y in zip(tokens.split(rows), targets.split(rows)):
        if ours:
            losses, best = each_loss(model.norm(model.hidden(x)), model.head.weight, y)
        else:
            logits = model(x)                                                   # (B, T, V)
            # flat: over transposed logits torch sums a large vocabulary less exactly
            losses = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-1,
                                     reduction='none').view_as(y)
            best = logits.argmax(-1)
        parts.append((losses.cpu(), best.cpu()))
    return [torch.cat(part) for part in zip(*parts)]


def answers(marks, wrong, unknown=None):
    """Each answer's kind, and whether all of it is right (nan where a loss is not a number): marks
    and wrong are (B, T). An answer lasts from its mark above 128 to the next beginning or 0; one
    that began in the row before counts nowhere."""
    begins = marks >= START
    counter = begins.clone()
    counter[:, 0] = True        # a row's first tokens do not belong to the row before
    number = counter.flatten().cumsum(0).view_as(marks)        # (B, T): the answer's number

    def touched(these):
        n = torch.bincount(number[these & (marks > 0)], minlength=int(number.max()) + 1)
        return (n > 0)[number[begins]]
    right = ~touched(wrong)
    if unknown is not None and unknown.any():
        right = torch.where(touched(unknown), math.nan, right.double())
    return marks[begins] - START, right
