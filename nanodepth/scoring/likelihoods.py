"""How likely each continuation of a prompt is to a model, and which is the likeliest. Anything that
maps tokens to logits can be asked. Each option is read after its prompt in one forward, as lm-eval
reads it, and only the logits that are needed are made.
Usage: log_likelihoods(model, get_tokenizer('out/lidas'), few_shot('assign_basic', 200))
"""
import math

import torch
import torch.nn.functional as F
from tqdm import tqdm

from nanodepth.common.errors import Refused
from nanodepth.common.whose import device_of, is_ours, width_of
from nanodepth.looping.solvers import PER_TOKEN
from nanodepth.model import Span, spans_in
from nanodepth.retrofit import Core
from nanodepth.text.primitives import continuation
from nanodepth.text.tokenizer import start_of_document
from nanodepth.training import measure
from nanodepth.wrapper import Window

LOGITS_AT_ONCE = 2 ** 26    # numbers: three copies of them are less than 1 GiB


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


TOKENS_AT_ONCE = 2 ** 15


def log_likelihoods(model_like, tokenizer, examples, *, batch=64):
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
    return [values for values, _ in likelihoods(model_like, prompts, options, batch)]


@torch.no_grad()
def likelihoods(model, prompts, options, batch=64):
    """[((options,) log-likelihoods, whether each option is what the model would say)] of each
    prompt, all as tokens. A batch has rows of nearly one length, filled up behind their ends, where
    no earlier token looks. So what a question scores does not depend on the questions beside it."""
    found = [(torch.zeros(len(o), dtype=torch.float64), torch.zeros(len(o), dtype=torch.bool))
             for o in options]
    # Options of one token have the same tokens before them, so one row serves them all.
    rows = {}           # {(tokens before an option's last, tokens of the prompt): [(i, option)]}
    for i, prompt in enumerate(prompts):
        for o, option in enumerate(options[i]):
            rows.setdefault(((*prompt, *option[:-1]), len(prompt)), []).append((i, o))
    keys = list(rows)
    lengths = [len(tokens) for tokens, _ in keys]

    def fits(part):
        longest = max(lengths[k] for k in part)
        needed = [lengths[k] - keys[k][1] + 1 for k in part]
        logits = sum(needed) if is_ours(model) else len(part) * (
            longest - min(keys[k][1] for k in part) + 1)
        return (len(part) <= batch and len(part) * longest <= TOKENS_AT_ONCE
                and logits * width_of(model) <= LOGITS_AT_ONCE)
    with tqdm(total=sum(lengths), unit='token', unit_scale=True, leave=False, delay=2) as bar:
        for part in in_batches(lengths, not fills_up(model), fits):
            read = filled([keys[k][0] for k in part], device_of(model))
            predict = spans([(keys[k][1] - 1, lengths[k]) for k in part], read)     # the option
            chances = picked_logits(model, read, predict).float().log_softmax(-1)       # (.., V)
            for k, row in zip(part, chances.split(predict.sum(1).tolist())):
                for i, o in rows[keys[k]]:
                    likelihood, greedy = found[i]
                    option = torch.tensor(options[i][o], device=row.device)
                    likelihood[o] = row.gather(-1, option[:, None]).double().sum()
                    greedy[o] = (row.argmax(-1) == option).all()
            bar.update(sum(lengths[k] for k in part))
    return found


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


def spans(bounds, like):
    "A mask (B, T), true in each row from its first bound to before its second."
    places = torch.arange(like.shape[1], device=like.device)
    first, end = torch.tensor(bounds, device=like.device)[..., None].unbind(1)      # (B, 1) each
    return (first <= places) & (places < end)


def picked_logits(model, tokens, mask):
    "Logits (.., V) where the mask (B, T) says, and few others where the model can be asked so."
    if is_ours(model):
        return model.head(model.norm(model.hidden(tokens)[mask]))
    if not hasattr(model, 'last_logits'):
        return model(tokens)[mask]
    n = tokens.shape[1] - int(mask.any(0).nonzero()[0])
    return model.last_logits(tokens, n)[mask[:, -n:]]


def fills_up(model):
    """May a row be filled up behind its end? Not where a solver looks at all tokens of a row, as a
    Span of one's own may, or where the positions of the longest row decide all angles."""
    theirs = getattr(model, 'model', model)
    rope = str(getattr(getattr(theirs, 'config', None), 'rope_parameters', ''))
    if 'dynamic' in rope or 'longrope' in rope:
        return False
    order = getattr(theirs, 'order', ())
    return all(span.solver.__name__ in PER_TOKEN if isinstance(span, Window)
               else type(span) in (Span, Core) for span in spans_in(order))


def losses_of(model, tokens, targets):
    """(the loss of each target, is another token likelier), (B, T) each: any model's, and of any
    function from tokens to logits."""
    if is_ours(model):
        return measure.losses_of(model, tokens, targets)
    rows = max(1, LOGITS_AT_ONCE // (tokens.shape[1] * width_of(model)))
    device, losses, wrong = device_of(model), [], []
    for x, y in zip(tokens.to(device).split(rows), targets.to(device).split(rows)):
        logits = model(x)                                                       # (B, T, V)
        # flat: over transposed logits torch sums a large vocabulary less exactly
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-1,
                                      reduction='none').view_as(y).cpu().double())
        wrong.append((logits.argmax(-1) != y).cpu())
    return torch.cat(losses), torch.cat(wrong)
