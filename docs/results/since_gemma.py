"""Recirculation on Gemma 3 270M, with a first token on each row and without (docs/ATLAS.md).

The best window and share are chosen on four rows, for each of the two by itself, and asked of 32
other rows. out/claims/gemma.jsonl keeps what was measured, so that a stopped run goes on. An hour
on two cores; `make claims` runs it.
"""
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from nanodepth.asking.scoring import Asked, Subject  # noqa: E402
from nanodepth.asking.way import Way  # noqa: E402
from nanodepth.text.tokenizer import start_of_document  # noqa: E402

LENGTH, NOTES = 256, ROOT / 'out/claims/gemma.jsonl'
NOTES.touch()
notes = {json.dumps(note['key']): note['value']
         for note in map(json.loads, NOTES.read_text().splitlines())}
subject = Subject('out/gemma', Asked(tasks='questions_piqa', measures=(), limit=1500,
                                     dtype='float32'))
text = (ROOT / 'out/atlas/pydoc.txt').read_text()
tokens = torch.tensor(subject.tokenizer.encode(text))
rows = tokens[:len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
half, rng = len(rows) // 2, torch.Generator().manual_seed(0)
screen = rows[:half][torch.randperm(half, generator=rng)[:4]]
test = rows[half:][torch.randperm(len(rows) - half, generator=rng)[:32]]


@torch.no_grad()
def losses(rows, first):
    "Of each row: the same targets, whether it begins with Gemma's first token or not."
    found = []
    for batch in rows.split(4):
        starts = torch.tensor(start_of_document(subject.tokenizer) * first).long()
        fed = torch.cat([starts.expand(len(batch), -1), batch], 1)
        logits = subject.model(fed).logits[:, -LENGTH:-1]
        each = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction='none')
        found += each.view(len(batch), -1).mean(1).tolist()
    return found


def noted(kind, first, window=None, alpha=None):
    "What was measured, or is now."
    key = json.dumps([kind, first, window, alpha])
    if key not in notes:
        way = Way(window=window, method='recirculate', K=2, alpha=alpha) if window else Way()
        if kind == 'piqa':
            notes[key] = subject.scores(way)['questions_piqa acc'].answers
        else:
            with way.apply(subject.model):
                notes[key] = losses(screen if kind == 'screen' else test, first)
        with NOTES.open('a') as file:
            file.write(json.dumps(dict(key=json.loads(key), value=notes[key])) + '\n')
        print(key, round(sum(notes[key]) / len(notes[key]), 4), flush=True)
    return notes[key]


ways = [(f'{a}-{b}', alpha) for alpha in (0.15, 0.05, 0.3) for a in (1, 2, 3, 4, 5, 6, 8)
        for b in (5, 7, 9, 11, 13, 15, 16, 17) if b > a + 1]
for first in (False, True):
    best = min(ways, key=lambda way: sum(noted('screen', first, *way)))
    print('with' if first else 'without', 'a first token the best is', *best)
    for way in ((), best):
        noted('test', first, *way)
        if first:                       # questions have the token anyway
            noted('piqa', first, *way)
