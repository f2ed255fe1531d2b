"""Does looping help a frozen model? Two commands: one setting against none, and a sweep of many.

The idea: one setting is scored on the same documents plain and looped, with one model in memory.
Two scores have errors of their own, but they share what is hard about the documents. So the error
that counts is that of the change, each document against itself.
A sweep tries many settings, and of a hundred some are better than none by chance. So all are
*screened* on one part of the data (every other document; of ours, the first batches), and the best
are *judged* on another part, which had no say. Both are shown side by side, with the number of
settings searched, and with the paper's recipe, which is always judged.

Paper: "Training-Free Looped Transformers", section 3 and appendices M (which windows help), E
(methods), G.5 and J.1 (windows that win the screen and lose on held-out data), P (the search).
Here: with errors and tests, which the paper does not print; some of its gains of one or two points
would lie within them. Changed arithmetic is a new sample: where text is drawn, only many samples a
problem, tested by problem, say anything. A finished cell of a sweep is on disk and is not run
again. The authors found that held-out loss and accuracy go against each other here: where there are
tasks, the best are chosen by those.

Usage:
    python wrapper.py HF_FOLDER --K=3 --tasks=arc_easy  # a table, out/evals/NAME_looped.json
    python wrapper.py HF_FOLDER --recipe                # the authors' settings on their 16 tasks
    nanodepth sweep out/toys/baseline-* --windows=all2,all4 --methods=naive,rk --K=2,3
    nanodepth sweep out/lidas --windows=all --K=6 --T=1,2 --tasks=toy_assign/4
    nanodepth sweep HF_FOLDER --K=2,3 --tasks=arc_easy --limit=200        # by lm-eval
    nanodepth sweep HF_FOLDER --K=2,3 --data=data/notes       # by the loss on your text
"""
import functools
import hashlib
import inspect
import itertools
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from nanodepth.commands.evaluate import add_scores, harness, open_model, rows_of, scores_in
from nanodepth.common.columns import columns
from nanodepth.common.errors import Refused, check_choice, say
from nanodepth.common.files import reading
from nanodepth.common.options import read
from nanodepth.engine.checkpoint import exists
from nanodepth.engine.foreign import answer_of, open_any
from nanodepth.engine.measure import fingerprint, parse_tasks, run_scorer
from nanodepth.engine.world import pick_device
from nanodepth.model import LM
from nanodepth.report.plot import draw_sweep, show
from nanodepth.report.tables import (beside, by_seed, in_percent, mean, more_is_better, number,
                                     p_value, pick_shown, run_names, standard_error, write_csv)
from nanodepth.variants.caches import CACHES
from nanodepth.variants.hosts import depth_of, pick_window
from nanodepth.wrapper import LAYERWISE, SOLVERS, looped, pick_solver

# as the paper's section 3.1 has it, in the middle four layers
PAPER = dict(method='rk', K=3, beta=0.5, T=1.0, mode='block', cache='first')


# ------------------------------------------------------------------------- one setting against none

@dataclass(kw_only=True)
class Dials:
    "How the wrapper loops a model; None: as wrapper.patch has it."
    window: str | None = None       # 3-5, mid4 (None), or a fraction of the depth such as 0.5
    method: Literal[tuple(SOLVERS)] | None = None       # None: rk
    K: int | None = None            # steps; None: 3
    T: float | None = None          # the time at which the K steps end; None: 1
    beta: float | None = None       # the share of the plain output; None: the method's own (rk 0.5)
    cache: Literal[tuple(CACHES)] | None = None     # what later tokens see of looped layers; first
    decode: int | str | None = None     # full, bypass, or how many decode steps are looped; full
    mode: str | None = None         # the window as one block, or layer by layer; None: block
    pin: str | None = None          # keep the experts of the first evaluation: mixture or indices
    # options of some methods (variants/solvers.py)
    alphas: list[float] | None = None
    tol: float | None = None
    alpha: float | None = None
    m: int | None = None
    safeguard: bool | None = None
    weights: list[float] | None = None

    def dials(self):
        "Those that are set."
        return given({each.name: getattr(self, each.name) for each in fields(Dials)})


@dataclass(kw_only=True)
class Options(Dials):
    WORDS = ['run']
    run: str                    # a folder that train.py wrote, or a Hugging Face checkpoint
    # tasks of lm-eval, or lists by name (evaluate.py): knowledge, language, primitives ...
    tasks: str | None = None
    data: str | None = None     # a dataset to measure the loss on, instead of tasks
    batches: int = 16           # of --data
    recipe: bool = False        # the authors': K = 6, cache first, decode bypass, 16 tasks; what is
                                # given beside it counts
    limit: int | None = None    # documents of each task: to try things, not to report them
    batch_size: str = '8'       # texts read at once
    chat: bool = False          # with the chat template of the checkpoint
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'           # of the weights
    device: str = 'auto'        # auto: cuda, else mps, else cpu
    out: Path | None = None     # the numbers as JSON; None: out/evals/NAME_looped.json


def side_by_side(path, tasks, settings, *, limit=None, chat=False, **options):
    """[{task, metric, plain, looped, change and their standard errors}] by lm-eval. The error of a
    change is that of its mean over documents, each against itself: far smaller than that of two
    scores, which share what is hard about the documents."""
    lm = open_model(path, **options)

    def score():
        return harness(lm, tasks, limit=limit, log_samples=True, apply_chat_template=chat)
    with looped(lm.model, **settings):
        after = score()         # first: a refusal comes before an hour is spent
    before = score()
    rows = []
    for plain, other in zip(rows_of(before), rows_of(after), strict=True):
        pairs = zip(documents(before, plain), documents(after, other), strict=True)
        changes = [float(b) - float(a) for a, b in pairs
                   if isinstance(a, (int, float)) and isinstance(b, (int, float))]
        change = other['value'] - plain['value']
        if not changes or abs(mean(changes) - change) > 1e-9:
            changes = []        # not a mean over documents: a perplexity, a group of tasks
        rows.append({key: plain[key] for key in ('task', 'shots', 'metric')} | dict(
            plain=plain['value'], plain_stderr=plain['stderr'], looped=other['value'],
            looped_stderr=other['stderr'], change=change,
            change_stderr=standard_error(changes) if len(changes) > 1 else None,
            documents=len(changes) or None, p=p_value(changes)))
    return rows


def documents(results, row):
    "What each document gives for a row's metric."
    samples = [s for s in results['samples'].get(row['task'], []) if s['filter'] == row['filter']]
    metric = row['metric'].partition(' ')[0]
    return [s.get(metric) for s in sorted(samples, key=lambda s: s['doc_id'])]


def compare(options, settings, out):
    "python wrapper.py MODEL --tasks=...: the table, and the numbers as JSON."
    rows = side_by_side(options.run, options.tasks, settings, limit=options.limit,
                        chat=options.chat, batch_size=options.batch_size, dtype=options.dtype,
                        device=options.device)
    table = [['task', 'shots', 'metric', 'plain', 'looped', 'change', 'p']]
    for row in rows:
        line = [row['task'], str(row['shots']), row['metric']]
        for name in ('plain', 'looped', 'change'):
            error = row[f'{name}_stderr']
            line.append(f'{row[name]:.4f}' + ('' if error is None else f' ± {error:.4f}'))
        line.append('' if row['p'] is None else f'{row["p"]:.3f}')
        table.append(line)
    print(columns(table))
    asked = dict(model=options.run, limit=options.limit, chat=options.chat, settings=settings)
    add_scores(out, [asked | row for row in rows], ['task', *asked])
    print(f'numbers: {out}')


def main(argv=None):
    options = read(Options, argv, __doc__)
    usual = dict(window='mid4', method='rk', K=3, decode='full')
    if options.recipe:          # what the authors' code has, where our defaults differ
        usual |= dict(K=6, decode='bypass')
        if not options.data:
            usual['tasks'] = 'looped'
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not (options.tasks or options.data):
        raise Refused('give --tasks (such as --tasks=primitives or --tasks=arc_easy), or --data')
    if options.tasks and options.data:
        raise Refused('give --tasks (of lm-eval) or --data (the loss on your own text), not both')
    for name in ('limit', 'batch_size', 'chat', 'dtype'):
        if options.data and getattr(options, name) != getattr(Options, name):
            raise Refused(f'--{name} is for --tasks: --data measures {options.run} as it is')
    settings = options.dials()
    out = options.out or Path('out/evals') / f'{Path(options.run).name}_looped.json'
    scores_in(out)          # what cannot be added to is refused before the work
    if options.data:
        compare_losses(options, settings, out)
    else:
        compare(options, settings, out)


def compare_losses(options, settings, out):
    "python wrapper.py MODEL --data=...: the mean loss, plain and looped, and both as JSON."
    state, model = open_any(options.run, pick_device(options.device))
    answer = answer_of(model)
    score = run_scorer(options.run, state, answer, options.data, options.batches, {})
    batches = min(options.batches, len(score.val))

    def losses(name):
        bar = tqdm(range(batches), name, unit='batch', leave=False)
        return [score.on_data(answer, 1, i)[0] for i in bar]
    with looped(model, **settings):
        after = losses('looped')        # first: a refusal comes before the work
    before = losses('plain')
    changes = [b - a for a, b in zip(before, after)]
    error = standard_error(changes)
    print(columns([['batches', 'plain loss', 'looped loss', 'change'],
                   [str(batches), number(mean(before)), number(mean(after)),
                    number(mean(changes), error)]]))
    asked = dict(model=options.run, data=options.data, batches=batches, settings=settings)
    found = dict(plain=mean(before), looped=mean(after), change=mean(changes),
                 change_stderr=error if batches > 1 else None)
    add_scores(out, [asked | found], [*asked])
    print(f'numbers: {out}')


# --------------------------------------------------------------------------------------- the sweep

@dataclass
class Sweep:
    WORDS = ['runs']
    # folders that train.py wrote, or Hugging Face checkpoints; NAME-SEED are averaged over seeds
    runs: list[str]
    # such as 3-5, mid4, all4 for every window of four layers, or all for every window there is,
    # which is drawn as a map of first and last layer too
    windows: tuple[str, ...] = ('all4',)
    methods: tuple[str, ...] = ('rk',)      # of wrapper.SOLVERS
    K: tuple[int, ...] = (2, 3)     # steps
    beta: tuple[float, ...] = ()    # the share of the plain output; (): the method's own
    T: tuple[float, ...] = (1.0,)   # the time at which the K steps end, such as 1,2
    mode: tuple[str, ...] = ('block',)      # block, layer
    cache: tuple[str, ...] = ('first',)     # matters where a cache is used
    # primitives with their depth (toy_assign/4); of a Hugging Face checkpoint without --data,
    # tasks of lm-eval
    tasks: str = ''
    judge_tasks: str | None = None  # tasks to judge by; None: documents that were not screened
    by_token: bool = False      # of ours: also the loss of text read token by token with the cache
    # what the best are chosen by; (): the mean share of right answers over the tasks, of our runs
    # without --tasks the loss
    score: tuple[str, ...] = ()
    show: tuple[str, ...] = ()  # what the picture shows; (): all
    best: int = 3               # how many are judged
    limit: int | None = None    # documents of each task: to try things, not to report them
    data: str | None = None     # a dataset; None: what the run was trained on
    batches: int = 8            # batches of validation data for each measurement
    n: int = 200                # examples of each task
    batch_size: int = 8         # texts read at once
    device: str = 'auto'        # auto: cuda, else mps, else cpu
    # beside the picture: .csv, and .jsonl with every finished cell
    out: Path = Path('out/sweep.png')


class Notes:
    "What has been measured, a line each, on disk: a sweep that was stopped goes on where it was."

    def __init__(self, path):
        self.path, self.known = path, {}
        with reading(path, then=': choose another --out'):
            lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
        for line in lines:
            try:
                note = json.loads(line)
            except ValueError:          # it was being written when it was killed
                continue
            self.known[json.dumps(note['of'], sort_keys=True)] = note['found']

    def get(self, of, measure):
        key = json.dumps(of, sort_keys=True)
        if key not in self.known:
            self.known[key] = measure()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            before = self.path.read_bytes() if self.path.exists() else b''
            torn = '\n' if before and not before.endswith(b'\n') else ''
            with open(self.path, 'a') as file:
                file.write(torn + json.dumps(dict(of=of, found=self.known[key])) + '\n')
        return self.known[key]


# ----------------------------------------------------------------------------------------- the grid

def windows_of(parts, depth):
    "('all4', 'mid2', '3-5') to ['0-3', '1-4', ...]; 'all': of every size."
    sizes = {f'all{n}': [n] for n in range(1, depth + 1)} | {'all': range(1, depth + 1)}
    chosen = []
    for part in parts:
        if part in sizes:
            chosen += [f'{a}-{a + n - 1}' for n in sizes[part] for a in range(depth - n + 1)]
        elif part.startswith('all'):
            raise Refused(f'--windows={part}: write all1 to all{depth}, every window of so many '
                          'layers, or all')
        else:
            chosen.append('{}-{}'.format(*pick_window(part, depth)))
    return list(dict.fromkeys(chosen))


class Cell(NamedTuple):
    "A setting of the wrapper. None: its method has no such option."
    window: str
    method: str
    K: int
    beta: float | None
    T: float | None
    mode: str
    cache: str


def cells_of(options, depth):
    "([the cells], [those that cannot run])."
    lists = [options.methods, options.K, options.beta or [None], options.T, options.mode,
             options.cache]
    possible, impossible = [], []
    windows = windows_of(options.windows, depth)
    for window, method, K, beta, T, mode, cache in itertools.product(windows, *lists):
        takes = inspect.signature(SOLVERS[method]).parameters if method in SOLVERS else {}
        if 'beta' not in takes:
            beta = None
        elif beta is None:
            beta = takes['beta'].default
        if 'T' not in takes:
            T = None
        if method == LAYERWISE:         # by itself, as its authors have it
            mode = 'layer'
            cache = 'natural' if cache == 'first' else cache
        cell = Cell(window, method, K, beta, T, mode, cache)
        try:
            pick_solver(method, K, **given(dict(beta=beta, T=T)))
        except ValueError as error:
            if method not in SOLVERS:
                raise
            impossible.append(f'{method} with K = {K} ({error})')
            continue
        possible.append(cell)
    return list(dict.fromkeys(possible)), list(dict.fromkeys(impossible))


def given(settings):
    return {name: value for name, value in settings.items() if value is not None}


def label(cell, grid):
    "What tells a setting from others of the grid, except its window."
    beta = '' if cell['beta'] is None else f' beta {cell["beta"]:g}'
    if cell['T'] not in (None, 1):
        beta += f' T={cell["T"]:g}'
    differing = [key for key in ('mode', 'cache') if len({other[key] for other in grid}) > 1]
    return f'{cell["method"]} K={cell["K"]}{beta}' + ''.join(f' {cell[key]}' for key in differing)


def cost(cell, depth):
    "Layers run for each token, relative to no loop."
    a, b = map(int, cell.window.split('-'))
    evaluations = pick_solver(cell.method, cell.K)[1]
    chain = cell.cache == 'last' or (cell.mode, cell.cache) == ('layer', 'first')
    return 1 + (b - a + 1) * (evaluations - 1 + chain) / depth


def gains(plain, looped_values):
    "Changes for the better."
    return {kind: value - plain[kind] if more_is_better(kind) else plain[kind] - value
            for kind, value in looped_values.items()}


# ---------------------------------------------------------------------------- screening and judging

class Study:
    "The runs of a sweep and what is known of them. `of(name, part, cells)` measures what is not."

    def __init__(self, options):
        self.options = options
        self.paths = run_names(options.runs)
        self.opened = {}            # one at a time
        self.known, self.left_out = {}, {}
        self.notes = Notes(beside(options.out, '.jsonl'))
        self.spec = {key: getattr(options, key)
                     for key in ('tasks', 'judge_tasks', 'n', 'by_token')}

    def open(self, name):
        "(model, {part: look}), of one run at a time."
        if name not in self.opened:
            path = self.paths[name]
            ours = path.endswith('.pt') or exists(path) or self.options.data
            if not ours and not self.options.tasks:
                raise Refused(f'{path} is not a run of ours: give --data, or --tasks, benchmarks '
                              'of lm-eval')
            self.opened.clear()         # free the last one before the next comes
            model, looks, data = (open_ours if ours else open_theirs)(path, self.options)
            mark = hashlib.sha256((fingerprint(model) + data).encode()).hexdigest()[:24]
            self.known[name] = mark, len(depth_of(model)[1])
            self.opened[name] = model, looks
        return self.opened[name]

    def about(self, name):
        """(a mark of the model and the data, the depth): with these, what is noted can be read
        without opening the model again."""
        if name not in self.known:
            self.open(name)
        return self.known[name]

    def depth(self, names):
        depths = {name: self.about(name)[1] for name in names}
        if len(set(depths.values())) > 1:
            raise Refused(f'these are not seeds of one run, their depths differ: {depths}')
        return depths[names[0]]

    def grid(self, name):
        cells, impossible = cells_of(self.options, self.about(name)[1])
        self.left_out |= dict.fromkeys(impossible)
        if not cells:
            raise Refused(f'nothing can be run: {"; ".join(impossible)}')
        return cells

    def of(self, name, part, cells):
        "{cell: {metric: gain}}"
        plain = self.values(name, part, None)
        bar = tqdm(cells, f'{part} {name}', unit='cell', leave=False)
        return {cell: gains(plain, self.values(name, part, cell)) for cell in bar}

    def values(self, name, part, cell):
        "{metric: value} in a cell, or without a loop (None): as noted, or measured now."
        settings = cell and cell._asdict()

        def measure():
            model, looks = self.open(name)
            if cell is None:
                return looks[part](model)
            with looped(model, **given(settings)):
                return looks[part](model)
        note = dict(model=self.about(name)[0], part=part, spec=self.spec, cell=settings)
        return self.notes.get(note, measure)


def kinds_in(runs):
    "The metrics of {run: {cell: {metric: gain}}}."
    return list(dict.fromkeys(kind for cells in runs.values() for changes in cells.values()
                              for kind in changes))


def study(options):
    """Screen every cell of the grid on every run, judge each group's best ones and the recipe, say
    what was found."""
    it = Study(options)
    rows = []
    groups = by_seed(it.paths)
    depths = {group: it.depth(names) for group, names in groups.items()}
    screened = {name: it.of(name, 'screen', it.grid(name)) for name in it.paths}
    kinds = kinds_in(screened)
    shown = pick_shown('show', options.show, kinds)
    for name, cells in screened.items():
        for kind in options.score:
            check_choice(f'{name}: --score', kind, kinds_in({name: cells}))
    for group, names in groups.items():
        of_group = {name: screened[name] for name in names}
        ranked_by = options.score or main_kinds(kinds_in(of_group), options.tasks.split(','))
        rows += judge(it, group, of_group, depths[group], ranked_by)
    for what in it.left_out:
        print(f'left out: {what}')
    write_csv(rows, options.out)
    screen = [row for row in rows if row['part'] == 'screen']
    screen = [row | dict(setting=label(row, screen)) for row in screen]
    show(options.out, draw_sweep, screen, shown)


def judge(it, group, screened, depth, ranked):
    """Judge the best cells, by the mean gain of one run's seeds in the `ranked` metrics, and the
    recipe. Prints a table; returns the rows of all that was measured."""
    names = list(screened)
    gain = {cell: [mean([screened[name][cell][kind] for kind in ranked]) for name in names]
            for cell in screened[names[0]]}
    recipe = Cell('{}-{}'.format(*pick_window(None, depth)), **PAPER)
    # what diverged comes last
    order = sorted(gain, key=lambda cell: (math.isnan(mean(gain[cell])), -mean(gain[cell])))
    chosen = list(dict.fromkeys([*order[:it.options.best], recipe]))
    parts = dict(screen={}, judge={})
    for name in names:          # each model is opened once
        for part in parts:
            parts[part][name] = it.of(name, part, chosen)
    shown = []
    for part, runs in parts.items():
        there = kinds_in(runs)
        wanted = {*ranked, 'loss'}
        shown += [(part, kind) for kind in there if kind in wanted or not wanted & {*there}]
    lines = [['window', 'setting', 'layers run', *(f'{part}: {kind}' for part, kind in shown)]]
    for cell in chosen:
        setting = label(cell._asdict(), [other._asdict() for other in (cell, *gain)])
        if cell == recipe:
            setting += ' (the recipe)'
        line = [cell.window, setting, f'{cost(cell, depth):.2f}']
        for part, kind in shown:
            values = [parts[part][name][cell][kind] for name in names]
            line.append(number(mean(values), standard_error(values), in_percent(kind)))
        lines.append(line)
    print(summary(group, gain, ' and '.join(ranked)) + '\n' + columns(lines))
    parts['screen'] = {name: screened[name] | parts['screen'][name] for name in names}
    return [dict(run=name, part=part, **cell._asdict(), **metrics) for part, runs in parts.items()
            for name in names for cell, metrics in runs[name].items()]


def summary(group, gain, score):
    "How many were searched, and how many gained."
    positive = [cell for cell, values in gain.items() if mean(values) > 0]
    text = f'\n{group}: {len(gain)} cells searched, {len(positive)} with a gain in {score}'
    seeds = len(next(iter(gain.values())))
    if seeds > 1:
        sure = sum(mean(gain[cell]) > 2 * standard_error(gain[cell]) for cell in positive)
        text += f', {sure} of them by more than two standard errors over {seeds} seeds'
    windows = {cell.window for cell in gain}
    good = {cell.window for cell in positive}
    return f'{text}; {len(good)} of {len(windows)} windows with one at some setting'


# ------------------------------------------------- what is measured: two parts of the data

def open_ours(path, options):
    """(model, {part: look}, what tells the data from others): loss and accuracies, screened on some
    validation batches and judged on the next."""
    for name in ('judge_tasks', 'limit'):
        if getattr(options, name):
            raise Refused(f"--{name} is for lm-eval's tasks, and {path} is measured by our own")
    state, model = open_any(path, pick_device(options.device))
    answer = answer_of(model)
    depth_of(model)         # a recurrent core is refused here, and not after the first measurement
    if options.by_token and not isinstance(model, LM):
        raise Refused(f'--by_token is for models of ours, and {path} is a {type(model).__name__}')
    looks = {}
    data = hashlib.sha256()
    batches = options.batches
    for i, part in enumerate(('screen', 'judge')):
        questions = parse_tasks(options.tasks, options.n, seed=i)
        score = run_scorer(path, state, answer, options.data, batches, questions)
        looks[part] = score if answer is model else lambda _, score=score: score(answer)
        if score.val is None:           # questions alone
            continue
        if len(score.val) < 2:
            raise Refused(f'the validation data of {path} fill one batch, of '
                          f'{score.val.batch_size} rows of {score.val.context} tokens: a sweep '
                          'screens on one and judges on another, so give more text')
        if len(score.val) < 2 * batches:
            batches = score.batches = len(score.val) // 2
            say(f'the validation data have {len(score.val)} batches: screened on {batches} of '
                'them, judged on others')
        score.first = i * batches
        for step in range(score.first, score.first + batches):
            data.update(b''.join(t.numpy().tobytes() for t in score.val.batch(step)))
        if options.by_token:
            looks[part] = functools.partial(score_by_token, score, min(2, batches))
    return model, looks, data.hexdigest()


def loss_of(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2).float(), targets, ignore_index=-1).item()


@torch.no_grad()
def score_by_token(score, batches, model):
    """Add the loss of each row's second half, read at once, and token by token with the cache that
    was filled by the first half: what a strategy for the cache changes."""
    device = next(model.parameters()).device
    at_once = []
    stepwise = []
    for step in range(score.first, score.first + batches):
        tokens, targets = (t.to(device) for t in score.val.batch(step))
        half = tokens.shape[1] // 2
        cache = model.new_cache()
        model(tokens[:, :half], cache=cache)
        pieces = [model(piece, cache=cache) for piece in tokens[:, half:].split(1, dim=1)]
        at_once.append(loss_of(model(tokens)[:, half:], targets[:, half:]))
        stepwise.append(loss_of(torch.cat(pieces, dim=1), targets[:, half:]))
    return score(model) | {'loss of the 2nd half': mean(at_once),
                           'loss of it token by token': mean(stepwise)}


def open_theirs(path, options):
    """The same by lm-eval: screened on every other document of each task and judged on the rest,
    or on tasks of their own."""
    if options.by_token:
        raise Refused(f'--by_token is for runs of ours, and {path} is scored by lm-eval')
    lm = open_model(path, batch_size=options.batch_size, device=options.device)
    tasks = dict(screen=options.tasks, judge=options.judge_tasks or options.tasks)
    keep = {}
    counts = {part: harness(lm, names, keep, limit=1)['n-samples']
              for part, names in tasks.items()}
    apart = not counts['screen'].keys() & counts['judge'].keys()
    samples = {}
    for i, part in enumerate(tasks):
        samples[part] = {}
        for task, n in counts[part].items():
            documents = range(n['original']) if apart else range(i, n['original'], 2)
            samples[part][task] = list(documents)[:options.limit]
            if not documents:
                raise Refused(f'{task} has {n["original"]} documents: none is left to {part} by')

    def measure(part, model):
        results = harness(lm, tasks[part], keep, samples=samples[part], bootstrap_iters=0)
        values = {}
        for row in rows_of(results):
            task = row['task']
            metric = row['metric'].partition(' (')[0]
            if task in samples[part]:               # (a group only says again what its tasks say)
                better = 'more' if results['higher_is_better'][task].get(metric, True) else 'less'
                what = '' if metric in SHARES else f' ({better} is better)'
                values[f'{task} {row["metric"]}{what}'] = row['value']
        return values
    looks = {part: functools.partial(measure, part) for part in tasks}
    return lm.model, looks, json.dumps(samples)


# from 0 to 1: these can be averaged
SHARES = ('acc', 'acc_norm', 'exact_match', 'em', 'f1', 'mc1', 'mc2')


def main_kinds(kinds, asked=()):
    """What a setting is ranked by if nothing else is asked for: of our runs the tasks asked for, or
    else the loss; of each benchmark its first share of right answers."""
    if 'loss' in kinds:
        return [kind for kind in kinds if '/' in kind or kind in asked] or ['loss']
    first = {}          # of each task

    def task_of(kind):
        return kind.partition(' ')[0]
    for metric in SHARES:
        for kind in filter(in_percent, kinds):
            if kind.partition(' (')[0].rpartition(' ')[2] == metric or ' ' not in kind:
                first.setdefault(task_of(kind), kind)
    if not first or {*map(task_of, kinds)} - first.keys():
        raise Refused(
            f'these metrics cannot be averaged: choose one of them by --score: {", ".join(kinds)}')
    return list(first.values())


def sweep(argv=None):
    study(read(Sweep, argv, __doc__))
