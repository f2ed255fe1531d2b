"""A number to beat: the fewest training FLOPs with which a config learns the toy, seed after seed.

The question: with how few training FLOPs does a model learn the toy of `make`, so that it answers
chains of depth 3 at 95% and predicts text at a loss of 2.20? Anything may change but the data and
the seeds: the layers, their order, growth, the optimizer, the batch, the schedule. The FLOPs follow
from the config, so whether they are fewer needs no statistics. Whether the model is good enough
does: over the seeds 0 to 7, the mean loss on text must be below its threshold and the mean share of
right answers above its own, each by a one-sided t-test. Eight other seeds, which nobody chose the
config by, may refute it. docs/RECORDS.md says who holds the record, and how to send one in.

Usage:
    nanodepth record config/lidas.py          # up to an hour; goes on where it stopped
    nanodepth record config/records/mine.py --first_seed=8    # confirms one on other seeds
    entries = accepted(rows)        # {config: Entry}, those that other seeds refute do not meet
    standing(entries)               # the name of the config that holds the record, or None
"""
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nanodepth import ROOT
from nanodepth.common.errors import Refused
from nanodepth.common.files import find, replace
from nanodepth.common.options import docstring_of, read
from nanodepth.engine.checkpoint import load_model
from nanodepth.engine.cost import planned
from nanodepth.engine.scoring import ask, measure
from nanodepth.report.logs import read_log
from nanodepth.report.tables import as_csv, mean, read_rows, where
from nanodepth.study.claims import ALPHA, Contrast, one_sided
from nanodepth.text.loader import Loader, make_toy_data
from nanodepth.text.primitives import few_shot
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.train import read_config

TEXT = 2.20             # nats a byte: the loss on text must be below it
RIGHT = 0.95            # the share of questions of depth 3 that are answered right: above it
SEEDS = 8
TOY = 'data/toy'
QUESTIONS = 500
BATCHES = 24            # of validation data, of 32 rows


# ------------------------------------------------------------------------------------------ judging

class Entry(NamedTuple):
    flops: float
    seeds: int
    text: Contrast      # the losses, minus the threshold
    right: Contrast     # the shares, minus the threshold
    p_text: float
    p_right: float
    meets: bool         # both thresholds, on all seeds


def judged(rows, first_seed=0):
    "{config: Entry} of eight seeds, the fewest FLOPs first."
    entries = {}
    rows = [row for row in rows if first_seed <= row['seed'] < first_seed + SEEDS]
    for config in dict.fromkeys(row['config'] for row in rows):
        seeds = where(rows, config=config)
        text = Contrast([row['text'] for row in seeds], [TEXT] * len(seeds))
        right = Contrast([row['depth 3 right'] for row in seeds], [RIGHT] * len(seeds))
        p_text = one_sided(text, -1)
        p_right = one_sided(right, 1)
        meets = len(seeds) >= SEEDS and max(p_text, p_right) < ALPHA
        entries[config] = Entry(seeds[0]['flops'], len(seeds), text, right, p_text, p_right, meets)
    return dict(sorted(entries.items(), key=lambda item: item[1].flops))


def accepted(rows):
    "The entries of the seeds 0 to 7. One that fails on the seeds 8 to 15 does not meet."
    entries = judged(rows)
    for config, other in judged(rows, SEEDS).items():
        if config in entries and other.seeds >= SEEDS and not other.meets:
            entries[config] = entries[config]._replace(meets=False)
    return entries


def standing(entries):
    "The entries come in the order of their FLOPs, so the first that is good enough holds it."
    return next((config for config, entry in entries.items() if entry.meets), None)


def table(rows):
    "Markdown: a line for each config, the most FLOPs first, so that it reads as a story."
    entries = accepted(rows)
    others = judged(rows, SEEDS)
    record = standing(entries)
    lines = ['| config | idea | 10^12 FLOPs | saved | text | depth 3, % | p | '
             'text, seeds 8 to 15 | depth 3, % | p | verdict |', '|' + '---|' * 11]
    best = None
    for config, e in reversed(entries.items()):
        if e.meets:
            verdict = '**the record**' if config == record else 'good enough'
        elif max(e.p_text, e.p_right) < ALPHA and e.seeds >= SEEDS:
            verdict = 'not confirmed'
        else:
            verdict = 'not good enough' if e.seeds >= SEEDS else 'open'
        saved = f'{1 - e.flops / best:.0%}' if best and e.meets else ''
        again = cells(others[config]) if config in others else ' | | '
        idea = where(rows, config=config)[0].get('idea', '')
        link = f'[{config}](../{config})' if (ROOT / config).exists() else config
        lines.append(f'| {link} | {idea} | {e.flops / 1e12:.2f} | {saved} | {cells(e)} | {again} | '
                     f'{verdict} |')
        best = e.flops if e.meets else best
    return lines


def cells(entry):
    "The two means, and the larger of the two p values."
    return (f'{mean(entry.text.a):.3f} | {100 * mean(entry.right.a):.1f} | '
            f'{max(entry.p_text, entry.p_right):.2g}')


# --------------------------------------------------------------------------- training and measuring

@dataclass
class Options:
    WORDS = ['config']
    config: Path
    first_seed: int = 0                         # 8: eight other seeds, to confirm a record
    jobs: int = 2                               # runs at a time, a thread each
    out: Path = Path('out/record')              # where the runs go
    rows: Path = ROOT / 'docs/results'          # where records.csv is


def allowed(path):
    "The config, if its run could be a record."
    config = read_config([str(path)])
    if config.data != TOY or config.cooldown_data or config.init_from:
        raise Refused(f'{path} must learn from {TOY} alone, from its first step on: a record has '
                      f'data={TOY!r}, and neither cooldown_data nor init_from')
    return config


def trained(seed, path, folder):
    "Train a seed, or what is left of it. A thread each, so that runs beside it cost it nothing."
    folder.mkdir(parents=True, exist_ok=True)
    argv = ['train', str(path), f'--seed={seed}', f'--out_dir={folder}']
    said = folder / 'said.txt'
    with open(said, 'w') as file:
        child = subprocess.run([sys.executable, '-m', 'nanodepth', *argv], stdout=file,
                               stderr=file, env=os.environ | dict(OMP_NUM_THREADS='1'))
    if child.returncode:
        lines = said.read_text().strip().splitlines() or [f'it ended with {child.returncode}']
        raise Refused(f'{said}: {lines[-1]}')
    return folder


def measured(config, idea, cost, seed, folder):
    "The row of a seed: six digits, which a seed that is repeated has too."
    model = load_model(folder)
    kinds = measure(model, Loader(TOY, 32, 64, split='val', seed=0), BATCHES)[1]
    questions = few_shot('toy_assign', QUESTIONS, shots=0, depth=3, seed=7)
    right = ask(model, get_tokenizer(folder), questions).mean
    text = kinds['text']['loss']
    minutes = read_log(folder)[-1]['seconds'] / 60
    print(f'seed {seed}: loss on text {text:.3f}, depth 3 {right:.1%}, {minutes:.1f} minutes',
          flush=True)
    return dict(config=config, idea=idea, seed=seed, flops=cost, minutes=minutes, text=text) | {
        'depth 3 right': right}


def main(argv=None):
    args = read(Options, argv, __doc__)
    path = find(args.config)
    config = allowed(path)
    make_toy_data([TOY])
    cost = planned(config)
    name = os.path.relpath(path, ROOT)
    idea = docstring_of(path).partition('.')[0]
    file = args.rows / 'records.csv'
    seeds = range(args.first_seed, args.first_seed + SEEDS)
    before = read_rows(file)
    kept = [row for row in before if row['config'] != name or row['seed'] not in seeds]
    entries = accepted([row for row in before if row['config'] != name])
    record = standing(entries)
    if record and cost >= entries[record].flops:
        print(f'{name} takes {cost:.4g} FLOPs and {record} {entries[record].flops:.4g}, so the '
              'record stays where it is; whether it learns the toy is measured all the same')
    folders = [args.out / path.stem / str(seed) for seed in seeds]
    with ThreadPoolExecutor(args.jobs) as pool:
        ended = pool.map(lambda seed, folder: trained(seed, path, folder), seeds, folders)
        rows = [measured(name, idea, cost, seed, folder) for seed, folder in zip(seeds, ended)]
    kept = [row | dict(flops=int(row['flops'])) for row in kept]
    # six digits are what a table needs, and a seed that is repeated has the same ones
    short = [{key: f'{v:.6g}' if isinstance(v, float) else v for key, v in row.items()}
             for row in kept + rows]
    replace(file, as_csv(short, lineterminator='\n'))
    entry = judged(rows, args.first_seed)[name]
    print(f'{name}: {entry.flops:.4g} FLOPs, loss on text {mean(entry.text.a):.3f} (below '
          f'{TEXT:.2f}: p = {entry.p_text:.2g}), depth 3 {mean(entry.right.a):.1%} (above '
          f'{RIGHT:.0%}: p = {entry.p_right:.2g})')
    print(f'the record: {standing(accepted(read_rows(file)))}\n'
          f'numbers: {file}; nanodepth results puts them into docs/RECORDS.md')
