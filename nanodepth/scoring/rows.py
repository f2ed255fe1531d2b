"""How a number in a table comes about, from top to bottom. A measure gives Scores: what each
question or row of data gave, and their mean. A row is a Score in one way of running the model
(way.py), and how it changed from the model as it is, question by question.
Usage: subject = Subject('out/lidas', Asked(tasks='toy_assign/3'))
       for rows in ask(subject, [{}, dict(window='mid4', K=2)]): ...
"""
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from nanodepth.common.errors import check_choice, say
from nanodepth.model import require
from nanodepth.models.checkpoint import open_any, pick_device
from nanodepth.models.hf import answer_of
from nanodepth.report.contrasts import error_of, mean, p_value
from nanodepth.report.tables import Row, Score, names_of
from nanodepth.scoring.data import described, is_there, open_data, parse_tasks, questions_of
from nanodepth.scoring.likelihoods import log_likelihoods, losses_of
from nanodepth.scoring.way import facts, in_way, in_words
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.training.measure import validate


# --------------------------------------------------------------------------------------- the scores

def score_of(kind, answers, chance=None):
    return Score(kind, mean(answers), error_of(answers), answers, chance)


def of_questions(model_like, tokenizer, examples):
    """Two Scores: is the likeliest option the right one, and the log-likelihood of that one, which
    has one peak over seeds where the share of right answers has two."""
    values = log_likelihoods(model_like, tokenizer, examples)
    right = [int(v.argmax() == e.answer) if v.isfinite().all() else math.nan
             for v, e in zip(values, examples)]
    return (score_of('share', right, 1 / len(examples[0].options)),
            score_of('log_prob', [v[e.answer].item() for v, e in zip(values, examples)]))


def data_scores(model, loader, batches=None, pieces=1, text=False):
    """{'loss', and the kinds of answers that the data mark: a Score of each}; with `text`, the loss
    on what they mark as text, too."""
    of_rows, of_kinds = [], 0
    right = {kind: [] for kind in loader.kinds}
    for of_batch, rows, answers in validate(model, loader, batches or 0, pieces, losses_of):
        of_kinds = of_kinds + of_batch
        of_rows += rows
        for kind, is_right in answers:
            right[loader.kinds[kind - 1]].append(int(is_right))
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
    for kind, each in right.items():
        if each and kind != 'text':     # where the loss is no number, the likeliest token is chance
            each = each if math.isfinite(loss) else [math.nan] * len(each)
            scores[kind] = score_of('share', each)
    return scores


# ------------------------------------------------------------------------------------ what is asked

MEASURES = {}       # yours: {name: a function (model, validation data) -> {name: number or Score}}


@dataclass(kw_only=True)
class Asked:
    "What is measured."
    # primitives with their depths (toy_assign/3, assign_math/0-5, toy, papers); any other name is
    # a task or a list of lm-eval's (scoring/harness.py)
    tasks: str = ''
    # loss: on data, with the kinds of answers that they mark; text: the loss on text alone;
    # log_prob: of the right answer to each task; or one of yours. --measures= leaves the data out
    measures: tuple[str, ...] = ('loss',)
    data: str | None = None     # a dataset; None: what the run was trained on
    batches: int | None = None  # of validation data; 0: all; None: as in training, or 8
    rows: int | None = None     # in a batch of validation data; None: as in training
    n: int = 200                # questions of each primitive
    shots: tuple[int, ...] | None = None    # answered examples before each; None: 0, or lm-eval's
    seed: int = 0               # of their draws
    limit: int | None = None    # documents of each task of lm-eval: to try, not to report
    chat: bool = False          # lm-eval with the chat template of the checkpoint
    max_length: int | None = None       # lm-eval: tokens of a prompt and its answer at most
    device: str = 'auto'        # cuda, else mps, else cpu
    # auto: bfloat16 for what was published in 16 bits, where the device is fast at it
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'


def questions_in(asked):
    "({name: its questions} of our tasks, the tasks that are lm-eval's, if any)."
    for name in asked.measures:
        check_choice('--measures', name, ['loss', 'text', 'log_prob', *MEASURES])
    require(asked.tasks or {*asked.measures} - {'log_prob'},
            'nothing is asked: give --tasks, such as toy_assign/3, or --measures')
    ours, theirs = parse_tasks(asked.tasks)
    if theirs:
        from nanodepth.scoring.harness import find      # lm-eval is needed by nothing else
        require(len(asked.shots or ()) < 2, "--shots: lm-eval's tasks take one number")
        theirs = find(tuple(theirs), *asked.shots or ())
    return questions_of(ours, asked.n, asked.shots or (0,), asked.seed), theirs


class Subject:
    "A checkpoint that is open, its validation data (as those of `like`), and its questions."

    def __init__(self, path, asked, like=None):
        self.path, self.asked = path, asked
        self.questions, self.theirs = questions_in(asked)
        self.state, self.model = open_any(path, pick_device(asked.device), asked.dtype)
        self.answer, self.tokenizer = answer_of(self.model), get_tokenizer(path)
        config = self.state.get('config') or {}
        self.val, own = None, config.get('data')
        self.batches = asked.batches
        if self.batches is None:
            self.batches = like.batches if like else config.get('eval_batches', 8)
        looks_at_data = {*asked.measures} - {'log_prob'}
        if looks_at_data and (asked.data or not asked.tasks or is_there(own)):
            self.val = open_data(path, self.state, self.answer, asked.data, rows=asked.rows,
                                 like=like and like.val)
        elif looks_at_data and own:
            say(f'{path}: what it was trained on ({own}) is not here, so its loss is left out')


def measured(subject, way):
    "{name: (Score, the data in words, '' if it looked at none)} of the model as it runs now."
    asked, val, found = subject.asked, subject.val, {}
    data = described(val, subject.batches) if val else ''
    if val and {'loss', 'text'} & {*asked.measures}:
        pieces = (subject.state.get('config') or {}).get('grad_accum', 1)
        of_data = data_scores(subject.answer, val, subject.batches, pieces,
                              'text' in asked.measures)
        found |= {name: (score, data) for name, score in of_data.items()}
    for name, examples in subject.questions.items():
        right, log_prob = of_questions(subject.answer, subject.tokenizer, examples)
        found[name] = right, ''
        if 'log_prob' in asked.measures:
            found[f'{name} log_prob'] = log_prob, ''
    if subject.theirs:
        from nanodepth.scoring.harness import lm_scores
        found |= {name: (score, '') for name, score in lm_scores(subject).items()}
    for measure in (MEASURES[name] for name in asked.measures if name in MEASURES):
        with torch.no_grad():
            numbers = measure(subject.model, val)
        for name, value in numbers.items():
            require(name not in found, f'{name!r} is measured already: choose another name')
            is_score = isinstance(value, Score)
            found[name] = value if is_score else Score('score', float(value), None, []), data
    return found


def ask(subject, ways, **names):
    """Yield the Rows of each way. Changes are from the first way, which is the model as it is.
    `names` are a Row's run, group and seed, if these do not follow from the subject's path."""
    for way in ways:            # refuse a way that this model does not have before hours of work
        with in_way(subject.model, way):
            pass
    plain, val = {}, subject.val
    names = names or names_of(Path(subject.path).absolute().name)
    names = dict(seed=(subject.state.get('config') or {}).get('seed', 0)) | names
    for way in tqdm(ways, str(subject.path), unit='way', leave=False, disable=len(ways) == 1):
        with in_way(subject.model, way):
            found = measured(subject, way)
            about = facts(subject.state, subject.model, way, val and len(val.starts) + val.context)
        plain = plain or found
        rows = []
        for name, (score, data) in found.items():
            before = plain[name][0] if name in plain else Score(score.kind, math.nan, None, [])
            change = score.mean - before.mean
            changes = [b - a for a, b in zip(before.answers, score.answers)]
            if abs(mean(changes) - change) > 1e-9:      # a perplexity is not a mean over documents
                changes = []
            rows.append(Row(
                **names, steps=subject.state.get('step'), **about, way=in_words(way), measure=name,
                kind=score.kind, mean=score.mean, error=score.error,
                n=len(score.answers) or None, chance=score.chance,
                change=change, change_error=error_of(changes), p=p_value(changes), data=data,
                settings=way, answers=score.answers, changes=changes))
        yield rows
