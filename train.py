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
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == '__main__':
    # A thread of torch that waits for work keeps its core busy, which slows down a run beside this
    # one. So it waits for 1,000 turns only. (This must be said before torch is loaded.)
    os.environ.setdefault('GOMP_SPINCOUNT', '1000')

import torch
from tqdm import tqdm

from grow import untie
from model import LM, Refused, require, unrolled
from retrofit import Core, core_of
from training.checkpoint import (as_written, load, open_log, prepare_folder, read_log,
                                 refuse_unreadable, save, written)
from training.loader import open_data, refuse_other_data
from training.machine import (RANK, SIZE, Machine, exchange, machine_of, say, stopping, together,
                              wrap)
from training.measure import measure
from training.optimizers import load_states, made_anew, make_optimizers, parameters_of
from training.picture import draw
from training.plan import (Config, hash_of_plans, model_config, plan, refuse_another_run,
                           refuse_what_does_not_fit, resolved, seed_for, stages)
from training.settings import read


@dataclass
class Run:
    "All that a run holds in memory. `change` gives it another model, `note` adds to its totals."
    c: Config                   # as `resolved` gave it
    machine: Machine
    data: dict                  # Loaders: 'data', 'val' and perhaps 'cooldown_data'
    model: LM
    optimizers: list
    wrapped: torch.nn.Module    # the model, or of several processes DDP around it
    totals: dict                # step, tokens, flops and seconds until now
    plans: str                  # a hash of the plans until now
    kept: dict                  # what each checkpoint says of the config, the data and the parent
    log: Any                    # log.jsonl; the null device where RANK is not 0
    bar: tqdm
    online: Any                 # wandb's run, or None


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
        events = change(run, now)               # the model may grow, or get another order
        began = time.perf_counter()
        with recurring(run.model, now):
            own_loss = backward(run, now, batch)
            flops = run.model.flops_per_token(context=c.context)    # with this step's r
        norm = clip(run)
        if step + 1 < c.steps:
            batch = fetch(run, step + 1)        # while the GPU works: `exchange` waits for it
        loss, stopped_by = exchange(run.machine, own_loss, signals)
        norm = norm.item()
        if not math.isfinite(loss + norm):      # in the log, so that a lower rate may go on here
            run.log.write(json.dumps(dict(step=step + 1, finite=False)) + '\n')
            raise Refused(f'step {step + 1} was not taken: loss {loss}, gradient norm {norm}. With '
                          'a lower --lr or --grad_clip the same command goes on')
        update(run, now.rate)
        note(run, now, events, time.perf_counter() - began, flops, loss=loss, grad_norm=norm)
        step = run.totals['step']
        stays = is_due(step, c.keep_every)
        if stays or is_due(step, c.save_every) or step == c.steps or stopped_by:
            save_run(run, [f'ckpt-{step}.pt', 'ckpt.pt'] if stays else ['ckpt.pt'])
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
def recurring(model, now):
    "In here a core runs as often as the plan says. (Its own r is for validation and checkpoints.)"
    core = core_of(model) or Core([])           # (a model without a core: one that nobody runs)
    own = dict(vars(core))      # r, backprop_depth, and the generators that `backward` sets
    core.r, core.backprop_depth = now.r, now.backprop_depth
    yield
    vars(core).update(own)


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
            seeds = [seed_for(run.c.seed, f'state of row {row + j}', now.step)
                     for j in range(len(x))]
            core.generators = [torch.Generator(x.device).manual_seed(seed) for seed in seeds]
        run.wrapped.require_backward_grad_sync = i == pieces - 1    # as DDP.no_sync() sets it
        with run.machine.autocast():
            # the model's loss is a mean: times its targets it is a sum (0 where none counts)
            share = run.wrapped(x, y) * (y != -1).sum() / n_targets.clamp(min=1)
        (share * SIZE).backward()           # DDP divides gradients by the number of processes
        loss += share.detach()
        row += len(x)
    return loss


def clip(run):
    "Clips the gradients, and returns their norm before that. (The order decides its last bit.)"
    return torch.nn.utils.clip_grad_norm_(parameters_of(run.optimizers),
                                          run.c.grad_clip or math.inf)


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
    event = dict(before=measure(run)['val_loss'])
    if grows:
        if run.c.keep_stages:
            save_run(run, [f'ckpt-{now.step}.pt', 'ckpt.pt'])
        run.wrapped = None      # DDP and its gradients go with the old model
        torch.manual_seed(seed_for(run.c.seed, 'growth', now.step))     # for `init`
        run.model = untie(run.model, now.grown_from, run.optimizers, run.c.init)
        run.optimizers = made_anew(run.optimizers, run.model, run.c)    # groups may be by depth
        gc.collect()            # the old model's memory: compiled Blocks are reference cycles
        torch.cuda.empty_cache()
        run.wrapped = wrap(run.machine, run.model)
        event |= dict(origin=now.grown_from, init=getattr(run.c.init, '__name__', None))
    else:
        run.model.order = now.order
    event['after'] = measure(run)['val_loss']
    say(f'now {now.n_layer} layers, {len(unrolled(run.model.order))} deep: the validation loss was '
        f'{event["before"]:.4f} and is {event["after"]:.4f}')
    return dict(grown=event) if grows else dict(looped=event)


def note(run, now, events, took, flops_per_token, **numbers):
    "After a step: add up what it cost, measure where that is due, and write a line of the log."
    c, totals = run.c, run.totals
    tokens = c.batch_size * c.context
    flops = int(tokens * flops_per_token)
    for name, more in dict(step=1, tokens=tokens, flops=flops, seconds=took).items():
        totals[name] += more
    run.plans = hash_of_plans(run.plans, now)
    step = totals['step']
    run.bar.update()
    is_measured = is_due(step, c.eval_every) or step == c.steps
    measured = measure(run, c.metric) if is_measured else {}
    if events or measured or is_due(step, c.log_every):
        recurrence = dict(r=now.r, backprop_depth=now.backprop_depth) if now.r else {}
        memory = torch.cuda.max_memory_allocated() / 1e9 if run.machine.cuda else None
        costs = dict(
            seconds=round(totals['seconds'], 1), tokens_per_s=round(tokens / took),
            memory_gb=memory and round(memory, 2),
            mfu=round(flops / took / run.machine.peak, 4) if run.machine.peak else None,
            lr=run.optimizers[0].param_groups[0]['lr'],         # with muon, of the layers' matrices
            passes=round(run.data[now.data].passes(now.batch + 1), 2))
        write_line(run, numbers | recurrence | events | costs, measured)


def is_due(step, every):
    return bool(every) and step % every == 0


def write_line(run, line, measured):
    "A line of the log. Its numbers stand beside the bar, or where nobody watches, on a line."
    depth = len(unrolled(run.model.order))
    line = run.totals | line | dict(n_layer=len(run.model.layers), depth=depth)
    require(not line.keys() & measured.keys(), 'a metric has the name of a number of the log')
    line |= measured
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


def save_run(run, names):
    save(run.c.out_dir, run.model, run.optimizers, names, plans=run.plans, **run.kept, **run.totals)


def report(run):
    "What a finished run leaves, and what to type next."
    out, flops = Path(run.c.out_dir), run.totals['flops']
    full = run.totals['tokens'] * run.model.flops_per_token(context=run.c.context)
    saving = f', {1 - flops / full:.1%} less than at the last depth' if run.c.grow else ''
    if RANK == 0:
        with contextlib.suppress(ImportError):      # without matplotlib there is no picture
            draw({out.name: read_log(out / 'log.jsonl')}, out / 'loss.png')
    say(f'{flops:.3e} training FLOPs{saving}. All is in {out}. Next: python probe.py {out}')


# --------------------------------------------------------------------------------- where it begins

def begin(c, machine, open_parent):
    "A Run at its first step, or at the next one, if it was stopped."
    out, data = Path(c.out_dir), open_data(c)
    model, saved, parent = open_model(c, data, open_parent)
    step = saved.get('step', 0)
    asked, c = c, resolved(c, model, saved)
    config = as_written(c)
    # is it what was asked for?
    refuse_what_does_not_fit(c, model, not saved, SIZE)
    if saved:
        refuse_another_run(c, config, saved, read_log(out / 'log.jsonl'))
    # cooldown_data may be another until it is read
    were_read = {'data', 'val', plan(c, step - 1).data} if step else {'data', 'val'}
    refuse_other_data(data, saved, parent, model.config.vocab_size, were_read)
    # the model as it is trained
    if core := core_of(model):
        core.r, core.backprop_depth, core.recompute = c.recurrence, c.backprop_depth, c.recompute
    if not saved:
        model.order = plan(c, 0).order or model.order
    model.to(machine.device, torch.float32)
    optimizers = make_optimizers(model, c)
    refuse_unreadable(model.order, optimizers)
    if saved:
        load_states(optimizers, saved['optimizers'])
    flops_before = parent.get('flops', 0) + parent.get('inherited_flops', 0)
    run = Run(c, machine, data, model, optimizers, wrap(machine, model),
              totals={name: saved.get(name, 0) for name in ('step', 'tokens', 'flops', 'seconds')},
              plans=saved.get('plans', ''),
              kept=dict(config=config, published=(saved or parent).get('published', False),
                        inherited_flops=saved.get('inherited_flops', flops_before),
                        data={name: loader.description() for name, loader in data.items()}),
              bar=tqdm(total=c.steps, initial=step, disable=RANK > 0 or not sys.stderr.isatty()),
              log=open(os.devnull, 'w'), online=None)
    measured = measure(run, c.metric) if step == 0 else {}
    # its folder: what was refused until here has left none
    if RANK == 0:
        if c.wandb:
            import wandb
            run.online = wandb.init(project='nanodepth', name=out.name, config=config)
        prepare_folder(out, config, data['data'].datasets, parent.get('copy_words'))
        run.log = open_log(out, step)
    trunk = c.steps - (c.decay_steps if c.cooldown_data else 0)
    decided = [f'{name}={value}' for name, value in vars(c).items() if value != vars(asked)[name]]
    functions = [name for name, value in vars(c).items() if callable(value)]
    say(f'{model.num_params():,} parameters, {SIZE} x {machine.device}; steps {step:,} to '
        f'{c.steps:,}; the data is read {data["data"].passes(trunk):.2f} times\nfunctions of the '
        f'config: {", ".join(functions) or "none"}; from the model: {", ".join(decided) or "none"}')
    if saved.get('config') != config:       # a new run, or what a resume may change
        save_run(run, ['ckpt.pt'])
    if step == 0:
        write_line(run, {}, measured)
    return run


def open_model(c, data, open_parent):
    """(model, saved, parent): the model of the run's last checkpoint, and what else that says; or
    init_from's, and what that says; or a new one. `saved` or `parent` is {} if there is none."""
    if (Path(c.out_dir) / 'ckpt.pt').exists():
        model, saved = load(c.out_dir)
        require(saved['optimizers'],
                f'{c.out_dir} has weights alone: --init_from={c.out_dir} begins with them')
        return model, saved, {}
    if c.init_from:
        model, parent = open_parent(c.init_from)
        return model, {}, parent
    torch.manual_seed(seed_for(c.seed, 'init'))
    n_vocab = c.vocab_size or data['data'].datasets[0].about['n_vocab']
    return LM(model_config(c, stages(c)[0].n_layer, n_vocab)), {}, {}


if __name__ == '__main__':
    try:
        stopped_by = train(read(Config, sys.argv[1:]))
    except Refused as error:
        sys.exit(f'train: {error}' if SIZE == 1 else f'train, process {RANK}: {error}')
    if stopped_by:          # make or a scheduler must not take it for finished
        sys.exit(128 + stopped_by)
