"""Open the data and the questions on which a model is scored.
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
    """Return our tasks, {'toy_assign/3': ('toy_assign', 3), ...}, and the names of all other tasks,
    which are lm-eval's. 'assign_math/0-5' names six tasks, and without a depth it is 0."""
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
    "Return {name: [Example, ...]} for the tasks of parse_tasks, with each number of shots."
    questions = {}
    for name, (task, depth) in tasks.items():
        for n_shots in shots:
            title = name if len(shots) == 1 else f'{name}, {n_shots} shots'
            questions[title] = few_shot(task, n, shots=n_shots, depth=depth, seed=seed)
    return questions


class PrefixedLoader(Loader):
    """A Loader that puts the tokens `starts` before each row, for models that expect each text to
    begin with them. These tokens are not targets. A row that begins with them already is padded at
    its end instead, so that all rows have one length."""
    starts = ()

    def batch(self, step):
        # tokens, targets and marks: (3, rows, T)
        batch, n = torch.stack(super().batch(step)).numpy(), len(self.starts)
        rows = np.full((3, batch.shape[1], n + self.context), [[[0]], [[-1]], [[0]]])
        for i in range(batch.shape[1]):
            first = 0 if (batch[0, i, :n] == self.starts).all() else n
            rows[0, i, :first] = self.starts[:first]
            rows[:, i, first:first + self.context] = batch[:, i]
        return torch.from_numpy(rows).unbind()


def open_data(path, state, model, data=None, seed=0, rows=None, like=None):
    """Return a Loader of validation rows: from `data`, or otherwise from what the run was trained
    on, with `rows` rows in a batch, or otherwise as many as in training. `like` is a Loader whose
    batch size is used instead and, if `data` is given, also its length of rows."""
    c, starts = state.get('config') or {}, starts_of(path, state)
    trained_on = None if data else (state.get('data') or {}).get('val')
    rows = like.batch_size if like else rows or c.get('batch_size', 4)
    context = c.get('context', min(model.config.context - len(starts), 512))
    if like and data:
        starts, context = like.starts or starts, like.context
    data = data or c.get('data')
    require(data, f'{path} does not record what it was trained on: give --data, a dataset for its '
            'tokenizer, or measure no loss: --tasks and an empty --measures=')
    for folder, _ in parts_of(data):
        if not is_on_disk(folder):
            raise Refused(f'there is no dataset at {folder}; {how_to_prepare(folder)}')
    loader = PrefixedLoader(data, rows, context, 'val', seed)
    loader.starts = starts
    refuse_another_tokenizer(path, loader)
    require(not trained_on or loader.description() == trained_on, f'{data} has changed since '
            f'{path} was trained: give --data={data} to measure on the data as they are now')
    require(len(starts) + context <= model.config.context, f'{path} reads {model.config.context} '
            f'tokens, but a row has {len(starts) + context}: name this model first, because the '
            'first one decides the length of rows')
    return loader


def described(val, batches=0):
    "Describe the rows on which the loss is measured: those of some batches, or all (0)."
    rows = min(batches * val.batch_size or val.n_rows, val.n_rows)
    folders = ', '.join(f'{100 * share / sum(val.quota):g}% {each.folder}'
                        for each, share in zip(val.datasets, val.quota))
    starts = ', each after the tokens that begin a text' if val.starts else ''
    return (f'{rows:,} of {val.n_rows:,} rows of {val.context} tokens, {val.batch_size} a batch, '
            f'{folders}{starts}')


def starts_of(path, state):
    """Return the tokens that a checkpoint needs before each row of data.

    If a published tokenizer begins each text with special tokens, its model was trained with them:
    without them Gemma, or a model that was cut from it, predicts nothing. A model that we trained
    has read windows from the middle of the data, so it needs no such tokens, even as an export
    whose tokenizer begins a text with the token that ends one. (An export with Llama's tokenizer
    cannot be told from a Llama, so it gets the tokens.)"""
    if kind_of(path) == OURS and (spent_on(state) or not state.get('published')):
        return []
    tokenizer = get_tokenizer(path)
    starts = getattr(tokenizer, 'starts', [])
    is_end = starts and starts == [tokenizer.encode_single_token(END_OF_TEXT)]
    return [] if is_end else starts


def is_on_disk(data):
    "Return whether this disk has the validation rows of a dataset, or of all parts of a mixture."
    return bool(data) and all((find(folder) / 'val.json').exists() for folder, _ in parts_of(data))


def how_to_prepare(folder):
    "Return the command that makes a dataset: the prepare.py in its folder or in one above."
    for path in (Path(folder) / 'prepare.py').parents:
        if (path / 'prepare.py').exists():
            return f'run: python {path / "prepare.py"} (--help says how)'
    return f'from your own text: python {find("data/text/prepare.py")} FILES --out={folder}'
