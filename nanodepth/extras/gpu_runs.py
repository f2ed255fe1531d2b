"""Growing at 102 million weights: the runs that docs/RESULTS.md judges, as many as fit into some
minutes.

The idea: a run takes two or three minutes on one GPU, and one may have a GPU for ten. So the study
is a list of runs in the order of what each one adds. Every call takes the next runs that have no
row yet, and leaves a row of gpu.csv and a log of each. Three runs are tuned: seed 0 tries rates
until the best one has a worse one on each side. All others take the best rate of theirs. The column
`best` marks the rows at best rates, and claims.toml reads no others.

Usage:
    make gpu_runs MINUTES=9         # any Python with torch; data/gpu as config/gpu_baseline.py says
    python -m nanodepth gpu_runs --more="--n_embd=32 --n_head=2 --steps=60 ..."   # to try it tiny
"""
import math
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nanodepth import ROOT
from nanodepth.commands.cost import planned
from nanodepth.common.files import replace
from nanodepth.common.options import read
from nanodepth.extras.table import commit, python
from nanodepth.loop import running
from nanodepth.models.checkpoint import open_any
from nanodepth.probe import depth_score, skip_blocks
from nanodepth.report.logs import growths, read_lines, read_log, without_compiling
from nanodepth.report.plot import draw_costs, show
from nanodepth.report.tables import as_csv, mean, read_rows, where
from nanodepth.text.loader import Loader
from nanodepth.train import read_config
from nanodepth.training.measure import evaluate
from nanodepth.training.processes import peak_flops, pick_device

FIRST = 'ordinary', 'LIDAS', 'ordinary, equal FLOPs', '12 layers, equal FLOPs'
LATER = ('MIDAS', 'ordinary, a third', 'LIDAS, a third', '12x2', 'ordinary, Muon', 'LIDAS, Muon')
RATES = {'ordinary': 1e-3, 'LIDAS': 2e-3, '12 layers, equal FLOPs': 2e-3}   # tried first


@dataclass
class Options:
    minutes: float = 9          # no run begins that would end later
    rows: Path = ROOT / 'docs/results'      # where gpu.csv is, and the logs in gpu/
    out: Path = ROOT / 'out/gpu'            # where the runs are
    picture: Path = ROOT / 'docs/assets/gpu.png'
    bytes_a_token: float = 3.40             # of the validation text, for bits a byte
    commit: str = ''            # of this code; '': git says it
    more: str = ''              # settings of every run


def tuned_as(run):
    if run in RATES:
        return run
    return 'LIDAS' if 'LIDAS' in run or run == 'MIDAS' else 'ordinary'


def tried(rows, run):
    "{rate: loss} of what seed 0 has tried for a tuned run."
    return {row['lr']: row['loss'] for row in where(rows, run=run, seed=0)}


def best_rate(rows, run):
    losses = tried(rows, tuned_as(run))
    return min(losses, key=losses.get) if losses else RATES[tuned_as(run)]


def all_runs(rows):
    "(run, rate, seed) of all, in their order. Which rates are tried next depends on the rows."
    for run in FIRST:
        yield run, RATES[tuned_as(run)], 0
    for run, first in RATES.items():
        yield run, first / 2, 0
        yield run, first * 2, 0
        losses = tried(rows, run)
        if losses and best_rate(rows, run) == min(losses):
            yield run, min(losses) / 2, 0
        if losses and best_rate(rows, run) == max(losses):
            yield run, max(losses) * 2, 0
    for seed in (0, 1, 2):      # seed 0 again: the partner at equal FLOPs, if the best rate is new
        for run in FIRST[:3]:
            yield run, best_rate(rows, run), seed
    for seed in (1, 2):
        yield FIRST[3], best_rate(rows, FIRST[3]), seed
    for run in LATER:
        yield run, best_rate(rows, run), 0


def settings(run, more):
    "A run's command line. A partner at equal FLOPs takes as many steps as LIDAS's FLOPs pay for."
    argv = [f'config/gpu_{"lidas" if tuned_as(run) == "LIDAS" else "baseline"}.py', *more]
    if run == 'MIDAS':
        argv.append('--grow=midas')
    if run.startswith('12'):
        argv.append('--n_layer=12')
    if run == '12x2':
        argv.append('--loop=12x2')
    if 'Muon' in run:           # its steps are scaled to the size of AdamW's
        argv.append('--optimizer=muon')
    config = read_config(argv)
    if 'equal FLOPs' in run:
        share = planned(read_config(settings('LIDAS', more))) / planned(config)
        argv.append(f'--steps={round(config.steps * share)}')
    if 'a third' in run:
        argv += [f'--{name}={getattr(config, name) // 3}'
                 for name in ('steps', 'warmup_steps', 'decay_steps')]
    return argv


def measure(run, rate, seed, folder, options):
    "Train it, and return its row."
    argv = [*settings(run, options.more.split()), f'--lr={rate}', f'--seed={seed}']
    began = time.perf_counter()
    python('train.py', *argv, f'--out_dir={folder}')
    all_seconds = time.perf_counter() - began
    log = without_compiling(read_log(folder))
    end = log[-1]
    device = pick_device()
    peak = peak_flops(device)
    state, model = open_any(folder, device)
    c = state['config']         # of its tokenizer nothing is asked: it may not be on that machine
    val = Loader(c['data'], c['batch_size'], c['context'], split='val')
    plain, depth = evaluate(model, val, 1), len(model.order)
    late = []                                       # the last third of the layers, one at a time
    for place in range(depth - depth // 3, depth):
        with running(model, skip_blocks(model.order, place, 1)):
            late.append(evaluate(model, val, 1) - plain)
    tokens = val.batch(0)[0][:4, :256].to(device)
    return dict(
        run=run, lr=rate, seed=seed, loss=end['val_loss'],
        bits=end['val_loss'] / math.log(2) / options.bytes_a_token, tokens=end['tokens'],
        passes=end['passes'], flops=end['flops'],
        of_peak=end['flops'] / end['seconds'] / peak if peak else 'unknown',
        seconds=round(end['seconds'], 1), all_seconds=round(all_seconds),
        growths=' '.join(str(line['step'] - 1) for line in growths(log)),
        depth_score=depth_score(model, tokens)[0], late_layers=mean(late),
        card=torch.cuda.get_device_name() if device.type == 'cuda' else platform.machine(),
        torch=torch.__version__, commit=options.commit)


def main(argv=None):
    options = read(Options, argv, __doc__)
    options.commit = options.commit or commit()
    table, logs = options.rows / 'gpu.csv', options.rows / 'gpu'
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    rows = read_rows(table)
    while True:
        known = {(row['run'], row['lr'], row['seed']) for row in rows}
        left = [each for each in all_runs(rows) if each not in known]
        needed = max((row['all_seconds'] for row in rows), default=240)
        if not left or time.monotonic() + needed > end:
            break
        run, rate, seed = left[0]
        name = f'{run.replace(", ", "_").replace(" ", "_")}_{rate:g}-{seed}'
        rows.append(measure(run, rate, seed, options.out / name, options) | dict(log=name))
        rows = [row | dict(best=float(row['lr'] == best_rate(rows, row['run']))) for row in rows]
        shutil.copy(options.out / name / 'log.jsonl', logs / f'{name}.jsonl')
        replace(table, as_csv(rows))
    print(f'{len(rows)} runs have rows; next: {left[0] if left else "none, all are done"}')
    groups = {run: [read_lines(logs / f'{row["log"]}.jsonl')
                    for row in where(rows, run=run, best=1)] for run in FIRST}
    if all(groups.values()):
        show(options.picture, draw_costs, groups)
