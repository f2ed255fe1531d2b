"""Does looping help this model, where, and at what cost? Many settings on one part of the data, the
best of them on another.

The idea: of a hundred settings some are better than none by chance, and the best of them looks like
a result. So all are *screened* on one part of the data (every other document; of ours, the first
batches), and the best are *judged* on another, which had no say. Both are shown side by side,
with the number of settings searched, and with the paper's recipe, which is always judged.

Paper: "Training-Free Looped Transformers", section 3.2 and appendix M (which windows help), E
(methods), G.5 and J.1 (windows that win the screen and lose on held-out data), P (the search).
Here: a gain is a change for the better, whichever direction that is. The error beside one is over
the seeds of a run, where there are several. A finished cell is on disk, and is not run again. The
authors found that held-out loss and accuracy go against each other here: where there are tasks, the
best are chosen by those.

Usage:
    python nanodepth.py sweep out/toys/baseline-* --windows=all2,all4 --methods=naive,rk --K=2,3
    python nanodepth.py sweep out/lidas --windows=all --K=6 --T=1,2 --tasks=toy_assign/4    # a map
    python nanodepth.py sweep HF_FOLDER --K=2,3 --tasks=arc_easy --limit=200        # by lm-eval
"""
import hashlib
import inspect
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common.columns import columns
from common.errors import Refused, number_list, refusing
from common.fields import fill
from common.files import reading
from engine.checkpoint import exists, fingerprint
from report.panels import draw_sweep, draw_windows
from report.plot import show
from report.tables import by_seed, in_percent, mean, number, run_names, standard_error, write_csv
from tools.evaluate import explain
from tools.options import RUNS, make_parser, pick_shown, picture
from tools.parts import main_kinds, open_ours, open_theirs
from variants.hosts import depth_of, pick_window
from wrapper import LAYERWISE, SOLVERS, looped, pick_solver

# the paper's section 3.1
RECIPE = dict(window='mid4', method='rk', K=3, beta=0.5, T=1.0, mode='block', cache='first')


# ------------------------------------------------------------------------------------ what is known

@dataclass
class Note:
    of: dict                    # a model, a part of the data, a setting
    found: dict[str, float]     # {metric: value}


class Notes:
    "What has been measured, a line each, on disk: a sweep that was stopped goes on where it was."

    def __init__(self, path):
        self.path, self.known = path, {}
        with reading(path, then=': choose another --out'):
            lines = path.read_text(encoding='utf-8').splitlines() if path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):        # it was being written when it was killed
                continue
            note = fill(Note, entry, f'{path} is no file of notes of a sweep')
            self.known[json.dumps(note.of, sort_keys=True)] = note.found

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

def windows_of(text, depth):
    "'all4,mid2,3-5' to ['0-3', '1-4', ...]; 'all': of every size."
    found = []
    for part in text.split(','):
        size = part[3:]
        if part == 'all' or part.startswith('all') and size.isdigit() and 1 <= int(size) <= depth:
            sizes = range(1, depth + 1) if part == 'all' else [int(size)]
            found += [f'{a}-{a + n - 1}' for n in sizes for a in range(depth - n + 1)]
        elif part.startswith('all'):
            raise Refused(f'--windows={part}: write all1 to all{depth}, every window of so many '
                          'layers, or all')
        else:
            found.append('{}-{}'.format(*pick_window(part, depth)))
    return list(dict.fromkeys(found))


def cells_of(args, depth):
    "([the settings], [those that cannot run])."
    betas = number_list('--beta', args.beta, kind=float) if args.beta else [None]
    lists = [args.methods.split(','), number_list('--K', args.K), betas,
             number_list('--T', args.T, kind=float), args.mode.split(','), args.cache.split(',')]
    found, impossible = [], []
    windows = windows_of(args.windows, depth)
    for window, method, K, beta, T, mode, cache in itertools.product(windows, *lists):
        options = dict(beta=default_of(method, 'beta') if beta is None else beta, T=T)
        options = {name: value if takes(method, name) else None for name, value in options.items()}
        if method == LAYERWISE:         # by itself, as its authors have it
            mode, cache = 'layer', 'natural' if cache == 'first' else cache
        cell = dict(window=window, method=method, K=K, **options, mode=mode, cache=cache)
        try:
            pick_solver(method, K, **given(options))
        except ValueError as error:
            if method not in SOLVERS:
                raise
            impossible.append(f'{method} with K = {K} ({error})')
            continue
        found += [cell] * (cell not in found)
    return found, list(dict.fromkeys(impossible))


def takes(method, option):
    return method in SOLVERS and option in inspect.signature(SOLVERS[method]).parameters


def default_of(method, option):
    return (inspect.signature(SOLVERS[method]).parameters[option].default
            if takes(method, option) else None)


def given(options):
    return {name: value for name, value in options.items() if value is not None}


def label(cell, grid):
    "What tells a setting from others of the grid, except its window."
    beta = '' if cell['beta'] is None else f' beta {cell["beta"]:g}'
    if cell['T'] not in (None, 1):
        beta += f' T={cell["T"]:g}'
    told = [key for key in ('mode', 'cache') if len({other[key] for other in grid}) > 1]
    return f'{cell["method"]} K={cell["K"]}{beta}' + ''.join(f' {cell[key]}' for key in told)


def cost(cell, depth):
    "Layers run for each token, relative to no loop."
    a, b = map(int, cell['window'].split('-'))
    evaluations = pick_solver(cell['method'], cell['K'])[1]
    chain = cell['cache'] == 'last' or (cell['mode'], cell['cache']) == ('layer', 'first')
    return 1 + (b - a + 1) * (evaluations - 1 + chain) / depth


def gains(plain, found):
    "Changes for the better."
    down = lambda kind: kind.startswith('loss') or kind.endswith('(less is better)')
    return {kind: plain[kind] - value if down(kind) else value - plain[kind]
            for kind, value in found.items()}


# ---------------------------------------------------------------------------- screening and judging

class Study:
    "The runs of a sweep and what is known of them. `of(name, part, cells)` measures what is not."

    def __init__(self, args):
        self.args, self.paths, self.opened = args, run_names(args.runs), (None,)
        self.known, self.left_out = {}, {}
        self.notes = Notes(args.out.with_suffix('.jsonl'))
        self.spec = {key: getattr(args, key) for key in ('tasks', 'judge_tasks', 'n', 'by_token')}

    def open(self, name):
        "(model, {part: look}), of one run at a time."
        if self.opened[0] != name:
            path = str(self.paths[name])
            ours = path.endswith('.pt') or exists(path)
            if not ours and not self.args.tasks:
                raise Refused(f'{path} is not a run of ours: give --tasks, benchmarks of lm-eval')
            self.opened = (None,)       # free the last one before the next comes
            model, looks, data = (open_ours if ours else open_theirs)(path, self.args)
            mark = hashlib.sha256((fingerprint(model) + data).encode()).hexdigest()[:24]
            self.known[name] = mark, len(depth_of(model)[1])
            self.opened = name, (model, looks)
        return self.opened[1]

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
        cells, impossible = cells_of(self.args, self.about(name)[1])
        self.left_out |= dict.fromkeys(impossible)
        if not cells:
            raise Refused(f'nothing can be run: {"; ".join(impossible)}')
        return cells

    def of(self, name, part, cells):
        "{cell as JSON: {metric: gain}}"
        noted = lambda cell: dict(model=self.about(name)[0], part=part, spec=self.spec, cell=cell)

        def measure(cell):
            model, looks = self.open(name)
            if cell is None:
                return looks[part](model)
            with looped(model, **given(cell)):
                return looks[part](model)
        plain, found = self.notes.get(noted(None), lambda: measure(None)), {}
        for cell in tqdm(cells, desc=f'{part} {name}', unit='cell', leave=False):
            found[json.dumps(cell)] = gains(plain,
                                            self.notes.get(noted(cell), lambda: measure(cell)))
        return found


def kinds_in(runs):
    "The metrics of {run: {cell: {metric: gain}}}."
    return list(dict.fromkeys(kind for cells in runs.values() for found in cells.values()
                              for kind in found))


def study(args):
    """Screen every cell of the grid on every run, judge each group's best ones and the recipe, say
    what was found."""
    it, rows = Study(args), []
    groups = by_seed(it.paths)
    depths = {group: it.depth(names) for group, names in groups.items()}
    screened = {name: it.of(name, 'screen', it.grid(name)) for name in it.paths}
    kinds = kinds_in(screened)
    shown = pick_shown('show', args.show, kinds)
    ranked = args.score and pick_shown('score', args.score, kinds)
    for group, names in groups.items():
        mine = {name: screened[name] for name in names}
        rows += judge(it, group, mine, depths[group], ranked or main_kinds(
            kinds_in(mine), args.tasks.split(',')))
    for what in it.left_out:
        print(f'left out: {what}')
    write_csv(rows, args.out)
    screen = [row for row in rows if row['part'] == 'screen']
    screen = [row | dict(setting=label(row, screen)) for row in screen]
    show(args.out, draw_sweep, screen, shown)
    if 'all' in args.windows.split(','):
        show(args.out.with_stem(args.out.stem + '_map'), draw_windows, screen, shown)


def judge(it, group, screened, depth, ranked):
    """Judge the best cells, by the mean gain of one run's seeds in the `ranked` metrics, and the
    recipe. Prints a table; returns the rows of all that was measured."""
    names = list(screened)
    gain = {cell: [mean([screened[name][cell][kind] for kind in ranked]) for name in names]
            for cell in screened[names[0]]}
    recipe = json.dumps(RECIPE | dict(window='{}-{}'.format(*pick_window(None, depth))))
    # what diverged comes last
    order = sorted(gain, key=lambda cell: (math.isnan(mean(gain[cell])), -mean(gain[cell])))
    chosen = list(dict.fromkeys([*order[:it.args.best], recipe]))
    parts = {part: {name: it.of(name, part, map(json.loads, chosen)) for name in names}
             for part in ('screen', 'judge')}
    shown = []
    for part, runs in parts.items():
        there, wanted = kinds_in(runs), {*ranked, 'loss'}
        shown += [(part, kind) for kind in there if kind in wanted or not wanted & {*there}]
    lines = [['window', 'setting', 'layers run', *(f'{part}: {kind}' for part, kind in shown)]]
    for key in chosen:
        cell = json.loads(key)
        setting = label(cell, [cell, *map(json.loads, gain)])
        found = [(kind, [parts[part][name][key][kind] for name in names]) for part, kind in shown]
        lines.append([cell['window'], setting + ' (the recipe)' * (key == recipe),
                      f'{cost(cell, depth):.2f}',
                      *(number(mean(v), standard_error(v), in_percent(kind)) for kind, v in found)])
    print(summary(group, gain, ' and '.join(ranked)) + '\n' + columns(lines))
    parts['screen'] = {name: screened[name] | parts['screen'][name] for name in names}
    return [dict(run=name, part=part, **json.loads(cell), **found) for part, runs in parts.items()
            for name in names for cell, found in runs[name].items()]


def summary(group, gain, score):
    "How many were searched, and how many gained."
    positive = [cell for cell, values in gain.items() if mean(values) > 0]
    seeds = len(next(iter(gain.values())))
    sure = sum(mean(gain[cell]) > 2 * standard_error(gain[cell]) for cell in positive)
    windows = [{json.loads(cell)['window'] for cell in cells} for cells in (positive, gain)]
    return (f'\n{group}: {len(gain)} cells searched, {len(positive)} with a gain in {score}'
            + (f', {sure} of them by more than two standard errors over {seeds} seeds' if seeds > 1
               else '')
            + f'; {len(windows[0])} of {len(windows[1])} windows with one at some setting')


def main(argv=None):
    parser = make_parser(
        __doc__, 'limit', 'data', 'batches', 'n', 'show', 'device',
        windows=('all4', 'windows such as 3-5, mid4, all4 for every window of four layers, or all '
                 'for every window there is: also drawn as a map of first and last layer'),
        methods=('rk', f'of {", ".join(SOLVERS)}'),
        K=('2,3', 'steps'), beta=('', "the share of the plain output (default: the method's own)"),
        T=('1', 'the time at which the K steps end, such as 1,2'),
        mode=('block', 'block, layer'),
        cache=('first', 'matters where something is generated, or scored with a cache'),
        tasks=('', 'primitives with their depth (toy_assign/4); of a Hugging Face checkpoint: '
               'benchmarks of lm-eval'),
        judge_tasks=(str, 'benchmarks to judge by, instead of the documents that were not '
                     'screened'),
        by_token=(False, 'of ours: also the loss of text read token by token with the cache'),
        score=(str, 'what the best are chosen by (default: the mean share of right answers over '
               'the tasks; of our runs without --tasks the loss)'),
        best=(3, 'how many are judged'), batch_size=(8, 'texts read at once'),
        out=(picture, 'the picture; beside it .csv, and .jsonl with every finished cell'))
    parser.set_defaults(out=Path('out/sweep.png'))
    parser.add_argument('runs', nargs='+', help=RUNS)
    args = parser.parse_args(argv)
    with refusing(ValueError, OSError, ImportError, why=lambda error: explain(error, args.tasks)):
        study(args)
