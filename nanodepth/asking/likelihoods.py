"""How likely each continuation of a prompt is to a model, and which is the likeliest.

The idea: all that maps tokens to logits can be asked, ours or not, in any way of running. The
logits are the largest tensors here, so only those are made that are needed, of a few rows at once;
and options of one prompt go on from its KV cache, so that it is read once.

Usage:
    values = log_likelihoods(model, get_tokenizer('out/lidas'), few_shot('assign_basic', 200))
    tokens = continued(model, [12, 7, 99], most=20, is_done=lambda new: 0 in new)
"""
import math

import torch
from tqdm import tqdm

from nanodepth.common.errors import Refused
from nanodepth.looping.layers import could_keep_all, keeping_all, mixes_tokens
from nanodepth.text.primitives import continuation
from nanodepth.text.tokenizer import start_of_document


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


# Logits are the largest tensors here, so a forward makes at most so many numbers of them, of which
# three copies exist for a moment: less than 1 GiB.
LOGITS_AT_ONCE = 2 ** 26
TOKENS_AT_ONCE = 2 ** 15


def log_likelihoods(model_like, tokenizer, examples, *, batch=64, share=True):
    """[(options,) of each example]: log-likelihoods of the options after the prompt. `model_like`
    maps tokens (B, T) to logits (B, T, V)."""
    prompts = [encode(tokenizer, e.prompt, model_like) for e in examples]
    options = [[in_vocabulary(continuation(tokenizer, e.prompt, o), model_like) for o in e.options]
               for e in examples]
    context = getattr(getattr(model_like, 'config', None), 'context', math.inf)
    longest = max(len(p) + max(map(len, o)) for p, o in zip(prompts, options))
    if longest > context:
        raise Refused(f'a prompt with its answer has {longest} tokens, but the context is '
                      f'{context}')
    return [values for values, _ in likelihoods(model_like, prompts, options, batch, share)]


@torch.no_grad()
def likelihoods(model_like, prompts, options, batch=64, share=True):
    """[((options,) log-likelihoods, whether each option is what the model would say)] of each
    prompt, all as tokens. A batch has rows of nearly one length, filled up behind their ends, where
    no earlier token looks. So what a question scores does not depend on the questions beside it. A
    model that keeps a plain KV cache reads each prompt once, for all of its options (share=False:
    with each of them)."""
    found = [(torch.zeros(len(o), dtype=torch.float64), torch.zeros(len(o), dtype=torch.bool))
             for o in options]
    shares = share and shares_prompts(model_like)
    by_prompt = [i for i, each in enumerate(options)
                 if shares and saves(len(prompts[i]), list(map(len, each)))]
    one_by_one = sorted({*range(len(options))}.difference(by_prompt))
    total = sum(len(prompt) for prompt in prompts)
    with tqdm(total=total, unit='token', unit_scale=True, leave=False, delay=2) as bar:
        if by_prompt:
            with keeping_all(module_of(model_like)):
                read_prompts(model_like, prompts, options, found, by_prompt, batch, bar)
        read_rows(model_like, prompts, options, found, one_by_one, batch, bar)
    return found


def width_of(model_like):
    return getattr(getattr(model_like, 'config', None), 'vocab_size', 1)


def module_of(model_like):
    "The model that the wrapper may have looped; None of a function that is no model."
    return model_like if hasattr(model_like, 'recurs') else getattr(model_like, 'model', None)


def device_of(model_like):
    return next((p.device for p in getattr(model_like, 'parameters', list)()), 'cpu')


def saves(prompt, options):
    """Does it pay that options of these lengths share their prompt? It takes a third of the tokens
    off, or they stand apart. (Options of one token share a row in any case.)"""
    apart = sum(prompt + n for n in options)
    return max(options) > 1 and apart > 1.5 * (prompt + len(options) * max(options))


def in_batches(lengths, alike, fits):
    """Lists of indices, in each of which no length is much above the smallest, or all are equal if
    `alike`. `fits(indices)`: are they not too many for one forward?"""
    batches = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        first = lengths[batches[-1][0]] if batches else math.inf
        longest = first if alike else first * 9 // 8 + 2
        if not (first <= lengths[i] <= longest and fits([*batches[-1], i])):
            batches.append([])
        batches[-1].append(i)
    return batches


def filled(rows, device):
    "Rows of tokens as one tensor, with zeros behind the shorter ones."
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


def read_rows(model, prompts, options, found, which, batch, bar):
    """Every option is read behind its whole prompt in one forward, as lm-eval does. Options of one
    token have the same tokens before them, so one row serves them all."""
    rows = {}           # {(tokens before an option's last, tokens of the prompt): [(i, option)]}
    for i in which:
        for o, option in enumerate(options[i]):
            key = (*prompts[i], *option[:-1]), len(prompts[i])
            rows.setdefault(key, []).append((i, o))
    keys = list(rows)
    lengths = [len(tokens) for tokens, _ in keys]

    def fits(part):
        longest = max(lengths[k] for k in part)
        needed = [lengths[k] - keys[k][1] + 1 for k in part]
        logits = sum(needed) if hasattr(model, 'recurs') else len(part) * (
            longest - min(keys[k][1] for k in part) + 1)
        return (len(part) <= batch and len(part) * longest <= TOKENS_AT_ONCE
                and logits * width_of(model) <= LOGITS_AT_ONCE)
    for part in in_batches(lengths, not fills_up(model), fits):
        read = filled([keys[k][0] for k in part], device_of(model))
        predict = spans([(keys[k][1] - 1, lengths[k]) for k in part], read)     # what comes next
        chances = picked_logits(model, read, predict).float().log_softmax(-1)       # (.., V)
        for k, row in zip(part, chances.split(predict.sum(1).tolist())):
            for i, o in rows[keys[k]]:
                likelihood, greedy = found[i]
                likelihood[o], greedy[o] = judged(row, options[i][o])
        bar.update(sum(keys[k][1] for k in part))


def spans(bounds, like):
    "A mask (B, T), true in each row from its first bound to before its second."
    places = torch.arange(like.shape[1], device=like.device)
    first, end = torch.tensor(bounds, device=like.device)[..., None].unbind(1)      # (B, 1) each
    return (first <= places) & (places < end)


def judged(row, option):
    "(the log-likelihood of an option, whether it is the likeliest) by log-probabilities (n, V)."
    option = torch.tensor(option, device=row.device)
    return (row.gather(-1, option[:, None]).double().sum().cpu(),
            (row.argmax(-1) == option).all().cpu())


def read_prompts(model, prompts, options, found, which, batch, bar):
    """Each prompt is read once, and its options go on from its KV cache. Of the longer prompts of a
    batch the last tokens are read with each option."""
    of_options = {}
    for i in which:
        of_options.setdefault(len(options[i]), []).append(i)
    for O, same in of_options.items():
        lengths = [len(prompts[i]) for i in same]

        def fits(part):
            some = [lengths[k] for k in part]
            longest = max(len(option) for k in part for option in options[same[k]])
            read = len(part) * O * (longest + max(some) - min(some))
            return (len(part) <= batch and len(part) * max(some) + read <= TOKENS_AT_ONCE
                    and read * width_of(model) <= LOGITS_AT_ONCE)
        for part in in_batches(lengths, not fills_up(model), fits):
            part = [same[k] for k in part]
            cut = min(len(prompts[i]) for i in part)        # up to here all are read from the cache
            asked = [(i, o) for i in part for o in range(O)]
            suffixes = filled([[*prompts[i][cut:], *options[i][o]] for i, o in asked],
                              device_of(model))                                 # (B O, W)
            counts = spans([(len(prompts[i]) - cut, len(prompts[i]) - cut + len(options[i][o]))
                            for i, o in asked], suffixes)
            prompt = filled([prompts[i][:cut] for i in part], device_of(model))
            chances = shared(model, prompt, suffixes.unflatten(0, (-1, O)),
                             counts.unflatten(0, (-1, O))).float().log_softmax(-1)      # (.., V)
            for (i, o), row in zip(asked, chances.split(counts.sum(1).tolist())):
                likelihood, greedy = found[i]
                likelihood[o], greedy[o] = judged(row, options[i][o])
            bar.update(sum(len(prompts[i]) for i in part))


@torch.no_grad()
def continued(model, tokens, most, is_done):
    "Up to `most` likeliest tokens after some, until is_done(those): a list."
    if not hasattr(model, 'recurs'):
        return model.continued(tokens, most, is_done)
    cache = model.new_cache()
    fresh = torch.tensor([tokens], device=device_of(model))
    new = []
    while len(new) < most and not is_done(new):
        x = model.hidden(fresh, cache=cache)[:, -1:]
        fresh = model.head(model.norm(x)).argmax(-1)
        new.append(fresh.item())
    return new


def picked_logits(model, tokens, mask):
    "Logits (.., V) where the mask (B, T) says, and few others where the model can be asked so."
    if hasattr(model, 'recurs'):
        return model.head(model.norm(model.hidden(tokens)[mask]))
    if not hasattr(model, 'last_logits'):
        return model(tokens)[mask]
    n = tokens.shape[1] - int(mask.any(0).nonzero()[0])
    return model.last_logits(tokens, n)[mask[:, -n:]]


def fills_up(model):
    "May a row be filled up behind its end? Not where a solver looks at all tokens of a row."
    module = module_of(model)
    return module is None or not mixes_tokens(module)


def shares_prompts(model):
    """May options go on from the cache of their prompt? Not where that is another computation than
    reading both at once, as with a solver that looks at all tokens of a row."""
    plain_cache = (not model.recurs if hasattr(model, 'recurs')
                   else getattr(model, 'shares_prompts', False))
    return plain_cache and could_keep_all(module_of(model))


class Branched:
    """A cache slot that O rows read for each row of its own: prompt and options are joined only
    when needed."""

    def __init__(self, slot, O):
        self.slot, self.O = slot, O
        self.get_seq_length = slot.get_seq_length

    def update(self, k, v):        # (B O, Hkv, W, hd) each
        return tuple(torch.cat((old[:, None].expand(-1, self.O, -1, -1, -1),
                                new.unflatten(0, (-1, self.O))), dim=3).flatten(0, 1)
                     for old, new in ((self.slot.keys, k), (self.slot.values, v)))


def shared(model, prompt, options, counts):
    """Logits (.., V) of those of the options' tokens (B, O, W) that count. Each prompt is read
    once, and its cache is handed to all of its options."""
    B, O, W = options.shape
    if not hasattr(model, 'recurs'):
        return model.shared(prompt, options)[counts]
    cache = model.new_cache()
    x = model.hidden(prompt, cache=cache)[:, None, -1:].expand(B, O, 1, -1)         # (B, O, 1, C)
    if W > 1:
        cache.layers = [Branched(slot, O) for slot in cache.layers]
        rest = model.hidden(options[..., :-1].flatten(0, 1), cache=cache)       # (B O, W - 1, C)
        x = torch.cat((x, rest.unflatten(0, (B, O))), dim=2)
    return model.head(model.norm(x[counts]))
