"""How good is a model as it runs now? A Score has a mean, its standard error, and what each
question gave, so two ways of running one model are compared question by question. The error of
their difference is then far smaller than that of a score.
Usage: ask(model, tokenizer, few_shot('assign_basic', 200)).mean
"""
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nanodepth.common.errors import Refused
from nanodepth.models.checkpoint import OURS, kind_of, spent_on
from nanodepth.report.tables import Score, error_of, mean, p_value
from nanodepth.scoring.likelihoods import log_likelihoods, losses_of
from nanodepth.text.primitives import TASKS, TOY_TASKS, few_shot
from nanodepth.text.tokenizer import END_OF_TEXT, get_tokenizer, refuse_another_tokenizer
from nanodepth.training.loader import Loader, folders_of
from nanodepth.training.measure import validate
from nanodepth.training.settings import find

# ------------------------------------------------------------------------------------ scores


class Change(NamedTuple):
    mean: float
    error: float | None
    p: float | None         # of so uneven a split, if up were as likely as down
    changes: list           # of each question; [] where the mean is none over questions


def compared(before, after):
    """What changes from one Score to another. Its error is that of the mean over questions, each
    against itself. Where there is nothing before, nothing is known of a change."""
    if before is None:
        return Change(math.nan, None, None, [])
    changes = [float(b) - float(a) for a, b in zip(before.answers, after.answers, strict=True)
               if isinstance(a, (int, float)) and isinstance(b, (int, float))]
    change = after.mean - before.mean
    if changes and abs(mean(changes) - change) > 1e-9:
        changes = []        # not a mean over documents: a perplexity, a group of tasks
    return Change(change, error_of(changes), p_value(changes), changes)


def half(score, offset):
    """The same score by every other answer, from the first or the second on. None where there are
    no answers to halve, as for a perplexity."""
    known = all(isinstance(answer, (int, float)) for answer in score.answers)
    some = score.answers[offset::2] if known else []
    return score._replace(mean=mean(some), error=error_of(some), answers=some) if some else None


def of_answers(right, chance=None):
    "The Score of questions that are answered right or wrong; nan if that is not known of one."
    if any(math.isnan(each) for each in right):
        return Score('share', math.nan, None, [None] * len(right), chance)
    right = list(map(int, right))
    return Score('share', sum(right) / len(right), error_of(right), right, chance)


# ---------------------------------------------------------------------------------------- questions

def ask(model_like, tokenizer, examples, **options):
    "The Score of a model on some questions: the likeliest option is its choice."
    return right_and_log_prob(model_like, tokenizer, examples, **options)[0]


def right_and_log_prob(model_like, tokenizer, examples, **options):
    """Two Scores of the same questions: which are right, and the log-likelihood of the right
    option, which has one peak over seeds where the share of right answers has two."""
    values = log_likelihoods(model_like, tokenizer, examples, **options)
    if all(v.isfinite().all() for v in values):
        right = [v.argmax().item() == e.answer for v, e in zip(values, examples)]
    else:       # argmax would still choose one
        right = [math.nan] * len(examples)
    log_probs = [v[e.answer].item() for v, e in zip(values, examples)]
    return (of_answers(right, 1 / len(examples[0].options)),
            Score('log_prob', mean(log_probs), error_of(log_probs), log_probs))


# --------------------------------------------------------------------------------------------- data

def data_scores(model, loader, batches=None, pieces=1, text=False):
    """{'loss', and the kinds of answers that the data mark: a Score of each}; with `text`, the loss
    on what they mark as text, too."""
    of_rows, of_kinds = [], 0
    right = {kind: [] for kind in loader.kinds}
    for of_batch, rows, answers in validate(model, loader, batches or 0, pieces, losses_of):
        of_kinds = of_kinds + of_batch
        of_rows += rows
        for kind, is_right in answers:
            right[loader.kinds[kind - 1]].append(is_right)
    sums, counts = torch.stack(of_rows).unbind(1)
    loss = (sums.sum() / counts.sum().clamp(min=1)).item()
    # The loss is a mean over tokens. These values of the rows have that mean, and their spread is
    # its error, also where rows have unequal numbers of targets.
    mean_count = counts.mean().clamp(min=1e-9)
    losses = (sums / mean_count + loss * (1 - counts / mean_count)).tolist()
    scores = dict(loss=Score('nats', loss, error_of(losses), losses))
    if text and 'text' in loader.kinds:
        total, n = of_kinds[1 + loader.kinds.index('text'), :2].tolist()
        scores['text'] = Score('nats', total / n if n else math.nan, None, [])
    # where a loss is not a number, the likeliest token is a matter of chance
    return scores | {kind: of_answers(each if math.isfinite(loss) else [math.nan] * len(each))
                     for kind, each in right.items() if each and kind != 'text'}


def starts_of(path, state):
    """The tokens that a checkpoint wants before each row of data. Others' checkpoints, if their
    tokenizer begins a text with tokens of its own, were trained with them at every text: without
    them Gemma is lost, and so is what was cut of one. What we trained was trained on windows out of
    the middle, and reads windows here too, also as an export whose start is the end of the text
    before. (One with Llama's tokenizer cannot be told from a Llama, and has a start in each
    row.)"""
    if kind_of(path) == OURS and (spent_on(state) or not state.get('published')):
        return []
    tokenizer = get_tokenizer(path)
    starts = getattr(tokenizer, 'starts', [])
    is_end = starts and starts == [tokenizer.encode_single_token(END_OF_TEXT)]
    return [] if is_end else starts


def is_there(data):
    "Are the validation rows of a folder, or of a list of them, on this disk?"
    return bool(data) and all(any((find(folder) / name).exists() for name in
                                  ('val.json', 'mixture.json')) for folder in folders_of(data))


def how_to_prepare(folder):
    "The command that makes a dataset: the prepare.py beside it or above it."
    if (Path(folder).parent / 'mixture.json').exists():
        return f'remove it, and repeat the command that made {Path(folder).parent}'
    for path in (Path(folder) / 'prepare.py').parents:
        if (path / 'prepare.py').exists():
            return f'run: python {path / "prepare.py"} (--help says how)'
    return (f'its config may say in its first lines how it is made; of your own text: python '
            f'{find("data/text/prepare.py")} FILES --out={folder}')


class Beginning(Loader):
    """A Loader before whose rows stand the tokens `starts`, for models that expect a text to begin
    so. They are no targets. A row that has them by itself is padded at its end."""
    starts = ()

    def batch(self, step):
        own, new = torch.stack(super().batch(step)).numpy(), len(self.starts)
        rows = np.full((3, own.shape[1], new + self.context), [[[0]], [[-1]], [[0]]])
        for i in range(own.shape[1]):
            first = 0 if (own[0, i, :new] == self.starts).all() else new
            rows[0, i, :first] = self.starts[:first]
            rows[:, i, first:first + self.context] = own[:, i]
        return torch.from_numpy(rows).unbind()


def open_data(path, state, model, data, seed=0, rows=None, starts=()):
    """The validation rows of `data`, else of what the run was trained on; `rows` in a batch, else
    as many as in training. `starts`: what each begins with, else what the checkpoint wants."""
    c = state.get('config') or {}
    starts = starts or starts_of(path, state)
    as_trained = not data and (state.get('data') or {}).get('val')
    data = data or c.get('data')
    if not data:
        raise Refused(f'{path} does not say what it was trained on: give --data, a dataset for '
                      'its tokenizer, or --tasks alone (with --measures=)')
    context = c.get('context', min(model.config.context - len(starts), 512))
    if not is_there(data):
        raise Refused(f'there is no dataset at {data}; {how_to_prepare(data)}')
    loader = Beginning(data, rows or c.get('batch_size', 4), context, 'val', seed)
    loader.starts = starts
    refuse_another_tokenizer(path, loader)
    if as_trained and loader.description() != as_trained:
        raise Refused(f'{data} has changed since {path} was trained: give --data={data} to measure '
                      'on what is there now')
    return loader


# --------------------------------------------------------------------------------------- the tasks

GROUPS = dict(toy='toy_copy,toy_assign/0-2', papers=','.join(
    task if 'copy' in task else f'{task}/0-2' for task in TASKS))


def parse_tasks(text):
    """({'toy_assign/3': ('toy_assign', 3)} of our tasks, a name for each depth; what is left for
    lm-eval). 'assign_math/0-5' is six tasks; the depth is 0 where none is named."""
    ours, theirs = {}, []
    names = ','.join(GROUPS.get(part, part) for part in text.split(','))
    for name in filter(None, names.split(',')):
        task, slash, depths = name.partition('/')
        if task not in (*TASKS, *TOY_TASKS):
            theirs.append(name)
            continue
        match = re.fullmatch(r'(\d{1,4})(?:-(\d{1,4}))?', depths or '0')
        if not match or slash and not depths:
            raise Refused(f'{name}: the depth must be a whole number, as in {task}/3')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise Refused(f'{name} names no depth: write {task}/{last}-{first}')
        for depth in range(first, last + 1):
            ours[f'{task}/{depth}' if slash else task] = task, depth
    return ours, theirs


def questions_of(tasks, n, shots=(0,), seed=0):
    "{name: [Example]} of our tasks, as parse_tasks has them, for each number of shots."
    return {name if len(shots) == 1 else f'{name}, {some} shots':
            few_shot(task, n, shots=some, depth=depth, seed=seed)
            for name, (task, depth) in tasks.items() for some in shots}
