"""Measure a model in several ways of running it. A measure returns Scores: a mean, and what each
question or row of data contributed to it. A Row (report/tables.py) holds one Score in one way of
running (ways.py), and the change from the model as it is, question by question.
Usage: subject = Subject('out/lidas', ScoreOptions(tasks='toy_assign/3'))
       for rows in score_ways(subject, [{}, dict(window='mid4', K=2)]): ...
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
from nanodepth.scoring.data import described, is_on_disk, open_data, parse_tasks, questions_of
from nanodepth.scoring.likelihoods import log_likelihoods, losses_of
from nanodepth.scoring.ways import cost_columns, in_way, in_words
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.training.measure import validate


# -------------------------------------------------------------------------------------- the scores

def score_of(kind, answers, chance=None):
    "Return the Score of a list of answers."
    return Score(kind, mean(answers), error_of(answers), answers, chance)


def question_scores(model_like, tokenizer, examples):
    """Return two Scores: the share of questions whose likeliest option is the right one, and the
    log-probability of the right option. (Over seeds the share often has two peaks, because a seed
    learns a task or does not. The log-probability has one, so its t-test can be trusted.)"""
    values = log_likelihoods(model_like, tokenizer, examples)
    is_right = [int(v.argmax() == example.answer) if v.isfinite().all() else math.nan
                for v, example in zip(values, examples)]
    log_probs = [v[example.answer].item() for v, example in zip(values, examples)]
    return (score_of('share', is_right, 1 / len(examples[0].options)),
            score_of('log_prob', log_probs))


def data_scores(model, loader, batches=None, pieces=1, text=False):
    """Return {'loss': its Score, ...}, with the share of right answers for each kind of answer that
    the data mark. With `text`, also the loss on the tokens that the data mark as text."""
    sums_of_rows, sums_of_kinds = [], 0
    answers = {kind: [] for kind in loader.kinds}
    batches_of_sums = validate(model, loader, batches or 0, pieces, losses_of)
    for of_kinds, of_rows, of_answers in batches_of_sums:
        sums_of_kinds = sums_of_kinds + of_kinds
        sums_of_rows += of_rows
        for kind, is_right in of_answers:
            answers[loader.kinds[kind - 1]].append(int(is_right))
    sums, counts = torch.stack(sums_of_rows).unbind(1)
    loss = (sums.sum() / counts.sum()).item()       # nan if there are no targets
    # The loss is a mean over tokens. These values, one for each row, have the same mean, and their
    # spread gives its standard error, even if rows have unequal numbers of targets.
    losses = (sums / counts.mean() + loss * (1 - counts / counts.mean())).tolist()
    scores = dict(loss=Score('nats', loss, error_of(losses), losses))
    if text and 'text' in loader.kinds:
        total, n = sums_of_kinds[1 + loader.kinds.index('text'), :2].tolist()
        scores['text'] = Score('nats', total / n if n else math.nan, None, [])
    for kind, of_kind in answers.items():
        if of_kind and kind != 'text':
            if not math.isfinite(loss):         # then the likeliest token means nothing
                of_kind = [math.nan] * len(of_kind)
            scores[kind] = score_of('share', of_kind)
    return scores


# --------------------------------------------------------------------------------- what is measured

# measures of yours: {name: a function (model, validation data) -> {name: number or Score}}
MEASURES = {}


@dataclass(kw_only=True)
class ScoreOptions:
    "What is measured."
    # primitives with their depths (toy_assign/3, assign_math/0-5, toy, papers); any other name is
    # a task or a list of tasks of lm-eval (scoring/harness.py)
    tasks: str = ''
    # loss: on data, with the kinds of answers that the data mark; text: the loss on text alone;
    # log_prob: of the right answer to each task; or one of yours. With an empty --measures= no data
    # are read
    measures: tuple[str, ...] = ('loss',)
    data: str | None = None     # a dataset; None: what the run was trained on
    batches: int | None = None  # of validation data; 0: all; None: as in training, or 8
    rows: int | None = None     # in a batch of validation data; None: as in training
    n: int = 200                # questions of each primitive
    shots: tuple[int, ...] | None = None    # answered examples before each; None: 0, or lm-eval's
    seed: int = 0               # of the questions that are drawn
    limit: int | None = None    # documents of each task of lm-eval: to try, not to report
    chat: bool = False          # lm-eval with the chat template of the checkpoint
    max_length: int | None = None       # lm-eval: tokens of a prompt and its answer at most
    device: str = 'auto'        # cuda, otherwise mps, otherwise cpu
    # auto: bfloat16 for what was published in 16 bits, if the device is fast at it
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'


def questions_in(options):
    """Return {name: questions} of our tasks, and what harness.find returns for the tasks of lm-eval
    (an empty list if there are none)."""
    for name in options.measures:
        check_choice('--measures', name, ['loss', 'text', 'log_prob', *MEASURES])
    require(options.tasks or {*options.measures} - {'log_prob'},
            'nothing to measure: give --tasks, such as toy_assign/3, or --measures')
    ours, theirs = parse_tasks(options.tasks)
    if theirs:
        from nanodepth.scoring.harness import find      # only here: lm-eval takes seconds to import
        require(len(options.shots or ()) < 2, "--shots: lm-eval's tasks take one number")
        theirs = find(tuple(theirs), *options.shots or ())
    return questions_of(ours, options.n, options.shots or (0,), options.seed), theirs


class Subject:
    "An open checkpoint with its validation data and its questions."

    def __init__(self, path, options, like=None):
        """Open a checkpoint. With `like`, another Subject, its validation data have rows of equal
        size."""
        self.path, self.options = path, options
        self.questions, self.theirs = questions_in(options)
        self.state, self.model = open_any(path, pick_device(options.device), options.dtype)
        self.config = self.state.get('config') or {}
        self.answer, self.tokenizer = answer_of(self.model), get_tokenizer(path)
        self.val, trained_on = None, self.config.get('data')
        self.batches = options.batches
        if self.batches is None:
            self.batches = like.batches if like else self.config.get('eval_batches', 8)
        if {*options.measures} <= {'log_prob'}:
            return
        if options.data or not options.tasks or is_on_disk(trained_on):
            self.val = open_data(path, self.state, self.answer, options.data, rows=options.rows,
                                 like=like and like.val)
        elif trained_on:
            say(f'{path}: its training data ({trained_on}) is not on this disk, so its loss is '
                'left out')


def scores_now(subject):
    """Return {name: (Score, the validation data in words, or '' if it reads none)} for the model as
    it runs now."""
    options, val, scores = subject.options, subject.val, {}
    data = described(val, subject.batches) if val else ''
    if val and {'loss', 'text'} & {*options.measures}:
        of_data = data_scores(subject.answer, val, subject.batches,
                              subject.config.get('grad_accum', 1), 'text' in options.measures)
        scores |= {name: (score, data) for name, score in of_data.items()}
    for name, examples in subject.questions.items():
        share, log_prob = question_scores(subject.answer, subject.tokenizer, examples)
        scores[name] = share, ''
        if 'log_prob' in options.measures:
            scores[f'{name} log_prob'] = log_prob, ''
    if subject.theirs:
        from nanodepth.scoring.harness import lm_scores
        scores |= {name: (score, '') for name, score in lm_scores(subject).items()}
    for measure in (MEASURES[name] for name in options.measures if name in MEASURES):
        with torch.no_grad():
            numbers = measure(subject.model, val)
        for name, value in numbers.items():
            require(name not in scores, f'{name!r} is measured already: choose another name')
            if not isinstance(value, Score):
                value = Score('score', float(value), None, [])
            scores[name] = value, data
    return scores


def score_ways(subject, ways, **names):
    """Yield the Rows of each way. Changes are from the first way, which is the model as it is.
    `names` are a Row's run, group and seed, if these do not follow from the subject's path."""
    for way in ways:            # refuse a way that this model does not have before hours of work
        with in_way(subject.model, way):
            pass
    plain, val = {}, subject.val
    names = names or names_of(Path(subject.path).absolute().name)
    names = dict(seed=subject.config.get('seed', 0)) | names
    context = val and len(val.starts) + val.context
    for way in tqdm(ways, str(subject.path), unit='way', leave=False, disable=len(ways) == 1):
        with in_way(subject.model, way):
            scores = scores_now(subject)
            cost = cost_columns(subject.state, subject.model, way, context)
        plain = plain or scores
        rows = []
        for name, (score, data) in scores.items():
            before = plain[name][0] if name in plain else Score(score.kind, math.nan, None, [])
            change = score.mean - before.mean
            changes = [b - a for a, b in zip(before.answers, score.answers)]    # paired
            if abs(mean(changes) - change) > 1e-9:      # a perplexity is not a mean over documents
                changes = []
            rows.append(Row(
                **names, **cost, steps=subject.state.get('step'), way=in_words(way), measure=name,
                kind=score.kind, mean=score.mean, error=score.error,
                n=len(score.answers) or None, chance=score.chance,
                change=change, change_error=error_of(changes), p=p_value(changes), data=data,
                settings=way, answers=score.answers, changes=changes))
        yield rows
