"""One page for several models: every probe as a picture, with the models side by side on one scale
and a sentence on how to read it. A probe is a function here: the first line of its text is the
title, the others say how to read it.
    nanodepth probe out/baseline out/lidas          # writes out/probe/index.html
"""
import html
import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

from nanodepth import probe
from nanodepth.common.errors import check_choice
from nanodepth.common.files import replace
from nanodepth.common.options import read
from nanodepth.model import require, spans_in, unrolled
from nanodepth.models.checkpoint import named_models, open_any, pick_device
from nanodepth.report.plot import draw_curves, draw_maps, show
from nanodepth.report.tables import columns, names_of, number, over_seeds, write_csv
from nanodepth.retrofit import core_of
from nanodepth.scoring.data import described, open_data, parse_tasks, questions_of
from nanodepth.scoring.lens import exit_at, quality, train_lens
from nanodepth.scoring.rows import data_scores, of_questions
from nanodepth.scoring.way import in_way
from nanodepth.text.tokenizer import get_tokenizer


@dataclass(kw_only=True)
class Options:
    # folders that train.py wrote, or Hugging Face checkpoints; NAME-0, NAME-1, ... are averaged
    models: list[str]
    only: tuple[str, ...] = ()      # some of the probes: depth_score,heatmap,norms; (): all
    loop: str | None = None         # the layers in another order, such as 3-2x2-3
    r: int | None = None            # how often a recurrent core runs
    data: str | None = None         # a dataset; None: what the run was trained on
    count: int = 20                 # validation rows that are looked at (the papers: 20 examples)
    length: int | None = None       # tokens of each; None: whole rows
    tasks: str = 'toy_assign/3'     # primitives to score too, with their depth
    n: int = 100                    # questions of each
    batches: int = 2                # of validation data, for a loss
    rows: int | None = None         # rows of a batch; None: as many as in training
    block: int = 2                  # layers of a block, for block_similarity
    lens_steps: int = 250           # of training a tuned lens
    device: str = 'auto'            # cuda, else mps, else cpu
    out: Path = Path('out/probe')   # the folder of the page


def opened(path, options):
    "What a probe looks at: a model, the tokens, and what an answer (tokens to logits) scores."
    # in float32: in bfloat16 the largest of many changes would hold rounding errors, too
    state, model = open_any(path, pick_device(options.device), 'float32', others=False)
    val = open_data(path, state, model, options.data, seed=1, rows=options.rows)
    tokens = rows_of(val, options.count, options.length).to(model.norm.weight.device)
    ours, theirs = parse_tasks(options.tasks)
    require(not theirs, f'{theirs} are no primitives: --tasks=toy_assign/3 is one')
    questions, tokenizer = questions_of(ours, options.n), get_tokenizer(path)

    def score(answer):
        loss = data_scores(answer, val, options.batches)['loss'].mean
        return dict(loss=loss) | {name: of_questions(answer, tokenizer, its)[0].mean
                                  for name, its in questions.items()}
    return SimpleNamespace(model=model, tokens=tokens, score=score, val=val, options=options)


def rows_of(val, count, length=None):
    "Validation rows, or the first tokens of them: (n, T)."
    require(count <= max(val.n_rows, 20), f'--count={count}, but the validation data have '
            f'{val.n_rows} rows')
    batches = range(min(val.n_batches, -(-count // val.batch_size)))
    return torch.cat([val.batch(i)[0] for i in batches])[:count, :length]


# --------------------------------------------------------------------------------------- the probes
# The figures of "Do Depth-Grown Models Overcome the Curse of Depth?" (1 to 7, 9 to 13) and of "From
# Growing to Looping" (2 to 4, 7 to 10). The papers measure them on GSM8K, MATH, MQuAKE and LAMBADA,
# and here it is done on the data at hand. A probe gives rows; none where it makes no sense.

def depth_score(it):
    """Which layers matter for later tokens?
    A layer is erased for the tokens up to t; the height is how far the output at later tokens
    moves. Work in the right half is work that deep layers do; the depth score (in the legend) is
    its mean depth. The last layer is always at zero: no later layer carries its result to another
    token."""
    score, changes = probe.depth_score(it.model, it.tokens)
    total = max(1e-30, changes.sum().item())
    return [dict(depth=d, change=change, share=change / total, score=score)
            for d, change in enumerate(changes.tolist())]


def heatmap(it, part='layer'):
    """Which layer depends on which?
    Row: the layer erased; column: the layer observed; colour: how much its update changes, relative
    to itself (1: as much as its own length). Propagated: the change runs on through all layers
    between; local: only this one layer sees the other missing. A bright column is a layer that
    gathers from all before it."""
    rows = []           # an adapter's output is no sum of updates, which could be left out of it
    ways = (True,) if spans_in(it.model.order) else (True, False)
    for future, propagate in itertools.product((True, False), ways):
        setting = (f'{"future" if future else "all"} tokens, '
                   f'{"propagated" if propagate else "local"}')
        changes = probe.future_effects(it.model, it.tokens, part, propagate, future).tolist()
        rows += [dict(setting=setting, erased=s, observed=d, change=changes[s][d])
                 for s in range(len(changes)) for d in range(s + 1, len(changes))]
    return rows


def heatmap_attn(it):
    """The same with only the attention of a layer erased
    As above."""
    return heatmap(it, 'attn')


def heatmap_mlp(it):
    """The same with only the MLP of a layer erased
    As above."""
    return heatmap(it, 'mlp')


def norms(it):
    """How much does each layer add?
    The stream's length; the length of what a layer or sublayer adds, as a share of the stream; and
    its cosine with the stream (above 0: it strengthens what is there; below: it erases). A pattern
    that repeats with the block is what growing and looping leave."""
    means = probe.residual_norms(it.model, it.tokens)
    return [dict(depth=d) | {name: values[d].item() for name, values in means.items()}
            for d in range(len(means['stream']))]


def swap(it, change=probe.swap_blocks, sizes=(1, 2, 4, 8)):
    """Blocks change places
    The layers from a position on change places with as many behind them. Dotted: the model as it
    is. Where a curve stays near it, the order does not matter."""
    rows = [] if core_of(it.model) else probe.order_sweep(it.model, it.score, change, sizes)
    return rows if len(rows) > 1 else []


def skip(it):
    """Blocks are left out
    The layers from a position on do not run. Where a curve stays near the dotted line (the model as
    it is), they are not needed."""
    return swap(it, probe.skip_blocks)


def reverse(it):
    """Blocks run backwards
    The layers from a position on run in reverse. Worst where a reversal straddles two blocks:
    layers of a block have roles that follow each other."""
    return swap(it, probe.reverse_block, (2, 4, 8))


def similarity(it, size=1):
    """Are layers copies of each other?
    Cosines between the MLP weights of two layers. Lines beside the diagonal are the traces of
    growing: layers that once were one. A looped model has its unique layers only."""
    matrix = [] if len(it.model.layers) % size else probe.block_similarity(it.model, size).tolist()
    return [dict(layer=i, other=j, lag=abs(i - j), cosine=cosine)
            for i, row in enumerate(matrix) for j, cosine in enumerate(row)]


def block_similarity(it):
    """Are blocks copies of each other?
    The same for whole blocks of layers (--block), each as one long vector."""
    return similarity(it, it.options.block)


def early_exit(it):
    """What is known behind each layer?
    The answer if the model stopped there: directly (logit lens), or through a trained translator
    (tuned lens). KL and overlap (of the five likeliest tokens) compare with the final answer. A
    curve that rises to the end: the last layers are needed."""
    n, o, rows = it.val.n_batches, it.options, []
    looked_at = max(-(-o.count // it.val.batch_size), o.batches, min(8, n // 2))
    if looked_at >= n:      # no row is left that neither training nor the probes have seen
        return []
    trained = train_lens(it.model, it.val, o.lens_steps, progress=True, batches=range(looked_at, n))
    for name, lens in (('logit lens', None), ('tuned lens', trained)):
        kl, overlap = quality(it.model, lens, it.tokens)
        rows += [dict(lens=name, depth=d, KL=kl[d].item(), overlap=overlap[d].item())
                 | it.score(exit_at(it.model, d, lens)) for d in range(len(kl))]
    return rows


PROBES = {each.__name__: each for each in (
    depth_score, heatmap, heatmap_attn, heatmap_mlp, norms, swap, skip, reverse, similarity,
    block_similarity, early_exit)}


# ------------------------------------------------------------------------------------------ showing

def draw(name, rows, folder):
    "A map of what says a row and a column, else curves over the depth, or over a block's start."
    path, title = folder / f'{name}.png', PROBES[name].__doc__.splitlines()[0]
    keys = dict.fromkeys(key for row in rows for key in row if key not in ('run', 'group', 'seed'))
    if 'erased' in keys:
        return show(path, draw_maps, rows, 'erased', 'observed', 'change', 'setting', title)
    if 'other' in keys:
        return show(path, draw_maps, rows, 'layer', 'other', 'cosine', None, title)
    x, axis = ('start', 'first of these layers') if 'start' in keys else ('depth', 'layer')
    panel = next((key for key in ('size', 'lens') if key in keys), None)
    labels = {row['run']: f'{row["run"]}: {row["score"]:.2f}' for row in over_seeds(rows, [], [])
              if 'score' in row}
    rows = [row | {x: None} if row.get('size') == 0 else row for row in rows]   # the model as it is
    values = ['change'] if labels else [key for key in keys if key not in (x, panel)]
    show(path, draw_curves, rows, x, panel, values, title, f'{axis} (by depth, from 0)', labels)


PAGE = '''<!doctype html><meta charset="utf-8"><title>Which layers do they use?</title>
<style>body{{font-family:sans-serif;max-width:70em;margin:2em auto;line-height:1.5}}
img{{max-width:100%}}</style><h1>Which layers do they use?</h1><ul>{}</ul>{}'''


def page(shown, lines):
    parts = []
    for name in shown:
        title, reads = map(html.escape, inspect.getdoc(PROBES[name]).split('\n', 1))
        parts.append(f'<h2>{title}</h2><p>{reads}</p><img src="{name}.png" alt="{title}">'
                     f'<p><a href="{name}.csv">the numbers</a></p>')
    return PAGE.format(''.join(f'<li>{html.escape(line)}</li>' for line in lines), ''.join(parts))


def main(argv=None):
    options = read(Options, argv, ['models'])
    for part in options.only:
        check_choice('--only', part, PROBES)
    chosen = [name for name in PROBES if not options.only or name in options.only
              or name.startswith('heatmap') and 'heatmap' in options.only]
    rows, lines = {name: [] for name in chosen}, []
    for run, path in tqdm(named_models(options.models).items(), 'models', unit='model'):
        it = opened(path, options)
        way = {name: value for name in ('loop', 'r') if (value := getattr(options, name))}
        with in_way(it.model, way):
            order, (n, T) = unrolled(it.model.order), it.tokens.shape
            at = 'every position' if T <= 32 else '16 drawn positions'
            lines.append(f'{run}: {len(order)} layers deep, {len({*order})} of their own '
                         f'({" ".join(map(str, order))}); looked at with {n} rows of {T} tokens, t '
                         f'at {at}; its data: {described(it.val)}')
            for name in tqdm(chosen, run, unit='probe', leave=False):
                found = PROBES[name](it)
                lines += [] if found else [f'{run} is not in {name}']
                rows[name] += [names_of(run) | row for row in found]
                if rows[name]:
                    write_csv(rows[name], options.out / f'{name}.csv')
    shown = [name for name in chosen if rows[name]]
    for name in shown:
        draw(name, rows[name], options.out)
    replace(options.out / 'index.html', page(shown, lines).encode())
    print('\n'.join(lines))
    deepest = [row | dict(of=row['score'] / max(1, row['depth'])) for row in
               {row['run']: row for row in rows.get('depth_score', ())}.values()]
    print(columns([['model', 'depth score', 'of the depth'], *(
        [row['run'], number(row['score'], row['score se']), number(row['of'], row['of se'])]
        for row in over_seeds(deepest, [], ['score', 'of']))]) if deepest else '')
    print(f'page: {options.out / "index.html"}')
