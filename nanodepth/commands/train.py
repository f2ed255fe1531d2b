"""Train a model with train.py. Here, init_from may also be a Hugging Face checkpoint. With
--dry_run, the command prints the cost of a run: its stages, FLOPs, memory, disk and hours of a GPU.
Usage: nanodepth train CONFIG [--name=value ...] [--dry_run]     (--help lists the settings)
"""
import ast
import collections
import functools
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from nanodepth import ROOT
from nanodepth.common.errors import Refused, as_refusal
from nanodepth.common.files import write_json
from nanodepth.common.options import read
from nanodepth.grow import untie
from nanodepth.model import LM, require, unrolled
from nanodepth.models.checkpoint import data_of, open_path, spent_on, state_of
from nanodepth.report.tables import columns
from nanodepth.retrofit import Core, core_of, surgery
from nanodepth.text.tokenizer import copy_tokenizer
from nanodepth.train import train
from nanodepth.training.checkpoint import as_written
from nanodepth.training.loader import Loader, make_toy_data
from nanodepth.training.machine import PEAKS, leave_processes
from nanodepth.training.plan import (NEEDED_BY, Config, changes, first_n_layer, model_config, plan,
                                     training_flops)
from nanodepth.training.start import (Past, continued, decided, refuse_another_beginning,
                                      refuse_what_does_not_fit, set_order_of_branch,
                                      set_order_of_new)

OUT_OF_MEMORY = 'the GPU has too little memory: a higher --grad_accum makes smaller pieces'


@dataclass
class Options(Config):
    dry_run: bool = False           # print what the run will cost, and end
    json: Path | None = None        # with dry_run: write the cost and the settings into this file
    costs: bool = True              # with json: with the cost, for which its parent must exist
    pays: float | None = None       # with json: take as many steps as these FLOPs pay for


def main(argv):
    if not argv:
        print(*__doc__.splitlines()[2:], sep='\n')
        for path in sorted((ROOT / 'config').glob('[!_]*.py')):
            about = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
            print(f'  {f"config/{path.name}":44}{about.partition(chr(10))[0]}')
        raise SystemExit(2)
    options = read(Options, argv)
    config = Config(**{each.name: getattr(options, each.name) for each in fields(Config)})
    if options.dry_run and options.json:
        words = [word for word in argv
                 if not word.startswith(('--dry_run', '--json=', '--costs=', '--pays='))]
        if options.pays:
            config = paid_by(options.pays, words)
        flops = costs(config)[1] if options.costs else None
        write_json(options.json, dict(steps=config.steps, flops=flops, config=as_written(config)))
        return
    if options.dry_run:
        show(config)
        return
    with as_refusal(torch.OutOfMemoryError, why=lambda error: OUT_OF_MEMORY):
        stopped = train(config, open_parent)
    leave_processes()
    if stopped:         # make or a scheduler must not take the run for finished
        raise SystemExit(128 + stopped)


def open_parent(path):
    "Return the model of a checkpoint, and what a new run needs to know of it."
    state, model = open_path(path)
    about = dict(data=data_of(path, state), copy_tokenizer=functools.partial(copy_tokenizer, path))
    return model, (state or dict(published=True)) | about


# --------------------------------------------------------------- the cost, before a run
# Everything that a run does follows from its settings, so its cost is computed without training.

def empty(config, n_layer):
    "Return the model of a config without its weights."
    n_vocab = config.vocab_size
    if n_vocab is None:
        make_toy_data(config)
        try:
            val = Loader(config.data, config.batch_size, config.context, 'val')
            n_vocab = val.datasets[0].about['n_vocab']
        except Refused as error:
            raise Refused(f'vocab_size is unknown: {error}, or say --vocab_size=N') from None
    with torch.device('meta'):
        return LM(model_config(config, n_layer, n_vocab))


def begun(config):
    "Return the complete config of a run, the model that the run begins with, and its first step."
    model, past = None, Past()
    if config.branch_from:
        model, past, _ = continued(config.branch_from)
        refuse_another_beginning(config, past)
    elif config.init_from:
        model = open_path(config.init_from)[1]
    model = model or empty(config, first_n_layer(config))
    if config.cut and not config.branch_from:
        model = surgery(model, config.cut, config.core or Core)
    if not past.step:
        past = replace(past, first_n_layer=len(model.layers))
    config = decided(config, model, past)
    refuse_what_does_not_fit(config, model, 1)
    if config.branch_from:
        set_order_of_branch(config, model, past)
    else:
        set_order_of_new(config, model)
    require(config.context <= model.config.context,
            f'{config.context} tokens are more than the context of {model.config.context}')
    return config, model, past.step


class Stretch(NamedTuple):
    "Steps of a run in which one model runs one order."
    first: int          # the number of its first step
    steps: int          # how many steps
    model: LM
    depth: int          # the layers that run
    flops: int          # the training FLOPs of one token, summed over these steps


def stretches(config):
    "Return the Stretches of a run, from its first step to its last."
    config, model, step = begun(config)
    core, rows = core_of(model), []
    ahead = [change for change in changes(config) if max(1, step) <= change.step < config.steps]
    firsts = sorted({step, *(change.step for change in ahead)})
    for first, end in zip(firsts, [*firsts[1:], config.steps]):
        for change in ahead:
            if change.step == first and change.copies:
                model = untie(model, change.order)
            elif change.step == first:
                model.order = change.order
        if core:        # steps with the same r and backprop_depth cost the same
            draws = (plan(config, step) for step in range(first, end))
            flops = 0
            counts = collections.Counter((now.r, now.backprop_depth) for now in draws)
            for (r, depth), n in counts.items():
                core.r, core.backprop_depth = r, depth
                flops += n * training_flops(model, config.loss, config.context)
            core.r, core.backprop_depth = config.recurrence, config.backprop_depth
        else:
            flops = (end - first) * training_flops(model, config.loss, config.context)
        rows.append(Stretch(first, end - first, model, len(unrolled(model.order)), flops))
    return rows


def planned(config):
    """Return the training FLOPs of a run. For config/smollm_*.py they are the totals of Table 7 of
    "Do Depth-Grown Models Overcome the Curse of Depth?", to the last digit."""
    flops = sum(stretch.flops for stretch in stretches(config))
    return flops * config.batch_size * config.context


def costs(config):
    """Return the training FLOPs of a step, on average, and those of the whole run, including those
    of the model that it begins from. (Those of a published model are not known, and count as 0.)"""
    rows, before = stretches(config), config.branch_from or config.init_from
    flops = sum(row.flops for row in rows) * config.batch_size * config.context
    spent = spent_on(state_of(before)) if before else 0
    return flops / sum(row.steps for row in rows), flops + spent


def paid_by(flops, words):
    "Return the config of a line, with as many steps as these training FLOPs pay for."
    config = read(Config, words)
    for _ in range(20):
        of_step, total = costs(config)
        more = round((flops - total) / of_step)
        if not more:
            break
        steps = config.steps + more
        require(steps > 0, f'{flops:.2e} FLOPs pay for less than a step of {shlex.join(words)}')
        # read again, because the warm-up may be a share of the steps
        config = read(Config, [*words, f'--steps={steps}'])
    return config


def show(config):
    "Print the cost of a run."
    a_step = config.batch_size * config.context
    table = [['steps', 'layers', 'depth', 'parameters', 'GFLOPs a token', 'petaFLOPs']]
    total = steps = 0
    for first, n, model, depth, flops in stretches(config):
        table.append([f'{first:,} to {first + n:,}', str(len(model.layers)), str(depth),
                      f'{model.num_params():,}', f'{flops / n / 1e9:.3f}',
                      f'{flops * a_step / 1e15:,.3f}'])
        steps += n
        total += flops * a_step
    print(columns(table))
    print(f'in all {total / 1e15:,.3f} petaFLOPs; {steps:,} steps of '
          f'{config.batch_size:,} x {config.context:,} = {a_step:,} tokens, '
          f'{steps * a_step / 1e9:,.2f}B in all')
    if config.grow and not config.init_from:
        alone = {name: getattr(Config, name) for name in NEEDED_BY['grow'].split()}
        full = planned(replace(config, grow=None, **alone))
        print(f'with {config.n_layer} layers from the first step on it would be '
              f'{full / 1e15:,.3f}: growing saves {1 - total / full:.1%}')
    # Weights, gradients and moments have 4 bytes each. For each token, a layer keeps its streams
    # and updates in 2 bytes, and the head its logits in 2 bytes and, with their gradient, in 4.
    hours = total / (0.4 * PEAKS['H100']) / 3600
    if hours < 0.001:           # a toy runs on a laptop, and its config tells how long it takes
        return
    c, n, GB = model.config, model.num_params(), 1e9
    of_layer = 6 * c.n_embd + 3 * c.ffn_dim + 2 * c.n_head * c.head_dim
    kept = a_step / config.grad_accum * (2 * depth * of_layer + 10 * c.vocab_size)
    size = 4 if c.vocab_size > 2**16 else 2     # bytes of a token on disk
    print(f'memory: {16 * n / GB:,.1f} GB for weights and optimizer, and about {kept / GB:,.1f} '
          'for what a forward pass keeps (on eight GPUs each has an eighth of this)\n'
          f'disk: {12 * n / GB:,.1f} GB a checkpoint, and {config.steps * a_step * size / GB:,.1f} '
          'GB of tokens, if none is read twice\n'
          f'time: {duration(hours)} on one H100, at 40% of its peak, and {duration(hours / 8)} on '
          'eight')


def duration(hours):
    "Return a time in words."
    return f'{hours:,.1f} hours' if hours > 2 else f'{60 * hours:,.1f} minutes'
