"""What a run will cost, before it starts: stages, parameters, FLOPs, and hours of so many GPUs.

The idea: everything a run does follows from its settings, so its cost can be added up without
running it. FLOPs are the ledger's, stage by stage. What it takes of memory its first step shows:
--grad_accum divides what a step keeps for its backward.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", Table 7: the totals of
config/smollm_*.py come out to the last digit.

Usage:
    python train.py config/smollm_360m_lidas.py --dry_run  # 8 GPUs, H100, at 40% of their peak
    python train.py config/smollm_1b7_lidas.py --dry_run --gpus=64 --grad_accum=2 --mfu=0.35
"""
import collections
import dataclasses
import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from tqdm import tqdm

from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.models import checkpoint
from nanodepth.running.plan import Parent, model_config
from nanodepth.running.processes import PEAK_FLOPS
from nanodepth.grow import untie
from nanodepth.model import LM
from nanodepth.report.tables import columns
from nanodepth.text.loader import Dataset, Loader, how_to_prepare, make_toy_data, mixture
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.train import Plan


class Stretch(NamedTuple):
    "Steps that run alike, but for the rate and a recurrent core's draws."
    first: int
    end: int
    model: LM               # a new one has no weights
    depth: int              # layers that run
    flops: int              # of a token, summed over these steps


def empty(config, n_layer):
    "The config's model without its weights."
    vocab_size = config.vocab_size
    if vocab_size is None:
        make_toy_data([config.data])
        try:
            vocab_size = Loader(config.data, config.batch_size, config.context).vocab_size
        except Refused as error:
            raise Refused(f'vocab_size is unknown: {error}, or say --vocab_size=N') from None
    with torch.device('meta'):
        return LM(model_config(config, vocab_size=vocab_size, n_layer=n_layer))


def stretches(config):
    "A run as a list of Stretch: the stages, and the decay where it loops or ends the growing."
    if config.init_from:
        saved = checkpoint.load(config.init_from)
        parent = checkpoint.build_model(saved, config.init_from)
        plan = Plan(config, Parent.of(parent, saved))
    else:
        parent = None
        plan = Plan(config)
    edges = [first for first, _ in plan.stages]
    if (config.cooldown_loop or config.grow) and config.decay_steps:
        edges.append(plan.cooldown_start)
    parts = []
    for first, end in itertools.pairwise([*edges, config.steps]):
        if first == end:
            continue
        now = plan.at(end - 1)
        if parent is None:
            model = empty(config, now.n_layer)
        else:
            model = parent if now.n_layer == len(parent.layers) else untie(parent, now.origin)
        if model.recurs:
            model.mean = plan.mean
        # equal steps are computed once
        alike = collections.Counter((tuple(step.order or ()), *step.how.items())
                                    for step in map(plan.at, range(first, end)))
        flops = sum(n * model.flops_per_token(**dict(how) or dict(order=order),
                                              context=config.context)
                    for (order, *how), n in alike.items())
        parts.append(Stretch(first, end, model, len(now.order or model.order), flops))
    return parts


def planned(config):
    "The training FLOPs of a whole run."
    a_token = sum(part.flops for part in stretches(config))
    return a_token * config.batch_size * config.context


def at_full_depth(config):
    "The same, if all layers were there from the first step on: what growing is compared with."
    return planned(dataclasses.replace(config, grow=None))


@dataclass
class Options:
    dry_run: bool = False           # print what a run will cost, and end
    gpus: int = 8
    gpu: Literal[tuple(PEAK_FLOPS)] = 'H100'
    mfu: float = 0.4        # the share of its peak FLOPs that a run uses


def main(argv, read_config):
    "The command train.py CONFIG --dry_run."
    own_options = [f'--{name}' for name in vars(Options())]
    options = read(Options, [arg for arg in argv if arg.partition('=')[0] in own_options])
    if not options.dry_run:
        raise Refused('--dry_run=false: leave it out to train')
    config = read_config([arg for arg in argv if arg.partition('=')[0] not in own_options])
    show(config, options.gpus, options.gpu, options.mfu)
    for data in (config.data, config.cooldown_data):
        for folder in [data] if isinstance(data, str) else data or []:
            check_data(folder)


def check_data(folder):
    "Say what is in a dataset, or in each of a mixture, and check every checksum."
    for part, _ in mixture(folder):
        if not (Path(part) / 'train.json').exists():
            print(f'{part} is not here yet; {how_to_prepare(part)}')
            continue
        for split in ('train', 'val'):
            data = Dataset(part, split, context=None)
            data.check(functools.partial(tqdm, desc=f'{part}, {split}: checking', leave=False))
            ids = data.shards[0]['.bin'][:40].tolist()
            print(f'{part}, {split}: {data.tokens:,} tokens of {data.tokenizer!r}, checksums '
                  f'right; it begins {get_tokenizer(data.tokenizer).decode(ids)!r}, from '
                  f'{json.dumps(data.origin)}')


def show(config, gpus, gpu, mfu):
    "Print the cost."
    each, left = divmod(config.batch_size, gpus)
    if left or each % config.grad_accum:
        raise Refused(f'batch_size={config.batch_size} on gpus={gpus} does not divide into '
                      f'grad_accum={config.grad_accum} pieces: choose other --gpus')
    a_step = config.batch_size * config.context
    table = [['steps', 'layers', 'depth', 'parameters', 'GFLOPs a token', 'petaFLOPs']]
    total = 0
    for first, end, model, depth, flops in stretches(config):
        table.append([f'{first:,} to {end:,}', str(len(model.layers)), str(depth),
                      f'{model.num_params():,}', f'{flops / (end - first) / 1e9:.3f}',
                      f'{flops * a_step / 1e15:,.3f}'])
        total += flops * a_step
    print(columns(table))
    print(f'in all {total / 1e15:,.3f} petaFLOPs; {config.steps:,} steps of '
          f'{config.batch_size:,} x {config.context:,} = {a_step:,} tokens, '
          f'{config.steps * a_step / 1e9:,.2f}B in all')
    if config.grow and not config.init_from:
        full = at_full_depth(config)
        print(f'with {config.n_layer} layers from the first step on it would be '
              f'{full / 1e15:,.3f}: growing saves {1 - total / full:.1%}')
    seconds = total / (gpus * PEAK_FLOPS[gpu] * mfu)
    print(f'time: {seconds / 3600:,.1f} hours on {gpus} {gpu} at {mfu:.0%} of '
          f'{PEAK_FLOPS[gpu] / 1e12:,.0f} TFLOP/s, '
          f'{a_step * config.steps / seconds:,.0f} tokens a second, '
          f'{total / (PEAK_FLOPS[gpu] * mfu) / 3600:,.0f} GPU hours')
