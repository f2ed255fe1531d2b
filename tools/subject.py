"""A model under the probes: the tokens it is shown, and how it is scored.

The idea: a probe wants a model, some tokens to watch it work on, and a score for when it is
tampered with: the loss, the primitives, and the last word of passages of text.

Papers: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix B, and "From Growing to
Looping", appendix E: GSM8K, MATH and MQuAKE for the effects, LAMBADA and a primitive for scored
interventions. Here: the last word stands for LAMBADA, on the data at hand.

Usage:
    subject = Subject('out/lidas', args)            # probes.py's arguments
    subject.score(subject.model)                    # {'loss', 'toy_assign/3', 'last word'}
"""
import functools
import hashlib
import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import probe
from common.errors import Refused, refusing
from common.files import read_json
from data.primitives import TASKS, TOY_TASKS
from data.tokenizer import get_tokenizer
from engine.checkpoint import build_model, fingerprint, load
from engine.hf import fold_scales
from engine.measure import After, in_vocabulary, open_data, parse_tasks, score
from engine.world import pick_device
from variants.lens import beside, load_lens, save_lens, train_lens


class NotHere(ValueError):
    "A probe that makes no sense for this model."


class Subject:
    "Interventions are measured once for all probes."

    def __init__(self, path, args):
        self.path, self.args, self.state, self.found = path, args, load(path), {}
        self.model = build_model(self.state, path).to(pick_device(args.device)).eval()
        if args.carry_scales and getattr(self.model.config, 'ln_scaling', False):
            self.model = fold_scales(self.model)
        self.tokenizer, self.tasks = get_tokenizer(path), parse_tasks(args.tasks, args.n)
        self.order, self.device = self.model.order, next(self.model.parameters()).device
        self.tokens = examples(self, args.examples, args.count, args.length).to(self.device)
        self.mark = fingerprint(self.model)

    @functools.cached_property
    def loaders(self):
        return [open_data(self.path, self.state, self.model, self.args.data, split, longest=512,
                          seed=1) for split in ('train', 'val')]

    @functools.cached_property
    def batches(self):
        train, val = self.loaders
        return [val.batch(step) for step in range(min(self.args.batches, len(val)))]

    @functools.cached_property
    def passages(self):
        return last_words(self.loaders[1], self.tokenizer, self.args.n, self.model.config.context)

    @functools.cached_property
    def scored_on(self):
        "A hash of the data of the scores."
        found = hashlib.sha256(repr((self.passages, self.tasks)).encode())
        for tokens, targets in self.batches:
            found.update(tokens.numpy().tobytes() + targets.numpy().tobytes())
        return found.hexdigest()

    def lens_file(self):
        "The lens beside the checkpoint, if there is one; else the page's own."
        return (beside(self.path) if beside(self.path).exists() else self.args.out / 'cache'
                / f'unseen-lens-{self.mark[:24]}-{self.args.lens_steps}.pt')

    @functools.cached_property
    def lens(self):
        file = self.lens_file()
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            # rows that neither the model was trained on nor the probes look at
            unseen = After(self.loaders[1], max(8, self.args.batches))
            save_lens(train_lens(self.model, unseen, self.args.lens_steps, progress=True),
                      self.model, file)
        return load_lens(file, self.model)

    def effects(self, part, propagate, future):
        "(matrix (D, D), what the depth score needs (D, B) or None) of probe.py, measured once."
        key = part, propagate, future
        if key in self.found:
            return self.found[key]
        what = ', '.join((f'{"future" if future else "all"} tokens',
                          'propagated' if propagate else 'local', part))
        progress = lambda it: tqdm(it, desc=what, unit='layer', leave=False)
        erasure = probe.Erasure(self.model, self.tokens, part, future)
        outputs = None
        if propagate:
            matrix = erasure.zeros(len(self.order))
            if part == 'layer' and future:          # it takes a vocabulary's worth of work
                outputs = erasure.zeros(len(self.tokens))
            for run in erasure.runs(progress):
                erasure.note_effects(matrix, *run)
                if outputs is not None:
                    erasure.note_output(outputs, *run)
        else:
            matrix = probe.local_effects(erasure, progress)
        self.found[key] = matrix, outputs
        return self.found[key]

    @torch.no_grad()
    def score(self, answer):
        "{'loss', the accuracy on each task, 'last word'} of a callable tokens -> logits."
        total = count = 0
        for tokens, targets in self.batches:
            logits = answer(tokens.to(self.device)).float().transpose(1, 2)
            total += F.cross_entropy(logits, targets.to(self.device), ignore_index=-1,
                                     reduction='sum').item()
            count += (targets != -1).sum().item()
        found = dict(loss=total / count)
        for name, questions in self.tasks.items():
            found[name], _ = score(answer, self.tokenizer, questions)
        if self.passages:
            found['last word'] = said(answer, self.passages, self.device)
        return found

    def orders_only(self):
        if isinstance(self.model, probe.Recurrent):
            raise NotHere('a recurrent core takes no other order of its layers')


# -------------------------------------------------------------------------------------------- texts

# of GSM8K, MATH, anything
FIELDS = (('question', 'answer'), ('problem', 'solution'), ('text',), ('prompt',))


def examples(subject, source, count, length):
    """(n, T) tokens: validation rows ('val'), a text file, JSON Lines, or the prompts of a
    primitive with its depth ('toy_assign/3')."""
    given, length = length, min(length or 32, subject.model.config.context)
    encode = lambda text: in_vocabulary(
        subject.tokenizer.encode(text, allowed_special='all'), subject.model)
    path, known = Path(source), [*TASKS, *TOY_TASKS]
    if source == 'val':
        val = subject.loaders[1]
        steps = range(min(len(val), -(-count // val.batch_size)))
        rows = torch.cat([val.batch(step)[0] for step in steps])
        if given and rows.shape[1] < length:
            raise Refused(f'the rows of the validation data have {rows.shape[1]} tokens, '
                          f'--length={length} were asked for')
        return rows[:count, :given]         # whole rows: the toy's deepest questions stand late
    with refusing(ValueError, OSError, RecursionError,
                  why=lambda error: f'{path} cannot be read: {error}'):
        whole = path.read_text(encoding='utf-8') if path.exists() else ''
        entries = []
        if path.suffix == '.json':
            entries = read_json(path, list)
        elif path.suffix == '.jsonl':
            entries = [json.loads(line) for line in whole.split('\n') if line.strip()]
    if path.suffix in ('.jsonl', '.json'):
        texts = [text_of(entry, path) for entry in entries]
    elif path.exists():
        whole = encode(whole)
        if len(whole) < length:
            raise Refused(f'{path} has {len(whole)} tokens, but {length} are looked at (--length)')
        return torch.tensor([whole[at * length:(at + 1) * length]
                             for at in range(min(count, len(whole) // length))])
    elif source.partition('/')[0] in known:
        texts = [e.prompt for e in parse_tasks(source, count)[source]]
    else:
        raise Refused(f'--examples={source}: no such file, and no primitive; there are val, a '
                      f'.txt or .jsonl file, and {", ".join(known)}')
    ids = [row[:length] for row in map(encode, texts) if len(row) >= length][:count]
    if not ids:
        raise Refused(f'{source} has no text of {length} tokens or more: lower --length')
    return torch.tensor(ids)


def text_of(entry, path):
    entry = entry if isinstance(entry, dict) else {}
    for fields in FIELDS:
        if all(isinstance(entry.get(field), str) for field in fields):
            return '\n'.join(entry[field] for field in fields)
    if isinstance(entry.get('questions'), list):        # MQuAKE: several forms of one question
        return entry['questions'][0]
    raise Refused(f'{path}: a line has none of the known fields: '
                  f'{", ".join("+".join(f) for f in FIELDS)}, questions')


def last_words(val, tokenizer, n, context):
    """[(tokens before, tokens of the last word)] of passages of running text in the validation
    data: rows without marked answers."""
    found, plain = [], {0, *(k for k, kind in enumerate(val.kinds, 1) if kind == 'text')}
    for step in range(len(val)):
        for tokens, _, marks in zip(*val.marked_batch(step)):
            if {mark % 128 for mark in marks.tolist()} <= plain:
                # the row's very last word may be cut off, and a character cut in two
                text = re.fullmatch(r'(.*\S)( \S+)\s+\S*', tokenizer.decode(tokens.tolist()), re.S)
                if text and len(text[1]) > len(text[0]) / 2 and '\ufffd' not in text[0]:
                    before, word = (tokenizer.encode(part, allowed_special='all')
                                    for part in text.groups())
                    found += [(before, word)] * (len(before) + len(word) <= context)
        if len(found) >= n:
            break
    return found[:n]


@torch.no_grad()
def said(answer, passages, device, batch=32):
    "The share of passages whose last word is predicted, each of its tokens as the likeliest."
    right = 0
    for at in range(0, len(passages), batch):
        part = passages[at:at + batch]
        width = max(len(a + b) for a, b in part)
        tokens = torch.tensor([(a + b)[:-1] + [0] * (width - len(a + b)) for a, b in part],
                              device=device)
        best = answer(tokens).argmax(-1).tolist()
        right += sum(row[len(a) - 1:len(a) + len(b) - 1] == b for row, (a, b) in zip(best, part))
    return right / len(passages)
