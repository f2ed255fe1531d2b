"""What a sweep measures: a model's scores on two parts of the data that have nothing in common.

The idea: a setting that is chosen on some documents must be judged on others.

Paper: "Training-Free Looped Transformers", appendices G.5, J.1 and P (a screen of 16 tasks, then
MMLU). Here: the same tasks and other documents, or tasks of their own.

Usage:
    model, looks, data = open_ours('out/lidas', args)       # sweep.py's arguments
    looks['screen'](model)  # {'loss', 'copy', 'depth 0', ..., 'toy_assign/4'}
"""
import functools
import hashlib
import json

import torch
import torch.nn.functional as F

from common.errors import Refused
from engine.checkpoint import build_model, load
from engine.measure import Scorer, parse_tasks
from engine.world import pick_device
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
    looks, data = {}, hashlib.sha256()
    for i, part in enumerate(('screen', 'judge')):
        first, questions = i * args.batches, parse_tasks(args.tasks, args.n, seed=i)
        look = Scorer(path, state, model, args.data, args.batches, questions, first)
        for step in range(first, first + args.batches) if look.val else ():
            data.update(b''.join(t.numpy().tobytes() for t in look.val.batch(step)))
        looks[part] = look
        if args.by_token and look.val:
            steps = range(first, first + min(2, args.batches))
            looks[part] = functools.partial(look_twice, look, steps)
    return model, looks, data.hexdigest()


@torch.no_grad()
def look_twice(look, steps, model):
    """Add the loss of each row's second half, read at once, and token by token with the cache that
    was filled by the first half: what a strategy for the cache changes."""
    device, at_once, stepwise = next(model.parameters()).device, [], []
    for step in steps:
        tokens, targets = (t.to(device) for t in look.val.batch(step))
        half = tokens.shape[1] // 2
        cache = KVCache(len(model.order))
        model(tokens[:, :half], cache=cache)
        pieces = [model(piece, cache=cache) for piece in tokens[:, half:].split(1, dim=1)]
        for found, logits in ((at_once, model(tokens)[:, half:]),
                              (stepwise, torch.cat(pieces, dim=1))):
            found.append(F.cross_entropy(logits.transpose(1, 2).float(), targets[:, half:],
                                         ignore_index=-1).item())
    return look(model) | {'loss of the 2nd half': mean(at_once),
                          'loss of it token by token': mean(stepwise)}


def open_theirs(path, args):
    """The same by lm-eval: screened on every other document of each task and judged on the rest,
    or on tasks of their own."""
    lm = open_model(path, batch_size=args.batch_size, device=args.device)
    tasks, keep = dict(screen=args.tasks, judge=args.judge_tasks or args.tasks), {}
    counts = {part: harness(lm, names, keep, limit=1)['n-samples']
              for part, names in tasks.items()}
    apart, samples = not counts['screen'].keys() & counts['judge'].keys(), {}
    for i, part in enumerate(tasks):
        samples[part] = {}
        for task, n in counts[part].items():
            documents = range(n['original']) if apart else range(i, n['original'], 2)
            samples[part][task] = list(documents)[:args.limit]
            if not documents:
                raise Refused(f'{task} has {n["original"]} documents: none is left to {part} by')

    def look(part, model):
        found, values = harness(lm, tasks[part], keep, samples=samples[part], bootstrap_iters=0), {}
        for row in rows_of(found):
            task, metric = row['task'], row['metric'].partition(' (')[0]
            if task in samples[part]:               # (a group only says again what its tasks say)
                better = 'more' if found['higher_is_better'][task].get(metric, True) else 'less'
                what = '' if metric in SHARES else f' ({better} is better)'
                values[f'{task} {row["metric"]}{what}'] = row['value']
        return values
    looks = {part: functools.partial(look, part) for part in tasks}
    return lm.model, looks, json.dumps(samples)


# from 0 to 1: these can be averaged
SHARES = ('acc', 'acc_norm', 'exact_match', 'em', 'f1', 'mc1', 'mc2')


def main_kinds(kinds, asked=()):
    """What a setting is ranked by if nothing else is asked for: of our runs the tasks asked for, or
    else the loss; of each benchmark its first share of right answers."""
    if 'loss' in kinds:
        return [kind for kind in kinds if '/' in kind or kind in asked] or ['loss']
    first, task_of = {}, lambda kind: kind.partition(' ')[0]
    for metric in SHARES:
        for kind in filter(in_percent, kinds):
            if kind.partition(' (')[0].rpartition(' ')[2] == metric or ' ' not in kind:
                first.setdefault(task_of(kind), kind)
    if not first or {*map(task_of, kinds)} - first.keys():
        raise Refused(
            f'these metrics cannot be averaged: choose one of them by --score: {", ".join(kinds)}')
    return list(first.values())
