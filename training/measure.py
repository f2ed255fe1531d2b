"Measure a model: its validation loss, the answers that it gets right, and the FLOPs of a step."
import copy
import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import Refused, unrolled
from retrofit import core_of
from training.loader import ANSWER_START
from training.machine import gathered
from training.plan import has_own_parts, seed_for, training_flops


@torch.no_grad()
def measure(run, metric=None):
    """Return what the log records of a run's model: the validation loss with its standard error,
    the shares of right answers, and the numbers of a metric."""
    model, val, machine, c = run.model, run.data['val'], run.machine, run.c
    model.eval()
    torch.manual_seed(seed_for(c.seed, 'measuring'))       # for the draws of a Span
    with machine.autocast():
        batches = [*validate(model, val, c.eval_batches, c.grad_accum)]
        sums = sum(batch_sums for batch_sums, *_ in batches)
        sums = gathered(machine, sums.flatten().tolist()).sum(0).view_as(sums)
        (loss, tokens, _, _), *kind_sums = sums.tolist()
        kinds = {name: dict(loss=kind_loss / kind_tokens, accuracy=right / n_answers)
                 for name, (kind_loss, kind_tokens, right, n_answers) in zip(val.kinds, kind_sums)
                 if n_answers}
        numbers = dict(val_loss=loss / max(1, tokens), kinds=kinds)
        # A row contributes to the error by how far its loss is from the mean loss of its tokens.
        far = [(row_loss - numbers['val_loss'] * n_tokens).item() ** 2
               for _, row_sums, _ in batches for row_loss, n_tokens in row_sums]
        n_rows, squares = gathered(machine, [len(far), sum(far)]).sum(0).tolist()
        error = math.sqrt(squares * n_rows / max(1, n_rows - 1)) / max(1, tokens)
        numbers |= dict(val_error=error, val_rows=round(n_rows))
        if metric:              # each number is a mean over rows, and each process has its own rows
            values = {name: float(number) for name, number in metric(model, val).items()}
            means = gathered(machine, [*values.values()]).mean(0).tolist()
            numbers['metric'] = dict(zip(values, means))
    model.train()
    return numbers


def losses_of(model, tokens, targets):
    """Return the loss of each target, and whether the target is missed: (B, T) each. A target is
    missed if another token is likelier, or is as likely and earlier in the vocabulary. Logits are
    computed in pieces, because a large vocabulary takes much memory."""
    x = model.norm(model.hidden(tokens.to(model.norm.weight.device))).flatten(0, 1)     # (B*T, C)
    y = targets.to(x.device).flatten()
    losses, wrong = [], []
    at_once = 4096 if x.is_cuda else max(1, 2 ** 26 // len(model.head.weight))  # 2^26 logits
    for part, wanted in zip(x.split(at_once), y.split(at_once)):
        logits = model.head(part)
        losses.append(F.cross_entropy(logits.float(), wanted, ignore_index=-1, reduction='none'))
        wrong.append(logits.argmax(-1) != wanted)
    return (torch.cat(losses).cpu().double().view(targets.shape),
            torch.cat(wrong).cpu().view(targets.shape))


@torch.no_grad()
def validate(model, loader, batches=0, pieces=1, losses_of=losses_of):
    """Yield three things for each of the first batches (0: all batches). First, a table of sums:
    line 0 has the loss and the number of all tokens, and line k has the loss, tokens, right answers
    and answers of kind k. Second, a list with (loss, tokens) of each row. Third, a list with (kind,
    is_right) of each answer."""
    for step in range(min(batches or loader.n_batches, loader.n_batches)):
        sums = torch.zeros(1 + len(loader.kinds), 4, dtype=torch.float64)
        row_sums, answered = [], []
        for x, y, marks in zip(*(t.chunk(pieces) for t in loader.batch(step))):
            if len(x) == 0:                     # another process has all of the last rows
                continue
            losses, wrong = losses_of(model, x, y)
            for row_sum in torch.stack((losses.sum(1), (y != -1).sum(1)), dim=1):
                sums[0, :2] += row_sum      # one by one, so that pieces do not change the last bit
                row_sums.append(row_sum)
            for kind in range(1, len(sums)):
                is_kind = marks % ANSWER_START == kind
                sums[kind, :2] += torch.stack((losses[is_kind].sum(), is_kind.sum()))
            for kind, is_right in answers(marks, wrong):
                sums[kind, 2:] += torch.tensor((is_right, 1))
                answered.append((kind, is_right))
        yield sums, row_sums, answered


def answers(marks, wrong):
    """Yield (kind, is_right) for each answer that begins in these rows (B, T). The first token of
    an answer has the mark 128 + kind, and its other tokens have the mark `kind`, so the answer ends
    before any other mark. If an answer continues in the next row, only its tokens in this row
    count."""
    firsts = (marks >= ANSWER_START).nonzero().tolist()
    marks, wrong = marks.tolist(), wrong.tolist()
    for row, first in firsts:
        kind = marks[row][first] - ANSWER_START
        end = first + 1
        while end < len(marks[row]) and marks[row][end] == kind:
            end += 1
        yield kind, not any(wrong[row][first:end])


def check_flops(model, c, machine, batch):
    """Refuse a loss or a Span of your own if its count of FLOPs is more than 2% off, because then a
    comparison at equal FLOPs would be untrue.

    Torch counts the products of matrices in a forward and a backward pass, once with your order and
    loss, and once with the same layers in a plain order and the ordinary loss. The ratio of the two
    must be the ratio of the FLOPs that the run will log. Rows are cut to 256 tokens, because
    torch counts attention only in its plainest form, which takes much memory."""
    if not has_own_parts(model, c):
        return
    model = copy.deepcopy(model)        # so that neither gradients nor the state of a Span change
    if core := core_of(model):
        core.recompute = False          # our count leaves out what is computed a second time
    tokens, targets = (t.chunk(c.grad_accum)[0][:, :256].to(machine.device) for t in batch[:2])

    def counted_by_torch(**how):
        torch.manual_seed(seed_for(c.seed, 'a Span'))
        with (FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH),
              machine.autocast()):
            model(tokens, targets, **how).backward()
        return counter.get_total_flops()

    layers, context = unrolled(model.order), tokens.shape[1]
    wanted = counted_by_torch(loss=c.loss) / counted_by_torch(order=layers)
    ours = training_flops(model, c.loss, context) / model.flops_per_token(layers, context)
    if abs(ours / wanted - 1) > 0.02:
        raise Refused(f'a step costs {wanted:.3f} times the FLOPs of its layers in a plain order, '
                      f'but would be logged with {ours:.3f} times: write the method flops of your '
                      'Span, or loss.flops if the loss computes more (docs/EXTEND.md)')
