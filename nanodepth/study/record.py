"""A number to beat: trains a config on seeds 0 to 7 and judges it against the standing record.

The question: with how few training FLOPs does a model learn the toy of `make`, so that it answers
chains of depth 3 at 95% and predicts text at a loss of 2.20? (study/records.py says how it is
judged, docs/RECORDS.md who holds the record and how to send one in.) Anything may change but the
data and the seeds: the layers, their order, growth, the optimizer, the batch, the schedule.

Usage:
    nanodepth record config/lidas.py          # up to an hour; goes on where it stopped
    nanodepth record config/records/mine.py --first_seed=8    # confirms one on other seeds
"""
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nanodepth import ROOT
from nanodepth.common.errors import Refused
from nanodepth.common.files import find, replace
from nanodepth.common.options import read
from nanodepth.data.tokens import make_toy_data
from nanodepth.engine.checkpoint import load_model
from nanodepth.engine.cost import planned
from nanodepth.report.runs import read_log
from nanodepth.report.tables import mean
from nanodepth.study.jobs import TOY, Questions, by_depth, in_a_process, write_rows
from nanodepth.study.records import RIGHT, SEEDS, TEXT, accepted, judged, standing
from nanodepth.study.results import all_tables, made, read_rows
from nanodepth.train import read_config

QUESTIONS = 500


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
    argv = [str(path), f'--seed={seed}', f'--out_dir={folder}']
    in_a_process(['train', *argv], folder / 'said.txt')
    return folder


def measured(config, cost, seed, folder):
    "The row of a seed."
    ask = Questions(folder, TOY, by_depth('toy_assign', (3,), QUESTIONS))
    answers = ask(load_model(folder))
    row = dict(config=config, seed=seed, flops=cost,
               minutes=read_log(folder)[-1]['seconds'] / 60, text=answers['text'])
    row['depth 3 right'] = answers['depth 3 right']
    print(f'seed {seed}: loss on text {row["text"]:.3f}, depth 3 {row["depth 3 right"]:.1%}, '
          f'{row["minutes"]:.1f} minutes', flush=True)
    return row


def verdict(name, entry, record, flops):
    """What is to be said of a config, beside the record that stood before. The seeds 0 to 7 decide;
    others can only confirm what those have said."""
    summary = (f'{name}: {entry.flops:.4g} FLOPs, loss on text {mean(entry.text.a):.3f} (below '
               f'{TEXT:.2f}: p = {entry.p_text:.2g}), depth 3 {mean(entry.right.a):.1%} (above '
               f'{RIGHT:.0%}: p = {entry.p_right:.2g}); ')
    if first := entry.first_seed:
        meets = 'both thresholds' if entry.meets else 'not both thresholds, which refutes it'
        return (f'{summary}on the seeds {first} to {first + SEEDS - 1} it meets {meets}; '
                f'who holds the record is decided on the seeds 0 to {SEEDS - 1}')
    if not entry.meets:
        return f'{summary}it does not meet both thresholds'
    if record is None or entry.flops < flops:
        from_whom = f' from {record} ({flops:.4g})' if record else ''
        return f'{summary}it takes the record{from_whom}'
    return (f'{summary}it meets both thresholds, but {record} has the record with '
            f'{flops:.4g} FLOPs')


def main(argv=None):
    args = read(Options, argv, __doc__)
    path = find(args.config)
    config = allowed(path)
    make_toy_data([TOY])
    cost = planned(config)
    name = os.path.relpath(path, ROOT)
    file = args.rows / 'records.csv'
    seeds = range(args.first_seed, args.first_seed + SEEDS)
    before = read_rows(file)
    kept = [row for row in before if row['config'] != name or row['seed'] not in seeds]
    entries = accepted([row for row in before if row['config'] != name])
    record = standing(entries)
    flops = entries[record].flops if record else 0
    if record and cost >= flops:
        print(f'{name} takes {cost:.4g} FLOPs and {record} {flops:.4g}, so the record stays where '
              'it is; whether it learns the toy is measured all the same')
    folders = [args.out / path.stem / str(seed) for seed in seeds]
    with ThreadPoolExecutor(args.jobs) as pool:
        ended = pool.map(lambda seed, folder: trained(seed, path, folder), seeds, folders)
        rows = [measured(name, cost, seed, folder) for seed, folder in zip(seeds, ended)]
    write_rows(file, [row | dict(flops=int(row['flops'])) for row in kept] + rows)
    page = args.rows.parent / 'RECORDS.md'
    replace(page, made(page.read_text(encoding='utf-8'), all_tables({}, args.rows)).encode())
    print(verdict(name, judged(rows, args.first_seed)[name], record, flops))
