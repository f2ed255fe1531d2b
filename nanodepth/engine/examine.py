"""How good is a model, run in some way? Every score is one value, wherever it comes from.

The idea: a Score has a mean, its standard error, and what each question, document or batch gave.
So two ways of running one model can be compared in pairs, question by question: they share what is
hard about the questions, and the error of their difference is far smaller than that of a score.
`Examined` opens a checkpoint once and measures it in any way: by MEASURES on data, by our own tasks
(engine/measure.py) and by lm-eval's (engine/harness.py).

Usage:
    examined = Examined('out/lidas', Asked(tasks='toy_assign/3'))
    plain, other = examined.scores(Way()), examined.scores(Way(window='mid4', K=3))
    change = compared(plain['loss'], other['loss'])         # its mean, error and p
"""
import contextlib
import functools
import hashlib
import inspect
import json
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from nanodepth import ROOT
from nanodepth.common.errors import Refused, check_choice, say
from nanodepth.common.files import find
from nanodepth.data.primitives import TASKS, TOY_TASKS, few_shot, task_and_depth
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.engine.checkpoint import is_hugging_face
from nanodepth.engine.foreign import answer_of, family_of, is_foreign, open_any
from nanodepth.engine.harness import Harness
from nanodepth.engine.measure import (Score, Scorer, error_of, fingerprint, lengths, of_answers,
                                      open_data)
from nanodepth.engine.raven import FAMILY
from nanodepth.engine.ways import Way, depth_in
from nanodepth.engine.world import pick_device
from nanodepth.model import LM
from nanodepth.report.tables import mean
from nanodepth.wrapper import SOLVERS


@dataclass(kw_only=True)
class Asked:
    "What is measured."
    # primitives with their depths (toy_assign/3, assign_math/0-5, toy, papers); any other name is
    # a task or a list of lm-eval's (engine/harness.py)
    tasks: str = ''
    # on data: loss (and the answers that the data mark), by_token (with the cache)
    measures: tuple[str, ...] = ('loss',)
    data: str | None = None     # a dataset; None: what the run was trained on
    batches: int = 8            # batches of validation data for each measurement
    n: int = 200                # examples of each primitive
    shots: tuple[int, ...] = (0,)       # answered examples before each; several are several scores
    seed: int = 0               # of their draws
    limit: int | None = None    # documents of each task of lm-eval: to try, not to report
    chat: bool = False          # lm-eval with the chat template of the checkpoint
    batch_size: str = '8'       # texts that lm-eval reads at once
    max_length: int | None = None       # tokens of a prompt and its answer; None: the context
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'   # of lm-eval's weights
    device: str = 'auto'        # auto: cuda, else mps, else cpu


# ------------------------------------------------------------------------------ measures on data
# A measure is a function of a Scorer and a model that returns {name: Score}. An entry of MEASURES
# is all it needs: --measures=NAME then knows it, and so do the table, the sweep and the picture.
# The Score's kind is its unit. Less is better of nats; of another score if its name says so.

def loss(scorer, model):
    "The loss, and the share of right answers of each kind that the data mark."
    singly = {}
    value, kinds = scorer.on_data(model, singly)
    scores = dict(loss=Score('nats', value, error_of(singly['loss']), singly['loss']))
    return scores | {kind: of_answers(row['accuracy'], singly[kind])
                     for kind, row in kinds.items() if kind != 'text'}


@torch.no_grad()
def by_token(scorer, model):
    """The loss of each row's second half, read at once, and token by token with the cache that was
    filled by the first half: what a strategy for the cache changes."""
    if not isinstance(model, LM):
        raise Refused('--measures=by_token is for models of ours')
    device = next(model.parameters()).device
    at_once = []
    stepwise = []
    for step in range(scorer.first, scorer.first + min(2, scorer.batches)):
        tokens, targets = (t.to(device) for t in scorer.val.batch(step))
        half = tokens.shape[1] // 2
        cache = model.new_cache()
        model(tokens[:, :half], cache=cache)
        pieces = [model(piece, cache=cache) for piece in tokens[:, half:].split(1, dim=1)]
        for logits, losses in ((model(tokens)[:, half:], at_once),
                               (torch.cat(pieces, dim=1), stepwise)):
            losses.append(F.cross_entropy(logits.transpose(1, 2).float(), targets[:, half:],
                                          ignore_index=-1).item())
    return {name: Score('nats', mean(losses), error_of(losses), losses) for name, losses in
            {'loss of the 2nd half': at_once, 'loss of it token by token': stepwise}.items()}


MEASURES = dict(loss=loss, by_token=by_token)


# ------------------------------------------------------------------------------------ the tasks

GROUPS = dict(toy='toy_copy,toy_assign/0-2', papers=','.join(
    task if 'copy' in task else f'{task}/0-2' for task in TASKS))


def split_tasks(text):
    "(names of our tasks, each with one depth; what is left for lm-eval)."
    ours, theirs = [], []
    names = ','.join(GROUPS.get(part, part) for part in text.split(','))
    for name in filter(None, names.split(',')):
        task, _, depths = name.partition('/')
        if task not in (*TASKS, *TOY_TASKS):
            theirs.append(name)
            continue
        first, _, last = depths.partition('-')
        if last:
            _, a = task_and_depth(f'{task}/{first}')
            _, b = task_and_depth(f'{task}/{last}')
            ours += [f'{task}/{depth}' for depth in range(a, b + 1)]
        else:
            task_and_depth(name)        # refuses what is no depth
            ours.append(name)
    return ours, theirs


def questions_of(names, asked, seed):
    "{name: [Example]} of our tasks, for each number of shots."
    questions = {}
    for name in names:
        task, depth = task_and_depth(name)
        for shots in asked.shots:
            label = name if len(asked.shots) == 1 else f'{name}, {shots} shots'
            questions[label] = few_shot(task, asked.n, shots=shots, depth=depth, seed=seed)
    return questions


# ----------------------------------------------------------------------------------- a checkpoint

class Examined:
    """A checkpoint, and all that it is asked. Several `tasks` are several parts: whatever is asked
    in one is not asked in another."""

    def __init__(self, path, asked, tasks=None, like=None):
        "With --data, the rows are those of `like`, another Examined: one size for all models."
        self.path, self.asked, self.like = path, asked, like
        for name in asked.measures:
            check_choice('measures', name, MEASURES)
        ours, theirs = zip(*map(split_tasks, tasks or [asked.tasks]))
        self.tasks = ours, theirs
        device = pick_device(asked.device)
        self.harness = Harness(path, theirs, asked, device) if any(theirs) else None
        for name in ('limit', 'chat', 'max_length', 'dtype'):
            if not self.harness and getattr(asked, name) != getattr(Asked, name):
                raise Refused(f"--{name} is for lm-eval's tasks, and none is asked for")
        if any(theirs) and not any(ours) and asked.shots != Asked.shots:
            raise Refused("--shots is for our own tasks: lm-eval's have numbers of their own")
        # what lm-eval alone looks at is in memory once
        self.is_lm_evals = bool(self.harness and is_hugging_face(path) and not any(ours)
                                and not asked.data and family_of(path) != FAMILY)
        if self.is_lm_evals:
            self.state, self.model = {}, self.harness.lm(Way()).model
            self.scorers = [None] * len(ours)
        else:
            self.state, self.model = open_any(path, device)
            self.answer = answer_of(self.model)
            if getattr(self.model, 'recurs', False):
                self.model.fresh = False        # else each forward begins with noise of its own
            self.scorers = [self.scorer(names, i, len(ours)) for i, names in enumerate(ours)]
        if not self.harness and not any(self.scorers):
            raise Refused(f'{path} does not say what it was trained on: give --data, a dataset for '
                          'its tokenizer, or --tasks (such as toy_assign/3 or arc_easy)')

    def scorer(self, names, part, parts):
        "What our own code asks in this part, or None."
        config = self.state.get('config') or {}
        tokenizer = get_tokenizer(self.path)
        questions = {name: examples for name, examples in
                     questions_of(names, self.asked, self.asked.seed + part).items()
                     if self.fit(name, examples, tokenizer)}
        data = self.asked.data or config.get('data')
        if data and not self.asked.data and (questions or self.harness) and not is_there(data):
            if part == 0:
                say(f'{self.path}: what it was trained on ({data}) is not here, so its loss is '
                    'left out')
            data = None
        val = None
        if data and self.asked.measures:
            state = self.like.state if self.like and self.asked.data else self.state
            val = open_data(self.path, self.state | dict(config=state.get('config')), self.answer,
                            self.asked.data)
            row = len(val.starts) + val.sets[0].context
            if row > self.answer.config.context:
                raise Refused(f'{self.path} reads {self.answer.config.context} tokens, but the '
                              f'rows of the first model have {row}: name this one first')
        if val is None and not questions:
            return None
        scorer = Scorer(tokenizer, questions, val, self.asked.batches,
                        pieces=config.get('grad_accum', 1))
        if val is not None and parts > 1:
            scorer.batches, scorer.first = self.share(val, part, parts)
        return scorer

    def fit(self, name, examples, tokenizer):
        "Are some questions short enough for the model? If not, it is said."
        context = self.answer.config.context
        longest = max(map(sum, lengths(self.answer, tokenizer, examples)))
        if longest > context:
            say(f'{name} is left out: with its answer it has {longest} tokens, but the context of '
                f'{self.path} is {context}')
        return longest <= context

    def share(self, val, part, parts):
        "(how many batches of the validation data a part has, the first of them)."
        batches = self.asked.batches
        if len(val) < parts:
            raise Refused(f'the validation data of {self.path} fill one batch, of '
                          f'{val.batch_size} rows of {val.sets[0].context} tokens: a sweep '
                          'screens on one and judges on another, so give more text')
        if len(val) < parts * batches:
            batches = len(val) // parts
            if part == 0:
                say(f'the validation data have {len(val)} batches: screened on {batches} of them, '
                    'judged on others')
        return batches, part * batches

    def data(self):
        "What the loss is measured on, in words."
        val = self.scorers[0] and self.scorers[0].val
        if not val:
            return 'no data'
        folders = ', '.join(f'{share / sum(val.quota):.0%} {each.folder}'
                            for each, share in zip(val.sets, val.quota))
        return f'{val.batch_size} rows of {val.sets[0].context} tokens a batch, {folders}'

    def check(self, ways):
        "Refuse what this model cannot do, before an hour is spent."
        for way in ways:
            if way.loop and self.is_lm_evals and not is_foreign(self.path):
                way.order(depth_in(self.model))         # it will be exported in that order
                continue
            with way.apply(self.model):
                pass

    def mark(self):
        "What tells the model and all that it is asked from others."
        digest = hashlib.sha256(fingerprint(self.model).encode())
        for path in sorted(Path(self.path).glob('*token*.json')) + [
                Path(self.path) / 'chat_template.jinja']:
            digest.update(path.read_bytes() if path.exists() else b'')
        for scorer in filter(None, self.scorers):
            if scorer.val is not None:
                digest.update(json.dumps(scorer.val.kinds).encode())
                batches = min(scorer.batches, len(scorer.val))
                for step in range(scorer.first, scorer.first + batches):
                    digest.update(b''.join(part.numpy().tobytes()
                                           for part in scorer.val.marked_batch(step)))
        asked = {each.name: getattr(self.asked, each.name) for each in fields(Asked)
                 if each.name not in ('tasks', 'data', 'device', 'batch_size')}
        digest.update(json.dumps([asked, self.tasks, code_that_runs()], default=str).encode())
        return digest.hexdigest()[:24]

    def scores(self, way, part=0):
        "{name: Score} of the model, run in a way."
        scores = {}
        scorer = self.scorers[part]
        if scorer:
            with way.apply(self.model):
                if scorer.val is not None:
                    for name in self.asked.measures:
                        scores |= MEASURES[name](scorer, self.answer)
                for name, answers in scorer.answers(self.answer).items():
                    options = scorer.questions[name][0].options
                    scores[name] = of_answers(answers.accuracy, answers.each, 1 / len(options))
        if self.harness:
            scores |= self.harness.scores(way, part)
        return scores


@functools.cache
def written_code():
    "A hash of all our code and tasks, and the versions of the packages that it calls."
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted([*package.rglob('*.py'), *ROOT.glob('*.py'),
                        *(ROOT / 'data/evals').rglob('*.*')]):
        digest.update(path.read_bytes())
    for name in ('torch', 'transformers', 'tokenizers', 'lm_eval'):
        with contextlib.suppress(PackageNotFoundError):
            digest.update(f'{name} {version(name)}'.encode())
    return digest.hexdigest()


def code_that_runs():
    """What makes a number, so that none outlives its code: all that is written here, and solvers
    and measures that a script of the user's has put into the tables."""
    added = [*SOLVERS.values(), *MEASURES.values()]
    texts = []
    for function in added:
        try:
            texts.append(inspect.getsource(function))
        except (OSError, TypeError):        # typed in: it is known to this process alone
            texts.append(repr(function))
    return [written_code(), texts]


def is_there(data):
    "Are the validation rows of a folder, or of a list of them, on this disk?"
    folders = [data] if isinstance(data, str) else data or []
    return bool(folders) and all(any((find(folder) / name).exists() for name in
                                     ('val.json', 'mixture.json')) for folder in folders)
