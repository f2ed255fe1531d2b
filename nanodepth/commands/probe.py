"""One page for several models: every probe as a picture, with the models side by side on one scale
and a sentence on how to read it. A probe is a measure whose numbers have places, such as depths
(scoring/rows.py, probe.py, scoring/lens.py), and a row of PROBES says how they are drawn.
    nanodepth probe out/baseline out/lidas          # writes out/probe/index.html
"""
import functools
import html
import itertools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Literal, NamedTuple

import torch
from tqdm import tqdm

from nanodepth import probe
from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import replace
from nanodepth.common.options import read
from nanodepth.common.whose import device_of
from nanodepth.model import spans_in, unrolled
from nanodepth.models.checkpoint import OURS, kind_of, named_models
from nanodepth.models.hf import config_of, lacking
from nanodepth.models.hf_recurrent import FAMILY
from nanodepth.report.plot import draw_curves, draw_maps, show
from nanodepth.report.tables import MADE, columns, groups_of, number, over_seeds, write_csv
from nanodepth.retrofit import core_of
from nanodepth.scoring.lens import exit_at, quality, train_lens
from nanodepth.scoring.rows import Asked, NotHere, Subject, notes_beside
from nanodepth.scoring.scores import ask, data_scores, open_data, parse_tasks
from nanodepth.scoring.way import Ways, notation, read_way
from nanodepth.text.primitives import TASKS, TOY_TASKS


@dataclass(kw_only=True)
class Looked(Asked):
    # how many validation rows are looked at (the papers: 20 examples)
    count: int = 20
    length: int | None = None       # tokens of each; None: whole rows
    tasks: str = 'toy_assign/3'     # primitives to score too, with their depth
    n: int = 100                    # examples of each task
    batches: int = 2                # batches of validation data for each measurement
    rows: int | None = None         # rows of a batch; None: as many as in training
    block: int = 2                  # layers of a block, for block_similarity
    lens_steps: int = 250           # of training a tuned lens
    lens_lr: float = 1e-3           # Adam's rate for it
    # auto: as evaluate has it, but the largest of many changes would then hold rounding errors too
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'float32'


@dataclass(kw_only=True)
class Options(Ways, Looked):
    # folders that train.py wrote, or Hugging Face checkpoints; runs NAME-SEED, trained with that
    # seed, are averaged
    models: list[str]
    only: tuple[str, ...] = ()      # some of the probes: depth_score,heatmap,norms; (): all
    # the folder of the page; index.jsonl has all that was measured
    out: Path = Path('out/probe')


# ------------------------------------------------------------------------------------- the subject

class Probed(Subject):
    "A Subject, and the tokens that all probes look at."
    asks = Looked

    def __init__(self, path, args):
        for name in parse_tasks(args.tasks)[1]:
            check_choice('task', name, [*TASKS, *TOY_TASKS])
        is_other = kind_of(path) not in (OURS, FAMILY)
        if is_other and (lacks := lacking(config_of(path))):        # before it is opened
            raise Refused(f'{path}: the probes look into models of ours, and what becomes ours: '
                          f'Llama and Qwen. This one asks for {lacks}')
        super().__init__(path, args)
        self.measures = {name: PROBES[name].measure for name in chosen(args.only)}
        self.tokens, self.targets = (rows.to(device_of(self.model)) for rows in
                                     rows_of(self.val, args.count, args.length))

    def open_val(self, like):
        return open_data(self.path, self.state, self.model, self.asked.data, seed=1,
                         rows=self.asked.rows)

    @functools.cached_property
    def lens(self):
        "A tuned lens, of rows that neither the model was trained on nor the probes look at."
        n = self.val.n_batches
        looked_at = max(-(-self.asked.count // self.val.batch_size), self.asked.batches,
                        min(8, n // 2))
        if looked_at >= n:
            raise NotHere(f'its validation data have {n} batches, and the probes look at '
                          f'{looked_at}: none is left to train a lens on')
        lens = train_lens(self.model, self.val, self.asked.lens_steps, self.asked.lens_lr,
                          progress=True, batches=range(looked_at, n))
        if not all(p.isfinite().all() for p in lens.parameters()):
            raise Refused(f'the lens is not finite after {self.asked.lens_steps} steps: lower '
                          f'--lens_lr={self.asked.lens_lr:g}')
        return lens

    def score(self, answer):
        "{'loss', the accuracy on each task} of a callable tokens -> logits."
        scores = dict(loss=data_scores(answer, self.val, self.asked.batches)['loss'].mean)
        for name, questions in self.questions.items():
            scores[name] = ask(answer, self.tokenizer, questions).mean
        return scores


def rows_of(val, count, length):
    "Validation rows, or the first tokens of them, and their targets: (n, T) each."
    if count > max(val.n_rows, Options.count):
        raise Refused(f'--count={count}, but the validation data have {val.n_rows} rows')
    batches = range(min(val.n_batches, -(-count // val.batch_size)))
    parts = zip(*(val.batch(step)[:2] for step in batches))
    tokens, targets = (torch.cat(part)[:count, :length] for part in parts)
    if length and tokens.shape[1] < length:
        raise Refused(f'the rows of the validation data have {tokens.shape[1]} tokens, '
                      f'--length={length} were asked for')
    return tokens, targets


# --------------------------------------------------------------------------------------- the probes

def depth_score(c):
    score, changes = probe.depth_score(c.model, c.tokens)
    total = max(1e-30, changes.sum().item())
    return [(dict(depth=d), dict(change=change, share=change / total, score=score))
            for d, change in enumerate(changes.tolist())]


def heatmap(c, part):
    rows = []
    for future, propagate in itertools.product((True, False), repeat=2):
        if not propagate and spans_in(c.model.order):
            continue            # an adapter's output is no sum of earlier updates
        setting = (f'{"future" if future else "all"} tokens, '
                   f'{"propagated" if propagate else "local"}')
        changes = probe.future_effects(c.model, c.tokens, part=part, propagate=propagate,
                                       future=future).tolist()
        rows += [(dict(setting=setting, erased=s, observed=d), dict(change=changes[s][d]))
                 for s in range(len(changes)) for d in range(s + 1, len(changes))]
    return rows


def norms(c):
    means = probe.residual_norms(c.model, c.tokens)
    return [(dict(depth=d), {name: values[d].item() for name, values in means.items()})
            for d in range(len(means['stream']))]


def similarity(c, blocks=False):
    size = c.asked.block if blocks else 1
    if len(c.model.layers) % size:
        raise NotHere(f'its {len(c.model.layers)} layers do not divide into blocks of {size}')
    matrix = probe.block_similarity(c.model, size).tolist()
    return [(dict(layer=i, other=j, lag=abs(i - j)), dict(cosine=cosine))
            for i, row in enumerate(matrix) for j, cosine in enumerate(row)]


def rearranged(change, *sizes):
    "A probe that makes a change to every block of some sizes, and scores the result."
    def measure(c):
        if core_of(c.model):
            raise NotHere('a recurrent core takes no other order of its layers')
        rows = probe.order_sweep(c.model, c.score, change, sizes)
        if len(rows) == 1:
            raise NotHere(f'its {len(c.model.order)} layers are too few for such blocks')
        return [(dict(size=row.pop('size'), start=row.pop('start')), row) for row in rows]
    return measure


def early_exit(c):
    rows = []
    for name, lens in (('logit lens', None), ('tuned lens', c.lens)):
        kl, overlap = quality(c.model, lens, c.tokens)
        rows += [(dict(lens=name, depth=d), dict(KL=kl[d].item(), overlap=overlap[d].item())
                  | c.score(exit_at(c.model, d, lens))) for d in range(len(kl))]
    return rows


class Probe(NamedTuple):
    measure: Callable
    x: str = None           # of curves; what tells their panels apart is `panel`, if anything does
    panel: str = None
    only: tuple = ()        # the columns that are drawn; all others if empty
    maps: tuple = ()        # instead: (down, right, value, what tells panels apart or None)


EFFECTS = 'erased', 'observed', 'change', 'setting'
COSINES = 'layer', 'other', 'cosine', None
# They are the figures of "Do Depth-Grown Models Overcome the Curse of Depth?" (1 to 7, 9 to 13) and
# of "From Growing to Looping" (2 to 4, 7 to 10). The papers measure them on GSM8K, MATH, MQuAKE and
# LAMBADA, and here it is done on the data at hand.
PROBES = dict(
    depth_score=Probe(depth_score, 'depth', only=('change',)),
    heatmap=Probe(lambda c: heatmap(c, 'layer'), maps=EFFECTS),
    heatmap_attn=Probe(lambda c: heatmap(c, 'attn'), maps=EFFECTS),
    heatmap_mlp=Probe(lambda c: heatmap(c, 'mlp'), maps=EFFECTS),
    norms=Probe(norms, 'depth'),
    swap=Probe(rearranged(probe.swap_blocks, 1, 2, 4, 8), 'start', 'size'),
    skip=Probe(rearranged(probe.skip_blocks, 1, 2, 4, 8), 'start', 'size'),
    reverse=Probe(rearranged(probe.reverse_block, 2, 4, 8), 'start', 'size'),
    similarity=Probe(similarity, maps=COSINES),
    block_similarity=Probe(lambda c: similarity(c, blocks=True), maps=COSINES),
    early_exit=Probe(early_exit, 'depth', 'lens'))
# {probe: its title, and how to read it}
TEXTS = tomllib.loads(Path(__file__).with_name('probe.toml').read_text(encoding='utf-8'))


# ------------------------------------------------------------------------------------------ showing

def draw(name, rows, folder):
    "The picture of a probe."
    p = PROBES[name]
    path = folder / f'{name}.png'
    title = TEXTS[name]['title']
    if p.maps:
        return show(path, draw_maps, rows, *p.maps, title)
    labels = {}
    if name == 'depth_score':
        labels = {row['run']: f'{row["run"]}: {row["score"]:.2f}'
                  for row in over_seeds(rows, [], [])}
    columns_of = dict.fromkeys(key for row in rows for key in row)
    values = p.only or [key for key in columns_of if key not in ('run', 'group', p.x, p.panel)]
    if p.panel == 'size':       # of size 0: the model as it is
        rows = [row | dict(start=row['start'] if row['size'] else None) for row in rows]
    axis = ('first of these layers' if p.x == 'start' else 'layer') + ' (by depth, from 0)'
    show(path, draw_curves, rows, p.x, p.panel, values, labels, title, axis)


STYLE = ('body{font-family:sans-serif;max-width:70em;margin:2em auto;line-height:1.5}'
         'img{max-width:100%}')
HEAD = 'Which layers do they use?'


def write_index(folder, names, notes):
    parts = []
    for name in names:
        title, reads = (html.escape(TEXTS[name][key]) for key in ('title', 'reads'))
        parts.append(f'<h2>{title}</h2><p>{reads}</p><img src="{name}.png" alt="{title}">'
                     f'<p><a href="{name}.csv">the numbers</a></p>')
    lines = ''.join(f'<li>{html.escape(line)}</li>' for line in notes)
    replace(folder / 'index.html', (
        f'<!doctype html><meta charset="utf-8"><title>{HEAD}</title><style>{STYLE}</style>'
        f'<h1>{HEAD}</h1><ul>{lines}</ul>{"".join(parts)}').encode())


def chosen(only):
    for part in only:
        check_choice('--only', part, PROBES)
    if 'heatmap' in only:           # all three
        only = *only, 'heatmap_attn', 'heatmap_mlp'
    return [name for name in PROBES if name in only or not only]


def print_scores(rows):
    "The depth scores, averaged over seeds."
    last = {row['run']: row for row in rows}        # the deepest layer's
    if last:
        scores = [row | dict(of=row['score'] / max(1, row['depth'])) for row in last.values()]
        lines = [['model', 'depth score', 'of the depth']]
        for row in over_seeds(scores, [], ['score', 'of']):
            lines.append([row['run'], number(row['score'], row['score se']),
                          number(row['of'], row['of se'])])
        print(columns(lines))


def main(argv=None):
    options = read(Options, argv, ['models'])
    rows = {name: [] for name in chosen(options.only)}
    way = read_way(options)
    if way.wrapped:
        raise Refused(f'{way}: the probes look at each layer as it is, so they take --loop and '
                      '--r, and no window')
    paths = named_models(options.models)
    groups, folder, lines = groups_of(paths, MADE), options.out, []
    notes = notes_beside(folder / 'index.html')
    for run, path in tqdm(paths.items(), desc='models', unit='model'):
        subject = Probed(path, options)
        with way.apply(subject.model):
            order, (n, T) = unrolled(subject.model.order), subject.tokens.shape
        for name, places in subject.noted([way], notes)[str(way)].items():
            rows[name] += [dict(run=run, group=groups[run]) | place | numbers
                           for place, numbers in places]
        lines.append(f'{run}: {len(order)} layers deep, {len({*order})} of their own '
                     f'({notation(order)}); looked at with {n} rows of {T} tokens, t at '
                     f'{"every position" if T <= 32 else "16 drawn positions"}; its data: '
                     f'{subject.data()}')
        lines += [f'{run} is not in {name}: {why}' for name, why in subject.left_out.items()]
    drawn = [name for name in rows if rows[name]]
    for name in drawn:
        write_csv(rows[name], folder / f'{name}.csv')
        draw(name, rows[name], folder)
    write_index(folder, drawn, lines)
    print('\n'.join(lines))
    print_scores(rows.get('depth_score', []))
    print(f'page: {folder / "index.html"}')
