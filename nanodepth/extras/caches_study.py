"""Does a later answer keep what looping gained on the first? It depends on the cache.

The idea: a puzzle of alias depth 4 has four last names, and each of them is asked for. The first
question belongs to the prompt, so if the prompt is read in one pass, every cache gives the same
first answer. The other questions come token by token, with the right values between them. There it
matters which version of the prompt's keys and values the cache has kept.

Each row is read in three ways: the prompt at once and the rest token by token, as in the paper;
everything token by token; and everything at once without a cache, which `exact` must equal. The
later answers can partly be had by elimination, so compare them with the plain model's.

Paper: "Training-Free Looped Transformers", appendices C, G.2 and N.
Usage: python caches.py models caches.csv         # models has SEED/baseline and SEED/lidas
"""
import platform
import random
import string
import sys
from pathlib import Path

import torch

from nanodepth.common.files import replace
from nanodepth.common.seeds import seed_for
from nanodepth.extras.table import commit
from nanodepth.models.checkpoint import open_any
from nanodepth.report.tables import as_csv
from nanodepth.text.primitives import chain
from nanodepth.wrapper import looped

CACHED = 'prompt at once', 'token by token'
PROMPT = 1 + 20 * 2 + 2         # end-of-text, the statements, the first question
NAMES = [PROMPT - 1 + 3 * i for i in range(4)]      # where the names stand that are asked for


def puzzle(i):
    "A row's tokens, its options, and the right answers. The table on README asks its question 1."
    rng = random.Random(seed_for(7, 'toy_assign at depth 4', i))
    names = rng.sample(string.ascii_lowercase, 20)
    statements, last = chain(rng, names, rng.sample(string.digits, 4), 4)
    first = rng.choice(list(last))
    asked = [first, *rng.sample([name for name in last if name != first], 3)]
    text = ''.join(name + value for name, value in statements)
    text += ''.join(f'?{name}{last[name]}' for name in asked)
    return [256, *text.encode()], [ord(v) for v in last.values()], [ord(last[a]) for a in asked]


@torch.no_grad()
def log_probs(model, tokens, reading):
    "What the model says after each question: (n, 4, V)."
    if reading == 'at once':
        return model(tokens)[:, NAMES].log_softmax(-1)
    cache = model.new_cache()
    n = PROMPT if reading == 'prompt at once' else 1
    pieces = [tokens[:, :n], *tokens[:, n:].split(1, dim=1)]
    logits = torch.cat([model(piece, cache=cache) for piece in pieces], dim=1)
    return logits[:, NAMES].log_softmax(-1)


def score(model, puzzles, reading, K, cache):
    tokens, options, answers = puzzles
    chances = log_probs(model, tokens, reading)
    likelihood = chances.gather(2, answers[..., None])[..., 0]              # (n, 4)
    right = likelihood == chances.gather(2, options[:, None].expand(-1, 4, -1)).amax(2)
    for name, which in (('first', slice(1)), ('later', slice(1, 4))):
        yield dict(K=K, reading=reading, cache=cache, answers=name,
                   right=right[:, which].double().mean().item(),
                   log_prob=likelihood[:, which].mean().item(), n=right[:, which].numel())


def rows_of(model, puzzles):
    for reading in (*CACHED, 'at once'):
        yield from score(model, puzzles, reading, 1, 'plain')
    for K in (3, 4):
        for cache in ('without', 'first', 'last', 'exact'):
            with looped(model, (2, 5), 'rk', K, 0.5, cache=None if cache == 'without' else cache):
                for reading in ['at once'] if cache == 'without' else CACHED:
                    yield from score(model, puzzles, reading, K, cache)


if __name__ == '__main__':
    models, out = map(Path, sys.argv[1:])
    puzzles = [torch.tensor(part) for part in zip(*map(puzzle, range(200)))]
    made = dict(commit=commit(), torch=torch.__version__,
                machine=f'{platform.machine()} {torch.backends.cpu.get_cpu_capability()}')
    replace(out, as_csv([dict(seed=int(run.parent.name), run=run.name) | row | made
                         for run in sorted(models.glob('*/*'))
                         for row in rows_of(open_any(run, 'cpu')[1], puzzles)]))
