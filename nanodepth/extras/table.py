"""README's toy table, made anew: its ten models, what each is asked, and the picture of growing.

The idea: a seed is ten trainings and some minutes of questions, and its rows are written as soon as
it is done. While there are fewer than eight seeds the rows stand in docs/results/table, beside the
published ones. With the eighth they take their place, and the picture is drawn. While the weights
are there, the probes of the growing paper's sections 4.3 and 4.4 look at four of the models, too.

Usage:
    make table                      # the next seed that has no row: 70 minutes, one thread
    make table SEED=3               # this one, so that two may go side by side
"""
import functools
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from nanodepth import ROOT, probe
from nanodepth.commands.probe import examples
from nanodepth.common.errors import Refused
from nanodepth.common.files import replace
from nanodepth.common.options import read
from nanodepth.loop import parse_loop, running
from nanodepth.models.checkpoint import exists, load, open_any
from nanodepth.report.logs import read_log
from nanodepth.report.plot import draw_runs, show
from nanodepth.report.tables import as_csv, mean, read_rows, where
from nanodepth.retrofit import core_of
from nanodepth.scoring.likelihoods import log_likelihoods
from nanodepth.text.loader import Loader
from nanodepth.text.primitives import few_shot
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.training.measure import measure
from nanodepth.wrapper import looped

SEEDS = range(8)
DEEP = '--data=data/toy_deep'
MODELS = dict(          # what train.py is given
    baseline=['config/baseline.py'],
    baseline_isoflops=['config/baseline.py', '--steps=482'],    # as many FLOPs as LIDAS
    midas=['config/lidas.py', '--grow=midas'], lidas=['config/lidas.py'],
    loop_2x4=['config/loop_2x4.py'], standard_2=['config/baseline.py', '--n_layer=2'],
    loop_1_2x3_1=['config/loop_1_2x3_1.py'], standard_4=['config/baseline.py', '--n_layer=4'],
    retrofit=['config/retrofit.py', DEEP], retrofit_dense=['config/retrofit_dense.py', DEEP])
PARENTS = dict(retrofit='cut', retrofit_dense='baseline')
DEEPER_BY_TWO = dict(baseline='3-2x2-3', lidas='3-2x2-3', loop_1_2x3_1='1-2x4-1')
WRAPPED = ('naive', 4), ('euler', 4), ('rk', 4), ('rk', 3)
PROBED = 'baseline', 'midas', 'lidas', 'loop_2x4'
TABLES = 'page', 'curves', 'probes'


@dataclass
class Options:
    seed: int | None = None             # None: the next one that has no row
    rows: Path = ROOT / 'docs/results'
    out: Path = ROOT / 'out/table'      # where the runs are
    more: str = ''                      # settings of every run, to try it small
    questions: int = 200


def python(*words, **environment):
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT,
                          env=os.environ | environment)
    if done.returncode:
        raise Refused(f'{" ".join(map(str, words))} ended with status {done.returncode}')


def commit():
    "What git says of this code; '' where there is no git."
    if not shutil.which('git'):
        return ''
    return subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=ROOT,
                          capture_output=True, text=True).stdout.strip()


def train(folder, seed, more):
    "The ten models of a seed; what is there already is not made again."
    start = functools.partial(python, OMP_NUM_THREADS='1')
    if not (ROOT / 'data/toy_deep/train.json').exists():
        start('data/toy/prepare.py', '--depths=6', '--out=data/toy_deep')
    for name, words in MODELS.items():
        if name == 'retrofit' and not exists(folder / 'cut'):
            start('-m', 'nanodepth', 'cut', folder / 'baseline', '2-2-2', f'--seed={seed}',
                  f'--out={folder / "cut"}')
        parent = [f'--init_from={folder / PARENTS[name]}'] if name in PARENTS else []
        run = folder / name
        saved = load(run) if exists(run) else None
        if saved is None or saved['step'] < saved['config']['steps']:
            start('train.py', *words, *parent, *more, f'--seed={seed}', f'--out_dir={run}')


# ------------------------------------------------------------------------------------ what is asked

def asked(model, folder, name, questions):
    "Losses on validation data; of questions of each depth the log-likelihood, and what is right."
    data = 'data/toy_deep' if name in PARENTS else 'data/toy'
    loss, kinds = measure(model, Loader(data, 32, 64, split='val', seed=0), 12)
    row = dict(loss=loss, text=kinds['text']['loss'], copy=kinds['copy']['accuracy'])
    for depth in range(6):
        chains = few_shot('toy_assign', questions, shots=0, depth=depth, seed=7)
        values = log_likelihoods(model, get_tokenizer(folder / 'baseline'), chains)
        row[f'depth {depth}'] = mean([v[e.answer].item() for v, e in zip(values, chains)])
        row[f'depth {depth} right'] = mean([float(v.argmax() == e.answer)
                                            for v, e in zip(values, chains)])
    return row


def page(folder, questions):
    "The rows of a seed: each model in each way."
    for name in MODELS:
        _, model = open_any(folder / name, 'cpu')
        ask = functools.partial(asked, model, folder, name, questions)
        same = dict(run=name, flops=read_log(folder / name)[-1]['flops'],
                    layers=len(model.layers),
                    parameters=sum(p.numel() for p in model.layers.parameters()))
        if name == 'retrofit':
            core = core_of(model)
            for core.recurrence in (1, 2, 3, 4, 8, 16):
                yield same | dict(way=f'r = {core.recurrence}') | ask()
            continue
        yield same | dict(way='as trained') | ask()
        if name in DEEPER_BY_TWO:
            with running(model, parse_loop(DEEPER_BY_TWO[name])):
                yield same | dict(way='two layers again') | ask()
        for method, K in WRAPPED if name in ('baseline', 'lidas') else ():
            with looped(model, (2, 5), method, K):
                yield same | dict(way=f'{method}, K = {K}') | ask()


def curves(folder):
    "What was measured in training: the lines of the logs with a measurement or a growth."
    for name in ('baseline', 'lidas', 'baseline_isoflops'):
        for line in read_log(folder / name):
            row = dict(run=name) | {key: line[key] for key in ('step', 'flops', 'depth')}
            if 'val_loss' in line:
                row |= dict(loss=line['val_loss']) | {
                    f'{kind} right': answers['accuracy']
                    for kind, answers in line['kinds'].items() if kind != 'text'}
            if 'val_loss' in line or 'grown' in line:
                yield row


def probes(folder):
    """Does a model repeat something with every block of two layers? Of the middle blocks, 2-3 and
    4-5: how much more of the stream the attention of a block's second layer adds than that of its
    first; what the loss gains when two layers change places, inside a block or across a border; and
    how much more directly a block's second layer depends on each earlier layer."""
    val = Loader('data/toy', 32, 64, split='val', seed=1)
    tokens = examples(val, 20, None)
    for name in PROBED:
        _, model = open_any(folder / name, 'cpu')
        norms = probe.residual_norms(model, tokens)
        share = norms['attn share'].tolist()
        effects = probe.future_effects(model, tokens, propagate=False).tolist()
        on = [mean([row[d] for row in effects[:d]]) for d in range(len(effects))]
        rows = probe.order_sweep(model, lambda m: dict(loss=measure(m, val, 2)[0]),
                                 probe.reverse_block, [2])
        rise = {row['start']: row['loss'] - rows[0]['loss'] for row in rows[1:]}
        yield dict(run=name, **{
            'depth score': probe.depth_score(model, tokens)[0],
            'stream growth': (norms['stream'][-1] / norms['stream'][0]).item(),
            'attention cycle': mean([share[3], share[5]]) - mean([share[2], share[4]]),
            'reversed inside': mean([rise[2], rise[4]]),
            'reversed across': mean([rise[1], rise[3], rise[5]]),
            'local effects': mean([on[3], on[5]]) - mean([on[2], on[4]])})


# ---------------------------------------------------------------------------------------- the rows

def logs_of(rows):
    "{run: [a log for each seed]}, as draw_runs takes them, from the rows of curves.csv."
    logs = {}
    for row in rows:
        line = {key: row[key] for key in ('step', 'flops', 'depth')}
        if row['loss'] != '':           # empty where a model grows between two measurements
            line |= dict(val_loss=row['loss'], kinds={
                kind.removesuffix(' right'): dict(accuracy=share)
                for kind, share in row.items() if kind.endswith(' right')})
        logs.setdefault(row['run'], {}).setdefault(row['seed'], []).append(line)
    return {run: list(seeds.values()) for run, seeds in logs.items()}


def write(path, rows):
    "Six digits are what a table needs, and a seed that is repeated has the same ones."
    replace(path, as_csv([{key: f'{v:.6g}' if isinstance(v, float) else v
                           for key, v in row.items()} for row in rows]))


def main(argv=None):
    options = read(Options, argv, __doc__)
    new = options.rows / 'table'
    new.mkdir(parents=True, exist_ok=True)
    done = {row['seed'] for row in read_rows(new / 'page.csv')}
    seed = options.seed
    if seed is None:
        seed = next((each for each in SEEDS if each not in done), None)
    if seed is None or seed in done:
        raise Refused(f'the seeds {sorted(map(int, done))} have rows in {new}')
    folder = options.out / str(seed)
    train(folder, seed, options.more.split())
    where_made = dict(commit=commit(), torch=torch.__version__,
                      machine=f'{platform.machine()} {torch.backends.cpu.get_cpu_capability()}')
    found = dict(page=[row | where_made for row in page(folder, options.questions)],
                 curves=[*curves(folder)], probes=[*probes(folder)])
    for name in TABLES:         # read now: another seed may have ended meanwhile
        rows = [row for row in read_rows(new / f'{name}.csv') if row['seed'] != seed]
        rows += [dict(seed=seed) | row for row in found[name]]
        write(new / f'{name}.csv', sorted(rows, key=lambda row: row['seed']))
    pages = read_rows(new / 'page.csv')
    done = {row['seed'] for row in pages}
    print(f'{len(where(pages, seed=float(seed)))} rows of seed {seed}; seeds so far: '
          f'{sorted(map(int, done))}')
    if done >= set(SEEDS):
        for name in TABLES:
            shutil.copy(new / f'{name}.csv', options.rows / f'{name}.csv')
        show(options.rows.parent / 'assets/growing.png', draw_runs,
             logs_of(read_rows(options.rows / 'curves.csv')), ['loss', 'depth 3'])
