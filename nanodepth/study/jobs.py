"""One seed of the study behind docs/RESULTS.md: its runs, its measurements, its rows.

The question: which way of adding depth suits which model? A trunk of each model (ordinary, MIDAS,
LIDAS, two loops) is trained up to the decay. There it branches into several cool-downs on the same
tokens: an ordinary one, a recurrent one, a looped one, and an ordinary one with the FLOPs of the
dearest. The model of the ordinary cool-down also gets more depth without training: a block that is
repeated, and the wrapper's window. Each is asked what it knows with three numbers of added layers.
One job has models of its own and is no part of a seed: `page` makes the README's. The jobs of other
tables have been answered: docs/RESULTS.md names for each table the commit that measured it.

A job is a folder of runs. `tables = ('depth', 'exits')` means that its methods depth() and exits()
yield the rows of depth.csv and exits.csv. A run is a command of this repo, so it can be made
again. `make seed-3` prepares the data and then runs seed 3.

Usage:
    nanodepth study 3                 # two jobs at a time; goes on where it stopped
    nanodepth study 3 --job=lidas     # one of them, in this process
    nanodepth study 3 --job=page      # its rows go to docs/results at once
"""
import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from nanodepth import ROOT
from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import replace
from nanodepth.common.options import read
from nanodepth.data.primitives import few_shot
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.data.tokens import Loader
from nanodepth.engine.checkpoint import exists, load, load_model
from nanodepth.engine.measure import Scorer
from nanodepth.loop import format_loop, parse_loop, running
from nanodepth.report.runs import read_log
from nanodepth.report.tables import as_csv, read_csv, where
from nanodepth.retrofit import Recurrent
from nanodepth.study.claims import one_more
from nanodepth.variants.exit import Exit
from nanodepth.wrapper import looped

DATA = 'data/chains'                    # depth 0 to 4
STEPS, DECAY = 520, 104                 # as config/chains_baseline.py has them
DEPTHS = (0, 1, 2, 3, 4, 5, 6)
QUESTIONS = 200
BATCHES = 24


def in_a_process(argv, output):
    "A command of this repo with a thread of its own; what it prints goes into the file `output`."
    with open(output, 'w') as file:
        child = subprocess.run([sys.executable, '-m', 'nanodepth', *argv], stdout=file,
                               stderr=file, env=os.environ | dict(OMP_NUM_THREADS='1'))
    if child.returncode:
        lines = output.read_text().strip().splitlines() or [f'it ended with {child.returncode}']
        raise Refused(f'{output}: {lines[-1]}')


def flops_of(run):
    "What a run cost."
    return read_log(run)[-1]['flops']


class Job:
    "Runs and rows of one seed, in a folder of their own."
    tables = ()         # each the name of a method that yields its rows
    train_options = ['--eval_every=200', '--save_every=100']

    def __init__(self, name, seed, root):
        self.name, self.seed = name, seed
        self.root = Path(root) / f'{seed}/{name}'

    def runs(self):
        "[(name of its folder, words for nanodepth)], in the order in which they are run."
        return []

    def file(self, table):
        "Where the rows of a table are kept."
        return self.root.with_suffix(f'.{table}.csv')

    def finished(self):
        return all(self.file(table).exists() for table in self.tables)

    def say(self, row):
        "The row, printed, with the seed and the run before its numbers."
        row = dict(seed=self.seed, run=self.name) | row
        print(', '.join(f'{key} {v:.3g}' if isinstance(v, float) else f'{key} {v}'
                        for key, v in row.items()), flush=True)
        return row

    # These only name a run, as runs() lists it.

    def trunk(self, config, steps, *more):
        return self.new('trunk', config, f'--steps={steps}', '--decay_steps=0', *more)

    def new(self, name, *words):
        "A training by a config or from a checkpoint."
        return name, ['train', *words, f'--seed={self.seed}', f'--out_dir={self.root / name}',
                      *self.train_options]

    def branch(self, name, *more, parent='trunk', steps=DECAY):
        "A cool-down: a new optimizer, the same tokens for all."
        return name, ['train', f'--data={DATA}', f'--out_dir={self.root / name}',
                      f'--init_from={self.root / parent}', f'--steps={steps}', '--warmup_steps=10',
                      f'--decay_steps={steps - 10}', f'--seed={1000 + self.seed}', *more,
                      *self.train_options]

    def cut(self, name, parent, *more, shape='3-4-3'):
        return name, ['cut', str(parent), shape, f'--out={self.root / name}',
                      f'--seed={self.seed}', *more]

    def train(self):
        for name, argv in self.runs():
            self.run(name, argv)

    def run(self, name, argv):
        folder = self.root / name
        if exists(folder) and self.ended(folder):
            return
        folder.mkdir(parents=True, exist_ok=True)
        in_a_process(argv, self.root / f'{name}.txt')

    def ended(self, folder):
        "A cut takes no steps: it has ended when it is there."
        state = load(folder)
        return state.get('step', 0) >= (state.get('config') or {}).get('steps', 0)


class Questions(Scorer):
    "What every model of the study is asked: validation data, and the same questions."

    def __init__(self, path, data, questions, batches=None):
        val = Loader(data, 32, 64, split='val', seed=0)
        super().__init__(get_tokenizer(path), questions, val, batches or BATCHES)

    def __call__(self, model):
        loss, kinds = self.on_data(model)
        return dict(loss=loss, text=kinds['text']['loss'],
                    copy=kinds['copy']['accuracy']) | self.depths(model)

    def depths(self, model):
        "The mean log-probability of the right answers, and the share answered right."
        row = {}
        for kind, answers in self.answers(model).items():               # 'depth 3'
            row[kind] = answers.log_likelihood
            row[f'{kind} right'] = answers.accuracy
        return row


def by_depth(task, depths, n):
    "{'depth 3': [Example]}: by their seed, the same questions for every model."
    return {f'depth {depth}': few_shot(task, n, shots=0, depth=depth, seed=7) for depth in depths}


def chains(path, depths=DEPTHS, n=None):
    "The questions of the study's toy: chains of some depths."
    return Questions(path, DATA, by_depth('toy_chains', depths, n or QUESTIONS))


# ------------------------------------------------------------------ models, and depth added to them

MIDDLE = dict(block='3-4x{}-3', window=(3, 6), added={4: 2, 8: 3, 16: 5})
# `added` says for each number of added layers how often the block runs; a loop repeats its own
# block, which runs `times` as trained
MODELS = dict(
    baseline=MIDDLE, midas=MIDDLE, lidas=MIDDLE,
    loop_5x2=dict(block='5x{}', window=(5, 9), added={5: 3, 10: 4, 15: 5}, times=2),
    loop_2_2x3_2=dict(block='2-2x{}-2', window=(6, 7), added={4: 5, 8: 7, 16: 11}, times=3))
PARTNERS = dict(    # ordinary models: (of so many layers, for so many steps)
    baseline_less=(10, 411),        # LIDAS's FLOPs
    half=(5, STEPS),                # as many layers as loop_5x2 has of its own
    half_longer=(5, 1029))          # ... with its FLOPs
EXIT_DEPTHS = (4, 5)
EXIT_QUESTIONS = 100
# These describe a row; the rest is measured.
SETTINGS = ('run', 'way', 'added', 'by', 'at', 'step')
MOST_R = 8
EXITS = {'latent': (0.02, 0.05, 0.1, 0.2, 0.4), 'sure': (0.003, 0.01, 0.03, 0.1, 0.3),
         'fixed r': (1, 2, 3, 4, 5, MOST_R)}


class Model(Job):
    "One of the five models: its trunk, its cool-downs, every way of adding depth, exits."
    tables = ('depth', 'exits')

    def __init__(self, name, seed, root):
        super().__init__(name, seed, root)
        self.settings = MODELS[name]
        self.is_loop = 'times' in self.settings

    def block(self, times):
        return self.settings['block'].format(times)

    def runs(self):
        "Without `more`, whose length depends on what the others cost."
        fewest = min(self.settings['added'].values())
        runs = [self.trunk(f'config/chains_{self.name}.py', STEPS - DECAY),
                self.branch('ordinary'),
                self.branch('looped', f'--cooldown_loop={self.block(fewest)}')]
        if self.is_loop:        # it has its own block: looped is its recurrence
            return runs
        return [*runs, self.cut('cut', self.root / 'trunk'),
                self.branch('recurrent', '--recurrence=2', '--curriculum=0.25', parent='cut')]

    def train(self):
        super().train()
        # the ordinary cool-down with the FLOPs of the recurrent one (a loop: of the looped one)
        dearer = flops_of(self.root / ('looped' if self.is_loop else 'recurrent'))
        ordinary = flops_of(self.root / 'ordinary')
        self.run(*self.branch('more', steps=round(DECAY * dearer / ordinary)))

    def depth(self):
        "The rows: every way of adding depth, at every number of layers added."
        ask = chains(self.root / 'ordinary')
        trunk = flops_of(self.root / 'trunk')

        def row(way, added, branch, model):
            flops = trunk + flops_of(self.root / branch)
            return dict(way=way, added=added, flops=flops) | ask(model)

        model = load_model(self.root / 'ordinary')
        yield row('ordinary', 0, 'ordinary', model)
        yield row('more FLOPs', 0, 'more', load_model(self.root / 'more'))
        a, b = self.settings['window']
        for added, times in self.settings['added'].items():
            with running(model, parse_loop(self.block(times))):
                yield row('repeated', added, 'ordinary', model)
            K = round(added / (b - a + 1)) + 1          # the passes after the first add the layers
            for T in (1, 2):
                with looped(model, (a, b), 'rk', K, T=T):
                    yield row(f'window, T = {T}', added, 'ordinary', model)
        deeper = load_model(self.root / 'looped')
        as_trained = {0: self.settings.get('times', 1)}
        for added, times in (as_trained | self.settings['added']).items():
            with running(deeper, parse_loop(self.block(times))):
                yield row('looped', added, 'looped', deeper)
        if not self.is_loop:
            recurrent = load_model(self.root / 'recurrent')
            for added, r in ({0: 1} | self.settings['added']).items():
                recurrent.mean = r
                yield row('recurrent', added, 'recurrent', recurrent)

    def exits(self):
        """When may a token of the recurrent or looped model stop? At fixed r, when its state moves
        little, or when the answer read off is sure. A row says how many layers ran for a token; the
        coda is counted as often as it was asked."""
        ask = chains(self.root / 'ordinary', EXIT_DEPTHS, EXIT_QUESTIONS)
        if self.is_loop:
            model = Loop(load_model(self.root / 'looped'))
        else:
            model = load_model(self.root / 'recurrent')
        prelude, core, coda = (len(part) for part in (model.prelude, model.core, model.coda))
        for by, places in EXITS.items():
            for at in places:
                if by == 'fixed r':
                    recurrences = at
                    right = ask.depths(partial(model, r=at))
                else:
                    stop = Exit(at, by)
                    right = ask.depths(partial(model, r=MOST_R, exit=stop))
                    recurrences = MOST_R * stop.used / stop.full
                codas = recurrences if by == 'sure' else 1      # an answer is read off after each
                layers = prelude + core * recurrences + coda * codas
                yield dict(by=by, at=at, recurrences=recurrences, layers=layers) | right


class Loop(Recurrent):
    "A looped model as prelude, core and coda, so that its tokens may stop: no adapter, no noise."

    def __init__(self, lm):
        core = [i for i in range(len(lm.layers)) if lm.order.count(i) > 1]
        prelude = [*range(core[0])]
        coda = [*range(core[-1] + 1, len(lm.layers))]
        super().__init__(dataclasses.replace(lm.config, order=None), prelude, core, coda,
                         inject='add', mean=lm.order.count(core[0]))
        self.load_state_dict(lm.state_dict())
        if self.order != lm.order:
            raise Refused(f'{format_loop(lm.order)} is not one block repeated, with layers around')

    def first_state(self, e, position, generator):
        return e

    def recur(self, s, e, i, cache, tap=None):         # without e: nothing was added in training
        return super().recur(s, torch.zeros_like(e), i, cache, tap)


class Partner(Job):
    "An ordinary model for comparison: fewer layers, or other FLOPs."
    tables = ('depth',)

    def runs(self):
        layers, steps = PARTNERS[self.name]
        return [self.trunk('config/chains_baseline.py', steps - DECAY, f'--n_layer={layers}'),
                self.branch('ordinary')]

    def depth(self):
        flops = flops_of(self.root / 'trunk') + flops_of(self.root / 'ordinary')
        ask = chains(self.root / 'ordinary')
        yield dict(way='ordinary', added=0, flops=flops) | ask(load_model(self.root / 'ordinary'))


# -------------------------------------------------------------------------- the README's own models

TOY = 'data/toy'                # the toy of `make`: depth 0 to 3
TOY_DEEP = 'data/toy_deep'      # depth 0 to 5
EVALUATED = 12                  # batches: the loss of a row is the last that train.py measured
PAGE = dict(        # what train.py is given for each model of the README
    baseline=['config/baseline.py'], baseline_isoflops=['config/baseline_isoflops.py'],
    midas=['config/midas.py'], lidas=['config/lidas.py'],
    loop_2x4=['config/loop_2x4.py'], standard_2=['config/baseline.py', '--n_layer=2'],
    loop_1_2x3_1=['config/loop_1_2x3_1.py'], standard_4=['config/baseline.py', '--n_layer=4'],
    retrofit=['config/retrofit.py', f'--data={TOY_DEEP}'],
    retrofit_dense=['config/retrofit_dense.py', f'--data={TOY_DEEP}'])
DEEPER_BY_TWO = dict(baseline='3-2x2-3', lidas='3-2x2-3', loop_1_2x3_1='1-2x4-1')


class Page(Job):
    "The models that the README shows, on the toy that `make` trains: what is asked of each."
    tables = ('page', 'curves')
    train_options = ['--save_every=100']     # evaluated often, for the curves of growing

    def runs(self):
        runs = []
        for name, words in PAGE.items():
            if name == 'retrofit':
                runs.append(self.cut('cut', self.root / 'baseline', shape='2-2-2'))
            parent = dict(retrofit='cut', retrofit_dense='baseline').get(name)
            start = [f'--init_from={self.root / parent}'] if parent else [f'--data={TOY}']
            runs.append(self.new(name, *words, *start))
        return runs

    def page(self):
        questions = by_depth('toy_assign', range(6), QUESTIONS)
        ask = Questions(self.root / 'baseline', TOY, questions, EVALUATED)
        deep = Questions(self.root / 'baseline', TOY_DEEP, questions, EVALUATED)

        def row(name, way, model, ask=ask):
            parameters = sum(p.numel() for p in model.layers.parameters())
            return dict(run=name, way=way, flops=flops_of(self.root / name),
                        layers=len(model.layers), parameters=parameters) | ask(model)

        for name in PAGE:
            model = load_model(self.root / name)
            if name == 'retrofit':
                for r in (1, 2, 3, 4, 8, 16):
                    model.mean = r
                    yield row(name, f'r = {r}', model, deep)
                continue
            yield row(name, 'as trained', model, deep if name == 'retrofit_dense' else ask)
            if name in DEEPER_BY_TWO:
                with running(model, parse_loop(DEEPER_BY_TWO[name])):
                    yield row(name, 'two layers again', model)
            if name in ('baseline', 'lidas'):
                for way, method, K in (('naive, K = 4', 'naive', 4), ('euler, K = 4', 'euler', 4),
                                       ('rk, K = 4', 'rk', 4), ('rk, K = 3', 'rk', 3)):
                    with looped(model, (2, 5), method, K):
                        yield row(name, way, model)

    def curves(self):
        "What was measured in training: the lines of the logs with a measurement or a growth."
        for name in ('baseline', 'lidas'):
            for line in read_log(self.root / name):
                row = {key: line[key] for key in ('step', 'flops', 'depth')}
                if 'val_loss' in line:
                    row |= dict(loss=line['val_loss']) | {
                        f'{kind} right': answers['accuracy']
                        for kind, answers in line['kinds'].items() if kind != 'text'}
                if 'val_loss' in line or 'grown' in line:
                    yield dict(run=name) | row


# --------------------------------------------------------------------------------------- the jobs

SEED = dict.fromkeys(MODELS, Model) | dict.fromkeys(PARTNERS, Partner)
OTHERS = dict(page=Page)         # only by --job=NAME
JOBS = SEED | OTHERS


def job(name, seed, root):
    check_choice('job', name, JOBS)
    return JOBS[name](name, seed, root)


# --------------------------------------------------------------------------------------------- rows

def write_rows(path, rows):
    "CSV. Six digits are what a table needs, and a seed that is repeated has the same ones."
    short = [{key: f'{v:.6g}' if isinstance(v, float) else v for key, v in row.items()}
             for row in rows]
    replace(path, as_csv(short, lineterminator='\n'))


def read_rows(path):
    return read_csv(path) if path.exists() else []


def expected(seed_rows, others):
    """(how many numbers of a seed lie where the other seeds expect 95% of those of one more, how
    many were held against them)"""
    inside = []
    for row in seed_rows:
        same = where(others, **{key: row.get(key) for key in SETTINGS})
        for key in row.keys() - {'seed', *SETTINGS}:
            values = [float(other[key]) for other in same if other.get(key)]
            if row[key] and len(set(values)) > 1:       # an empty cell, or a constant, says nothing
                middle, half = one_more(values)
                inside.append(abs(float(row[key]) - middle) <= half)
    return sum(inside), len(inside)


def collect(seed, root, results):
    """Write the rows of a seed's finished jobs into the tables, in place of those that they had
    there, and print how well they agree with them and with the other seeds."""
    tables = {}
    for name in JOBS:
        one = job(name, seed, root)
        for table in one.tables:
            tables.setdefault(table, []).extend(read_rows(one.file(table)))
    for table, seed_rows in tables.items():
        path = Path(results) / f'{table}.csv'
        fresh = {row['run'] for row in seed_rows}
        before = read_rows(path)
        others = [row for row in before if row['seed'] != str(seed)]
        kept = [row for row in where(before, seed=str(seed)) if row['run'] not in fresh]
        if seed_rows:
            write_rows(path, sorted(others + kept + seed_rows, key=lambda row: int(row['seed'])))
            inside, of = expected(seed_rows, others)
            as_before = sum(row in before for row in seed_rows)
            print(f'{path}: {len(seed_rows)} rows of seed {seed}, {as_before} as they stood; '
                  f'{inside} of {of} numbers where the other seeds expect 95%')


@dataclass
class Options:
    WORDS = ['seed']
    seed: int
    job: str | None = None          # one of them, in this process
    jobs: int = 2                   # how many at a time, a thread each
    root: Path = Path('out/study')  # where the runs go


def finish(job):
    "Train what is not trained, measure what is not measured."
    job.train()
    for table in job.tables:
        if not job.file(table).exists():
            write_rows(job.file(table), [job.say(row) for row in getattr(job, table)()])


def main(argv=None):
    args = read(Options, argv, __doc__)
    names = [args.job] if args.job else list(SEED)
    todo = [job(name, args.seed, args.root) for name in names]
    if args.job:
        finish(todo[0])
        if args.job in OTHERS:
            collect(args.seed, args.root, ROOT / 'docs/results')
        return

    def start(one):
        "Has it ended well?"
        one.root.mkdir(parents=True, exist_ok=True)
        try:
            in_a_process(['study', str(args.seed), f'--job={one.name}', f'--root={args.root}'],
                         one.root.with_suffix('.txt'))
        except Refused:
            return False
        return True
    unfinished = [one for one in todo if not one.finished()]
    with ThreadPoolExecutor(args.jobs) as pool:
        failed = [one for one, well in zip(unfinished, pool.map(start, unfinished)) if not well]
    collect(args.seed, args.root, ROOT / 'docs/results')
    if failed:
        raise Refused(f'{", ".join(one.name for one in failed)} ended with an error: see '
                      f'{failed[0].root.with_suffix(".txt")}')
