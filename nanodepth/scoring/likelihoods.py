"""Compute how likely each continuation of a prompt is, and whether it is the likeliest. The model
may be anything that maps tokens to logits. An option is read after its prompt in one forward pass,
as lm-eval does, and only the logits that are needed are computed.
Usage: log_likelihoods(model, get_tokenizer('out/lidas'), few_shot('assign_basic', 200))
"""
import itertools
import math

import torch
import torch.nn.functional as F
from tqdm import tqdm

from nanodepth.common.origin import device_of, is_ours, vocab_size_of
from nanodepth.model import require
from nanodepth.text.primitives import continuation
from nanodepth.text.tokenizer import start_of_document
from nanodepth.training import measure

TOKENS_AT_ONCE = 2 ** 15
LOGITS_AT_ONCE = 2 ** 26    # numbers: three copies of them are less than 1 GiB


def encode(tokenizer, text):
    "Return a text's tokens, after the tokens that begin a document."
    return [*start_of_document(tokenizer), *tokenizer.encode(text, allowed_special='all')]


def log_likelihoods(model_like, tokenizer, examples):
    "Return the log-likelihoods of the options of each example: a list of (options,)."
    prompts = [encode(tokenizer, e.prompt) for e in examples]
    options = [[continuation(tokenizer, e.prompt, o) for o in e.options] for e in examples]
    context = getattr(getattr(model_like, 'config', None), 'context', math.inf)
    longest = max(len(p) + max(map(len, o)) for p, o in zip(prompts, options))
    require(longest <= context, f'a prompt with its answer has {longest} tokens, but the context '
            f'is {context}')
    return [values for values, _ in likelihoods(model_like, prompts, options)]


@torch.no_grad()
def likelihoods(model, prompts, options, batch=64):
    """Return for each prompt the log-likelihoods of its options, and whether each option is what
    the model would write: two tensors, (options,). Prompts and options are lists of tokens. A score
    does not depend on the other questions of a batch."""
    found = [(torch.zeros(len(o), dtype=torch.float64), torch.zeros(len(o), dtype=torch.bool))
             for o in options]
    # Options of one token follow the same tokens, so one row serves all of them.
    rows = {}           # {(tokens before an option's last, tokens of the option): [(i, option)]}
    for i, prompt in enumerate(prompts):
        for o, option in enumerate(options[i]):
            rows.setdefault(((*prompt, *option[:-1]), len(option)), []).append((i, o))
    batches = [*in_batches(rows, batch, vocab_size_of(model))]
    for part, n in tqdm(batches, 'questions', unit='batch', leave=False, delay=2):
        read = torch.tensor([tokens for tokens, _ in part], device=device_of(model))
        chances = last_logits(model, read, n).float().log_softmax(-1)               # (B, n, V)
        for row, here in zip(part, chances):
            for i, o in rows[row]:
                option = torch.tensor(options[i][o], device=here.device)
                of_option, (likelihood, is_greedy) = here[n - len(option):], found[i]
                likelihood[o] = of_option.gather(-1, option[:, None]).double().sum()
                is_greedy[o] = (of_option.argmax(-1) == option).all()
    return found


def in_batches(rows, batch, width):
    """Yield batches of rows that have one length, each with the number of tokens of its longest
    option. A batch is small enough for one forward pass."""
    rows = sorted(rows, key=lambda row: (len(row[0]), -row[1]))         # long options first
    for length, alike in itertools.groupby(rows, lambda row: len(row[0])):
        alike = list(alike)
        while alike:
            n = alike[0][1]
            size = max(1, min(batch, TOKENS_AT_ONCE // length, LOGITS_AT_ONCE // (n * width)))
            yield alike[:size], n
            alike = alike[size:]


def last_logits(model, tokens, n):
    "Return the logits of the last n tokens (B, n, V). If the model can, it computes no others."
    if is_ours(model):
        return model.head(model.norm(model.hidden(tokens)[:, -n:]))
    return model.last_logits(tokens, n) if hasattr(model, 'last_logits') else model(tokens)[:, -n:]


def losses_of(model, tokens, targets):
    """Return the loss of each target, and whether another token is likelier: (B, T) each. The model
    may be any function from tokens to logits."""
    if is_ours(model):
        return measure.losses_of(model, tokens, targets)
    rows = max(1, LOGITS_AT_ONCE // (tokens.shape[1] * vocab_size_of(model)))
    device, losses, wrong = device_of(model), [], []
    for x, y in zip(tokens.to(device).split(rows), targets.to(device).split(rows)):
        logits = model(x)                                                       # (B, T, V)
        # flat: over transposed logits torch sums a large vocabulary less exactly
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-1,
                                      reduction='none').view_as(y).cpu().double())
        wrong.append((logits.argmax(-1) != y).cpu())
    return torch.cat(losses), torch.cat(wrong)
