"""One seed of the study behind docs/RESULTS.md: its runs, its measurements, its rows.

The question: which way of adding depth suits which model? A trunk of each model (ordinary, MIDAS,
LIDAS, two loops) is trained up to the decay, and branches there, on the same tokens: an ordinary
cool-down, a recurrent one (no layer dropped, r = 1 begins as the trunk), a looped one, and an
ordinary one with the recurrent one's FLOPs. The model of the ordinary cool-down then gets more
depth without training too: a block repeated, and the wrapper's window. What each knows is asked at
4, 8 and 16 more layers a token.

Usage:
    python nanodepth.py study 3 --dry_run       # what seed 3 would run, and what it costs
    python nanodepth.py study 3                 # two models at a time; goes on where it stopped
    python nanodepth.py study 3 --model=lidas   # one model of it, in this process
"""
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from common.errors import Refused, check_choice
from common.files import ROOT, replace
from data.primitives import few_shot
from data.tokenizer import get_tokenizer
from data.tokens import Loader, measure
from engine.checkpoint import exists, load, load_model
from engine.measure import log_likelihoods
from loop import parse_loop, running
from report.logs import read_log
from report.tables import as_csv, read_csv
from tools.options import make_parser
from variants.exit import Exit
from wrapper import looped

MIDDLE = dict(block='3-4x{}-3', window=(3, 6), added={4: 2, 8: 3, 16: 5})
MODELS = dict(      # a loop repeats its own block; added: layers -> how often the block runs then
    baseline=MIDDLE, midas=MIDDLE, lidas=MIDDLE,
    loop_5x2=dict(block='5x{}', window=(5, 9), added={5: 3, 10: 4, 15: 5}, runs=2),
    loop_2_2x3_2=dict(block='2-2x{}-2', window=(6, 7), added={4: 5, 8: 7, 16: 11}, runs=3))
DATA, STEPS, DECAY = 'data/chains', 520, 104        # as config/chains_baseline.py has them
DEPTHS, DEEPEST, QUESTIONS, BATCHES = (0, 1, 2, 3, 4, 5, 6), (4, 5), 200, 24
EXITS = [*(('latent', at) for at in (0.02, 0.05, 0.1, 0.2, 0.4)),       # the last r is their most
         *(('sure', at) for at in (0.003, 0.01, 0.03, 0.1, 0.3)),
         *(('fixed r', r) for r in (1, 2, 3, 5, 8))]


class Seed:
    "The runs of one model and one seed, in a folder of their own."

    def __init__(self, model, seed, root):
        check_choice('model', model, tuple(MODELS))
        self.model, self.seed, self.about = model, seed, MODELS[model]
        self.root = Path(root) / f'{seed}/{model}'

    def runs(self):
        "[(name, the command's words)]; `more`, which needs the cost of the others, comes last."
        first = next(iter(self.about['added'].values()))
        found = [('trunk', ['train', f'config/chains_{self.model}.py',
                            f'--out_dir={self.root / "trunk"}', f'--steps={STEPS - DECAY}',
                            '--decay_steps=0', f'--seed={self.seed}']),
                 self.branch('ordinary'),
                 self.branch('looped', f'--cooldown_loop={self.about["block"].format(first)}')]
        if 'runs' in self.about:        # a loop has its own block: looped is its recurrence
            return found
        cut = self.root / 'cut'
        return [*found, ('cut', ['retrofit', str(self.root / 'trunk'), '3-4-3', f'--out={cut}',
                                 f'--seed={self.seed}']),
                self.branch('recurrent', '--recurrence=2', '--curriculum=0.25', parent='cut')]

    def branch(self, name, *more, parent='trunk', steps=DECAY):
        "A cool-down of the trunk: a new optimizer, the same tokens for all."
        return name, ['train', 'config/chains_baseline.py', f'--out_dir={self.root / name}',
                      f'--init_from={self.root / parent}', f'--steps={steps}',
                      '--warmup_steps=10', f'--decay_steps={steps - 10}',
                      f'--seed={1000 + self.seed}', *more]

    def dearest(self):
        "The ordinary cool-down with the FLOPs of the recurrent one (a loop: of the looped one)."
        flops = lambda name: read_log(self.root / name)[-1]['flops']
        other = 'looped' if 'runs' in self.about else 'recurrent'
        return self.branch('more', steps=round(DECAY * flops(other) / flops('ordinary')))

    def train(self):
        for name, argv in self.runs():
            self.run(name, argv)
        self.run(*self.dearest())

    def run(self, name, argv):
        folder = self.root / name
        if exists(folder) and self.ended(folder):
            return
        folder.mkdir(parents=True, exist_ok=True)
        more = ['--eval_every=50', '--save_every=100'] * (argv[0] == 'train')
        with open(self.root / f'{name}.txt', 'w') as said:
            child = subprocess.run([sys.executable, str(ROOT / 'nanodepth.py'), *argv, *more],
                                   stdout=said, stderr=said)
        if child.returncode:
            last = (self.root / f'{name}.txt').read_text().strip().splitlines()[-1]
            raise Refused(f'{self.root / name}: {last}')

    def ended(self, folder):
        state = load(folder)
        return state.get('step', 0) >= (state.get('config') or {}).get('steps', 0)

    def measured(self):
        "The rows: every way of adding depth, at every number of layers added."
        ask, about = Questions(self.root / 'ordinary'), self.about
        flops = {name: read_log(self.root / name)[-1]['flops']
                 for name in ('trunk', 'ordinary', 'looped', 'recurrent', 'more')
                 if (self.root / name / 'log.jsonl').exists()}

        def row(way, added, branch, model):
            found = dict(seed=self.seed, run=self.model, way=way, added=added,
                         flops=flops['trunk'] + flops[branch]) | ask(model)
            print(', '.join(f'{key} {v:.3g}' if isinstance(v, float) else f'{key} {v}'
                            for key, v in found.items()), flush=True)
            return found

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
        """When may a token of the recurrent model stop? At fixed r, when its state moves little, or
        when the answer read off is sure: rows with the layer evaluations a token that each took,
        coda and head counted as often as they were asked."""
        if not (self.root / 'recurrent').exists():
            return []
        ask, rows = Questions(self.root / 'ordinary', DEEPEST, QUESTIONS // 2), []
        model = load_model(self.root / 'recurrent')
        ends, core = len(model.prelude), len(model.core)
        coda = len(model.coda)
        for by, at in EXITS:
            fixed = by == 'fixed r'
            r, stop = (at, None) if fixed else (EXITS[-1][1], Exit(at, by))
            found = ask.answers(lambda tokens: model(tokens, r=r, exit=stop))
            mean = r if fixed else r * stop.used / stop.full
            layers = ends + core * mean + coda * (mean if by == 'sure' else 1)
            rows.append(dict(seed=self.seed, run=self.model, by=by, at=at, recurrences=mean,
                             layers=layers) | found)
        return rows


class Questions:
    "What every model of the study is asked: validation data, and the same questions."

    def __init__(self, path, depths=None, n=None):
        self.val = Loader(DATA, 32, 64, split='val', seed=0)
        self.tokenizer = get_tokenizer(path)
        self.examples = {depth: few_shot('toy_chains', n or QUESTIONS, shots=0, depth=depth, seed=7)
                         for depth in depths or DEPTHS}

    @torch.no_grad()
    def __call__(self, model):
        loss, kinds = measure(model, self.val, BATCHES)
        return dict(loss=loss, text=kinds['text']['loss'],
                    copy=kinds['copy']['accuracy']) | self.answers(model)

    @torch.no_grad()
    def answers(self, model):
        "The mean log-probability of the right answers, and the share of them that was chosen."
        found = {}
        for depth, examples in self.examples.items():
            values = log_likelihoods(model, self.tokenizer, examples)
            found[f'depth {depth}'] = sum(v[e.answer].item() for v, e in zip(values, examples)
                                          ) / len(examples)
            right = sum(v.argmax().item() == e.answer for v, e in zip(values, examples))
            found[f'depth {depth} right'] = right / len(examples)
        return found


def write_rows(path, rows):
    "CSV, of six digits: what a table needs, and the same on every run of one machine."
    short = [{key: f'{v:.6g}' if isinstance(v, float) else v for key, v in row.items()}
             for row in rows]
    replace(path, as_csv(short, lineterminator='\n'))


def read_rows(path):
    return read_csv(path) if path.exists() else []


def collect(seed, root, results):
    "The rows of a finished seed, in place of those that it had."
    for name, ending in (('depth', '.csv'), ('exits', '.exits.csv')):
        path = Path(results) / f'{name}.csv'
        mine = [row for model in MODELS
                for row in read_rows(Path(root) / f'{seed}/{model}{ending}')]
        rows = [row for row in read_rows(path) if row['seed'] != str(seed)] + mine
        write_rows(path, sorted(rows, key=lambda row: int(row['seed'])))
        print(f'{len(mine)} rows of seed {seed}: {path}')


def main(argv=None):
    parser = make_parser(__doc__, model=(str, 'one of them, in this process'),
                         jobs=(2, 'models at a time, a thread each'),
                         root=('out/study', 'where the runs go'),
                         results=(ROOT / 'docs/results', 'where the rows go'))
    parser.add_argument('seed', type=int)
    parser.add_argument('--dry_run', action='store_true', help='say what would be run')
    args = parser.parse_args(argv)
    names = [args.model] if args.model else list(MODELS)
    if args.dry_run:
        for name in names:
            print(name, *(' '.join(words) for _, words in Seed(name, args.seed, args.root).runs()),
                  '... and the ordinary cool-down with as many FLOPs', sep='\n    ')
        return print('as much as nine runs of 520 steps in all: seed 0 took 85 minutes on two '
                     'cores, with other work beside it')
    if args.model:
        one = Seed(args.model, args.seed, args.root)
        one.train()
        if not one.root.with_suffix('.csv').exists():
            write_rows(one.root.with_suffix('.csv'), one.measured())
        return write_rows(one.root.with_suffix('.exits.csv'), one.exits())
    todo = [name for name in names
            if not (Path(args.root) / f'{args.seed}/{name}.exits.csv').exists()]

    def start(name):
        (Path(args.root) / str(args.seed)).mkdir(parents=True, exist_ok=True)
        with open(Path(args.root) / f'{args.seed}/{name}.txt', 'w') as said:
            return subprocess.run([sys.executable, str(ROOT / 'nanodepth.py'), 'study',
                                   str(args.seed), f'--model={name}', f'--root={args.root}'],
                                  stdout=said, stderr=said,
                                  env=os.environ | dict(OMP_NUM_THREADS='1')).returncode
    with ThreadPoolExecutor(args.jobs) as pool:
        failed = [name for name, code in zip(todo, pool.map(start, todo)) if code]
    if failed:
        raise Refused(f'{", ".join(failed)} ended with an error: see {args.root}/{args.seed}/'
                      f'{failed[0]}.txt')
    collect(args.seed, args.root, args.results)
