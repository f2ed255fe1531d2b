"""The training loop of every run: plain, growing, looped or recurrent, on a laptop or eight GPUs.

The idea: training/plan.py says what happens at a step, from the step's number alone. `take_steps`
does that. So a run is its config and its seed, and the same command goes on where it was stopped.
A first reading can stop after `change`. What is called from here stands in training/.

Papers: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A (the schedule, AdamW, the
clipping, mixtures); "From Growing to Looping", section 5.2 (a cool-down with a loop and other
data); "Retrofitted Recurrence", section 4.3.1 (Muon). Differs: the defaults are the toy's.

Usage:
    python train.py config/baseline.py --lr=2e-3        # minutes; any setting by --name=value
    python train.py --help                              # the settings
    torchrun --standalone --nproc_per_node=8 train.py config/smollm_360m_lidas.py
"""
import contextlib
import gc
import importlib.util
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == '__main__':
    # Threads of torch that wait are busy, and slow down a run beside this one: 1,000 turns only.
    os.environ.setdefault('GOMP_SPINCOUNT', '1000')     # (said before torch is loaded)

import torch
from tqdm import tqdm

from grow import untie
from model import LM, Refused, require, spans_in, unrolled
from retrofit import core_of
from training.checkpoint import load, open_folder, read_log, save, written
from training.loader import open_data
from training.machine import (RANK, SIZE, Machine, compile_and_distribute, exchange, machine_of,
                              say, stopping, together)
from training.measure import check_flops, measure
from training.optimizers import load_states, made_anew, make_optimizers, parameters_of
from training.picture import draw
from training.plan import Config, generator_for, plan, seed_for, training_flops
from training.settings import read
from training.start import differences, kept_of, start


@dataclass
class Run:
    "All that a run holds in memory. `renew` gives it another model, `add_up` adds to its totals."
    c: Config                   # with what the model decides filled in
    machine: Machine
    data: dict                  # Loaders: 'data', 'val' and perhaps 'cooldown_data'
    model: LM
    optimizers: list
    ddp: torch.nn.Module        # DDP around the model, or with one process the model itself
    totals: dict                # step, tokens, flops and seconds until now
    kept: dict                  # what each checkpoint says of the config, the data and the parent
    bar: tqdm
    log: Any = None             # log.jsonl; the null device where RANK is not 0
    online: Any = None          # wandb's run, or None


def train(c, open_parent=load):
    """To the end (returns 0), or until a signal (returns its number): the same command goes on from
    there. open_parent(init_from): nanodepth's also opens models of Hugging Face."""
    machine = machine_of(c)
    with together(machine):
        run = begin(c, machine, open_parent)
        with stopping() as signals, run.log, run.bar:
            stopped_by = take_steps(run, signals)
        if run.totals['step'] == c.steps:
            report(run)
            return 0
        say(f'stopped after step {run.totals["step"]}, and saved: the same command goes on')
        return stopped_by


def take_steps(run, signals):
    "Until the last step, or a signal, whose number is returned."
    c = run.c
    step = run.totals['step']
    stopped_by = 0
    batch = fetch(run, step) if step < c.steps else None
    while step < c.steps and not stopped_by:
        now = plan(c, step)
        event = change(run, now)                # the model may grow, or get another order
        began = time.perf_counter()
        torch.manual_seed(seed_for(c.seed, f'a Span in process {RANK}', step))
        with as_planned(run.model, now):
            own_loss = backward(run, now, batch)
            flops = training_flops(run.model, c)        # with this step's r
        norm = torch.nn.utils.clip_grad_norm_(parameters_of(run.optimizers),
                                              c.grad_clip or math.inf)
        if step + 1 < c.steps:
            batch = fetch(run, step + 1)        # while the GPU works: the next line waits for it
        loss, stopped_by = exchange(run.machine, own_loss.item(), signals)
        norm = norm.item()
        require(math.isfinite(loss + norm), f'step {step + 1} was not taken: loss {loss}, gradient '
                f'norm {norm}. A branch goes on from the last checkpoint: --branch_from={c.out_dir}'
                ', another --out_dir, and a lower --lr or --grad_clip')
        torch.manual_seed(seed_for(c.seed, 'optimizers', step))     # all processes draw the same
        update(run, now.rate)
        cost = add_up(run, time.perf_counter() - began, flops)
        log(run, now, dict(loss=loss, grad_norm=norm) | event, cost)
        step = run.totals['step']
        stays = is_due(step, c.keep_every)
        if stays or is_due(step, c.save_every) or step == c.steps or stopped_by:
            save_run(run, stays)
    return stopped_by


def fetch(run, step):
    "This process's rows of a step: (tokens, targets). -1 is no target."
    now = plan(run.c, step)
    tokens, targets, _ = run.data[now.data].batch(now.batch)
    device, cuda = run.machine.device, run.machine.cuda
    if cuda:                                        # pinned memory is sent while the GPU works
        tokens, targets = tokens.pin_memory(), targets.pin_memory()
    return tokens.to(device, non_blocking=cuda), targets.to(device, non_blocking=cuda)


@contextlib.contextmanager
def as_planned(model, now):
    "In here a core runs as often as the plan says, and elsewhere as often as the config."
    core = core_of(model)
    if core is None:
        yield
        return
    config_says = core.r, core.backprop_depth
    core.r, core.backprop_depth = now.r, now.backprop_depth
    yield
    core.r, core.backprop_depth = config_says
    core.generators = None


def backward(run, now, batch):
    """Gradients of this process's rows, in pieces. Returns its share of the loss: the sum over its
    targets, divided by the number of all processes' targets."""
    pieces = run.c.grad_accum
    n_targets = (batch[1] != -1).sum()
    if SIZE > 1:
        torch.distributed.all_reduce(n_targets)     # on the device: nothing waits for it
    loss = 0.0
    row = RANK * len(batch[0])              # the number of its first row in the whole batch
    for i, (x, y) in enumerate(zip(*(each.chunk(pieces) for each in batch))):
        if core := core_of(run.model):  # first states by a row's number: pieces change nothing
            core.generators = [generator_for(run.c.seed, f'state of row {n}', now.step, x.device)
                               for n in range(row, row + len(x))]
        run.ddp.require_backward_grad_sync = i == pieces - 1        # as DDP.no_sync() sets it
        with run.machine.autocast():
            # A loss is a mean. Times its targets it is a sum, which is 0 if no target counts.
            share = run.ddp(x, y, loss=run.c.loss) * (y != -1).sum() / n_targets.clamp(min=1)
        (share * SIZE).backward()           # DDP divides gradients by the number of processes
        loss += share.detach()
        row += len(x)
    return loss


def update(run, rate):
    "One step of each optimizer, at this share of its peak rate."
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group['lr'] = group['peak'] * rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=SIZE == 1)      # DDP's gradients are views of its buckets


def change(run, now):
    "Grow the model, or give it another order, if the plan says so. Returns what the log says."
    grows = now.n_layer > len(run.model.layers)
    if not grows and (now.order is None or written(now.order) == written(run.model.order)):
        return {}
    before = measure(run)['val_loss']
    if grows and run.c.keep_stages:
        save_run(run, stays=True)
    renew(run, now, grows)
    event = dict(before=before, after=measure(run)['val_loss'])
    say(f'now {now.n_layer} layers, {len(unrolled(run.model.order))} deep: the validation loss was '
        f'{event["before"]:.4f} and is {event["after"]:.4f}')
    if not grows:
        return dict(looped=event)
    init = getattr(run.c.init, '__name__', None)
    return dict(grown=event | dict(origin=now.grown_from, init=init))


def renew(run, now, grows):
    """Give the run its next model. If it grows, layers and optimizer states are copies of earlier
    ones. Otherwise it gets another order, perhaps with new Spans. Optimizers and DDP are made again
    in both cases, because the parameters may be others."""
    run.ddp = None          # DDP and its gradients go with the old model
    torch.manual_seed(seed_for(run.c.seed, 'growth', now.step))     # `init` and new Spans draw
    if grows:
        run.model = untie(run.model, now.grown_from, run.optimizers, run.c.init)
    else:
        run.model.order = now.order
    run.optimizers = made_anew(run.optimizers, run.model, run.c)    # groups may be by depth
    gc.collect()            # the old model's memory: compiled Blocks are reference cycles
    torch.cuda.empty_cache()
    run.ddp = compile_and_distribute(run.machine, run.model, run.c)


def add_up(run, seconds, flops_per_token):
    "Adds what a step has cost to the totals, and returns it."
    tokens = run.c.batch_size * run.c.context
    cost = dict(step=1, tokens=tokens, flops=int(tokens * flops_per_token), seconds=seconds)
    for name, more in cost.items():
        run.totals[name] += more
    run.bar.update()
    return cost


def log(run, now, numbers, cost):
    "After a step: measure where that is due, and write a line of the log."
    c, step, took = run.c, run.totals['step'], cost['seconds']
    is_measured = is_due(step, c.eval_every) or step == c.steps
    measured = measure(run, c.metric) if is_measured else {}
    if not (measured or is_due(step, c.log_every) or numbers.keys() & {'grown', 'looped'}):
        return
    recurrence = dict(r=now.r, backprop_depth=now.backprop_depth) if now.r else {}
    memory = torch.cuda.max_memory_allocated() / 1e9 if run.machine.cuda else None
    costs = dict(
        seconds=round(run.totals['seconds'], 1), tokens_per_s=round(cost['tokens'] / took),
        memory_gb=memory and round(memory, 2),
        mfu=round(cost['flops'] / took / run.machine.peak, 4) if run.machine.peak else None,
        lr=run.optimizers[0].param_groups[0]['lr'],         # with muon, of the layers' matrices
        passes=round(run.data[now.data].passes(now.batch + 1), 2))
    write_line(run, numbers | recurrence | costs, measured)


def is_due(step, every):
    return bool(every) and step % every == 0


def write_line(run, line, measured):
    "A line of the log. Its numbers stand beside the bar, or where nobody watches, on a line."
    depth = len(unrolled(run.model.order))
    line = run.totals | line | dict(n_layer=len(run.model.layers), depth=depth) | measured
    run.log.write(json.dumps(line) + '\n')
    if run.online:
        run.online.log(line, step=line['step'])
    shown = 'loss', 'val_loss', 'n_layer', 'tokens_per_s', 'mfu', 'memory_gb'
    words = [f'{name} {round(line[name], 4):,}' for name in shown if line.get(name)]
    words += [f'{kind} {its["accuracy"]:.0%}' for kind, its in line.get('kinds', {}).items()
              if kind != 'text']
    run.bar.set_postfix_str(', '.join(words), refresh=False)
    if run.bar.disable:
        say(f'step {line["step"]} of {run.c.steps}: {", ".join(words)}')


def save_run(run, stays=False):
    names = [f'ckpt-{run.totals["step"]}.pt', 'ckpt.pt'] if stays else ['ckpt.pt']
    save(run.c.out_dir, run.model, run.optimizers, names, **run.kept, **run.totals)


def report(run):
    "What a finished run leaves, and what to type next."
    out, flops = Path(run.c.out_dir), run.totals['flops']
    saving = ''
    if run.c.grow:      # beside all layers from the start, and the same loop in the cool-down
        of_decay = run.c.decay_steps / run.c.steps
        plain, last = (run.model.flops_per_token(order, run.c.context)
                       for order in ([*range(len(run.model.layers))], run.model.order))
        full = run.totals['tokens'] * ((1 - of_decay) * plain + of_decay * last)
        saving = f', {1 - flops / full:.1%} less than at full depth from the start'
    if RANK == 0:
        with contextlib.suppress(ImportError):      # without matplotlib there is no picture
            draw({out.name: read_log(out / 'log.jsonl')}, out / 'loss.png')
    more = '' if spans_in(run.model.order) else f' Next: python probe.py {out}'
    say(f'{flops:.3e} training FLOPs{saving}. All is in {out}.{more}')


# --------------------------------------------------------------------------------- where it begins

def begin(asked, machine, open_parent):
    "A Run at its next step. (training/start.py says where it comes from.)"
    require(not asked.wandb or importlib.util.find_spec('wandb'),
            '--wandb needs pip install wandb')
    data = open_data(asked)
    c, model, past = start(asked, data, open_parent)
    kept = kept_of(past, c, data)
    is_resumed = past.origin == c.out_dir
    model.to(machine.device, torch.float32)
    optimizers = make_optimizers(model, c)
    if past.origin:
        load_states(optimizers, past.optimizers, is_resumed)
    if not is_resumed:
        check_flops(model, c, machine, data['data'].batch(0))
    totals = dict(step=past.step, tokens=past.tokens, flops=past.flops, seconds=past.seconds)
    bar = tqdm(total=c.steps, initial=past.step, disable=RANK > 0 or not sys.stderr.isatty())
    ddp = compile_and_distribute(machine, model, c)
    run = Run(c, machine, data, model, optimizers, ddp, totals, kept, bar)
    # now, so that a bad metric fails before a folder is made
    measured = measure(run, c.metric) if c.metric or past.step == 0 else {}
    run.log = open_folder(Path(c.out_dir), kept['config'], data['data'].datasets, past)
    if c.wandb and RANK == 0:
        import wandb
        run.online = wandb.init(project='nanodepth', name=Path(c.out_dir).name,
                                config=kept['config'])
    greet(run, asked, past)
    if not is_resumed:
        save_run(run)
    if past.step == 0:
        write_line(run, {}, measured)
    return run


def greet(run, asked, past):
    "What is about to happen, and what was decided."
    c, data = run.c, run.data['data']
    read = data.passes(c.steps - (c.decay_steps if c.cooldown_data else 0))
    decided = [f'{name}={value}' for name, value in vars(c).items() if value != vars(asked)[name]]
    functions = [name for name, value in vars(c).items() if callable(value)]
    say(f'{run.model.num_params():,} parameters, {SIZE} x {run.machine.device}; steps '
        f'{past.step:,} to {c.steps:,}; the data is read {read:.2f} times')
    say(f'functions of the config: {", ".join(functions) or "none"}; from the model: '
        f'{", ".join(decided) or "none"}')
    if past.origin and past.origin != c.out_dir:
        alike = vars(run.model.config).keys() - {'n_layer', 'context'}
        differ = differences(past.config, run.kept['config'], {'out_dir', 'branch_from', *alike})
        say(f'a branch of {past.origin} after step {past.step:,}, with {differ or "its settings"}')


if __name__ == '__main__':
    try:
        stopped_by = train(read(Config, sys.argv[1:]))
    except Refused as error:
        sys.exit(f'train: {error}' if SIZE == 1 else f'train, process {RANK}: {error}')
    if stopped_by:          # make or a scheduler must not take it for finished
        sys.exit(128 + stopped_by)
