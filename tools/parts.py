"""What a sweep measures: a model's scores on two parts of the data that have nothing in common.

The idea: a setting that is chosen on some documents must be judged on others. Our runs are measured
by the loss and the accuracies on some batches of validation data, and on the next; Hugging Face
checkpoints by lm-eval, on every other document of each task, and on the rest.

Paper: "Training-Free Looped Transformers", appendices G.5, J.1 and P (a screen of 16 tasks, then
MMLU). Here: the same tasks and other documents, or tasks of their own.

Usage:
    model, looks, data = open_ours('out/lidas', args)       # sweep.py's arguments
    looks['screen'](model)  # {'loss', 'copy', 'depth 0', ..., 'toy_assign/4'}
"""
import hashlib
import json

import torch
import torch.nn.functional as F

from common.errors import Refused
from engine.checkpoint import build_model, load
from engine.launch import pick_device
from engine.measure import Scorer, parse_tasks
from model import KVCache
from report.tables import in_percent, mean
from tools.adapters import open_model
from tools.evaluate import harness, rows_of
from variants.hosts import depth_of


def open_ours(path, args):
    """(model, {part: look}, what tells the data from others): loss and accuracies of one of our
    runs, screened on some validation batches and judged on the next."""
    state = load(path)
    model = build_model(state, path).to(pick_device(args.device)).eval()
    depth_of(model)         # a recurrent core is refused here, and not after the first measurement

    data = hashlib.sha256()

    def look(i):
        first = i * args.batches
        scorer = Scorer(path, state, model, args.data, args.batches,
                        parse_tasks(args.tasks, args.n, seed=i), first)
        for step in range(first, first + args.batches) if scorer.val else ():
            data.update(b''.join(t.numpy().tobytes() for t in scorer.val.batch(step)))
        if args.by_token and scorer.val:
            return (lambda model: scorer(model)
                    | by_token(model, scorer.val, first, min(2, args.batches)))
        return scorer
    return model, {part: look(i) for i, part in enumerate(('screen', 'judge'))}, data.hexdigest()


@torch.no_grad()
def by_token(model, val, first, batches=2):
    """The loss of each row's second half, read at once, and token by token with the cache that was
    filled by the first half: what a strategy for the cache changes."""
    device, at_once, stepwise = next(model.parameters()).device, [], []
    for step in range(first, first + batches):
        tokens, targets = (t.to(device) for t in val.batch(step))
        half = tokens.shape[1] // 2
        cache = KVCache(len(model.order))
        pieces = tokens[:, :half], *tokens[:, half:].split(1, dim=1)
        logits = [model(piece, cache=cache) for piece in pieces]
        for found, values in ((at_once, model(tokens)[:, half:]),
                              (stepwise, torch.cat(logits[1:], dim=1))):
            found.append(F.cross_entropy(values.transpose(1, 2).float(), targets[:, half:],
                                         ignore_index=-1).item())
    return {'loss of the 2nd half': mean(at_once), 'loss of it token by token': mean(stepwise)}


def open_theirs(path, args):
    """The same by lm-eval: screened on every other document of each task and judged on the rest,
    or on tasks of their own."""
    lm = open_model(path, batch_size=args.batch_size, device=args.device)
    tasks, keep = dict(screen=args.tasks, judge=args.judge_tasks or args.tasks), {}
    counts = {part: {task: n['original'] for task, n in
                     harness(lm, names, keep, limit=1)['n-samples'].items()}
              for part, names in tasks.items()}
    apart = not counts['screen'].keys() & counts['judge'].keys()
    samples = {part: {task: list(range(0 if apart else i, n, 1 if apart else 2))[:args.limit]
                      for task, n in counts[part].items()}
               for i, part in enumerate(tasks)}
    for part, of in samples.items():
        for task, documents in of.items():
            if not documents:
                raise Refused(f'{task} has {counts[part][task]} documents: none is left to '
                              f'{part} by')

    def look(part):
        found, values = harness(lm, tasks[part], keep, samples=samples[part], bootstrap_iters=0), {}
        for row in rows_of(found):
            if row['task'] in samples[part]:        # (a group only says again what its tasks say)
                metric = row['metric'].partition(' (')[0]
                up = found['higher_is_better'][row['task']].get(metric, True)
                way = '' if metric in SHARES else f' ({"more" if up else "less"} is better)'
                values[f'{row["task"]} {row["metric"]}{way}'] = row['value']
        return values
    looks = {part: lambda model, part=part: look(part) for part in tasks}
    return lm.model, looks, json.dumps(samples)


# from 0 to 1: these can be averaged
SHARES = ('acc', 'acc_norm', 'exact_match', 'em', 'f1', 'mc1', 'mc2')


def main_kinds(kinds):
    """What a setting is ranked by if nothing else is asked for: the loss of our runs; of each
    benchmark its first share of right answers."""
    if 'loss' in kinds:
        return ['loss']
    first = {}
    for metric in SHARES:
        for kind in kinds:
            name, _, its_metric = kind.partition(' (')[0].rpartition(' ')
            if in_percent(kind) and (its_metric == metric or not name):
                first.setdefault(kind.partition(' ')[0], kind)
    if not first or {kind.partition(' ')[0] for kind in kinds} - first.keys():
        raise Refused('these metrics cannot be averaged: choose one of them by --score: '
                      + ', '.join(kinds))
    return list(first.values())
