"""How good a model is: log-likelihoods of a question's options, and all other scores of a run.

The idea: an option's score is its log-likelihood after the prompt, and the options of one prompt
share its cache. All that maps tokens to logits can be scored: our models, looped, retrofitted or
wrapped, and others'.

Usage:
    accuracy, (low, high) = score(model, get_tokenizer('out/lidas'), few_shot('assign_basic', 200))
    scorer = Scorer(tokenizer, parse_tasks('toy_assign/4', 200), val=loader, batches=8)
    scorer.on_data(model), scorer.answers(model)        # the loss; {'toy_assign/4': Answers}
"""
import hashlib
import json
import math
from typing import NamedTuple

import torch

from nanodepth.common.errors import Refused
from nanodepth.data.primitives import continuation, few_shot, task_and_depth
from nanodepth.data.tokenizer import (get_tokenizer, refuse_another_tokenizer,
                                      start_of_document)
from nanodepth.data.tokens import Loader, measure
from nanodepth.engine.checkpoint import describe, is_hugging_face
from nanodepth.model import LM
from nanodepth.report.tables import mean, p_value, standard_error
from nanodepth.variants.hosts import is_looped


class Score(NamedTuple):
    "How good a model is at something."
    kind: str               # 'nats' of a loss, a 'share' of right answers, or another 'score'
    mean: float
    error: float | None     # its standard error, where there is one
    answers: list           # what each question, document or batch gave
    chance: float | None = None


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


def error_of(values):
    return standard_error(values) if len(values) > 1 else None


def of_answers(accuracy, right, chance=None):
    "The Score of questions that are answered right or wrong."
    if not math.isfinite(accuracy):
        return Score('share', math.nan, None, [None] * len(right), chance)
    right = list(map(int, right))
    return Score('share', accuracy, error_of(right), right, chance)


def score(model_like, tokenizer, examples, **options):
    "(accuracy, its 95% interval): the option with the highest log-likelihood is the choice."
    answers = ask(model_like, tokenizer, examples, **options)
    return answers.accuracy, interval(answers.right, answers.n)


class Answers(NamedTuple):
    "How some questions were answered."
    right: float                # how many; nan if a log-likelihood is not finite
    n: int
    log_likelihood: float       # of the right option, the mean over the questions
    each: list                  # was it answered right?

    @property
    def accuracy(self):
        return self.right / self.n


def ask(model_like, tokenizer, examples, **options):
    "The Answers of a model to some questions: the likeliest option is its choice."
    values = log_likelihoods(model_like, tokenizer, examples, **options)
    each = [v.argmax().item() == e.answer for v, e in zip(values, examples)]
    right = sum(each)
    if not all(v.isfinite().all() for v in values):         # argmax still chose one
        right = math.nan
    total = sum(v[e.answer].item() for v, e in zip(values, examples))
    return Answers(right, len(examples), total / len(examples), each)


def interval(right, n, z=1.96):
    "Wilson's interval: valid near 0 and 1 too, unlike ± 2 standard errors."
    p = right / n
    width = z * z / n
    middle = (p + width / 2) / (1 + width)
    half = z * math.sqrt(p * (1 - p) / n + width / n / 4) / (1 + width)
    return middle - half, middle + half


def encode(tokenizer, text, model):
    "A text as the model was trained on documents: its tokens, behind those that begin one."
    return in_vocabulary([*start_of_document(tokenizer),
                          *tokenizer.encode(text, allowed_special='all')], model)


def in_vocabulary(ids, model):
    "The same tokens, which must all be in the model's vocabulary."
    size = getattr(getattr(model, 'config', None), 'vocab_size', math.inf)
    if ids and max(ids) >= size:
        raise Refused(f'the tokenizer gives a token {max(ids)}, but the model has a vocabulary of '
                      f'{size}: is this the tokenizer of this model?')
    return ids


def encoded(model, tokenizer, examples):
    "(the tokens of each prompt, those of each of its options)."
    return ([encode(tokenizer, e.prompt, model) for e in examples],
            [[in_vocabulary(continuation(tokenizer, e.prompt, o), model) for o in e.options]
             for e in examples])


def lengths(model, tokenizer, examples):
    "[(tokens of the prompt, of its longest option)] of each example."
    prompts, options = encoded(model, tokenizer, examples)
    return [(len(p), max(map(len, o))) for p, o in zip(prompts, options)]


# Logits are the largest tensors here, so a forward makes at most so many numbers of them, of which
# three copies exist for a moment: less than 1 GiB.
LOGITS_AT_ONCE = 2 ** 26
TOKENS_AT_ONCE = 2 ** 15


@torch.no_grad()
def log_likelihoods(model_like, tokenizer, examples, *, batch=64, share=True):
    """[(options,) of each example]: log-likelihoods of the options after the prompt. `model_like`
    maps tokens (B, T) to logits (B, T, V). Rows of one batch have one length, so that what a
    question scores does not depend on the questions beside it. A model that keeps a plain KV cache
    reads each prompt once, for all of its options (share=False: with each of them)."""
    prompts, options = encoded(model_like, tokenizer, examples)
    config = getattr(model_like, 'config', None)
    context = getattr(config, 'context', math.inf)
    longest = max(len(p) + max(map(len, o)) for p, o in zip(prompts, options))
    if longest > context:
        raise Refused(f'a prompt with its answer has {longest} tokens, but the context is '
                      f'{context}')
    device = next((p.device for p in getattr(model_like, 'parameters', list)()), 'cpu')
    width = getattr(config, 'vocab_size', 1)
    read = by_prompts if share and shares_prompts(model_like) else by_rows
    values = [torch.zeros(len(o), dtype=torch.float64) for o in options]
    read(model_like, prompts, options, values, batch, width, device)
    return values


def in_batches(lengths, batch, size):
    """Lists of indices with one and the same length; `size(length)` is how many logits one row of
    that length makes."""
    batches = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        first = batches[-1][0] if batches else None
        most = max(1, min(batch, LOGITS_AT_ONCE // size(lengths[i]),
                          TOKENS_AT_ONCE // sum(lengths[i])))
        if first is None or lengths[first] != lengths[i] or len(batches[-1]) == most:
            batches.append([])
        batches[-1].append(i)
    return batches


def by_rows(model, prompts, options, values, batch, width, device):
    """Every option is read behind its whole prompt in one forward, as lm-eval does. Options of one
    token have the same tokens before them, so one row serves them all."""
    rows = {}           # {tokens before the last: [(example, option)]}
    for i, (prompt, each) in enumerate(zip(prompts, options)):
        for o, option in enumerate(each):
            key = (*prompt, *option[:-1]), len(prompt)
            rows.setdefault(key, []).append((i, o))
    keys = list(rows)
    lengths = [(len(tokens), len(tokens) - n + 1) for tokens, n in keys]
    for part in in_batches(lengths, batch, lambda length: length[1] * width):
        read = torch.tensor([keys[k][0] for k in part], device=device)
        n = lengths[part[0]][1]                     # logits that are needed of each row
        chances = last_logits(model, read, n).float().log_softmax(-1)           # (B, n, V)
        for k, row in zip(part, chances):
            for i, o in rows[keys[k]]:
                option = torch.tensor(options[i][o], device=device)[:, None]
                values[i][o] = row.gather(-1, option).double().sum().cpu()


def by_prompts(model, prompts, options, values, batch, width, device):
    "Each prompt is read once, and its options go on from its KV cache."
    lengths = [(len(prompt), len(each)) for prompt, each in zip(prompts, options)]
    longest = max(len(option) for each in options for option in each)
    for part in in_batches(lengths, batch, lambda length: length[1] * longest * width):
        O, W = lengths[part[0]][1], max(len(option) for i in part for option in options[i])
        tokens = torch.zeros(len(part), O, W, dtype=torch.long)
        counts = torch.zeros(len(part), O, W, dtype=torch.bool)
        for b, i in enumerate(part):
            for o, option in enumerate(options[i]):
                tokens[b, o, :len(option)] = torch.tensor(option)
                counts[b, o, :len(option)] = True
        tokens, counts = tokens.to(device), counts.to(device)
        prompt = torch.tensor([prompts[i] for i in part], device=device)        # (B, T)
        logits = shared(model, prompt, tokens).float()
        chances = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]  # (B, O, W)
        for i, value in zip(part, chances.masked_fill(~counts, 0).cpu().double().sum(-1)):
            values[i] = value


def last_logits(model, tokens, n):
    "Logits (B, n, V) at the last n positions, and no others where the model can be asked so."
    if isinstance(model, LM):
        return model.head(model.norm(model.hidden(tokens)[:, -n:]))
    if hasattr(model, 'last_logits'):
        return model.last_logits(tokens, n)
    return model(tokens)[:, -n:]


def shares_prompts(model):
    """May options go on from the cache of their prompt? Not where that is another computation than
    reading both at once: a looped window shows later tokens one version of its keys."""
    if isinstance(model, LM):
        return not model.recurs and not is_looped(model)
    return getattr(model, 'shares_prompts', False) and not is_looped(model.model)


class Branched:
    """A cache slot that O rows read for each row of its own: prompt and options are joined only
    when needed."""

    def __init__(self, slot, O):
        self.slot, self.O = slot, O

    def update(self, k, v):        # (B O, Hkv, W, hd) each
        return tuple(torch.cat((old[:, None].expand(-1, self.O, -1, -1, -1),
                                new.unflatten(0, (-1, self.O))), dim=3).flatten(0, 1)
                     for old, new in ((self.slot.keys, k), (self.slot.values, v)))

    def get_seq_length(self):
        return self.slot.get_seq_length()


def shared(model, prompt, options):
    """Logits (B, O, W, V) at the options' tokens. Each prompt is read once, and its cache is handed
    to all of its options."""
    B, O, W = options.shape
    if not isinstance(model, LM):
        return model.shared(prompt, options)
    cache = model.new_cache()
    first = model.head(model.norm(model.hidden(prompt, cache=cache)[:, -1:]))        # (B, 1, V)
    first = first[:, None].expand(B, O, 1, -1)
    if W == 1:
        return first
    cache.layers = [Branched(slot, O) for slot in cache.layers]
    rest = model(options[..., :-1].flatten(0, 1), cache=cache)                     # (B O, W - 1, V)
    return torch.cat((first, rest.unflatten(0, (B, O))), dim=2)


# --------------------------------------------------------------------------------------------- runs

def fingerprint(model):
    "A hash of all that a model computes with: settings and every weight."
    state = (describe(model) if isinstance(model, LM)
             else dict(config=model.config.to_dict()))
    state.pop('model', None)
    digest = hashlib.sha256(json.dumps(state, sort_keys=True, default=str).encode())
    for name, t in model.state_dict().items():
        digest.update(name.encode())
        digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def parse_tasks(text, n):
    "'assign_code/1,copy_words' to examples of each: {'assign_code/1': [Example]}."
    asked = {name: task_and_depth(name) for name in filter(None, text.split(','))}
    return {name: few_shot(task, n, shots=0, depth=depth)
            for name, (task, depth) in asked.items()}


def starts_of(path):
    """The tokens that a checkpoint wants before each row of data. Others' checkpoints, if their
    tokenizer begins a text with tokens of its own, were trained with them at every text: without
    them Gemma is lost. Ours are trained on windows out of the middle, and read windows here too."""
    return getattr(get_tokenizer(path), 'starts', []) if is_hugging_face(path) else []


def open_data(path, state, model, data, seed=0):
    "The validation rows of `data`, else of what the run was trained on."
    c = state.get('config') or {}
    starts = starts_of(path)
    data, weights = (data, None) if data else (c.get('data'), c.get('data_weights'))
    if not data:
        raise Refused(f'{path} does not say what it was trained on: give --data, a dataset for '
                      'its tokenizer')
    context = c.get('context', min(model.config.context - len(starts), 512))
    loader = Loader(data, c.get('batch_size', 4), context, split='val', weights=weights, seed=seed,
                    vocab_size=model.config.vocab_size, starts=starts)
    refuse_another_tokenizer(path, loader, state.get('tokenizer'))
    return loader


class After:
    "The batches of a Loader's first epoch after the first n, over and over."

    def __init__(self, loader, n):
        if n >= len(loader):
            raise Refused(f'the data have {len(loader)} batches: none comes after the first {n}')
        self.loader = loader
        self.first = n
        self.n = len(loader) - n

    def batch(self, step):
        return self.loader.batch(self.first + step % self.n)


class Scorer:
    """Asks every model the same: the loss on some batches of validation data, from the `first` on,
    and some questions, {name: [Example]}. A model is anything that maps tokens to logits."""

    def __init__(self, tokenizer, questions, val=None, batches=None, pieces=1):
        self.tokenizer, self.questions, self.val = tokenizer, questions, val
        self.batches, self.first, self.pieces = batches, 0, pieces

    def on_data(self, model, singly=None):
        "(loss, {kind: {'loss', 'accuracy'}}); `singly` as of tokens.measure."
        return measure(model, self.val, self.batches, self.pieces, self.first, singly)

    def answers(self, model):
        "{name: Answers} to all questions."
        return {name: ask(model, self.tokenizer, examples)
                for name, examples in self.questions.items()}
