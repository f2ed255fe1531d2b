"""Which layers do models use? Each probe draws a picture with the models side by side, writes its
numbers as CSV and prints how to read the picture. A probe is a function here. Its docstring begins
with the picture's title, and then says how to read it.
    nanodepth probe out/baseline out/lidas          # writes out/probe/*.png and *.csv
"""
import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

from nanodepth import probe
from nanodepth.common.errors import check_choice, say
from nanodepth.common.options import read
from nanodepth.model import require, spans_in, unrolled
from nanodepth.models.checkpoint import named_models, open_any, pick_device
from nanodepth.report.contrasts import mean
from nanodepth.report.plot import draw_curves, draw_maps, show
from nanodepth.report.tables import grouped, names_of, write_csv
from nanodepth.retrofit import core_of
from nanodepth.scoring.data import described, open_data, parse_tasks, questions_of
from nanodepth.scoring.lens import exit_at, quality, train_lens
from nanodepth.scoring.rows import data_scores, question_scores
from nanodepth.scoring.ways import in_way
from nanodepth.text.tokenizer import get_tokenizer


@dataclass(kw_only=True)
class Options:
    # folders that train.py wrote, or Hugging Face checkpoints; NAME-0, NAME-1, ... are averaged
    models: list[str]
    only: tuple[str, ...] = ()      # some of the probes: depth_score,heatmap,norms; (): all
    loop: str | None = None         # the layers in another order, such as 3-2x2-3
    r: int | None = None            # how often a recurrent core runs
    data: str | None = None         # a dataset; None: the data that the run was trained on
    count: int = 20                 # validation rows that are looked at
    length: int | None = None       # tokens of each row; None: all
    tasks: str = 'toy_assign/3'     # primitives to score, with their depth
    n: int = 100                    # questions of each primitive
    batches: int = 2                # of validation data, for the loss
    rows: int | None = None         # rows of a batch; None: as many as in training
    block: int = 2                  # layers of a block, for block_similarity
    lens_steps: int = 250           # of training a tuned lens
    device: str = 'auto'            # cuda, otherwise mps, otherwise cpu
    out: Path = Path('out/probe')   # the folder of the pictures


def opened(path, options):
    "Return what a probe gets: a model, tokens, and `score` for any function tokens -> logits."
    # float32: in bfloat16 the largest of many changes would contain rounding errors
    state, model = open_any(path, pick_device(options.device), 'float32', others=False)
    val = open_data(path, state, model, options.data, seed=1, rows=options.rows)
    tokens = rows_of(val, options.count, options.length).to(model.norm.weight.device)
    ours, others = parse_tasks(options.tasks)
    require(not others, f'{others} are not primitives: --tasks=toy_assign/3 is one')
    questions, tokenizer = questions_of(ours, options.n), get_tokenizer(path)

    def score(answer):
        loss = data_scores(answer, val, options.batches)['loss'].mean
        return dict(loss=loss) | {name: question_scores(answer, tokenizer, examples)[0].mean
                                  for name, examples in questions.items()}
    return SimpleNamespace(model=model, tokens=tokens, score=score, val=val, options=options)


def rows_of(val, count, length=None):
    "Return validation rows, or the first tokens of them: (n, T)."
    require(count <= max(val.n_rows, 20), f'--count={count}, but the validation data have '
            f'{val.n_rows} rows')
    batches = range(min(val.n_batches, -(-count // val.batch_size)))
    return torch.cat([val.batch(i)[0] for i in batches])[:count, :length]


# ----------------------------------------------------------------------------------------- probes
# The figures of "Do Depth-Grown Models Overcome the Curse of Depth?" (1, 3 to 13) and of "From
# Growing to Looping" (2 to 4, 7, 9, 10). The papers measure them on GSM8K, MATH, MQuAKE and
# LAMBADA, and here they are measured on the data at hand. A probe returns rows, or none if it makes
# no sense for this model. `m` is what `opened` returns.

def depth_score(m):
    """Which layers matter for later tokens?
    A layer is erased for the tokens up to t; the height is how far the output at later tokens
    moves. Work in the right half is work that deep layers do; the depth score (in the legend) is
    its mean depth. The last layer is always at zero: no later layer carries its result to another
    token."""
    score, changes = probe.depth_score(m.model, m.tokens)
    total = max(1e-30, changes.sum().item())
    return [dict(depth=d, change=change, share=change / total, score=score)
            for d, change in enumerate(changes.tolist())]


def heatmap(m, part='layer'):
    """Which layer depends on which?
    Row: the erased layer. Column: the observed layer. Colour: how much its update changes, relative
    to its length. Propagated: the change passes through all layers in between. Local: only the
    observed layer misses the erased one. A bright column is a layer that reads from all before."""
    rows = []           # an adapter's output is not a sum of updates, so nothing is local there
    ways = (True,) if spans_in(m.model.order) else (True, False)
    for future, propagate in itertools.product((True, False), ways):
        setting = (f'{"future" if future else "all"} tokens, '
                   f'{"propagated" if propagate else "local"}')
        changes = probe.future_effects(m.model, m.tokens, part, propagate, future).tolist()
        rows += [dict(setting=setting, erased=s, observed=d, change=changes[s][d])
                 for s in range(len(changes)) for d in range(s + 1, len(changes))]
    return rows


def heatmap_attn(m):
    """Which layer depends on which, if only a layer's attention is erased?
    As in heatmap."""
    return heatmap(m, 'attn')


def heatmap_mlp(m):
    """Which layer depends on which, if only a layer's MLP is erased?
    As in heatmap."""
    return heatmap(m, 'mlp')


def norms(m):
    """How much does each layer add?
    The length of the stream; the length of what a layer or sublayer adds, as a share of the stream;
    and its cosine with the stream (above 0 it strengthens the stream, below 0 it erases). Growing
    and looping leave a pattern that repeats with the block."""
    means = probe.residual_norms(m.model, m.tokens)
    return [dict(depth=d) | {name: values[d].item() for name, values in means.items()}
            for d in range(len(means['stream']))]


def swap(m, change=probe.swap_blocks, sizes=(1, 2, 4, 8)):
    """Do blocks work in each other's places?
    The layers from a position on change places with as many layers after them. Dotted: the model as
    it is. If a curve stays near it, the order does not matter."""
    rows = [] if core_of(m.model) else probe.order_sweep(m.model, m.score, change, sizes)
    return rows if len(rows) > 1 else []


def skip(m):
    """Which blocks can be left out?
    The layers from a position on do not run. If a curve stays near the dotted line (the model as it
    is), they are not needed."""
    return swap(m, probe.skip_blocks)


def reverse(m):
    """Do blocks work backwards?
    The layers from a position on run in reverse. It is worst if a reversal straddles two blocks:
    the layers of a block have roles that follow each other."""
    return swap(m, probe.reverse_block, (2, 4, 8))


def similarity(m, size=1):
    """Are layers copies of each other?
    Cosines between the MLP weights of two layers. Lines next to the diagonal are traces of growing:
    layers that were one layer once. A looped model has only its unique layers here."""
    matrix = [] if len(m.model.layers) % size else probe.block_similarity(m.model, size).tolist()
    return [dict(layer=i, other=j, lag=abs(i - j), cosine=cosine)
            for i, row in enumerate(matrix) for j, cosine in enumerate(row)]


def block_similarity(m):
    """Are blocks copies of each other?
    The same for whole blocks of layers (--block), each as one long vector."""
    return similarity(m, m.options.block)


def early_exit(m):
    """What is known after each layer?
    The answer if the model stopped there: directly (logit lens), or through a trained translator
    (tuned lens). KL and overlap (of the five likeliest tokens) compare with the final answer. If a
    curve rises to the end, the last layers are needed."""
    n, o, rows = m.val.n_batches, m.options, []
    looked_at = max(-(-o.count // m.val.batch_size), o.batches, min(8, n // 2))
    if looked_at >= n:      # no row is left that neither training nor the probes have seen
        return []
    trained = train_lens(m.model, m.val, o.lens_steps, progress=True, batches=range(looked_at, n))
    for name, lens in (('logit lens', None), ('tuned lens', trained)):
        kl, overlap = quality(m.model, lens, m.tokens)
        rows += [dict(lens=name, depth=d, KL=kl[d].item(), overlap=overlap[d].item())
                 | m.score(exit_at(m.model, d, lens)) for d in range(len(kl))]
    return rows


PROBES = {each.__name__: each for each in (
    depth_score, heatmap, heatmap_attn, heatmap_mlp, norms, swap, skip, reverse, similarity,
    block_similarity, early_exit)}


# --------------------------------------------------------------------------------------- pictures

def scores_of(rows):
    "Return {group: its depth score, the mean over the seeds}."
    return {group: mean([row['score'] for row in group_rows])
            for group, group_rows in grouped(rows).items()}


def draw(name, rows, folder):
    "Draw a map if the rows have two layers each, otherwise curves over the depth or the start."
    title, how = inspect.getdoc(PROBES[name]).split('\n', 1)
    path, keys = folder / f'{name}.png', dict.fromkeys(key for row in rows for key in row)
    print(f'\n{name}: {title} {" ".join(how.split())}')
    if 'erased' in keys:
        return show(path, draw_maps, rows, 'erased', 'observed', 'change', 'setting', title)
    if 'other' in keys:
        return show(path, draw_maps, rows, 'layer', 'other', 'cosine', None, title)
    x, axis = ('start', 'first of these layers') if 'start' in keys else ('depth', 'layer')
    panel = next((key for key in ('size', 'lens') if key in keys), None)
    labels = {}
    values = [key for key in keys if key not in (x, panel, 'run', 'group', 'seed')]
    if 'score' in keys:
        labels = {group: f'{group}: {score:.2f}' for group, score in scores_of(rows).items()}
        values = ['change']
    rows = [row | {x: None} if row.get('size') == 0 else row for row in rows]   # the model as it is
    show(path, draw_curves, rows, x, panel, values, title, f'{axis} (by depth, from 0)', labels)


def main(argv=None):
    options = read(Options, argv, ['models'])
    for part in options.only:
        check_choice('--only', part, PROBES)
    chosen = [name for name in PROBES if not options.only or name in options.only
              or name.startswith('heatmap') and 'heatmap' in options.only]
    rows = {name: [] for name in chosen}
    for run, path in tqdm(named_models(options.models).items(), 'models', unit='model'):
        m = opened(path, options)
        way = {name: value for name in ('loop', 'r') if (value := getattr(options, name))}
        with in_way(m.model, way):
            order, (n, T) = unrolled(m.model.order), m.tokens.shape
            say(f'{run}: {len(order)} layers deep ({" ".join(map(str, order))}), {n} rows of {T} '
                f'tokens, {described(m.val)}')
            for name in tqdm(chosen, run, unit='probe', leave=False):
                found = PROBES[name](m)
                if not found:
                    say(f'{name} leaves out {run}: this probe makes no sense for it, or there are '
                        'too few rows')
                rows[name] += [names_of(run) | row for row in found]
                if rows[name]:
                    write_csv(rows[name], options.out / f'{name}.csv')
    for name in chosen:
        if rows[name]:
            draw(name, rows[name], options.out)
    for group, score in scores_of(rows.get('depth_score', ())).items():
        print(f'{group}: depth score {score:.3f}')
