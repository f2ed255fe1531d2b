"""One page for several models: every probe of probe.py and lens.py as a picture, side by side on
one scale, with a sentence on how to read it.

The idea: a probe is a function of a model that returns rows of numbers; a row of PROBES says how
they are drawn and read. The numbers are kept by the checkpoint's hash, so that a second look costs
nothing, and the pictures come from the CSV files alone.

Papers: the figures of "Do Depth-Grown Models Overcome the Curse of Depth?" (1 to 7, 9 to 13) and
"From Growing to Looping" (2 to 4, 7 to 10).
Here: where the papers use GSM8K, MATH, MQuAKE and LAMBADA, the examples are the data at hand, and
what is scored is the loss, the primitives, and the last word of passages of text.

Usage:
    python probe.py out/baseline out/lidas                          # out/probe/index.html
    python probe.py out/toys/* --only=depth_score,heatmap  # NAME-SEED are averaged over their seeds
    python probe.py --redraw  # the pictures again, from out/probe/*.csv
"""
import contextlib
import functools
import hashlib
import html
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from tqdm import tqdm

import probe
from common.columns import columns
from common.errors import Refused, check_choice, refusing
from common.files import read_json, replace, write_json
from common.options import read, words
from common.progress import timed
from data.primitives import TASKS, TOY_TASKS
from data.tokenizer import get_tokenizer
from engine.foreign import answer_of, open_any
from engine.hf import fold_scales
from engine.measure import After, Scorer, fingerprint, in_vocabulary, open_data, parse_tasks
from engine.world import pick_device
from loop import name_of, repeat_block
from model import LM
from report.plot import draw_curves, draw_maps, show
from report.tables import number, over_seeds, read_csv, run_names, write_csv
from variants.lens import beside, compare_exits, exit_at, load_lens, quality, save_lens, train_lens

VERSION = 1         # of the probes' definitions: what an older one has measured is measured again


@dataclass
class Options:
    # folders that train.py wrote, or Hugging Face checkpoints; NAME-SEED are averaged over seeds
    runs: list[str] = words(least=0)
    only: tuple[str, ...] = ()      # some of the probes: depth_score,heatmap,norms; (): all
    # what effects are measured on: val, a .txt or .jsonl file, or a primitive such as toy_assign/3
    examples: str = 'val'
    count: int = 20                 # how many examples (the papers: 20)
    length: int | None = None       # tokens of each; None: whole validation rows, 32 of other texts
    tasks: str = 'toy_assign/3'     # primitives to score too, with their depth
    n: int = 100                    # examples of each task
    data: str | None = None         # a dataset; None: what the run was trained on
    batches: int = 2                # batches of validation data for each measurement
    block: int = 2                  # layers of a block, for block_similarity
    # of LN-scaled models: a layer that is moved keeps its scale; else it gets its new depth's
    carry_scales: bool = False
    lens_steps: int = 250           # training of a tuned lens, if none lies beside the checkpoint
    redraw: bool = False            # only the pictures, from the CSV files
    device: str = 'auto'            # auto: cuda, else mps, else cpu
    out: Path = Path('out/probe')   # the folder of the page


# ------------------------------------------------------------------------------------- the subject

def layer_by_layer(what):
    "A bar over the layers."
    return functools.partial(timed, desc=what, unit='layer', shorter='a lower --count or --length')


class NotHere(ValueError):
    "A probe that makes no sense for this model."


class Subject:
    "Interventions are measured once for all probes."

    def __init__(self, path, args):
        self.path = path
        self.args = args
        self.state, model = open_any(path, pick_device(args.device))
        self.model = answer_of(model)
        self.foreign = not isinstance(model, LM)
        if args.carry_scales and getattr(self.model.config, 'ln_scaling', False):
            self.model = fold_scales(self.model)
        self.tokenizer = get_tokenizer(path)
        self.tasks = parse_tasks(args.tasks, args.n)
        if getattr(self.model, 'recurs', False):
            self.model.fresh = False        # else each forward begins with noise of its own
        self.order = self.model.order
        self.device = next(self.model.parameters()).device
        self.tokens = examples(self, args.examples, args.count, args.length).to(self.device)
        self.mark = fingerprint(model if self.foreign else self.model)

    @functools.cached_property
    def val(self):
        return open_data(self.path, self.state, self.model, self.args.data, seed=1)

    @functools.cached_property
    def scorer(self):
        return Scorer(self.tokenizer, self.tasks, self.val, self.args.batches)

    @functools.cached_property
    def passages(self):
        return last_words(self.val, self.tokenizer, self.args.n, self.model.config.context)

    @functools.cached_property
    def scored_on(self):
        "A hash of the data of the scores."
        digest = hashlib.sha256(repr((self.passages, self.tasks)).encode())
        for step in range(min(self.args.batches, len(self.val))):
            tokens, targets = self.val.batch(step)
            digest.update(tokens.numpy().tobytes() + targets.numpy().tobytes())
        return digest.hexdigest()

    def lens_file(self):
        "The lens beside the checkpoint, if there is one; else the page's own."
        file = beside(self.path)
        if file.exists():
            return file
        return self.args.out / 'cache' / f'unseen-lens-{self.mark[:24]}-{self.args.lens_steps}.pt'

    @functools.cached_property
    def lens(self):
        file = self.lens_file()
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            # rows that neither the model was trained on nor the probes look at
            unseen = After(self.val, max(8, self.args.batches))
            save_lens(train_lens(self.model, unseen, self.args.lens_steps, progress=True),
                      self.model, file)
        return load_lens(file, self.model)

    @functools.cached_property
    def layer_effects(self):
        """What happens at later tokens without a layer, for the heat map and for the depth score:
        (effects on later layers (D, D), on the output of each example (D, B)). They share runs."""
        erasure = probe.Erasure(self.model, self.tokens)
        matrix = erasure.zeros(len(self.order))
        outputs = erasure.zeros(len(self.tokens))
        for run in erasure.runs(layer_by_layer('future tokens, propagated, layer')):
            erasure.note_effects(matrix, *run)
            erasure.note_output(outputs, *run)
        return matrix, outputs

    def score(self, answer):
        "{'loss', the accuracy on each task, 'last word'} of a callable tokens -> logits."
        scores = dict(loss=self.scorer.on_data(answer)[0])
        for name, answers in self.scorer.answers(answer).items():
            scores[name] = answers.accuracy
        if self.passages:
            scores['last word'] = said(answer, self.passages, self.device)
        return scores

    def ours_only(self):
        if self.foreign:
            raise NotHere("this needs a layer's parts, which only models of ours name")


# -------------------------------------------------------------------------------------------- texts

# of GSM8K, MATH, anything
FIELDS = (('question', 'answer'), ('problem', 'solution'), ('text',), ('prompt',))


def examples(subject, source, count, length):
    """(n, T) tokens: validation rows ('val'), a text file, JSON Lines, or the prompts of a
    primitive with its depth ('toy_assign/3')."""
    given = length
    length = min(length or 32, subject.model.config.context)

    def encode(text):
        return in_vocabulary(subject.tokenizer.encode(text, allowed_special='all'), subject.model)
    path = Path(source)
    known = [*TASKS, *TOY_TASKS]
    if source == 'val':
        val = subject.val
        steps = range(min(len(val), -(-count // val.batch_size)))
        rows = torch.cat([val.batch(step)[0] for step in steps])
        if given and rows.shape[1] < length:
            raise Refused(f'the rows of the validation data have {rows.shape[1]} tokens, '
                          f'--length={length} were asked for')
        return rows[:count, :given]         # whole rows: the toy's deepest questions stand late
    with refusing(ValueError, OSError, RecursionError,
                  why=lambda error: f'{path} cannot be read: {error}'):
        if path.suffix == '.json':
            texts = [text_of(entry, path) for entry in read_json(path, list)]
        elif path.suffix == '.jsonl':
            lines = path.read_text(encoding='utf-8').split('\n')
            texts = [text_of(json.loads(line), path) for line in lines if line.strip()]
        elif path.exists():
            whole = encode(path.read_text(encoding='utf-8'))
            if len(whole) < length:
                raise Refused(f'{path} has {len(whole)} tokens, but {length} are looked at '
                              '(--length)')
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
    questions = entry.get('questions')
    if isinstance(questions, list) and questions:       # MQuAKE: several forms of one question
        return questions[0]
    raise Refused(f'{path}: a line has none of the known fields: '
                  f'{", ".join("+".join(f) for f in FIELDS)}, questions')


def last_words(val, tokenizer, n, context):
    """[(tokens before, tokens of the last word)] of passages of running text in the validation
    data: rows without marked answers."""
    questions = []
    plain = {0, *(k for k, kind in enumerate(val.kinds, 1) if kind == 'text')}
    for step in range(len(val)):
        for tokens, _, marks in zip(*val.marked_batch(step)):
            if {mark % 128 for mark in marks.tolist()} <= plain:
                # the row's very last word may be cut off, and a character cut in two
                text = re.fullmatch(r'(.*\S)( \S+)\s+\S*', tokenizer.decode(tokens.tolist()), re.S)
                if text and len(text[1]) > len(text[0]) / 2 and '\ufffd' not in text[0]:
                    before, word = (tokenizer.encode(part, allowed_special='all')
                                    for part in text.groups())
                    if len(before) + len(word) <= context:
                        questions.append((before, word))
        if len(questions) >= n:
            break
    return questions[:n]


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


# --------------------------------------------------------------------------------------- the probes

def depth_score(c):
    if c.foreign:
        changes = c.model.moved_without(c.tokens, probe.pick_boundaries(c.tokens.shape[1]),
                                        layer_by_layer('depth score'))
    else:
        changes = c.layer_effects[1].mean(1)
    score = probe.score_of(changes)
    return [dict(depth=d, change=v, share=v / max(1e-30, changes.sum().item()), score=score)
            for d, v in enumerate(changes.tolist())]


def heatmap(c, part):
    c.ours_only()
    rows = []
    for future, propagate in itertools.product((True, False), repeat=2):
        if not propagate and c.model.recurs:
            continue            # an adapter's output is no sum of earlier updates
        setting = (f'{"future" if future else "all"} tokens, '
                   f'{"propagated" if propagate else "local"}')
        if part == 'layer' and future and propagate:
            matrix = c.layer_effects[0]
        else:
            matrix = probe.future_effects(
                c.model, c.tokens, part=part, propagate=propagate, future=future,
                progress=layer_by_layer(f'{setting}, {part}'))
        changes = matrix.tolist()
        rows += [dict(setting=setting, erased=s, observed=d, change=changes[s][d])
                 for s in range(len(changes)) for d in range(s + 1, len(changes))]
    return rows


def norms(c):
    if c.foreign:
        _, before, after = c.model.listen(c.tokens)
        added = after - before
        size = before.norm(dim=-1)      # (D, B, T)
        share = added.norm(dim=-1) / size.clamp(min=1e-12)
        cosine = torch.cosine_similarity(added, before, dim=-1)
        each = {'stream': size, 'layer share': share, 'layer cosine': cosine}
        means = {name: values.float().mean(dim=(1, 2)) for name, values in each.items()}
    else:
        means = probe.residual_norms(c.model, c.tokens)
    return [dict(depth=d) | {name: values[d].item() for name, values in means.items()}
            for d in range(len(c.order))]


def similarity(c, blocks=False):
    c.ours_only()
    size = c.args.block if blocks else 1
    if len(c.model.layers) % size:
        raise NotHere(f'its {len(c.model.layers)} layers do not divide into blocks of {size}')
    matrix = probe.block_similarity(c.model, size).tolist()
    return [dict(layer=i, other=j, lag=abs(i - j), cosine=v) for i, row in enumerate(matrix)
            for j, v in enumerate(row)]


def rearranged(change, *sizes):
    "A probe that makes a change to every block of some sizes, and scores the result."
    def measure(c):
        if c.model.recurs:
            raise NotHere('a recurrent core takes no other order of its layers')
        bar = functools.partial(timed, desc='orders', unit='order',
                                shorter='a lower --batches or --n')
        rows = probe.order_sweep(c.model, c.score, change, sizes, bar)
        if len(rows) == 1:
            raise NotHere(f'its {len(c.model.order)} layers are too few for such blocks')
        return rows
    return measure


def permute_block(order, start, length, seed=0):
    "The `length` layers from `start` on in a random order."
    turns = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    before, block, after = probe.cut_out(order, start, length)
    return before + [block[i] for i in turns] + after


def foreign_exit(c):
    "The logit lens of another family's model."
    read = c.model.reader(c.tokens)
    if read is None:
        raise NotHere('how its output is read off the stream is not known here')
    logits, _, streams = c.model.listen(c.tokens)
    kl, overlap = compare_exits(map(read, streams), logits)
    rows = []
    for d in range(len(streams)):
        def answer(tokens):
            return read(c.model.listen(tokens)[2][d])
        answer.config, answer.parameters = c.model.config, c.model.parameters
        rows.append(dict(lens='logit lens', depth=d, KL=kl[d].item(), overlap=overlap[d].item())
                    | c.score(answer))
    return rows


def early_exit(c):
    if c.foreign:
        return foreign_exit(c)
    rows = []
    for name, lens in (('logit lens', None), ('tuned lens', c.lens)):
        kl, overlap = quality(c.model, lens, c.tokens)
        rows += [dict(lens=name, depth=d, KL=kl[d].item(), overlap=overlap[d].item())
                 | c.score(exit_at(c.model, d, lens)) for d in range(len(kl))]
    return rows


def repeat_once(order, start, length):
    return repeat_block(order, start, length, 2)


class Probe(NamedTuple):
    measure: Callable
    title: str
    reads: str              # how to read it
    x: str = None           # of curves; what tells their panels apart is `panel`, if anything does
    panel: str = None
    only: tuple = ()        # the columns that are drawn; all others if empty
    maps: tuple = ()        # instead: (down, right, value, what tells panels apart or None)


EFFECTS = 'erased', 'observed', 'change', 'setting'

# A new one: text only in the columns run, setting and lens; into SCORED too if it scores. When what
# it measures changes, raise VERSION: numbers are kept in out/probe/cache.
PROBES = dict(
    depth_score=Probe(
        depth_score, 'Which layers matter for later tokens?',
        'A layer is erased for the tokens up to t; the height is how far the output at later '
        'tokens moves. Work in the right half is work that deep layers do; the depth score (in the '
        'legend) is its mean depth. The last layer is always at zero: no later layer carries '
        'its result to another token.', 'depth', only=('change',)),
    heatmap=Probe(
        functools.partial(heatmap, part='layer'), 'Which layer depends on which?',
        'Row: the layer erased; column: the layer observed; colour: how much its update changes, '
        'relative to itself (1: as much as its own length). Propagated: the change runs on through '
        'all layers between; local: only this one layer sees the other missing. A bright column is '
        'a layer that gathers from all before it.', maps=EFFECTS),
    heatmap_attn=Probe(
        functools.partial(heatmap, part='attn'),
        'The same with only the attention of a layer erased', 'As above.', maps=EFFECTS),
    heatmap_mlp=Probe(
        functools.partial(heatmap, part='mlp'),
        'The same with only the MLP of a layer erased', 'As above.', maps=EFFECTS),
    norms=Probe(
        norms, 'How much does each layer add?',
        "The stream's length; the length of what a layer or sublayer adds, as a share of the "
        'stream; and its cosine with the stream (above 0: it strengthens what is there; below: it '
        'erases). A pattern that repeats with the block is what growing and looping leave.',
        'depth'),
    swap=Probe(
        rearranged(probe.swap_blocks, 1, 2, 4, 8), 'Blocks change places',
        'The layers from a position on change places with as many behind them. Dotted: the model '
        'as it is. Where a curve stays near it, the order does not matter.', 'start', 'size'),
    skip=Probe(
        rearranged(probe.skip_blocks, 1, 2, 4, 8), 'Blocks are left out',
        'The layers from a position on do not run. Where a curve stays near the dotted line (the '
        'model as it is), they are not needed.', 'start', 'size'),
    reverse=Probe(
        rearranged(probe.reverse_block, 2, 4, 8), 'Blocks run backwards',
        'The layers from a position on run in reverse. Worst where a reversal straddles two '
        'blocks: layers of a block have roles that follow each other.', 'start', 'size'),
    permute=Probe(
        rearranged(permute_block, 4, 8), 'Blocks in a random order',
        'The layers from a position on run in a random order (the same for every model).',
        'start', 'size'),
    repeat=Probe(
        rearranged(repeat_once, 1, 2, 4, 8), 'Blocks run twice',
        'The layers from a position on run once more, without any training for it.',
        'start', 'size'),
    similarity=Probe(
        similarity, 'Are layers copies of each other?',
        'Cosines between the MLP weights of two layers. Lines beside the diagonal are the traces '
        'of growing: layers that once were one. A looped model has its unique layers only.',
        maps=('layer', 'other', 'cosine', None)),
    block_similarity=Probe(
        functools.partial(similarity, blocks=True), 'Are blocks copies of each other?',
        'The same for whole blocks of layers (--block), each as one long vector.',
        maps=('layer', 'other', 'cosine', None)),
    early_exit=Probe(
        early_exit, 'What is known behind each layer?',
        'The answer if the model stopped there: directly (logit lens), or through a trained '
        'translator (tuned lens). KL and overlap (of the five likeliest tokens) compare with the '
        'final answer. A curve that rises to the end: the last layers are needed.',
        'depth', 'lens'))


SCORED = ('swap', 'skip', 'reverse', 'permute', 'repeat', 'early_exit')

# ---------------------------------------------------------------------- measuring, keeping, showing

def measured(subject, name, folder):
    """The rows of a probe, from the folder if this very model has been measured with these very
    examples and settings."""
    key = [VERSION, name, subject.mark]
    key.append(hashlib.sha256(subject.tokens.cpu().numpy().tobytes()).hexdigest())
    if name == 'block_similarity':
        key.append(subject.args.block)
    if name in SCORED:
        key.append(subject.scored_on)
    if name == 'early_exit' and not subject.foreign:
        subject.lens                # trained or loaded: it is part of what is shown
        key.append(hashlib.sha256(subject.lens_file().read_bytes()).hexdigest())
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    kept = folder / 'cache' / f'{name}-{digest[:24]}.json'
    with contextlib.suppress(OSError, Refused):         # not there, or not whole
        return read_json(kept, list)
    rows = PROBES[name].measure(subject)
    write_json(kept, rows)
    return rows


def read_rows(path):
    return [{key: text if key in ('run', 'setting', 'lens') else float(text)
             for key, text in row.items() if text != ''} for row in read_csv(path)]


def draw(name, folder):
    "The picture of a probe, from its CSV file."
    p = PROBES[name]
    rows = read_rows(folder / f'{name}.csv')
    path = folder / f'{name}.png'
    if p.maps:
        return show(path, draw_maps, rows, *p.maps, p.title)
    labels = {}
    if name == 'depth_score':
        labels = {row['run']: f'{row["run"]}: {row["score"]:.2f}'
                  for row in over_seeds(rows, [], [])}
    values = p.only or [key for key in rows[0] if key not in ('run', p.x, p.panel)]
    show(path, draw_curves, rows, p.x, p.panel, values, labels, p.title)


STYLE = ('body{font-family:sans-serif;max-width:70em;margin:2em auto;line-height:1.5}'
         'img{max-width:100%}')
HEAD = 'Which layers do they use?'


def write_index(folder, names, notes):
    parts = []
    for name in names:
        title, reads = html.escape(PROBES[name].title), html.escape(PROBES[name].reads)
        parts.append(f'<h2>{title}</h2><p>{reads}</p><img src="{name}.png" alt="{title}">'
                     f'<p><a href="{name}.csv">the numbers</a></p>')
    lines = ''.join(f'<li>{html.escape(line)}</li>' for line in notes)
    replace(folder / 'index.html', (
        f'<!doctype html><meta charset="utf-8"><title>{HEAD}</title><style>{STYLE}</style>'
        f'<h1>{HEAD}</h1><ul>{lines}</ul>{"".join(parts)}').encode())


def describe(name, subject):
    order = subject.order
    shared = {}
    for d, i in enumerate(order):
        shared.setdefault(i, []).append(d)
    ties = [' = '.join(map(str, ds)) for ds in shared.values() if len(ds) > 1]
    return f'{name}: {len(order)} layers deep, {len(shared)} of their own ({name_of(order)})' + (
        f'; depths that share weights: {", ".join(ties)}' if ties else '')


def chosen(only):
    for part in only:
        check_choice('--only', part, PROBES)
    if 'heatmap' in only:           # all three
        only = *only, 'heatmap_attn', 'heatmap_mlp'
    return [name for name in PROBES if name in only or not only]


def make(args):
    names = chosen(args.only)
    folder = args.out
    if args.redraw:
        there = [name for name in names if (folder / f'{name}.csv').exists()]
        if not there:
            raise Refused(f'{folder} has no numbers to draw from')
        for name in there:
            draw(name, folder)
        return
    if not args.runs:
        raise Refused('give the models to look at, or --redraw')
    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: [] for name in names}
    notes = []
    try:
        for run, path in tqdm(run_names(args.runs).items(), desc='models', unit='model'):
            subject = Subject(path, args)
            n, T = subject.tokens.shape
            notes.append(f'{describe(run, subject)}; looked at with {n} examples of {T} tokens '
                         f'({args.examples}), t at '
                         f'{"every position" if T <= 32 else "16 drawn positions"}')
            for name in names:
                try:
                    rows[name] += [dict(run=run, **row) for row in measured(subject, name, folder)]
                except NotHere as error:
                    notes.append(f'{run} is not in {name}: {error}')
    # show what has been measured, even if a later model fails
    finally:
        drawn = [name for name in names if rows[name]]
        for name in drawn:
            write_csv(rows[name], folder / f'{name}.csv')
            draw(name, folder)
        if drawn:
            write_index(folder, drawn, notes)
    print('\n'.join(notes))
    last = {row['run']: row for row in rows.get('depth_score', [])}     # the deepest layer's
    if last:
        scores = [row | dict(of=row['score'] / max(1, row['depth'])) for row in last.values()]
        lines = [['model', 'depth score', 'of the depth']]
        for row in over_seeds(scores, [], ['score', 'of']):
            lines.append([row['run'], number(row['score'], row['score se']),
                          number(row['of'], row['of se'])])
        print(columns(lines))
    print(f'page: {folder / "index.html"}')


def main(argv=None):
    args = read(Options, argv, __doc__)
    with refusing(OSError):
        make(args)
