"""What a run will cost before it starts: its stages, parameters, FLOPs, and hours of a GPU.
Everything that a run does follows from its settings, so its cost is added up without running it.
Usage: python train.py config/smollm_360m_lidas.py --dry_run
"""
import collections
import dataclasses
import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from nanodepth.common.errors import Refused, say
from nanodepth.grow import untie
from nanodepth.model import LM
from nanodepth.models import checkpoint
from nanodepth.report.tables import columns
from nanodepth.retrofit import core_of
from nanodepth.text.loader import Dataset, Loader, how_to_prepare, make_toy_data, mixture
from nanodepth.text.tokenizer import get_tokenizer, refuse_changed_tokenizer
from nanodepth.train import Config, Plan, read_config
from nanodepth.training.plan import Parent, model_config
from nanodepth.training.processes import PEAK_FLOPS


@dataclass
class DryRun(Config):
    dry_run: bool = True            # print what a run will cost, and end


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
    """A run as a list of its stretches, steps of one order: [(how many steps, the model, the layers
    that run, the FLOPs of a token summed over these steps)]."""
    parent, plan = None, None
    if config.init_from:
        saved = checkpoint.load(config.init_from)
        parent = checkpoint.build_model(saved, config.init_from)
        plan = Plan(config, Parent.of(parent))
    plan = plan or Plan(config)
    found = []
    for (n_layer, order), steps in itertools.groupby(
            map(plan.at, range(config.steps)), key=lambda now: (now.n_layer, now.order)):
        steps = list(steps)
        if parent is None:
            model = empty(config, n_layer)
        else:
            model = parent if n_layer == len(parent.layers) else untie(parent, steps[0].growth)
        if core := core_of(model):
            core.r = plan.recurrence
        # a recurrent core's equal draws are computed once
        alike = collections.Counter(tuple(step.how.items()) for step in steps)
        flops = sum(n * model.flops_per_token(**dict(how) or dict(order=order),
                                              context=config.context) for how, n in alike.items())
        found.append((len(steps), model, len(order or model.unrolled()), flops))
    return found


def planned(config):
    """The training FLOPs of a whole run. Those of config/smollm_*.py are the totals of Table 7 of
    "Do Depth-Grown Models Overcome the Curse of Depth?", to the last digit."""
    return sum(flops for *_, flops in stretches(config)) * config.batch_size * config.context


def main(argv):
    "The command train.py CONFIG --dry_run."
    config = read_config(argv, DryRun, tell=say)
    if not config.dry_run:
        raise Refused('--dry_run=false: leave it out to train')
    show(config)
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
            tokenizer = get_tokenizer(data.tokenizer)
            refuse_changed_tokenizer(data, tokenizer)
            ids = data.shards[0]['.bin'][:40].tolist()
            print(f'{part}, {split}: {data.tokens:,} tokens of {data.tokenizer!r}, checksums '
                  f'right; it begins {tokenizer.decode(ids)!r}, from '
                  f'{json.dumps(data.origin)}')


def show(config):
    "Print the cost."
    a_step = config.batch_size * config.context
    table = [['steps', 'layers', 'depth', 'parameters', 'GFLOPs a token', 'petaFLOPs']]
    total = first = 0
    for n, model, depth, flops in stretches(config):
        table.append([f'{first:,} to {first + n:,}', str(len(model.layers)), str(depth),
                      f'{model.num_params():,}', f'{flops / n / 1e9:.3f}',
                      f'{flops * a_step / 1e15:,.3f}'])
        first += n
        total += flops * a_step
    print(columns(table))
    print(f'in all {total / 1e15:,.3f} petaFLOPs; {config.steps:,} steps of '
          f'{config.batch_size:,} x {config.context:,} = {a_step:,} tokens, '
          f'{config.steps * a_step / 1e9:,.2f}B in all')
    if config.grow and not config.init_from:
        full = planned(dataclasses.replace(config, grow=None))
        print(f'with {config.n_layer} layers from the first step on it would be '
              f'{full / 1e15:,.3f}: growing saves {1 - total / full:.1%}')
    minutes = total / (0.4 * PEAK_FLOPS['H100']) / 60
    time = f'{minutes / 60:,.1f} hours' if minutes > 120 else f'{minutes:,.1f} minutes'
    if minutes >= 0.05:         # a toy is for a laptop: its config says how long it takes there
        print(f'time: {time} on one H100, at 40% of its peak')
