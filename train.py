"""Train a model: plain, growing, looped or recurrent, on a laptop or on eight GPUs.

The idea: training/plan.py computes from a step's number alone what happens at the step, and lists
the changes of the model's order. `take_steps` carries out both. So a run is its config and its
seed, and the same command continues where the run was stopped. A first reading can stop after
`renew`. The functions that are called from here are in training/.

Papers: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A (the schedule, AdamW, the
clipping, mixtures); "From Growing to Looping", section 5.2 (a cool-down with a loop and other
data); "Retrofitted Recurrence", section 4.3.1 (Muon). What differs here: the defaults are for the
toy.

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
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == '__main__':
    # This must be set before torch is loaded. Waiting threads of torch spin, which slows down other
    # runs on this machine, so let them spin only 1,000 times.
    os.environ.setdefault('GOMP_SPINCOUNT', '1000')
    # Until there is something to save, Ctrl-C just ends the process.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import torch
from tqdm import tqdm

from grow import states_of_copies, untie
from model import LM, Refused, require, spans_in, unrolled
from retrofit import core_of
from training.checkpoint import load, open_folder, read_log, save, try_to_open
from training.loader import open_data
from training.machine import (Machine, compile_and_distribute, exchange, gathered,
                              join_processes, leave_processes, machine_of, say, stopping)
from training.measure import check_flops, measure
from training.optimizers import load_states, make_optimizers, parameters_of, states_of
from training.picture import draw
from training.plan import (Config, changes, generator_for, has_own_parts, plan, seed_for,
                           training_flops)
from training.settings import read
from training.start import MADE_THE_MODEL, Past, differences, start


@dataclass
class Run:
    "Everything that a run has in memory. `change` exchanges the model, and a step adds to `past`."
    c: Config                   # the settings, completed by those that the model decides
    machine: Machine
    data: dict                  # Loaders: 'data', 'val' and perhaps 'cooldown_data'
    changes: list               # the steps at which the model grows or gets another order
    model: LM
    optimizers: list
    ddp: torch.nn.Module        # DDP around the model, or with one process the model itself
    past: Past                  # what the run has done so far, which each checkpoint stores
    bar: tqdm
    log: Any = None             # log.jsonl; the null device if this is not the first process
    online: Any = None          # wandb's run, or None


def train(c, open_parent=load):
    """Train to the end and return 0, or until a signal arrives and return its number. The same
    command continues from there. open_parent(init_from) opens the model that the run begins with.
    (nanodepth passes a function that opens models of Hugging Face, too.)"""
    machine = machine_of(c)
    join_processes(machine)
    run = begin(c, machine, open_parent)
    with stopping() as signals, run.log, run.bar:
        stopped_by = take_steps(run, signals)
    if run.past.step == c.steps:
        report(run)
        return 0
    say(f'saved and stopped after step {run.past.step}: the same command continues the run')
    return stopped_by


def take_steps(run, signals):
    "Take steps until the last one, or until a signal arrives. Return the signal's number, or 0."
    c, past = run.c, run.past
    stopped_by = 0
    batch = fetch(run, past.step) if past.step < c.steps else None
    while past.step < c.steps and not stopped_by:
        step = past.step
        step_plan = plan(c, step)
        event = {}
        for due in run.changes:
            if due.step == step > 0:            # a new model has the changes of step 0 already
                event |= change(run, due)
        began = time.perf_counter()
        with as_planned(run.model, step_plan):
            own_loss = backward(run, step_plan, batch)
            flops = training_flops(run.model, c.loss, c.context)       # with this step's r
        norm = torch.nn.utils.clip_grad_norm_(parameters_of(run.optimizers),
                                              c.grad_clip or math.inf)
        if step + 1 < c.steps:
            batch = fetch(run, step + 1)        # while the GPU works: the next line waits for it
        loss, stopped_by = exchange(run.machine, own_loss.item(), signals)
        norm = norm.item()
        require(math.isfinite(loss + norm), f'step {step + 1} was not taken: loss {loss}, gradient '
                f'norm {norm}. A branch continues from the last checkpoint: '
                f'--branch_from={c.out_dir}, another --out_dir, and a lower --lr or --grad_clip')
        torch.manual_seed(seed_for(c.seed, 'optimizers', step))     # all processes draw the same
        update(run, step_plan.rate)
        seconds, tokens = time.perf_counter() - began, c.batch_size * c.context
        past.step += 1
        past.tokens += tokens
        past.flops += int(tokens * flops)
        past.seconds += seconds
        run.bar.update()
        log(run, step_plan, dict(loss=loss, grad_norm=norm) | event, tokens / seconds, flops)
        keep_forever = is_due(past.step, c.keep_every)
        if keep_forever or is_due(past.step, c.save_every) or past.step == c.steps or stopped_by:
            save_run(run, keep_forever)
    return stopped_by


def fetch(run, step):
    "Return this process's rows of a step: (tokens, targets). A target of -1 does not count."
    step_plan = plan(run.c, step)
    tokens, targets, _ = run.data[step_plan.data].batch(step_plan.batch)
    device, cuda = run.machine.device, run.machine.cuda
    if cuda:                                        # pinned memory is sent while the GPU works
        tokens, targets = tokens.pin_memory(), targets.pin_memory()
    return tokens.to(device, non_blocking=cuda), targets.to(device, non_blocking=cuda)


@contextlib.contextmanager
def as_planned(model, step_plan):
    "Inside this `with`, a core runs as often as the plan of the step says, and then as before."
    core = core_of(model)
    if core is None:
        yield
        return
    r_and_depth = core.r, core.backprop_depth
    core.r, core.backprop_depth = step_plan.r, step_plan.backprop_depth
    yield
    core.r, core.backprop_depth = r_and_depth
    core.generators = None


def backward(run, step_plan, batch):
    """Compute the gradients of this process's rows, in pieces. Return its share of the loss: the
    sum over its targets, divided by the number of targets of all processes."""
    pieces, size = run.c.grad_accum, run.machine.size
    n_targets = (batch[1] != -1).sum()
    if size > 1:
        torch.distributed.all_reduce(n_targets)     # on the device, so nothing waits for it
    loss = 0.0
    row = run.machine.rank * len(batch[0])  # the number of the first row in the whole batch
    core = core_of(run.model)
    for i, (x, y) in enumerate(zip(*(rows.chunk(pieces) for rows in batch))):
        if core:        # first states are seeded by row, so the pieces do not matter
            core.generators = [
                generator_for(run.c.seed, f'state of row {n}', step_plan.step, x.device)
                for n in range(row, row + len(x))]
        run.ddp.require_backward_grad_sync = i == pieces - 1        # what DDP.no_sync() sets
        # what a Span or a loss draws, such as a number of iterations, is the same for all rows
        torch.manual_seed(seed_for(run.c.seed, 'a Span', step_plan.step))
        with run.machine.autocast():
            # A loss is a mean over targets. Times their number it is a sum, or 0 without targets.
            share = run.ddp(x, y, loss=run.c.loss) * (y != -1).sum() / n_targets.clamp(min=1)
        (share * size).backward()           # DDP divides gradients by the number of processes
        loss += share.detach()
        row += len(x)
    return loss


def update(run, rate):
    "Take one step of each optimizer, at this share of its peak rate."
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group['lr'] = group['peak'] * rate
        optimizer.step()
        optimizer.zero_grad()


def change(run, due):
    """Make a change that is due: the model grows, or gets another order. Return what the log
    records about it."""
    before = measure(run)['val_loss']
    if due.copies and run.c.keep_stages:
        save_run(run, keep_forever=True)
    renew(run, due)
    event = dict(before=before, after=measure(run)['val_loss'])
    say(f'now {len(run.model.layers)} layers, {len(unrolled(run.model.order))} deep: the '
        f'validation loss was {event["before"]:.4f} and is {event["after"]:.4f}')
    if not due.copies:
        return dict(looped=event)
    init = getattr(run.c.init, '__name__', None)
    return dict(grown=event | dict(origin=due.order, init=init))


def renew(run, due):
    """Give the run its next model. If the model grows, its layers and the optimizer states are
    copies of earlier ones. Otherwise it gets another order, perhaps with new Spans. In both cases
    optimizers and DDP are made again, because there may be other parameters."""
    run.ddp = None          # DDP and its gradients go with the old model
    torch.manual_seed(seed_for(run.c.seed, 'growth', due.step))     # `init` and new Spans draw
    states = states_of(run.optimizers, run.model)
    if due.copies:
        run.model = untie(run.model, due.order, run.c.init)
        states = {name: states_of_copies(of_optimizer, due.order)
                  for name, of_optimizer in states.items()}
    else:
        run.model.order = due.order
    run.model.requires_grad_(True)      # an optimizer of your own may freeze weights again
    run.optimizers = make_optimizers(run.model, run.c)      # its groups may depend on the depth
    load_states(run.optimizers, run.model, states)
    gc.collect()            # the old model's memory: compiled Blocks are reference cycles
    torch.cuda.empty_cache()
    run.ddp = compile_and_distribute(run.machine, run.model, run.c)


def log(run, step_plan, numbers, tokens_per_s, flops):
    "Measure the model if that is due after this step, and write a line of the log."
    c, step, peak = run.c, run.past.step, run.machine.peak
    is_measured = is_due(step, c.eval_every) or step == c.steps
    measured = measure(run, c.metric) if is_measured else {}
    if not (measured or is_due(step, c.log_every) or numbers.keys() & {'grown', 'looped'}):
        return
    recurrence = dict(r=step_plan.r, backprop_depth=step_plan.backprop_depth) if step_plan.r else {}
    memory = torch.cuda.max_memory_allocated() / 1e9 if run.machine.cuda else None
    costs = dict(
        seconds=round(run.past.seconds, 1), tokens_per_s=round(tokens_per_s),
        memory_gb=memory and round(memory, 2),
        mfu=round(flops * tokens_per_s / peak, 4) if peak else None,
        lr=run.optimizers[0].param_groups[0]['lr'],         # with muon, of the layers' matrices
        passes=round(run.data[step_plan.data].passes(step_plan.batch + 1), 2))
    write_line(run, numbers | recurrence | costs, measured)


def is_due(step, every):
    "Return whether a step is a multiple of `every`, which is not 0."
    return bool(every) and step % every == 0


def write_line(run, line, measured):
    "Write a line of the log, and show its numbers next to the bar, or on a line without a bar."
    past, model = run.past, run.model
    line = dict(step=past.step, tokens=past.tokens, flops=past.flops, seconds=past.seconds) | line
    line |= dict(n_layer=len(model.layers), depth=len(unrolled(model.order))) | measured
    run.log.write(json.dumps(line) + '\n')
    if run.online:
        run.online.log(line, step=line['step'])
    shown = 'loss', 'val_loss', 'n_layer', 'tokens_per_s', 'mfu', 'memory_gb'
    words = [f'{name} {round(line[name], 4):,}' for name in shown if line.get(name)]
    words += [f'{kind} {of_kind["accuracy"]:.0%}' for kind, of_kind in line.get('kinds', {}).items()
              if kind != 'text']
    run.bar.set_postfix_str(', '.join(words), refresh=False)
    if run.bar.disable:
        say(f'step {line["step"]} of {run.c.steps}: {", ".join(words)}')


def save_run(run, keep_forever=False):
    "Save the run. With `keep_forever`, also save a checkpoint named after its step."
    names = [f'ckpt-{run.past.step}.pt', 'ckpt.pt'] if keep_forever else ['ckpt.pt']
    save(run.c.out_dir, run.model, states_of(run.optimizers, run.model), names, **vars(run.past))


def report(run):
    "Print what a finished run leaves, and what to type next."
    out, flops = Path(run.c.out_dir), run.past.flops
    saving = ''
    if run.c.grow and not run.c.init_from:      # compared with all layers from the first step on
        of_decay = run.c.decay_steps / run.c.steps
        plain, at_the_end = (run.model.flops_per_token(order, run.c.context)
                       for order in ([*range(len(run.model.layers))], run.model.order))
        full = run.past.tokens * ((1 - of_decay) * plain + of_decay * at_the_end)
        saving = f', {1 - flops / full:.1%} less than at full depth from the start'
    if run.machine.rank == 0:
        with contextlib.suppress(ImportError):      # without matplotlib there is no picture
            draw({out.name: read_log(out / 'log.jsonl')}, out / 'loss.png')
        last = [line for line in read_log(out / 'log.jsonl') if 'val_loss' in line][-1]
        say(f'The validation loss is {last["val_loss"]:.4f}, with a standard error of '
            f'{last["val_error"]:.4f}: it was measured on {last["val_rows"]:,} of '
            f'{run.data["val"].n_rows:,} rows.')
    # probe.py does not know your own Spans, and a Window runs a depth several times
    more = '' if spans_in(run.model.order) else f' Next: python probe.py {out}'
    say(f'{flops:.3e} training FLOPs{saving}. Everything is in {out}.{more}')


# ------------------------------------------------------------------------------ where a run begins

def begin(typed, machine, open_parent):
    "Return a Run before its next step. (training/start.py resumes, branches or creates it.)"
    require(not typed.wandb or importlib.util.find_spec('wandb'),
            '--wandb needs pip install wandb')
    data = open_data(typed)
    beginning = start(typed, data, open_parent, machine.size)
    c, model, past = beginning.c, beginning.model, beginning.past
    steps = gathered(machine, [past.step])
    require((steps == past.step).all(), 'the processes do not begin at the same step: is out_dir '
            'on a disk that all of them see?')
    model.to(machine.device, torch.float32)
    optimizers = make_optimizers(model, c)
    n_new = load_states(optimizers, model, beginning.states)
    if not beginning.is_resumed:
        check_flops(model, c, machine, data['data'].batch(0))
    bar = tqdm(total=c.steps, initial=past.step,
               disable=machine.rank > 0 or not sys.stderr.isatty())
    ddp = compile_and_distribute(machine, model, c)
    run = Run(c, machine, data, changes(c), model, optimizers, ddp, past, bar)
    # already here, so that a bad metric fails before a folder is made
    measured = measure(run, c.metric) if c.metric or past.step == 0 else {}
    run.log = open_folder(beginning, data['data'].datasets)
    if c.wandb and machine.rank == 0:
        import wandb
        run.online = wandb.init(project='nanodepth', name=Path(c.out_dir).name, config=past.config)
    greet(run, typed, beginning, n_new)
    if not beginning.is_resumed:
        save_run(run)
        if has_own_parts(model, c) and machine.rank == 0:
            try_to_open(c.out_dir)
    if past.step == 0:
        write_line(run, {}, measured)
    return run


def greet(run, typed, beginning, n_new):
    "Print what is about to happen, and which settings the model decided."
    c, past, data = run.c, run.past, run.data['data']
    passes = data.passes(c.steps - (c.decay_steps if c.cooldown_data else 0))
    functions = [name for name, value in vars(c).items() if callable(value)]
    from_model = [f'{name}={value}' for name, value in vars(c).items()
                  if value != vars(typed)[name] and name not in MADE_THE_MODEL]
    say(f'{run.model.num_params():,} parameters, {run.machine.size} x {run.machine.device}; steps '
        f'{past.step:,} to {c.steps:,}; the data is read {passes:.2f} times')
    say(f'functions of the config: {", ".join(functions) or "none"}; decided by the model: '
        f'{", ".join(from_model) or "none"}')
    if beginning.origin and not beginning.is_resumed:
        # the model decides its shape, whatever was typed
        shape = vars(run.model.config).keys() - {'context'}
        differ = differences(beginning.trunk, past.config, {'out_dir', *MADE_THE_MODEL, *shape})
        of_rows = 'batch_size', 'context', 'data'
        if any(beginning.trunk[name] != past.config[name] for name in of_rows):
            differ += (' (rows are counted as if the trunk had had these settings, so some may be '
                       'read twice or never)')
        anew = f'; {n_new} parameters begin with new optimizer states' if n_new else ''
        say(f'a branch of {beginning.origin} after step {past.step:,}, with '
            f'{differ or "its settings"}{anew}')


if __name__ == '__main__':
    try:
        stopped_by = train(read(Config, sys.argv[1:]))
    except Refused as error:
        rank = os.environ.get('RANK')
        sys.exit(f'train: {error}' if rank is None else f'train, process {rank}: {error}')
    leave_processes()
    if stopped_by:          # make or a scheduler must not take it for finished
        sys.exit(128 + stopped_by)
