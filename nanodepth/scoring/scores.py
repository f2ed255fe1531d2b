"""How good is a model, run in some way? A Score has a mean, its standard error, and what each
question gave, so two ways of running one model are compared question by question. The error of
their difference is then far smaller than that of a score.
Usage: Subject('out/lidas', Asked(tasks='toy_assign/3')).scores(Way(window='mid4', K=3))
"""
import ast
import contextlib
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from tqdm import tqdm

from nanodepth import __version__
from nanodepth.common.errors import Refused, say
from nanodepth.common.files import on_hub, refuse_unwritable
from nanodepth.models.checkpoint import is_hugging_face, open_any, pick_device
from nanodepth.models.hf import answer_of
from nanodepth.retrofit import core_of
from nanodepth.scoring.likelihoods import log_likelihoods
from nanodepth.scoring.lm_eval_scores import Harness, check_tasks
from nanodepth.report.tables import Score, beside, error_of, mean, p_value
from nanodepth.scoring.measure import measured
from nanodepth.scoring.way import Way
from nanodepth.text.loader import Rows, how_to_prepare
from nanodepth.text.primitives import TASKS, TOY_TASKS, few_shot
from nanodepth.train import find
from nanodepth.text.tokenizer import (get_tokenizer, local_folder, refuse_another_tokenizer,
                                      tokenizer_file)

# ------------------------------------------------------------------------------------ scores


class Change(NamedTuple):
    mean: float
    error: float | None
    p: float | None         # of so uneven a split, if up were as likely as down


def compared(before, after):
    """What changes from one Score to another. Its error is that of the mean over questions, each
    against itself."""
    changes = [float(b) - float(a) for a, b in zip(before.answers, after.answers, strict=True)
               if isinstance(a, (int, float)) and isinstance(b, (int, float))]
    change = after.mean - before.mean
    if before.kind != 'nats' and changes and abs(mean(changes) - change) > 1e-9:
        changes = []        # not a mean over documents: a perplexity, a group of tasks
    return Change(change, error_of(changes), p_value(changes))


def of_answers(right, chance=None):
    "The Score of questions that are answered right or wrong; nan if that is not known of one."
    if any(math.isnan(each) for each in right):
        return Score('share', math.nan, None, [None] * len(right), chance)
    right = list(map(int, right))
    return Score('share', sum(right) / len(right), error_of(right), right, chance)


def interval(right, n, z=1.96):
    "Wilson's interval: valid near 0 and 1 too, unlike ± 2 standard errors."
    p = right / n
    width = z * z / n
    middle = (p + width / 2) / (1 + width)
    half = z * math.sqrt(p * (1 - p) / n + width / n / 4) / (1 + width)
    return middle - half, middle + half


# ---------------------------------------------------------------------------------------- questions

def score(model_like, tokenizer, examples, **options):
    "(accuracy, its 95% interval): the option with the highest log-likelihood is the choice."
    answers = ask(model_like, tokenizer, examples, **options)
    return answers.mean, interval(answers.mean * len(examples), len(examples))


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
            Score('nats', mean(log_probs), error_of(log_probs), log_probs))


# --------------------------------------------------------------------------------------------- data

def data_scores(model, loader, batches=None, pieces=1, text=False):
    """{'loss', and the kinds of answers that the data mark: a Score of each}; with `text`, the loss
    on what they mark as text, too."""
    of_rows, right, of_kinds = [], {}, 0
    for of_batch, rows, answers_of in measured(model, loader, batches, pieces):
        if text:
            of_kinds = of_kinds + of_batch
        of_rows += rows
        for kind, each in answers_of.items():
            right.setdefault(kind, []).extend(each)
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
    return scores | {kind: of_answers(each) for kind, each in right.items()
                     if each and kind != 'text'}


def starts_of(path):
    """The tokens that a checkpoint wants before each row of data. Others' checkpoints, if their
    tokenizer begins a text with tokens of its own, were trained with them at every text: without
    them Gemma is lost. Ours are trained on windows out of the middle, and read windows here too."""
    return getattr(get_tokenizer(path), 'starts', []) if is_hugging_face(path) else []


def open_data(path, state, model, data, seed=0, rows=None):
    """The validation rows of `data`, else of what the run was trained on; `rows` in a batch, else
    as many as in training."""
    c = state.get('config') or {}
    starts = starts_of(path)
    data = data or c.get('data')
    if not data:
        raise Refused(f'{path} does not say what it was trained on: give --data, a dataset for '
                      'its tokenizer')
    context = c.get('context', min(model.config.context - len(starts), 512))
    if not is_there(data):
        raise Refused(f'there is no dataset at {data}; {how_to_prepare(data)}')
    loader = Rows(data, rows or c.get('batch_size', 4), context, seed=seed, starts=starts)
    refuse_another_tokenizer(path, loader)
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


# ------------------------------------------------------------------------------------ a checkpoint

@dataclass(kw_only=True)
class Asked:
    "What is measured."
    # primitives with their depths (toy_assign/3, assign_math/0-5, toy, papers); any other name is
    # a task or a list of lm-eval's (scoring/lm_eval_scores.py)
    tasks: str = ''
    # loss: on data, with the kinds of answers that they mark; text: the loss on text alone, too;
    # log_prob: of the right answer to each task, beside the right answers. --measures= leaves the
    # data out
    measures: tuple[Literal['loss', 'text', 'log_prob'], ...] = ('loss',)
    data: str | None = None     # a dataset; None: what the run was trained on
    batches: int = 8            # batches of validation data for each measurement
    n: int = 200                # examples of each primitive
    # answered examples before each; several are several scores. None: none, but as many as a task
    # of lm-eval's says itself
    shots: tuple[int, ...] | None = None
    seed: int = 0               # of their draws
    limit: int | None = None    # documents of each task of lm-eval: to try, not to report
    chat: bool = False          # lm-eval with the chat template of the checkpoint
    # in a file of arms: (model, validation data) gives {name: number} more of each model as it is
    metric: Callable | None = None
    max_length: int | None = None       # tokens of a prompt and its answer; None: the context
    device: str = 'auto'        # auto: cuda, else mps, else cpu
    # auto: bfloat16 for what was published in 16 bits, where the device is fast at it
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'


class Subject:
    """A checkpoint, and all that it is asked. With --data, the rows are as long and as many as
    those of `like`, another Subject."""

    def __init__(self, path, asked=None, like=None):
        asked = self.asked = asked or Asked()
        self.path = path
        ours, theirs = parse_tasks(asked.tasks)
        if theirs and len(asked.shots or ()) > 1:
            raise Refused(f"--shots={','.join(map(str, asked.shots))}: lm-eval's tasks take one")
        if theirs:
            check_tasks(theirs, asked.shots and asked.shots[0])     # before a model is opened
        self.files = files_of(path)     # before it is opened: a run may go on and write others
        self.state, self.model = open_any(path, pick_device(asked.device), asked.dtype)
        self.answer = answer_of(self.model)
        if core := core_of(self.model):
            core.fresh = False              # else each forward begins with noise of its own
        self.tokenizer = get_tokenizer(path)
        self.harness = Harness(self, theirs) if theirs else None
        self.questions = questions_of(ours, asked.n, asked.shots or (0,), asked.seed)
        self.val = self.open_val(like)
        if not (self.val or self.harness or self.questions):
            raise Refused(f'{path} does not say what it was trained on: give --data, a dataset for '
                          'its tokenizer, or --tasks (such as toy_assign/3 or arc_easy)')

    def open_val(self, like):
        "The validation data, or None."
        asked, config = self.asked, self.state.get('config') or {}
        data = asked.data or config.get('data')
        if not data or not {'loss', 'text'} & {*asked.measures}:
            return None
        if not asked.data and (self.harness or self.questions) and not is_there(data):
            say(f'{self.path}: what it was trained on ({data}) is not here, so its loss is left '
                'out')
            return None
        state = like.state if like and asked.data else self.state
        val = open_data(self.path, self.state | dict(config=state.get('config')), self.answer,
                        asked.data)
        row = len(val.starts) + val.context
        if row > self.answer.config.context:
            raise Refused(f'{self.path} reads {self.answer.config.context} tokens, but the rows of '
                          f'the first model have {row}: name this one first')
        return val

    def data(self):
        "What the loss is measured on, in words."
        val = self.val
        if not val:
            return 'no data'
        folders = ', '.join(f'{share / sum(val.quota):.0%} {each.folder}'
                            for each, share in zip(val.datasets, val.quota))
        return f'{val.batch_size} rows of {val.context} tokens a batch, {folders}'

    def check(self, ways):
        "Refuse what this model cannot do, before an hour is spent."
        for way in ways:
            with way.apply(self.model):
                pass

    def scores(self, way):
        "{name: Score} of the model, run in a way."
        with way.apply(self.model):
            scores = {}
            if self.val:
                pieces = (self.state.get('config') or {}).get('grad_accum', 1)
                scores = data_scores(self.answer, self.val, self.asked.batches, pieces,
                                     text='text' in self.asked.measures)
            for name, examples in self.questions.items():
                right, log_prob = right_and_log_prob(self.answer, self.tokenizer, examples)
                scores[name] = right
                if 'log_prob' in self.asked.measures:
                    scores[f'{name} log_prob'] = log_prob
            if self.harness:
                scores |= self.harness.scores(way)
            if self.asked.metric and str(way) == str(Way()):
                with torch.no_grad():
                    numbers = self.asked.metric(self.model, self.val)
                if taken := scores.keys() & numbers.keys():
                    raise Refused(f'the metric gives {min(taken)!r}, which is measured already: '
                                  'choose another name')
                scores |= {name: Score('score', float(value), None, [])
                           for name, value in numbers.items()}
            return scores

    def noted(self, ways, path):
        """{way: {name: Score}} of the model in some ways. Each is a line of a file as soon as it is
        measured, and what stands there is not measured again."""
        mark = self.mark()
        scores = {}
        with path.open('a+', encoding='utf-8', errors='replace') as file:
            file.seek(0)
            for line in file.read().splitlines():
                if mark in line:
                    with contextlib.suppress(ValueError):       # half a line: it was killed there
                        note = json.loads(line)
                        scores[note['way']] = note['scores']
            for way in tqdm(ways, f'{self.path}, ways', unit='way', leave=False):
                if str(way) not in scores:
                    scores[str(way)] = self.scores(way)
                    note = dict(mark=mark, way=str(way), scores=scores[str(way)])
                    file.write('\n' + json.dumps(note) + '\n')
                    file.flush()
        return {str(way): {name: Score(*each) for name, each in scores[str(way)].items()}
                for way in ways}

    def mark(self):
        "What a note counts for: these files of a checkpoint, all that is asked, and our version."
        rows = (self.val.description(), self.val.batch_size, self.val.context) if self.val else None
        asked = [getattr(self.asked, each.name) for each in fields(Asked) if each.name != 'metric']
        asked += [sources_of([self.asked.metric])] if self.asked.metric else []
        said = [self.files, rows, asked, str(next(self.model.parameters()).dtype), __version__]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]


def files_of(path):
    """The name, the size and the last change of each file of a checkpoint, and of its tokenizer,
    which may stand elsewhere."""
    path = local_folder(path) if on_hub(path) else Path(path)
    folder = path.parent if path.suffix == '.pt' else path
    tokenizer = tokenizer_file(path)
    files = {path if path.suffix == '.pt' else path / 'ckpt.pt'}
    for each in (folder, tokenizer.parent if tokenizer else folder):
        for ending in ('safetensors', 'json', 'jinja'):
            files.update(each.glob(f'*.{ending}'))
    return sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns)
                  for file in files if file.exists())


def sources_of(functions):
    """The files in which functions or classes stand, and those beside them that these import, as
    Python code without remarks. So what a function calls is noticed, too, where it is edited."""
    texts, todo = {}, []
    for each in functions:
        parts = vars(each).values() if inspect.isclass(each) else [each]
        todo += [Path(part.__code__.co_filename) for part in parts if inspect.isfunction(part)]
    while todo:
        path = todo.pop()
        if path in texts or not path.exists():
            continue
        tree = ast.parse(path.read_text(encoding='utf-8'))
        texts[path] = ast.unparse(tree)
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ''] if isinstance(node, ast.ImportFrom) else []
            todo += [path.with_name(f'{name.partition(".")[0]}.py') for name in names if name]
    return sorted((path.name, text) for path, text in texts.items())


def notes_beside(out):
    """The file of notes beside a file of rows, to which ours are added. What cannot be written is
    refused before the work."""
    path = beside(out, '.jsonl')
    refuse_unwritable(out)
    refuse_unwritable(path)
    if path.exists() and path.stat().st_size:
        with path.open('rb') as file:       # a note begins with its mark
            if not re.match(rb'\s*{"mark": "', file.read(100)):
                raise Refused(f'{path} holds no notes of ours: choose another --out')
    return path


def is_there(data):
    "Are the validation rows of a folder, or of a list of them, on this disk?"
    folders = [data] if isinstance(data, str) else data or []
    return bool(folders) and all(any((find(folder) / name).exists() for name in
                                     ('val.json', 'mixture.json')) for folder in folders)
