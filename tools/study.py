"""One seed of the study behind docs/RESULTS.md: its runs, its measurements, its rows.

The question: which way of adding depth suits which model? A trunk of each model (ordinary, MIDAS,
LIDAS, two loops) is trained up to the decay, and branches there, on the same tokens: an ordinary
cool-down, a recurrent one (no layer dropped, r = 1 begins as the trunk), a looped one, and an
ordinary one with the recurrent one's FLOPs. The model of the ordinary cool-down then gets more
depth without training too: a block repeated, and the wrapper's window. What each knows is asked at
4, 8 and 16 more layers a token. Jobs that stand on these models follow (tools/studied.py).

Usage:
    python nanodepth.py study 3 --dry_run       # what seed 3 would run
    python nanodepth.py study 3                 # two jobs at a time; goes on where it stopped
    python nanodepth.py study 3 --job=lidas     # one of them, in this process
"""
import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import Refused, check_choice
from common.files import ROOT, replace
from common.options import read, word
from engine.checkpoint import load_model
from loop import format_loop, parse_loop, running
from report.claims import one_more
from report.runs import read_log
from report.tables import as_csv, read_csv, where
from retrofit import Recurrent
from tools.studied import DECAY, STEPS, Frozen, Job, Layers, Questions, Retrofits, Taught
from variants.exit import Exit
from wrapper import looped

MIDDLE = dict(block='3-4x{}-3', window=(3, 6), added={4: 2, 8: 3, 16: 5})
MODELS = dict(      # a loop repeats its own block; added: layers -> how often the block runs then
    baseline=MIDDLE, midas=MIDDLE, lidas=MIDDLE,
    loop_5x2=dict(block='5x{}', window=(5, 9), added={5: 3, 10: 4, 15: 5}, runs=2),
    loop_2_2x3_2=dict(block='2-2x{}-2', window=(6, 7), added={4: 5, 8: 7, 16: 11}, runs=3))
PARTNERS = dict(    # ordinary models: (of so many layers, for so many steps)
    baseline_less=(10, 411),        # LIDAS's FLOPs
    half=(5, STEPS),                # the loops' shallow partner: as many layers of its own
    half_longer=(5, 1029))          # ... with the loops' FLOPs
DEEPEST, EXAMPLES = (4, 5), 100
# what a row is told by; its other columns are measured
SETTINGS = 'run', 'way', 'added', 'by', 'at', 'factor', 'value', 'examples', 'r', 'layer'
EXITS = [*(('latent', at) for at in (0.02, 0.05, 0.1, 0.2, 0.4)),       # the last r is their most
         *(('sure', at) for at in (0.003, 0.01, 0.03, 0.1, 0.3)),
         *(('fixed r', r) for r in (1, 2, 3, 4, 5, 8))]


class Model(Job):
    "One of the five models: its trunk, its cool-downs, every way of adding depth, exits."
    tables = ('depth', 'exits')
    about = property(lambda self: MODELS[self.name])

    def runs(self):
        "`more`, which needs the cost of the others, is not among them."
        first = next(iter(self.about['added'].values()))
        found = [self.trunk(f'config/chains_{self.name}.py', STEPS - DECAY),
                 self.branch('ordinary'),
                 self.branch('looped', f'--cooldown_loop={self.about["block"].format(first)}')]
        if 'runs' in self.about:        # a loop has its own block: looped is its recurrence
            return found
        return [*found, self.cut('cut', self.root / 'trunk'),
                self.branch('recurrent', '--recurrence=2', '--curriculum=0.25', parent='cut')]

    def train(self):
        super().train()
        # the ordinary cool-down with the FLOPs of the recurrent one (a loop: of the looped one)
        flops = lambda name: read_log(self.root / name)[-1]['flops']
        other = 'looped' if 'runs' in self.about else 'recurrent'
        self.run(*self.branch('more', steps=round(DECAY * flops(other) / flops('ordinary'))))

    def depth(self):
        "The rows: every way of adding depth, at every number of layers added."
        ask, about = Questions(self.root / 'ordinary'), self.about
        flops = {name: read_log(self.root / name)[-1]['flops']
                 for name in ('trunk', 'ordinary', 'looped', 'recurrent', 'more')
                 if (self.root / name / 'log.jsonl').exists()}

        def row(way, added, branch, model):
            return self.say(dict(way=way, added=added, flops=flops['trunk'] + flops[branch])
                            | ask(model))

        model = load_model(self.root / 'ordinary')
        rows = [row('ordinary', 0, 'ordinary', model),
                row('more FLOPs', 0, 'more', load_model(self.root / 'more'))]
        a, b = about['window']
        for added, times in about['added'].items():
            with running(model, parse_loop(about['block'].format(times))):
                rows.append(row('repeated', added, 'ordinary', model))
            K = round(added / (b - a + 1)) + 1
            for T in (1, 2):
                with looped(model, (a, b), 'rk', K, T=T):
                    rows.append(row(f'window, T = {T}', added, 'ordinary', model))
        deeper = load_model(self.root / 'looped')
        for added, times in ({0: about.get('runs', 1)} | about['added']).items():
            with running(deeper, parse_loop(about['block'].format(times))):
                rows.append(row('looped', added, 'looped', deeper))
        if 'recurrent' in flops:
            recurrent = load_model(self.root / 'recurrent')
            for added, r in ({0: 1} | about['added']).items():
                recurrent.mean = r
                rows.append(row('recurrent', added, 'recurrent', recurrent))
        return rows

    def exits(self):
        """When may a token of the recurrent or looped model stop? At fixed r, when its state moves
        little, or when the answer read off is sure: rows with the layer evaluations a token that
        each took, coda and head counted as often as they were asked."""
        ask, rows = Questions(self.root / 'ordinary', DEEPEST, EXAMPLES), []
        model = (Loop(load_model(self.root / 'looped')) if 'runs' in self.about
                 else load_model(self.root / 'recurrent'))
        ends, core = len(model.prelude), len(model.core)
        coda = len(model.coda)
        for by, at in EXITS:
            fixed = by == 'fixed r'
            r, stop = (at, None) if fixed else (EXITS[-1][1], Exit(at, by))
            found = ask.answers(lambda tokens: model(tokens, r=r, exit=stop))
            mean = r if fixed else r * stop.used / stop.full
            layers = ends + core * mean + coda * (mean if by == 'sure' else 1)
            rows.append(self.say(dict(by=by, at=at, recurrences=mean, layers=layers) | found))
        return rows


class Loop(Recurrent):
    "A looped model as prelude, core and coda, so that its tokens may stop: no adapter, no noise."

    def __init__(self, lm):
        core = [i for i in range(len(lm.layers)) if lm.order.count(i) > 1]
        ends = [*range(core[0])], [*range(core[-1] + 1, len(lm.layers))]
        super().__init__(dataclasses.replace(lm.config, order=None), ends[0], core, ends[1],
                         inject='add', mean=lm.order.count(core[0]))
        self.load_state_dict(lm.state_dict())
        if self.order != lm.order:
            raise Refused(f'{format_loop(lm.order)} is not one block repeated, with layers around')

    def first_state(self, e, position, generator):
        return e

    def recur(self, s, e, i, cache, tap=None):
        return super().recur(s, torch.zeros_like(e), i, cache, tap)


class Partner(Job):
    "An ordinary model for comparison: fewer layers, or other FLOPs."
    tables = ('depth',)

    def runs(self):
        layers, steps = PARTNERS[self.name]
        return [self.trunk('config/chains_baseline.py', steps - DECAY, f'--n_layer={layers}'),
                self.branch('ordinary')]

    def depth(self):
        flops = sum(read_log(self.root / name)[-1]['flops'] for name in ('trunk', 'ordinary'))
        ask = Questions(self.root / 'ordinary')
        return [self.say(dict(way='ordinary', added=0, flops=flops)
                         | ask(load_model(self.root / 'ordinary')))]


# a wave's jobs run side by side; those of the second stand on the models of the first
FIRST = dict.fromkeys(MODELS, Model) | dict.fromkeys(PARTNERS, Partner)
SECOND = dict(taught=Taught, frozen=Frozen, layers=Layers, retrofits=Retrofits)


def job(name, seed, root):
    check_choice('job', name, (*FIRST, *SECOND))
    return (FIRST | SECOND)[name](name, seed, root)


# --------------------------------------------------------------------------------------------- rows

def write_rows(path, rows):
    "CSV, of six digits: what a table needs, and the same on every run of one machine."
    short = [{key: f'{v:.6g}' if isinstance(v, float) else v for key, v in row.items()}
             for row in rows]
    replace(path, as_csv(short, lineterminator='\n'))


def read_rows(path):
    return read_csv(path) if path.exists() else []


def expected(mine, others):
    "(of a seed's numbers, how many lie where the other seeds expect 95% of one more; of how many)"
    inside = []
    for row in mine:
        same = where(others, **{key: row.get(key) for key in SETTINGS})
        for key in row.keys() - {'seed', *SETTINGS}:
            values = [float(other[key]) for other in same if other.get(key)]
            if row[key] and len(set(values)) > 1:       # else it is no measurement, or the only one
                middle, half = one_more(values)
                inside.append(abs(float(row[key]) - middle) <= half)
    return sum(inside), len(inside)


def collect(seed, root, results):
    "The rows of a seed's finished jobs, in place of those that they had; and do they repeat?"
    jobs = [job(name, seed, root) for name in (*FIRST, *SECOND)]
    for table in dict.fromkeys(table for one in jobs for table in one.tables):
        path = Path(results) / f'{table}.csv'
        mine = [row for one in jobs for row in read_rows(one.file(table))]
        fresh = {row['run'] for row in mine}
        before = read_rows(path)
        others = [row for row in before if row['seed'] != str(seed)]
        kept = [row for row in where(before, seed=str(seed)) if row['run'] not in fresh]
        if mine:
            write_rows(path, sorted(others + kept + mine, key=lambda row: int(row['seed'])))
            inside, of = expected(mine, others)
            print(f'{path}: {len(mine)} rows of seed {seed}, {sum(row in before for row in mine)} '
                  f'as they stood; {inside} of {of} numbers where the other seeds expect 95%')


@dataclass
class Options:
    seed: int = word()
    job: str | None = None          # one of them, in this process
    jobs: int = 2                   # how many at a time, a thread each
    root: Path = Path('out/study')  # where the runs go
    dry_run: bool = False           # say what would be run


def finish(job):
    "Train what is not trained, measure what is not measured."
    job.train()
    for table in job.tables:
        if not job.file(table).exists():
            write_rows(job.file(table), getattr(job, table)())


def main(argv=None):
    args = read(Options, argv, __doc__)
    names = [args.job] if args.job else [*FIRST, *SECOND]
    todo = [job(name, args.seed, args.root) for name in names]
    if args.dry_run:
        for one in todo:
            print(one.name, *(' '.join(words) for _, words in one.runs()), sep='\n    ')
        return print('and an ordinary cool-down of each model with as many FLOPs as its recurrent '
                     'one. The jobs of a seed add up to 80 minutes on two cores')
    if args.job:
        return finish(todo[0])

    def start(one):
        one.root.mkdir(parents=True, exist_ok=True)
        with open(one.root.with_suffix('.txt'), 'w') as said:
            return subprocess.run([sys.executable, str(ROOT / 'nanodepth.py'), 'study',
                                   str(args.seed), f'--job={one.name}', f'--root={args.root}'],
                                  stdout=said, stderr=said,
                                  env=os.environ | dict(OMP_NUM_THREADS='1')).returncode
    for wave in (FIRST, SECOND):
        mine = [one for one in todo if one.name in wave and not one.finished()]
        with ThreadPoolExecutor(args.jobs) as pool:
            failed = [one for one, code in zip(mine, pool.map(start, mine)) if code]
        collect(args.seed, args.root, ROOT / 'docs/results')
        if failed:
            raise Refused(f'{", ".join(one.name for one in failed)} ended with an error: see '
                          f'{failed[0].root.with_suffix(".txt")}')
