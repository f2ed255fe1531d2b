"""What is asked of a model: validation data, and questions by name.
Usage: open_data('out/lidas', state, model); questions_of(parse_tasks('toy_assign/0-3')[0], 200)
"""
import re
from pathlib import Path

import numpy as np
import torch

from nanodepth.model import Refused, require
from nanodepth.models.checkpoint import OURS, kind_of, spent_on
from nanodepth.text.primitives import TASKS, TOY_TASKS, few_shot
from nanodepth.text.tokenizer import END_OF_TEXT, get_tokenizer, refuse_another_tokenizer
from nanodepth.training.loader import Loader, parts_of
from nanodepth.training.settings import find

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
        match = re.fullmatch(r'(\d{1,4})(?:-(\d{1,4}))?', depths if slash else '0')
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        require(first <= last, f'{name}: a depth is written {task}/3, and several as {task}/0-3')
        for depth in range(first, last + 1):
            ours[f'{task}/{depth}' if slash else task] = task, depth
    return ours, theirs


def questions_of(tasks, n, shots=(0,), seed=0):
    "{name: [Example]} of our tasks, as parse_tasks has them, for each number of shots."
    return {name if len(shots) == 1 else f'{name}, {some} shots':
            few_shot(task, n, shots=some, depth=depth, seed=seed)
            for name, (task, depth) in tasks.items() for some in shots}


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


def open_data(path, state, model, data=None, seed=0, rows=None, like=None):
    """The validation rows of `data`, else of what the run was trained on; `rows` in a batch, else
    as many as in training. like: other rows, as many of which these are; of `data`, as long."""
    c, starts = state.get('config') or {}, starts_of(path, state)
    trained_on = None if data else (state.get('data') or {}).get('val')
    rows = like.batch_size if like else rows or c.get('batch_size', 4)
    context = c.get('context', min(model.config.context - len(starts), 512))
    if like and data:
        starts, context = like.starts or starts, like.context
    data = data or c.get('data')
    require(data, f'{path} does not say what it was trained on: give --data, a dataset for its '
            'tokenizer, or --tasks alone (with --measures=)')
    if not is_there(data):
        raise Refused(f'there is no dataset at {data}; {how_to_prepare(data)}')
    loader = Beginning(data, rows, context, 'val', seed)
    loader.starts = starts
    refuse_another_tokenizer(path, loader)
    require(not trained_on or loader.description() == trained_on, f'{data} has changed since '
            f'{path} was trained: give --data={data} to measure on what is there now')
    require(len(starts) + context <= model.config.context, f'{path} reads {model.config.context} '
            f'tokens, but a row has {len(starts) + context}: name this one first')
    return loader


def described(val, batches=0):
    "Return in words what the loss is measured on: the rows of so many batches, or of all."
    rows = min(batches * val.batch_size or val.n_rows, val.n_rows)
    folders = ', '.join(f'{100 * share / sum(val.quota):g}% {each.folder}'
                        for each, share in zip(val.datasets, val.quota))
    behind = ', each behind what begins a text' * bool(val.starts)
    return (f'{rows:,} of {val.n_rows:,} rows of {val.context} tokens, {val.batch_size} a batch, '
            f'{folders}{behind}')


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
    return bool(data) and all((find(folder) / 'val.json').exists() for folder, _ in parts_of(data))


def how_to_prepare(folder):
    "The command that makes a dataset: the prepare.py beside it or above it."
    for path in (Path(folder) / 'prepare.py').parents:
        if (path / 'prepare.py').exists():
            return f'run: python {path / "prepare.py"} (--help says how)'
    return f'of your own text: python {find("data/text/prepare.py")} FILES --out={folder}'
