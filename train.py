"""The training loop of every run: plain, growing, looped or recurrent, on a laptop or eight GPUs.

The idea: what happens at a step is a function of the step's number. `plan` says it: how deep the
model is, in which order its layers run, at which rate it learns, which batch it reads. The loop
asks it and does it. So a run is its config and its seed, and the same command goes on where a run
was stopped, as if nothing had happened.

How to read this file: `plan` and `take_steps` are all of training. They stand first, behind the
settings. After them comes what they call, each part under a line with its name. A first reading
can stop at the optimizers.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A: linear warm-up, a constant
plateau, and a 1-sqrt decay; AdamW, gradients clipped at 1; datasets by fixed shares. A loop and
other data from the decay on: "From Growing to Looping", section 5.2. Muon: "Retrofitted
Recurrence", section 4.3.1.
Differs: the defaults are the toy's, with Muon for the layers' matrices and AdamW for the rest.

Usage:
    python train.py config/baseline.py --lr=2e-3        # minutes; any setting by --name=value
    python train.py --help                              # the settings
    torchrun --standalone --nproc_per_node=8 train.py config/smollm_360m_lidas.py
"""
import contextlib
import copy
import difflib
import functools
import gc
import hashlib
import inspect
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types
import typing
import warnings
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

if __name__ == '__main__':
    # A thread of torch that waits for work keeps its core busy, and slows the run beside this one
    # down. So it gives up after 1,000 turns. It must be said before torch is loaded.
    os.environ.setdefault('GOMP_SPINCOUNT', '1000')

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from grow import GROWTH, Stage, growth_plan, untie
from loop import fit_loop
from model import LM, ModelConfig, Refused, Step, loss_of_piece, steps_in
from retrofit import (Core, core_of, new_adapter, recurrence_curriculum, sample_recurrence,
                      seed_for)
from wrapper import Window


# ----------------------------------------------------------------------------------------- settings

@dataclass
class Config:
    # what is trained, on what, and where it is kept
    out_dir: str = 'out/run'
    seed: int = 0                       # of every random draw
    init_from: str | None = None        # another run's folder, which decides all of "the model"
    data: str | list[str] = 'data/toy'  # a folder, or several in equal parts
    context: int = 64                   # tokens of a training row
    batch_size: int = 32                # rows of a step, over all processes
    # the model
    vocab_size: int | None = None       # None: as many as the data's tokenizer has
    n_layer: int = 8                    # at the end, if it grows; the unique ones, if it loops
    n_embd: int = 128
    n_head: int = 4
    n_kv_head: int | None = None        # None: n_head
    head_dim: int | None = 64           # None: n_embd / n_head. The toy's heads are twice as wide
    ffn_dim: int | None = None          # None: 8/3 of n_embd
    tie_embeddings: bool = False        # the papers tie; a toy learns three times as fast untied
    ln_scaling: bool = False            # norms at depth d are scaled by 1/sqrt(d + 1)
    # the schedule: linear warm-up, constant, decay. Below 1 their lengths are shares of the steps
    steps: int = 600
    warmup_steps: float = 1 / 12
    decay_steps: float = 0.2            # the last steps: growing is over, the cool-down begins
    lr: float = 4e-3                    # the peak rate
    # how the rate falls from there; or a function (c, step) that gives its share of the peak
    lr_shape: Literal['1-sqrt', 'cosine', 'constant'] | Callable = '1-sqrt'
    # muon for the layers' matrices and AdamW for the rest, adamw for all; or a function (model, c)
    # that gives a list of optimizers
    optimizer: Literal['muon', 'adamw'] | Callable = 'muon'
    weight_decay: float = 0.01
    grad_clip: float = 1.0              # 0: none
    adamw_lr: float | None = None       # with muon, the peak rate of the rest; None: lr
    muon_scaling: Literal['match_rms_adamw', 'original'] = 'match_rms_adamw'    # of Muon's steps
    # growing; a model from init_from grows once, by one block
    # an operator of grow.py, or a function like them; None: full depth at once
    grow: Literal['midas', 'lidas', 'stack', 'double'] | Callable | None = None
    grow_block: int = 2                 # the layers to begin with, and those that a growth adds
    grow_alpha: float = 1.0             # stage i gets a share i^alpha of the steps before the decay
    init: Callable | None = None        # (new_layer, old_layer) changes a copy; None: an exact one
    # looping; n_layer counts the unique layers
    loop: str | None = None             # their order, such as 2x4 or 2-2x2-2; None: each runs once
    order: list[int | Step] | None = None       # or the order itself, in a config with Steps, too
    cooldown_loop: str | None = None    # the order from the first step of the decay on
    # what is read from there on, from its first batch on; None: data
    cooldown_data: str | list[str] | None = None
    # a recurrent core, which retrofit.py made; None: its own
    recurrence: int | None = None       # it runs r times, at random; r averages this number + 1
    backprop_depth: int | None = None   # at most so many last runs get gradients
    curriculum: float = 0.25            # over this part of the steps `recurrence` rises from 1
    curriculum_shape: Literal['linear', '1-sqrt'] = 'linear'
    backprop_curriculum: float = 0.0    # over this part of the steps backprop_depth rises from 1
    recompute: bool = False             # less memory: its runs are computed anew in the backward
    # what is measured and kept
    eval_every: int = 25
    eval_batches: int = 12              # batches of validation data per evaluation
    metric: Callable | None = None      # (model, val loader) gives {name: number} more for the log
    log_every: int = 10
    save_every: int = 200
    keep_every: int | None = None       # every so many steps a checkpoint stays, as ckpt-STEP.pt
    keep_stages: bool = False           # one before each growth stays, too
    resume: bool = True                 # false: move the run in out_dir aside and start over
    wandb: bool = False                 # show the log online, too (pip install wandb)
    # the machine
    device: Literal['auto', 'cuda', 'mps', 'cpu'] = 'auto'
    # auto: bfloat16 on GPUs fast at it; float32 is TF32 on GPUs that have it
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'
    compile: bool | Literal['auto'] = 'auto'    # auto: on for cuda
    grad_accum: int = 1                 # a process computes its rows in this many pieces


# --------------------------------------------------------------------------------------------- plan

class StepPlan(NamedTuple):
    "What one training step does."
    rate: float                         # the share of the peak rate
    n_layer: int
    grown_from: list | None             # the order that was untied into this stage's model
    order: list | None                  # what runs; None: as the model has it
    data: str                           # 'data' or 'cooldown_data'
    batch: int                          # which of its batches
    r: int | None = None                # how often a recurrent core runs,
    backprop_depth: int | None = None   # and through how many of these gradients go back


def plan(c, step, first_n_layer=None):
    """What a step does. first_n_layer: how many layers a model from init_from had at step 0.
    (Settings of a core that were None have been filled in by `resolved`.)"""
    cools_down = step >= first_of_decay(c)
    stage = [each for each in stages(c, first_n_layer) if each.first_step <= step][-1]
    loop = c.cooldown_loop if cools_down and c.cooldown_loop else c.loop
    order = fit_loop(loop, stage.n_layer) if loop else c.order
    data, batch = 'data', step
    if cools_down and c.cooldown_data:      # a reading of its own, also if data is part of it
        data, batch = 'cooldown_data', step - first_of_decay(c)
    r = backprop_depth = None
    if c.recurrence:    # gradients never go through more runs than the mean, as the authors have it
        mean = recurrence_curriculum(step, c.steps, c.recurrence, c.curriculum, c.curriculum_shape)
        most = recurrence_curriculum(step, c.steps, c.backprop_depth, c.backprop_curriculum)
        r, backprop_depth = sample_recurrence(mean, step, c.seed), min(most, mean)
    return StepPlan(rate(c, step), stage.n_layer, stage.grown_from, order, data, batch, r,
                    backprop_depth)


def in_steps(length, steps):
    "warmup_steps or decay_steps as a number of steps: below 1 it is a share of them all."
    return round(length * steps if length < 1 else length)


def first_of_decay(c):
    "The first step of the cool-down. Growth is over by then."
    return c.steps - in_steps(c.decay_steps, c.steps)


def stages(c, first_n_layer=None):
    "The Stages of a run: one, if it does not grow."
    first = first_n_layer or (c.grow_block if c.grow else c.n_layer)
    if not c.grow:
        return [Stage(0, None, first)]
    last = c.n_layer
    if c.init_from:             # a model that is there already grows once, whatever n_layer is
        operator = c.grow if callable(c.grow) else GROWTH[c.grow]
        last = len(operator(first, c.grow_block))
    return growth_plan(c.grow, last, c.grow_block, first_of_decay(c), c.grow_alpha, first)


def rate(c, step):
    """The share of the peak rate: linear up, constant, then down over the last decay_steps, by
    1 - sqrt, or by half a cosine to a thousandth, as the retrofit's authors have it."""
    if callable(c.lr_shape):
        return float(c.lr_shape(c, step))
    warmup, decay = in_steps(c.warmup_steps, c.steps), in_steps(c.decay_steps, c.steps)
    if step < warmup:
        return (step + 1) / warmup
    t = max(0, step - first_of_decay(c)) / max(1, decay)        # from 0 to 1 over the decay
    if c.lr_shape == '1-sqrt':
        return 1 - math.sqrt(t)
    if c.lr_shape == 'cosine':
        return 0.001 + 0.999 * (1 + math.cos(math.pi * t)) / 2
    return 1.0


# ----------------------------------------------------------------------------------------- the loop

@dataclass
class Run:
    "What a run consists of while it trains."
    c: Config                   # resolved: no share of the steps, no None that a core decides
    here: SimpleNamespace       # this process and its device, see `machine`
    out: Path                   # its folder
    data: dict                  # {'data', 'val', perhaps 'cooldown_data': a Loader}
    # what changes from step to step, and is saved
    model: LM
    wrapped: torch.nn.Module    # the same model as it is trained: in DDP, if processes are several
    optimizers: list
    totals: dict                # step, tokens, flops and seconds until now
    taken: str                  # a hash of the plans of all steps until now
    # what stays as it is
    first_n_layer: int | None   # for `plan`
    kept: dict                  # what each checkpoint says of the run, beside its weights
    # what is shown
    lines: list                 # of the log
    log: typing.IO
    bar: tqdm
    online: typing.Any = None   # of wandb


def train(c, open_parent=None):
    """To the end (returns 0), or until a signal (returns its number): the same command goes on from
    there. open_parent(init_from, classes) opens init_from; None: `load`, which opens runs alone."""
    with machine(c) as here:
        run = begin(c, here, open_parent or load)
        if run.totals['step'] == 0:
            write_line(run, **run.totals, **measure(run, c.metric))
        with stopping() as signals:
            stopped_by = take_steps(run, signals)
        run.bar.close()
        run.log.close()
        if run.totals['step'] < c.steps:
            say(f'stopped after step {run.totals["step"]}, and saved: the same command goes on'
                + ('' if c.resume else ', without --resume=false'))
            return stopped_by
        if here.rank == 0:
            report(run)
    return 0


def take_steps(run, signals):
    "Until the last step, or a signal, whose number is returned."
    c, here, optimizers, step = run.c, run.here, run.optimizers, run.totals['step']
    if step == c.steps:
        return 0
    batch = fetch(run, step)
    # n_targets: those of all processes
    _, n_targets, stopped_by = exchange(here, torch.zeros((), device=here.device), batch.n_targets)
    while step < c.steps and not stopped_by:
        now = plan(c, step, run.first_n_layer)
        events = change(run, now)               # the model may grow, or get another order
        began = time.perf_counter()

        # forward and backward; the next batch comes while the GPU is at work
        loss = backward(run, now, batch, n_targets)
        norm = clip(optimizers, c.grad_clip)
        next_batch = fetch(run, step + 1) if step + 1 < c.steps else batch
        # here it waits for the GPU
        loss, next_n_targets, stopped_by = exchange(here, loss, next_batch.n_targets, signals)
        norm = norm.item()
        if not math.isfinite(loss + norm):
            refuse_step(run, events, loss, norm)

        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group['lr'] = group['peak'] * now.rate
            optimizer.step()
            # DDP keeps gradients in buckets of its own: there they become 0
            optimizer.zero_grad(set_to_none=here.size == 1)
        step += 1

        note(run, now, events, time.perf_counter() - began, loss=loss, grad_norm=norm)
        stays = c.keep_every and step % c.keep_every == 0
        if stays or step % c.save_every == 0 or step == c.steps or stopped_by:
            save_run(run, *([f'ckpt-{step}.pt'] if stays else []), 'ckpt.pt')
        batch, n_targets = next_batch, next_n_targets
    return stopped_by


class Batch(NamedTuple):
    "This process's rows of a step."
    tokens: torch.Tensor                # (B, T)
    targets: torch.Tensor               # (B, T), -1 where a token is no target
    n_targets: int


def fetch(run, step):
    "The Batch of a step, on its way to the device."
    now, device, cuda = plan(run.c, step, run.first_n_layer), run.here.device, run.here.cuda
    tokens, targets, _ = run.data[now.data].batch(now.batch)
    n_targets = (targets != -1).sum().item()    # counted here, where it does not wait for a GPU
    if cuda:                                    # pinned memory is sent while the GPU works
        tokens, targets = tokens.pin_memory(), targets.pin_memory()
    return Batch(tokens.to(device, non_blocking=cuda), targets.to(device, non_blocking=cuda),
                 n_targets)


def backward(run, now, batch, n_targets):
    """Gradients of this process's rows, in pieces; returns their part of the loss. The loss is one
    sum over the targets of all processes, divided by their number: a mean for each piece would give
    tokens of short answers more weight."""
    c, here, loss = run.c, run.here, 0.0
    pieces = zip(batch.tokens.chunk(c.grad_accum), batch.targets.chunk(c.grad_accum))
    for i, (x, y) in enumerate(pieces):
        how = {}
        if now.r:
            first = here.rank * len(batch.tokens) + i * len(x)      # the number of its first row
            how = dict(r=now.r, backprop_depth=now.backprop_depth,
                       generator=noise_of_rows(run, range(first, first + len(x))))
        if here.size > 1:   # DDP exchanges gradients with the last piece alone
            run.wrapped.require_backward_grad_sync = i == c.grad_accum - 1
        with here.autocast():
            # the model's loss is a mean: times its targets it is a sum (0 where none counts)
            share = run.wrapped(x, y, **how) * (y != -1).sum() / max(1.0, n_targets)
        (share * here.size).backward()      # DDP divides gradients by the number of processes
        loss += share.detach()
    return loss


def noise_of_rows(run, rows):
    """A core's first states are noise. That of a row depends on the step and the row's number, and
    not on how rows are shared out among processes and pieces."""
    seeds = [seed_for(run.c.seed, f'state of row {row}', run.totals['step']) for row in rows]
    return [torch.Generator(run.here.device).manual_seed(seed) for seed in seeds]


def clip(optimizers, most):
    "Gradients are scaled down to a joint norm of `most` (0: they are not). Their norm before that."
    # A sum in another order has another last bit, so it is always the optimizers' order.
    params = [p for optimizer in optimizers for group in optimizer.param_groups
              for p in group['params']]
    return torch.nn.utils.clip_grad_norm_(params, most or math.inf)


def exchange(here, loss, n_targets, signals=()):
    """A step's one message, and its one wait for the GPU: (the sum of the processes' losses, that
    of their targets, the number of a signal that one of them got, or 0)."""
    signal_number = max(signals, default=0)
    if here.size == 1:
        return float(loss), n_targets, signal_number
    # full_like and not tensor: a copy to the GPU would wait for it
    own = torch.stack([loss.double(), *(torch.full_like(loss, number, dtype=torch.float64)
                                        for number in (n_targets, signal_number))])
    every = [torch.empty_like(own) for _ in range(here.size)]
    dist.all_gather(every, own)         # not all_reduce: two are summed, of one it is the maximum
    losses, counts, signal_numbers = torch.stack(every).cpu().unbind(1)
    return losses.sum().item(), counts.sum().item(), int(signal_numbers.max())


def change(run, now):
    """Grow the model, or give it another order, if the step's plan says so. Returns what the log
    says of that: {} if nothing changed."""
    grows = now.n_layer > len(run.model.layers)
    same_order = now.order is None or written(now.order) == written(run.model.order)
    if not grows and same_order:
        return {}
    event = dict(before=measure(run)['val_loss'])
    if grows:
        if run.c.keep_stages:
            save_run(run, f'ckpt-{run.totals["step"]}.pt', 'ckpt.pt')
        run.wrapped = None      # DDP and its gradients go with the old model
        torch.manual_seed(seed_for(run.c.seed, 'growth', run.totals['step']))   # for `init`
        run.model = untie(run.model, now.grown_from, run.optimizers, run.c.init)
        gc.collect()            # so does its memory: compiled Blocks are reference cycles
        if run.here.cuda:
            torch.cuda.empty_cache()
        run.wrapped = wrap(run.here, run.model)
    else:
        run.model.order = now.order
    event['after'] = measure(run)['val_loss']
    say(f'before step {run.totals["step"] + 1}: {now.n_layer} layers, {len(run.model.unrolled())} '
        f'deep; the validation loss was {event["before"]:.4f} and is {event["after"]:.4f}')
    if not grows:
        return dict(looped=event)
    return dict(grown=event | dict(origin=now.grown_from, init=run.kept['config']['init']))


def refuse_step(run, events, loss, norm):
    "A loss or gradients that are not finite: the weights before them are saved, and the run ends."
    # They may be far off already, so the checkpoint before them stays, too.
    last, step = run.out / 'ckpt.pt', run.totals['step']
    if run.here.rank == 0 and last.exists():
        _, saved = load(last, {*map(type, steps_in(run.model.order))})
        copy_whole(last, run.out / f'ckpt-{saved["step"]}.pt')
    # A model that has just grown is not saved: its growth is not in the log yet, and a resume,
    # which would find it grown, could not write it there. It grows again from the last checkpoint.
    if not events:
        save_run(run, 'ckpt.pt')
    raise Refused(f'step {step + 1} has loss {loss} and gradient norm {norm}, so it was not taken; '
                  f'{last} holds the last weights before it, and a ckpt-STEP.pt beside it those of '
                  'the last checkpoint. Try a lower --lr or a longer --warmup_steps, in another '
                  '--out_dir')


# --------------------------------------------------------------------------------------- optimizers

def make_optimizers(model, c):
    """AdamW for everything, or Muon for the layers' matrices and AdamW for the rest: embedding and
    head, whose rows are looked up one by one, and norms, which do not decay. A group's 'peak' is
    its peak rate."""
    if callable(c.optimizer):
        optimizers = c.optimizer(model, c)
        places = {p: i for i, p in enumerate(model.parameters())}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                its = [places[p] for p in group['params']]      # a growth sorts them so, too, and a
                # checkpoint knows a parameter's state by its place in the group
                assert its == sorted(its), 'a group has its parameters in the order of the model'
                group.setdefault('peak', group['lr'])
        return optimizers
    matrices, rest, norms = [], [], []
    for name, p in model.named_parameters():
        if p.dim() < 2:
            norms.append(p)
        elif c.optimizer == 'adamw' or name in ('embed.weight', 'head.weight'):
            rest.append(p)
        else:
            matrices.append(p)
    lr = c.lr if c.adamw_lr is None or c.optimizer == 'adamw' else c.adamw_lr
    groups = [dict(params=rest, weight_decay=c.weight_decay, peak=lr),
              dict(params=norms, weight_decay=0.0, peak=lr)]
    adamw = torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)
    if c.optimizer == 'adamw':
        return [adamw]
    return [Muon([dict(params=matrices, peak=c.lr)], c.lr, c.weight_decay,
                 adjust_lr_fn=c.muon_scaling), adamw]


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal: a matrix's step moves every direction alike. It computes what
    torch.optim.Muon does, but in float32 on a CPU, most of which only emulate bfloat16. Each
    process makes its share of the matrices orthogonal, and sends it to the others. adjust_lr_fn:
    'match_rms_adamw' makes steps as large as AdamW's; 'original' is the first Muon's."""

    AT_ONCE = 2 ** 25       # numbers in one batch of matrices: all of a large model fill a GPU

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95,
                 adjust_lr_fn='match_rms_adamw'):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum,
                                      adjust_lr_fn=adjust_lr_fn))

    @torch.no_grad()
    def step(self, closure=None):
        # Each process takes its part of a batch, so that a batch is as large as all their parts.
        for group in self.param_groups:
            by_shape = {}       # matrices of one shape, or its transpose, go in one batch
            for p in group['params']:
                if p.grad is not None:
                    by_shape.setdefault(tuple(sorted(p.shape)), []).append(p)
            _, processes, _ = which_process()
            for (n, m), matrices in by_shape.items():
                at_once = max(1, self.AT_ONCE // (n * m)) * processes
                for i in range(0, len(matrices), at_once):
                    self.step_of(matrices[i:i + at_once], **group)

    def step_of(self, matrices, lr, weight_decay, momentum, adjust_lr_fn, **_):
        """A step of some matrices; `_` is what else a group says. Functions torch._foreach_... are
        one kernel for all matrices, where a GPU would start hundreds."""
        for p in matrices:
            if 'momentum_buffer' not in self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
        grads = [p.grad for p in matrices]
        buffers = [self.state[p]['momentum_buffer'] for p in matrices]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        # This process makes its share of them orthogonal. The last processes may have fewer left:
        # there the last matrix is computed again.
        rank, size, _ = which_process()
        share = math.ceil(len(matrices) / size)
        own = [min(i, len(matrices) - 1) for i in range(rank * share, (rank + 1) * share)]
        updates = torch._foreach_lerp([grads[i] for i in own], [buffers[i] for i in own],
                                      momentum)                         # Nesterov's look ahead
        # all wide, so that they are one tensor, and the products in `orthogonal` smaller
        updates = torch.stack([u.mT if u.shape[0] > u.shape[1] else u for u in updates])
        updates = orthogonal(updates.to(torch.bfloat16 if updates.is_cuda else torch.float32))
        updates = of_all_processes(updates).to(matrices[0].dtype)
        torch._foreach_mul_(matrices, 1 - lr * weight_decay)
        for n, m in {tuple(p.shape) for p in matrices}:         # one shape, and its transpose
            scale = (0.2 * math.sqrt(max(n, m)) if adjust_lr_fn == 'match_rms_adamw' else
                     math.sqrt(max(1, n / m)))
            # (zip leaves out what the last processes computed again)
            its = [p for p in matrices if p.shape == (n, m)]
            steps = [u.mT if n > m else u for p, u in zip(matrices, updates) if p.shape == (n, m)]
            torch._foreach_sub_(its, steps, alpha=lr * scale)


def of_all_processes(x):
    "The rows of each process's x (k, ...), one after another."
    _, size, _ = which_process()
    if size == 1:
        return x
    every = x.new_empty(size * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(every, x.contiguous())
    return every


def orthogonal(x):
    """Matrices (k, n, m), n <= m, with their singular values pushed towards 1: five steps of
    Newton-Schulz, each the odd polynomial a s + b s^3 + c s^5 of every singular value s. The
    coefficients are Keller Jordan's: steepest at 0, and from there on within 0.7 to 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT                                                         # (k, n, n)
        even = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)     # b gram + c gram gram
        x = torch.baddbmm(x, even, x, beta=a)                       # a x + even x
    return x


# --------------------------------------------------------------------------------------------- data
# A dataset is a folder. Its train.json and val.json say what is in the shards train_*.bin and
# val_*.bin, which are tokens and nothing else. Beside a .bin may be a .mask (1 where a token counts
# in the loss) and a .marks (which kind of answer a token belongs to, plus 128 where an answer
# begins). A folder may also be a mixture: mixture.json is {folder in it: share}.

# may stand there, too
TOKENIZER_FILES = ('tokenizer_config.json', 'special_tokens_map.json', 'generation_config.json',
                   'chat_template.jinja', 'tokenizer.json')
BEGINS = 128
PERIOD = 1000       # a mixture's shares are exact in every thousand rows


class Dataset:
    "A dataset's windows of `context` tokens. Window i always holds the same ones."

    def __init__(self, folder, split, context):
        self.folder, self.context, self.file = folder, context, folder / f'{split}.json'
        self.about, self.written_at = json.loads(self.file.read_text()), self.file.stat().st_mtime
        # where each shard's windows end, if all are numbered one after the other
        self.ends = np.cumsum([(shard['tokens'] - 1) // context for shard in self.about['shards']])
        self.new_marks = np.arange(2 * BEGINS)      # what `read` gives for each mark, see below

    def number_kinds(self, kinds):
        "From now on, `read` gives each kind of answer its number among these, from 1 on."
        for i, kind in enumerate(self.about['kinds'], 1):
            self.new_marks[i] = 1 + kinds.index(kind)
            self.new_marks[i + BEGINS] = self.new_marks[i] + BEGINS

    @functools.lru_cache(300)       # more would be too many open files
    def shard(self, s):
        "{'.bin': its tokens}, and .mask and .marks, if it has them; mapped, not read."
        shard, arrays = self.about['shards'][s], {}
        if self.file.stat().st_mtime != self.written_at:        # while a run has read others
            assert json.loads(self.file.read_text()) == self.about, f'{self.folder} has changed'
        for ending in shard['sha256']:          # its keys are the endings of the files there are
            path = self.folder / Path(shard['file']).with_suffix(ending).name
            dtype = self.about['dtype'] if ending == '.bin' else 'uint8'
            assert dtype in ('uint8', 'uint16', 'uint32'), f'{path} has no tokens of {dtype}'
            arrays[ending] = np.asarray(np.memmap(path, dtype, 'r', shape=(shard['tokens'],)))
        return arrays

    def read(self, windows):
        "Of n windows (3, n, T): tokens, the tokens after them (-1 is no target), marks of those."
        T, rows = self.context, np.zeros((3, len(windows), self.context), np.int64)
        of_shard = self.ends.searchsorted(windows, side='right')
        first = (windows - np.append(0, self.ends)[of_shard]) * T       # its place in its shard
        for s in np.unique(of_shard).tolist():
            arrays, its = self.shard(s), of_shard == s
            # sliding_window_view(a, n)[i] is a[i:i + n]; a target stands one place after its token
            tokens = sliding_window_view(arrays['.bin'], T + 1)[first[its]]
            rows[0, its], rows[1, its] = tokens[:, :-1], tokens[:, 1:]
            if '.mask' in arrays:
                counts = sliding_window_view(arrays['.mask'], T)[first[its] + 1] > 0
                rows[1, its] = np.where(counts, rows[1, its], -1)
            if '.marks' in arrays:
                marks = sliding_window_view(arrays['.marks'], T)[first[its] + 1]
                rows[2, its] = self.new_marks[marks]
        return rows


def folders_of(data):
    "The folders of a setting of data; of None there are none."
    return data if isinstance(data, list) else str(data).split(',') if data else []


def parts_of_mixture(folder):
    "{folder: its share} of what a mixture is made of; a dataset is made of itself."
    file = find(folder) / 'mixture.json'
    shares = json.loads(file.read_text()) if file.exists() else {'.': 1}
    return {find(folder) / name: share for name, share in shares.items()}


class Loader:
    """Batches of c.batch_size rows of c.context tokens for all processes together, each of which
    gets its equal part. Which window of the data a row holds follows from (seed, number of the
    row): none comes twice within an epoch of its dataset, and the next epoch has another order."""

    def __init__(self, c, data, split='train', seed=0):
        self.batch_size, self.context, self.seed = c.batch_size, c.context, seed
        self.rank, self.size, _ = which_process()
        self.datasets, shares = [], []
        for folder in folders_of(data):
            parts = parts_of_mixture(folder)
            for part, share in parts.items():
                self.datasets.append(Dataset(part, split, c.context))
                shares.append(share / sum(parts.values()))
        self.windows = np.array([each.ends[-1] for each in self.datasets])      # of each dataset
        # rows of each dataset in a period: rounded down, the rest to the largest remainders
        exact = [share * PERIOD / sum(shares) for share in shares]
        self.quota = [math.floor(rows) for rows in exact]
        by_remainder = sorted(range(len(exact)), key=lambda d: -(exact[d] - self.quota[d]))
        for d in by_remainder[:PERIOD - sum(self.quota)]:
            self.quota[d] += 1
        assert min(*self.windows, *self.quota) > 0, f'{data}: a dataset that would never be read'
        # kinds of answers, numbered through all datasets: another's second may be the first here
        self.kinds = list(dict.fromkeys(kind for each in self.datasets
                                        for kind in each.about['kinds']))
        for each in self.datasets:
            each.number_kinds(self.kinds)

    def __len__(self):
        "Batches until some dataset has been seen once."
        return max(1, min(self.windows * PERIOD // self.quota) // self.batch_size)

    def description(self):
        "What a checkpoint keeps of the data, to know it again: all that the JSON files say."
        return [each.about | dict(rows_of_1000=n) for each, n in zip(self.datasets, self.quota)]

    def passes(self, batches):
        "How often the dataset that is read most has been read after so many batches."
        return max(batches * self.batch_size * np.array(self.quota) / PERIOD / self.windows).item()

    def of_all_processes(self):
        "The same, but each process reads all rows of a batch."
        loader = copy.copy(self)
        loader.rank, loader.size = 0, 1
        return loader

    def batch(self, step, again=True):
        """(tokens, targets, marks of the targets), (B, T) each; -1 is no target. again=False leaves
        out rows that were there before: small data is gone through several times."""
        n = self.batch_size // self.size
        first = step * self.batch_size + self.rank * n
        dataset, epoch, window = self.places(np.arange(first, first + n))
        if not again:
            dataset, window = dataset[epoch == 0], window[epoch == 0]
        rows = np.zeros((3, len(window), self.context), np.int64)
        for d in np.unique(dataset).tolist():
            rows[:, dataset == d] = self.datasets[d].read(window[dataset == d])
        return torch.from_numpy(rows).unbind()

    def places(self, rows):
        """Of rows, numbered through the whole run: (whose they are, in which epoch, which window).
        Say row 1,237 is, by `turns`, dataset 0's 866th. If that has 500 windows, the row is in
        its epoch 1, and holds the one of them that comes 366th in that epoch's permutation."""
        dataset, number = np.empty_like(rows), np.empty_like(rows)
        for period in np.unique(rows // PERIOD).tolist():
            its = rows // PERIOD == period
            datasets, numbers = self.turns(period)
            dataset[its] = datasets[rows[its] % PERIOD]
            number[its] = numbers[rows[its] % PERIOD]
        epoch, window = np.divmod(number, self.windows[dataset])
        for d, e in {*zip(dataset.tolist(), epoch.tolist())}:
            its = (dataset == d) & (epoch == e)
            key = seed_for(self.seed, f'epoch of dataset {d}', e)
            window[its] = permute(window[its], self.windows[d].item(), key)
        return dataset, epoch, window

    @functools.lru_cache(4)
    def turns(self, period):
        "For each row of a period: (whose it is, how many of that dataset's rows came before it)."
        datasets = np.repeat(np.arange(len(self.quota)), self.quota)
        shuffled = permute(np.arange(PERIOD), PERIOD, seed_for(self.seed, 'mixture', period))
        datasets, numbers = datasets[shuffled], np.empty(PERIOD, int)
        for d, quota in enumerate(self.quota):
            numbers[datasets == d] = period * quota + np.arange(quota)
        return datasets, numbers


def permute(places, n, key):
    """Where an array of places goes in the permutation of range(n) that the key picks. Unlike
    numpy's, it needs no list of n: there may be billions of windows. (How it does so matters
    nowhere else. A Feistel network of four rounds permutes the numbers below a power of four, by
    exchanging and mixing the two halves of their bits. A place that it sends past n is sent on
    until it comes back below n.)"""
    bits = max(1, ((n - 1).bit_length() + 1) // 2)              # of a half
    half, mask = np.uint64(bits), np.uint64(2 ** bits - 1)
    result, outside = np.array(places, np.uint64), np.ones(len(places), bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for turn in range(4):
            mixed = mix(right + np.uint64((key + turn * 0x9E3779B97F4A7C15) % 2 ** 64))
            left, right = right, left ^ (mixed & mask)
        result[outside] = (left << half) | right
        outside = result >= n
    return result.astype(np.int64)


def mix(z):
    "splitmix64's way to mix the bits of 64-bit numbers."
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# --------------------------------------------------------------------------------- what is measured

OF_THE_LOG = set('step tokens flops seconds loss grad_norm lr tokens_per_s memory_gb mfu passes r '
                 'backprop_depth grown looped n_layer depth val_loss kinds'.split())


def measure(run, metric=None):
    "What the log says of a model: the validation loss, right answers, a config's own metric."
    if core := core_of(run.model):
        core.forwards = 0       # with `fresh`, a measurement draws what another one has drawn
    run.model.eval()
    with run.here.autocast(), torch.no_grad():
        numbers = validate(run.model, run.data['val'], run.c.eval_batches, run.c.grad_accum)
        more = metric(run.model, run.data['val'].of_all_processes()) if metric else {}
    run.model.train()
    if taken := more.keys() & OF_THE_LOG:
        raise Refused(f'the log has a {min(taken)} already: let the metric call its own otherwise')
    return numbers | {name: float(more[name]) for name in more}


@torch.no_grad()
def validate(model, loader, batches=None, pieces=1):
    """The mean loss over the first batches (None: until a dataset ends), and of each kind of answer
    its loss and the share of right ones."""
    # for all tokens, and for each kind of answer: its losses, tokens, right answers and answers
    sums = torch.zeros(1 + len(loader.kinds), 4, dtype=torch.float64)
    for step in range(min(batches or len(loader), len(loader))):
        of_batch = torch.zeros_like(sums)
        for x, y, marks in zip(*(t.chunk(pieces) for t in loader.batch(step, again=False))):
            if not len(x):
                continue
            losses, wrong = losses_of(model, x, y)
            # row by row, so that the sum has the same bits in any number of pieces
            for of_row, count in zip(losses.sum(1), (y != -1).sum(1)):
                of_batch[0, :2] += torch.stack((of_row, count))
            kinds, right = answers_of(marks, wrong)
            for k in range(1, len(sums)):
                of_kind, rights = marks % BEGINS == k, right[kinds == k]
                of_batch[k] += torch.tensor([losses[of_kind].sum(), of_kind.sum(),
                                             rights.sum(), len(rights)])
        sums += of_batch
    if loader.size > 1:
        sums = sums.to(model.norm.weight.device)
        dist.all_reduce(sums)
    (loss, n, *_), *of_kinds = sums.tolist()
    return dict(val_loss=loss / max(1, n), kinds={
        kind: dict(loss=loss / n, accuracy=right / answers)
        for kind, (loss, n, right, answers) in zip(loader.kinds, of_kinds) if answers})


def answers_of(marks, wrong):
    """(each answer's kind, is all of it right). An answer lasts from a mark above 128 to the next
    one, or to a 0. The rest of one that began in the row before counts nowhere."""
    begins = marks >= BEGINS
    counter = begins.clone()
    counter[:, 0] = True            # so that such a rest is not taken for the row before
    number = counter.flatten().cumsum(0).view_as(marks)         # (B, T): the answer's number
    mistakes = torch.bincount(number[wrong & (marks > 0)], minlength=int(number.max()) + 1)
    return marks[begins] - BEGINS, mistakes[number[begins]] == 0


def losses_of(model, tokens, targets):
    "(the loss of each target, is another token likelier), (B, T) each; logits are made in pieces."
    device, losses, wrong = model.norm.weight.device, [], []
    rows = max(1, 2 ** 16 // tokens.shape[1])
    for x, y in zip(tokens.to(device).split(rows), targets.to(device).split(rows)):
        x, y = model.norm(model.hidden(x)).flatten(0, 1), y.flatten()           # (B*T, C)
        at_once = 4096 if x.is_cuda else max(1, 2 ** 26 // len(model.head.weight))
        for part, answers in zip(x.split(at_once), y.split(at_once)):
            logits = model.head(part)
            losses.append(F.cross_entropy(logits.float(), answers, ignore_index=-1,
                                          reduction='none'))
            wrong.append(logits.argmax(-1) != answers)
    return (torch.cat(losses).cpu().double().view(targets.shape),
            torch.cat(wrong).cpu().view(targets.shape))


# ------------------------------------------------------------------------- the log and what is said

def note(run, now, events, took, **numbers):
    "After a step: add up what it cost, measure where that is due, and write a line of the log."
    c, here, n = run.c, run.here, run.c.batch_size * run.c.context
    flops = n * run.model.flops_per_token(None, c.context, now.r, now.backprop_depth)
    for name, more in (('step', 1), ('tokens', n), ('flops', flops), ('seconds', took)):
        run.totals[name] += more
    run.taken = hash_of_plans(run.taken, now)
    step = run.totals['step']
    measured = measure(run, c.metric) if step % c.eval_every == 0 or step == c.steps else {}
    if events or measured or step % c.log_every == 0:
        memory = round(torch.cuda.max_memory_allocated() / 1e9, 2) if here.cuda else None
        core = dict(r=now.r, backprop_depth=now.backprop_depth) if now.r else {}
        totals = run.totals | dict(seconds=round(run.totals['seconds'], 1))
        write_line(run, **totals, **numbers,
                   lr=run.optimizers[0].param_groups[0]['lr'],      # of the layers' matrices
                   tokens_per_s=round(n / took), memory_gb=memory,
                   mfu=here.peak and round(flops / took / here.peak, 4),
                   passes=round(run.data[now.data].passes(now.batch + 1), 2),
                   **core, **events, **measured)
    run.bar.update()


def write_line(run, **line):
    "A line of the log; its numbers stand beside the bar, or where nobody watches, on a line."
    line |= dict(n_layer=len(run.model.layers), depth=len(run.model.unrolled()))
    run.lines.append(line)
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


def say(text):
    "A line on the terminal, above the bar."
    if which_process()[0] == 0:
        with contextlib.suppress(OSError):      # it may be closed: the run is saved all the same
            tqdm.write(text)
            sys.stdout.flush()


def report(run):
    "What a finished run leaves, and what to type next."
    c, out, model, flops = run.c, run.out, run.model, run.totals['flops']
    saving = ''
    if c.grow and not c.init_from:      # compared with all layers from the first step on
        full = c.batch_size * c.context * (
            (c.steps - c.decay_steps) * model.flops_per_token(range(c.n_layer), c.context)
            + c.decay_steps * model.flops_per_token(None, c.context))
        saving = f', {1 - flops / full:.1%} less than at full depth'
    try:
        draw(run.lines, out / 'loss.png')
        picture = 'left the losses, right how many answers are right; at a dotted line layers begin'
    except ImportError:
        picture = 'not drawn, because matplotlib is not installed'
    say(f'{flops:.3e} training FLOPs{saving}\n{out}/loss.png: {picture}\n{out}/log.jsonl: the '
        f'numbers\nnext: python probe.py {out} (or nanodepth probe) says what each layer does for '
        f'later tokens, and nanodepth play {out} opens a page on which you move them')


def draw(lines, path):
    "The losses, and how many answers are right: a line for each number of aliases to follow."
    from matplotlib.figure import Figure
    figure = Figure((12, 4.5), layout='constrained')
    left, right = figure.subplots(1, 2)
    trained = [line for line in lines if 'loss' in line]
    measured = [line for line in lines if 'val_loss' in line]
    steps = [line['step'] for line in measured]
    kinds = [kind for kind in measured[-1]['kinds']
             if all(kind in line['kinds'] for line in measured)]
    left.plot([line['step'] for line in trained], [line['loss'] for line in trained],
              color='#bbbbbb', label='training')
    left.plot(steps, [line['val_loss'] for line in measured], label='validation')
    if 'text' in kinds:
        kinds.remove('text')
        left.plot(steps, [line['kinds']['text']['loss'] for line in measured],
                  label='validation, on text alone')
    for i, kind in enumerate(kinds):
        share = [100 * line['kinds'][kind]['accuracy'] for line in measured]
        [curve] = right.plot(steps, share)
        # Its name stands beside it where it rises. The curves end at one height, so each name has
        # a height of its own.
        height = min(max(share), 40 + 12 * i)
        at = next(j for j in range(len(share)) if share[j] >= height)
        x = np.interp(height, share[max(0, at - 1):at + 1], steps[max(0, at - 1):at + 1])
        right.text(x, height, f'{kind} '.replace('depth', 'aliases:'), color=curve.get_color(),
                   ha='right', weight='bold')
    for line in lines:
        if line['step'] == 0 or line.keys() & {'grown', 'looped'}:
            for ax in (left, right):
                ax.axvline(line['step'], ls=':', color='#888888')
                ax.text(line['step'], 0.02, f' {line["depth"]} layers', rotation=90,
                        transform=ax.get_xaxis_transform())
    left.legend()
    left.set(xlabel='steps', ylabel='loss (nats per token)')
    right.set(xlabel='steps', ylabel='% of the answers that are right', ylim=(-3, 103))
    with whole(path) as new:
        figure.savefig(new, format='png', dpi=130)


# ---------------------------------------------------------------------- this process and its device
# Dense bfloat16 FLOPs per second. The first name that a GPU has counts; None: it is not known.
PEAKS = {'Laptop': None, '4090 D': None, 'H100 PCIe': 756e12, 'H100 NVL': 835e12,
         'H200 NVL': 835e12, 'H200': 989e12, 'H100': 989e12, 'B200': 2250e12, 'A100': 312e12,
         'L40S': 362e12, 'L40': 181e12, '4090': 165e12}


def which_process():
    "(its rank, how many there are, its number on this machine): torchrun says so."
    if 'RANK' not in os.environ:        # some clusters set WORLD_SIZE alone
        return 0, 1, 0
    return tuple(int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'))


@contextlib.contextmanager
def machine(c):
    "This process's device, and what it can do; in here the processes of a run are together."
    rank, size, local = which_process()
    file = lock(Path(c.out_dir)) if rank == 0 else None         # before the processes meet
    kind = c.device
    if kind == 'auto':
        kind = ('cuda' if torch.cuda.is_available() else
                'mps' if torch.backends.mps.is_available() else 'cpu')
    device, is_cuda, peak, is_half = torch.device(kind), kind == 'cuda', None, c.dtype == 'bfloat16'
    if is_cuda:
        device = torch.device('cuda', local)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
        is_half |= c.dtype == 'auto' and torch.cuda.get_device_capability() >= (8, 0)
        name = torch.cuda.get_device_name()
        peak = next((PEAKS[each] for each in PEAKS if each in name), None)
    compiles = is_cuda if c.compile == 'auto' else c.compile
    if compiles:        # with it, DDP would make torch.compile cut each Block at every 25 MB
        torch._dynamo.config.optimize_ddp = False
    if size > 1:
        dist.init_process_group('nccl' if is_cuda else 'gloo', timeout=timedelta(minutes=10),
                                device_id=device if is_cuda else None)
    here = SimpleNamespace(
        rank=rank, size=size, device=device, cuda=is_cuda, compiles=compiles, lock=file,
        peak=peak and peak * size,      # FLOPs per second of all of the run's GPUs
        autocast=functools.partial(torch.autocast, kind, torch.bfloat16, enabled=is_half))
    try:
        yield here
    finally:
        if here.lock:
            here.lock.close()
        # After an error NCCL would wait for the others here, and the error would stay unsaid.
        if size > 1 and not (is_cuda and sys.exc_info()[0]):
            # Gloo's threads need the interpreter's lock to let go of a message. Destroying the
            # group waits for them while it holds that lock, so they get a moment before it.
            time.sleep(0.2)
            dist.destroy_process_group()


@contextlib.contextmanager
def stopping():
    """In here Ctrl-C, SIGTERM and a closed terminal wait for the step's end: their numbers go into
    the list. A second Ctrl-C does not wait."""
    signals, handlers = [], {}

    def ask(number, frame):
        if signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        signals.append(number)
    hangup = getattr(signal, 'SIGHUP', signal.SIGTERM)      # Windows has none; nohup ignores it
    for number in {signal.SIGINT, signal.SIGTERM, hangup}:
        if number != hangup or signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = signal.signal(number, ask)
    try:
        yield signals
    finally:
        for number in handlers:
            signal.signal(number, handlers[number])


def wrap(here, model):
    "As it is trained: each Block compiled by itself, so that no growth compiles again; in DDP."
    if here.compiles:
        for block in model.layers:
            block.compile()
        if here.cuda:
            model.compiled_loss = torch.compile(loss_of_piece, dynamic=False)
    if here.size == 1:
        return model
    # Without find_unused_parameters DDP sorts its buckets anew after the first step: on three
    # processes or more a resumed run would add gradients in another order.
    with warnings.catch_warnings(action='ignore', category=FutureWarning):      # DDP's own
        wrapped = DistributedDataParallel(model, find_unused_parameters=True,
                                          broadcast_buffers=False, gradient_as_bucket_view=True)
    # By itself DDP would multiply by 1/3 in the first step, and divide by 3 in all later ones.
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


# ------------------------------------------------------------------------------- where a run begins

def begin(c, here, open_parent):
    "All that a run needs at its first step, or at the next one, if it was stopped."
    # 1. what there is
    if c.wandb:
        import wandb
    data = open_data(c, here)
    model, saved, parent = open_model(c, data, open_parent)
    step, core = saved.get('step', 0), core_of(model)
    refuse_several_folders(here, step)
    at_start = saved.get('start') or what_it_starts_with(c, model)
    # 2. is it what was asked for?
    c = resolved(c, at_start, saved)
    first_n_layer = at_start['n_layer'] if c.init_from else None
    refuse_what_does_not_fit(c, model, data, parent)
    config = as_written(c)
    if saved:
        refuse_another_run(c, config, saved, first_n_layer, data)
    # 3. the model as it is trained
    if core:
        core.r, core.backprop_depth, core.recompute = c.recurrence, c.backprop_depth, c.recompute
    # The config's own order takes the place of an equal one that was saved, because its Steps may
    # hold what no checkpoint does, such as a function. (A cool-down's order comes in `change`,
    # which tells the log.)
    order = plan(replace(c, cooldown_loop=None), step, first_n_layer).order
    if order and (not saved or written(order) == written(model.order)):
        model.order = order
    model.to(here.device, torch.float32).train()
    optimizers = make_optimizers(model, c)
    for optimizer, state in zip(optimizers, saved.pop('optimizers', ())):
        optimizer.load_state_dict(state)
    # 4. its folder and its log
    prepare_folder(c, here, config, data['data'], is_new=not saved)
    lines, log, bar = open_log(c, here, step)
    flops_before = parent.get('flops', 0) + parent.get('inherited_flops', 0)
    run = Run(
        c=c, here=here, out=Path(c.out_dir), data=data, model=model, wrapped=wrap(here, model),
        optimizers=optimizers, first_n_layer=first_n_layer, lines=lines, log=log, bar=bar,
        totals={name: saved.get(name, 0) for name in ('step', 'tokens', 'flops', 'seconds')},
        taken=saved.get('taken') or hash_of_plans('', plan(c, 0, first_n_layer)),
        kept=dict(config=config, start=at_start, steps=source_of_steps(c.order),
                  data={name: data[name].description() for name in data},
                  inherited_flops=saved.get('inherited_flops', flops_before)))
    if c.wandb and here.rank == 0:
        run.online = wandb.init(project='nanodepth', name=run.out.name, config=config)
    say_what_begins(run)
    return run


def refuse_several_folders(here, step):
    "On several machines, out_dir is one folder that all of them see."
    steps = [step] * here.size
    if here.size > 1:
        dist.all_gather_object(steps, step)
    assert len({*steps}) == 1, f'the processes of a run go on from one folder, not at steps {steps}'


def say_what_begins(run):
    c, here, model, data, config = run.c, run.here, run.model, run.data, run.kept['config']
    functions = [name for name in config if callable(getattr(c, name))]
    say(f'{here.size} x {here.device}, compile {"on" if here.compiles else "off"}; functions of '
        f'the config: {", ".join(functions) or "none"}\n{model.num_params():,} parameters in '
        f'{len(model.layers)} layers, {len(model.unrolled())} deep, '
        f'{model.flops_per_token(context=c.context):,} FLOPs per token\n'
        f'steps {run.totals["step"]:,} to {c.steps:,} of {c.batch_size} x {c.context} tokens; the '
        f'data is read {data["data"].passes(c.steps):.2f} times, and can be validated on '
        f'{len(data["val"])} batches')


def open_data(c, here):
    "{its name: Loader}. Which rows a batch has follows from (seed, step), so no place is kept."
    if here.rank == 0:
        make_toy_data(c)
    if here.size > 1:
        dist.barrier()          # the others wait for it
    data = dict(data=Loader(c, c.data, seed=c.seed), val=Loader(c, c.data, 'val'))
    if c.cooldown_data:
        data['cooldown_data'] = Loader(c, c.cooldown_data, seed=c.seed)
    return data


def make_toy_data(c):
    "The toy's data takes seconds to make. Other data is the user's own decision."
    is_used = 'data/toy' in folders_of(c.data) + folders_of(c.cooldown_data)
    if is_used and not (find('data/toy') / 'train.json').exists():
        say('data/toy is not there yet: it is made now')
        script = Path(__file__).resolve().parent / 'data/toy/prepare.py'
        subprocess.run([sys.executable, script], check=True)


def open_model(c, data, open_parent):
    """(the model, what was saved with it, what was saved with init_from): a resumed run's model,
    that of init_from, or a new one. What there is not is {}."""
    classes = {*map(type, steps_in(c.order or ()))}
    if c.resume and (Path(c.out_dir) / 'ckpt.pt').exists():
        model, saved = load(c.out_dir, classes)
        if not saved['optimizers']:
            raise Refused(f'{c.out_dir} holds weights without their optimizers: start another '
                          f'--out_dir from them, with --init_from={c.out_dir}')
        return model, saved, {}
    if c.init_from:
        model, parent = open_parent(c.init_from, classes)
        assert not c.grow or model.order == [*range(len(model.layers))], (
            f'{c.init_from} runs {model.order}: only a model that runs each layer once grows')
        return model, {}, parent
    torch.manual_seed(seed_for(c.seed, 'init'))
    n_vocab = data['data'].datasets[0].about['n_vocab']
    return LM(model_config(c, n_vocab, stages(c)[0].n_layer)), {}, {}


def model_config(c, n_vocab, n_layer):
    "The settings that are the model's. Its order is set later, and it may begin with fewer layers."
    shape = {each.name: getattr(c, each.name) for each in fields(ModelConfig)
             if hasattr(c, each.name)}
    return ModelConfig(**shape | dict(vocab_size=c.vocab_size or n_vocab, n_layer=n_layer,
                                      order=None))


def what_it_starts_with(c, model):
    "What a resume must know of the model at step 0."
    core = core_of(model)
    settings = dict(recurrence=core.r, backprop_depth=core.backprop_depth) if core else {}
    return dict(n_layer=len(model.layers), warmup_steps=c.warmup_steps) | settings


def resolved(c, at_start, saved):
    "The settings, in which shares of the steps are numbers, and a core's that were None its own."
    warmup = c.warmup_steps
    if saved and warmup == at_start['warmup_steps']:    # more steps do not move the warm-up
        warmup = saved['config']['warmup_steps']
    return replace(c, warmup_steps=in_steps(warmup, c.steps),
                   decay_steps=in_steps(c.decay_steps, c.steps),
                   recurrence=c.recurrence or at_start.get('recurrence'),
                   backprop_depth=c.backprop_depth or at_start.get('backprop_depth'))


def refuse_what_does_not_fit(c, model, data, parent):
    "Settings that each may be, and not together; and data of another tokenizer."
    core = core_of(model)
    about = [each.about for loader in data.values() for each in loader.datasets]
    assert c.warmup_steps + c.decay_steps <= c.steps, 'too few steps for warm-up and decay'
    assert c.decay_steps or not (c.cooldown_loop or c.cooldown_data), 'decay_steps is 0'
    assert bool(c.grow) + bool(c.loop) + bool(c.order) <= 1, 'give one of grow, loop and order'
    assert not core or not (c.grow or c.loop or c.order or c.cooldown_loop), (
        'a model with a recurrent core takes no grow, loop or order')
    assert core or not (c.recurrence or c.backprop_depth), 'recurrence is for a recurrent core'
    assert c.batch_size % (which_process()[1] * c.grad_accum) == 0, (
        'batch_size does not divide into equal pieces, processes x grad_accum of them')
    assert c.context <= model.config.context, f'rows may have {model.config.context} tokens'
    about += parent.get('data', {}).get('data', ())
    if len({each['fingerprint'] for each in about}) > 1:
        raise Refused('a model has one tokenizer, but these data, or those of init_from, have '
                      f'several: {", ".join(sorted({each["tokenizer"] for each in about}))}')
    if model.config.vocab_size < about[0]['n_vocab']:
        raise Refused(f'the data has a vocabulary of {about[0]["n_vocab"]} tokens, and the model '
                      f'one of {model.config.vocab_size}')


# ----------------------------------------------------------------- is it the same run that goes on?
# What a resumed run may change: speed, and what is measured, kept and shown ...
FREE = set('out_dir resume device compile grad_accum recompute eval_every eval_batches metric '
           'log_every save_every keep_every keep_stages wandb'.split())
# ... what it may change as long as `plan` says the same of every step that it has taken ...
AHEAD = set('steps warmup_steps decay_steps lr_shape n_layer grow grow_block grow_alpha loop order '
            'cooldown_loop cooldown_data recurrence backprop_depth curriculum curriculum_shape '
            'backprop_curriculum'.split())
# ... and what counts nowhere with init_from, because it is the parent's.
OF_PARENT = {each.name for each in fields(ModelConfig)} - {'context', 'order'}


def refuse_another_run(c, config, saved, first_n_layer, data):
    "A resume whose settings or data would have made another run of the steps until here."
    step, old = saved['step'], saved['config']
    instead = 'choose another --out_dir, or move that run out of the way by --resume=false'
    if step > c.steps:
        raise Refused(f'{c.out_dir} has taken {step} steps, more than steps={c.steps}: {instead}')
    free = FREE | (OF_PARENT if c.init_from else set())
    differ = {name for name in config if config[name] != old.get(name)} - free
    if saved['steps'] != source_of_steps(c.order):
        raise Refused(f'the Steps of the run in {c.out_dir} were written otherwise: {instead}')
    of_functions = any(map(callable, vars(c).values()))     # which may read what has changed
    if differ & AHEAD or of_functions:
        taken = hash_of_plans('', plan(c, 0, first_n_layer))    # if no step is taken: its model
        for i in range(step):
            taken = hash_of_plans(taken, plan(c, i, first_n_layer))
        if taken == saved['taken']:
            differ -= AHEAD
        elif not differ:
            raise Refused(f'the functions of the config now give another plan than that of the run '
                          f'in {c.out_dir}: {instead}')
    if differ:
        was = ', '.join(f'{name}={old.get(name)} and not {config[name]}' for name in sorted(differ))
        raise Refused(f'{c.out_dir} holds a run with {was}: {instead}')
    for name in {'data', 'val', plan(c, max(0, step - 1), first_n_layer).data}:
        if saved['data'][name] != data[name].description():
            raise Refused(f'the data has changed since the run in {c.out_dir} began: {instead}')


def as_written(c):
    "The settings as files keep them: of a function its name and a hash of its source."
    config = {each.name: getattr(c, each.name) for each in fields(c)}
    for name, value in config.items():
        if callable(value):
            assert inspect.isfunction(value), f'{name} must be a function, whose source is kept'
            config[name] = f'{value.__name__} {hash_of(inspect.getsource(value))[:12]}'
    config['order'] = c.order and written(c.order)
    return config


def source_of_steps(order):
    "Hashes of the classes of an order's Steps and of those that they extend, but for ours."
    classes = {each for step in steps_in(order or ()) for each in type(step).__mro__}
    hashes = []
    for each in classes - {*KNOWN.values(), object}:
        text = ''
        for name, value in vars(each).items():
            function = getattr(value, 'fget', None) or getattr(value, '__func__', value)
            if inspect.isfunction(function):        # also of a property or a static method
                text += inspect.getsource(function)
            elif not name.startswith('__'):
                text += f'{name} = {value!r}'
        hashes.append(hash_of(text))
    return sorted(hashes)


def hash_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


def hash_of_plans(before, now):
    "A hash of the plans of all steps taken: of those before, by their hash, and of this one."
    return hash_of(f'{before} {now._replace(order=now.order and written(now.order))}')


# ------------------------------------------------------------------------------- a run's own folder

def lock(folder):
    """Makes a run's folder, and refuses somebody else's. As long as the file that this returns is
    open, no other run writes into it."""
    ends = '.json', '.jsonl', '.jinja', '.pt', '.png'       # as of what a run writes
    names = {path.name for path in folder.glob('*') if path.suffix in ends}
    if names and not names & {'ckpt.pt', 'run.json'}:
        raise Refused(f'{folder} holds {min(names)}, and no run: choose another --out_dir')
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / 'lock', 'a')
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(f'another run is at work in {folder}') from None
    except (ImportError, OSError):      # Windows, some network folders: there it is up to you
        pass
    return file


def prepare_folder(c, here, config, train_data, is_new):
    """run.json and the tokenizer, for a run that is no other one. What is there is moved aside, if
    it has no checkpoint to go on from, or by --resume=false."""
    out = Path(c.out_dir)
    before = out / 'run.json'
    if c.resume and is_new and (kept := [*out.glob('ckpt-*.pt')]):
        raise Refused(f'{out} holds {kept[0].name}, but no ckpt.pt to go on from: put that back, '
                      'or move all of it out of the way by --resume=false')
    if c.resume and is_new and before.exists():         # it was stopped before it saved anything
        old, now = json.loads(before.read_text())['config'], json.loads(json.dumps(config))
        if any(old.get(name) != now[name] for name in now.keys() - FREE):
            raise Refused(f'{out} holds the log of another run: choose another --out_dir, or move '
                          'that run out of the way by --resume=false')
    if here.rank > 0:
        return
    for left in out.glob('.*.unfinished'):          # of a process that was killed
        left.unlink()
    if is_new and any((out / name).exists() for name in ('ckpt.pt', 'log.jsonl', 'run.json')):
        names = (out.with_name(f'{out.name}.{i}') for i in itertools.count(1))
        here.lock.close()               # or it would still lock that folder, under its new name
        aside = out.rename(next(path for path in names if not path.exists()))
        here.lock = lock(out)
        say(f'the run that was in {out} is now in {aside}')
    about = [each.about for each in train_data.datasets]
    with whole(out / 'run.json') as new:
        new.write_text(json.dumps(dict(
            tokenizer=about[0]['tokenizer'], fingerprint=about[0]['fingerprint'], config=config,
            torch=torch.__version__, data=[each['origin'] for each in about]), indent=1))
    for name in TOKENIZER_FILES if is_new else ():          # (bytes have none)
        if (train_data.datasets[0].folder / name).exists():
            copy_whole(train_data.datasets[0].folder / name, out / name)


def open_log(c, here, step):
    "(log.jsonl's lines until a step, the file open for those of the next steps, the bar)."
    bar = tqdm(total=c.steps, initial=step, dynamic_ncols=True,
               disable=here.rank > 0 or not sys.stderr.isatty())
    if here.rank > 0:
        return [], open(os.devnull, 'w'), bar
    path = Path(c.out_dir) / 'log.jsonl'
    lines = [line for line in read_log(path) if line['step'] <= step] if step else []
    with whole(path) as new:
        new.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return lines, open(path, 'a', buffering=1), bar


def read_log(path):
    "The lines of a log.jsonl, if there is one."
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):   # a process that was killed leaves half of one
            lines.append(json.loads(text))
    return lines


@contextlib.contextmanager
def whole(path):
    "Where a file is written: it takes its name at the end, so no reader ever sees half of it."
    new = path.with_name(f'.{path.name}.{os.getpid()}.unfinished')
    yield new
    with open(new, 'rb+') as file:
        os.fsync(file.fileno())
    os.replace(new, path)


def copy_whole(path, to):
    with whole(to) as new:
        shutil.copy(path, new)


# -------------------------------------------------------------------------------------- checkpoints

KNOWN = {'Step': Step, 'Core': Core, 'Window': Window}      # what any checkpoint may have


def save_run(run, *names):
    "Save the run as it is now."
    if run.here.rank == 0:
        own, there = os.fstat(run.here.lock.fileno()), run.out / 'lock'
        if not there.exists() or not os.path.samestat(own, there.stat()):
            raise Refused(f'{run.out} was moved or removed while this run was at work in it, so it '
                          'is saved nowhere: another run may be there now')
        os.fsync(run.log.fileno())      # a checkpoint is never ahead of its log
    save(run.out, run.model, run.optimizers, names, taken=run.taken, **run.kept, **run.totals)


def save(folder, model, optimizers, names=('ckpt.pt',), **more):
    "All that a resumed run needs. It goes on from ckpt.pt; a file of another name just stays."
    if not all(p.isfinite().all() for p in model.parameters()):
        raise Refused(f'these weights are not finite, so they are not saved; {folder} holds the '
                      'last checkpoint. Try a lower --lr or a longer --warmup_steps')
    if which_process()[0] == 0:
        state = dict(model=model.state_dict(), order=written(model.order), **more,
                     model_config=asdict(replace(model.config, order=None)),
                     optimizers=[optimizer.state_dict() for optimizer in optimizers])
        for name in names:
            with whole(Path(folder) / name) as new:
                torch.save(state, new)
    if dist.is_initialized():
        dist.barrier()


def checkpoint_file(folder):
    "What stands for a run: its ckpt.pt, or the checkpoint that is named itself."
    return Path(folder) if str(folder).endswith('.pt') else Path(folder) / 'ckpt.pt'


def load(folder, classes=()):
    "(the model of a checkpoint, what else that says). `classes`: of Steps that are not ours."
    path = checkpoint_file(folder)
    # mapped: what nobody reads takes no memory. (Windows replaces no file that is mapped.)
    saved = torch.load(path, map_location='cpu', weights_only=True, mmap=os.name == 'posix')
    model = LM(ModelConfig(**saved['model_config']))
    model.order = read_order(saved['order'], folder, classes)
    if 'adapter.weight' in saved['model']:      # also of a model whose order has no Core any more
        model.adapter = new_adapter(model.config.n_embd, 'identity')
    elif core_of(model):
        model.adapter = new_adapter(model.config.n_embd, 'add')
    model.load_state_dict(saved.pop('model'))
    return model, saved


def written(order):
    "An order as files keep it: numbers, and of a Step the name of its class and its settings."
    items = []
    for item in order:
        if not isinstance(item, int):
            kind = type(item)
            if KNOWN.get(kind.__name__, kind) is not kind:
                raise Refused(f'{item} is not the {kind.__name__} that a checkpoint knows: give '
                              'its class another name')
            settings = item.settings()
            _, *takes = inspect.signature(kind).parameters.values()     # after its items
            lost = [each.name for each in takes
                    if each.kind is not each.VAR_KEYWORD and each.name not in settings]
            if lost:
                raise Refused(f'{kind.__name__}.settings() leaves out {", ".join(lost)}, so a '
                              'checkpoint would lose what it was made with')
            item = dict(step=kind.__name__, items=written(item.items), settings=settings)
        items.append(item)
    return items


def read_order(items, folder, classes=()):
    "The order that `written` gave. Other classes are brought: no file is run that it names."
    known, order = {each.__name__: each for each in classes} | KNOWN, []
    for item in items:
        if not isinstance(item, int):
            if item['step'] not in known:
                raise Refused(f'{folder} has a Step {item["step"]}: --classes=FILE.py, where its '
                              'class stands')
            inside = read_order(item['items'], folder, classes)
            item = known[item['step']](inside, **item['settings'])
        order.append(item)
    return order


# ---------------------------------------------------------------------------- how settings are read
# Every command of the package reads its options by this, too. A first reading needs none of it.

def read(cls, argv, words=()):
    """A command line as an instance of a dataclass: --name=value or --name value for its fields.
    What has no dashes goes to the fields that `words` names, of which a list takes all that are
    left. Without `words` it is config files: Python that assigns the same names."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if {'-h', '--help'} & set(argv):
        print(sys.modules[cls.__module__].__doc__ or '',
              *(inspect.getsource(each) for each in cls.__mro__ if is_dataclass(each)), sep='\n\n')
        sys.exit()
    kinds = typing.get_type_hints(cls)
    plain, options = split_words(argv, kinds)
    values = {}
    if words:
        for name in words:
            if plain and typing.get_origin(kinds[name]) is list:
                values[name], plain = setting(kinds, name, plain), []
            elif plain:
                values[name] = setting(kinds, name, plain.pop(0))
        if plain:
            raise Refused(f'{plain[0]} is one word too many')
    for path in plain:
        values |= config_file(path, kinds)
    values |= {name: setting(kinds, name, text, '--') for name, text in options.items()}
    for each in fields(cls):
        if each.name not in values and each.default is each.default_factory is MISSING:
            raise Refused(f'{each.name}: none is given (--help says more)')
    return cls(**values)


def split_words(argv, kinds):
    "A command line as (its plain words, {name: text of its value} of the options)."
    plain, options, left = [], {}, list(argv)
    while left:
        word = left.pop(0)
        if not word.startswith('-'):
            plain.append(word)
            continue
        name, equals, text = word.lstrip('-').partition('=')
        if name not in kinds:
            raise Refused(f'--{name} is no setting{nearest(name, kinds)}')
        following = left[0] if left else '--'
        if not equals and bool in choices(kinds[name]):         # --resume is --resume=true
            text = left.pop(0) if following.lower() in ('true', 'false', 'auto') else 'true'
        elif not equals:
            if following.startswith('--'):
                raise Refused(f'{word} has no value: write {word}=VALUE')
            text = left.pop(0)
        options[name] = text
    return plain, options


def config_file(path, kinds):
    """{name: value} of a config's settings. Its functions, classes and modules of other names are
    its own business, and so is what begins with an underscore; another name is a slip."""
    file = find(path).resolve()
    if file.is_file() and file.suffix != '.py':         # a stranger's checkpoint, say
        raise Refused(f'{path} is no config, which is a .py file')
    if not file.is_file():
        there = [f'config/{each.name}' for each in find('config').glob('*.py')]
        raise Refused(f'there is no config {path}{nearest(path, there)}')
    values = dict(__name__='config', __file__=str(file))
    with imports_of(file.parent):
        exec(compile(file.read_text(encoding='utf-8'), str(file), 'exec'), values)
    settings = {}
    for name, value in values.items():
        is_own = name.startswith('_') or callable(value) or isinstance(value, types.ModuleType)
        if name in kinds:
            settings[name] = setting(kinds, name, value, f'{path}: ')
        elif not is_own:
            raise Refused(f'{path}: {name} is no setting{nearest(name, kinds)} (write _{name} for '
                          'a name of your own)')
    return settings


@contextlib.contextmanager
def imports_of(folder):
    """Say a config writes `from loop import repeat_block`, and this file is part of an installed
    package: there loop.py is nanodepth.loop, and `loop` may be somebody else's. So in here the
    seven files of this book have their bare names, and files beside the config are found by
    theirs. Afterwards all names are what they were."""
    package = __name__.rpartition('train')[0]           # 'nanodepth.', or nothing
    book = {name: sys.modules[package + name]
            for name in ('model', 'loop', 'grow', 'retrofit', 'wrapper', 'probe', 'train')
            if package + name in sys.modules}
    names = book.keys() | {path.stem for path in folder.glob('*.py')}
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.modules.update(book)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module:
                sys.modules[name] = module


def setting(kinds, name, value, where=''):
    "A value as its field's kind, or a line that says what it must be."
    with contextlib.suppress(ValueError):
        return as_kind(value, kinds[name])
    allowed = []
    for kind in choices(kinds[name]):
        if typing.get_origin(kind) is Literal:
            allowed += map(str, typing.get_args(kind))
        else:
            allowed.append(inspect.formatannotation(kind).removeprefix('collections.abc.'))
    raise Refused(f'{where}{name}={value} must be {" or ".join(allowed)}{nearest(value, allowed)}')


def nearest(name, names):
    near = difflib.get_close_matches(str(name), [str(each) for each in names], 1, 0.5)
    return f'; did you mean {near[0]!r}?' if near else ''


def choices(kind):
    "The kinds of value that a field may have: of int | None, both."
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def as_kind(value, kind):
    """A value as this kind, or a ValueError. On a command line it is a text, in a config anything.
    (Config has no tuples, dicts or paths; options of the package's commands have.)"""
    if len(choices(kind)) > 1:
        return as_one_of(value, choices(kind))
    origin, inside, text = typing.get_origin(kind) or kind, typing.get_args(kind), str(value)
    if origin is Literal:
        return inside[[str(word) for word in inside].index(text)]
    if origin in (list, tuple):
        items = value.split(',') if isinstance(value, str) else value
        return origin(as_kind(item, inside[0]) for item in items if item != '')
    if origin is dict:
        return {str(name): as_kind(item, inside[1]) for name, item in dict(value).items()}
    if kind is types.NoneType and text.lower() == 'none':
        return None
    if kind in (Callable, Step) and isinstance(value, kind):
        return value
    is_plain = isinstance(value, (str, int, float, np.number, Path))
    if kind in (Callable, Step, types.NoneType) or not is_plain:
        raise ValueError
    if kind is bool:
        if text.lower() not in ('true', 'false'):
            raise ValueError
        return text.lower() == 'true'
    if kind is int and not text.lstrip('-').isdigit():          # 1e3 is a whole number, too
        if not float(text).is_integer():
            raise ValueError
        return int(float(text))
    return kind(os.path.expanduser(text) if text.startswith('~/') else text)


def as_one_of(value, kinds):
    "A value as the first of these kinds that it fits. Any text fits str, so that is tried last."
    is_one_text = str in kinds and isinstance(value, str) and ',' not in value
    for kind in sorted(kinds, key=lambda kind: kind is str):
        if is_one_text and typing.get_origin(kind) is list:     # of str | list[str] it is the str
            continue
        with contextlib.suppress(ValueError, TypeError):
            return as_kind(value, kind)
    raise ValueError


def find(path):
    "A config or data: in the current folder, else beside this file."
    beside = Path(__file__).resolve().parent / path
    return Path(path) if Path(path).exists() or not beside.exists() else beside


OUT_OF_MEMORY = ('the GPU has too little memory for a step: compute it in more pieces by a higher '
                 '--grad_accum (the result is the same), or in fewer rows by a lower --batch_size')

if __name__ == '__main__':
    sys.modules['train'] = sys.modules['__main__']      # for configs, which may import it
    try:
        stopped_by = train(read(Config, sys.argv[1:]))
    except Refused as error:
        sys.exit(f'train: {error}' if which_process()[0] == 0 else 1)
    except torch.OutOfMemoryError:
        sys.exit(f'train: {OUT_OF_MEMORY}')
    if stopped_by:          # make or a scheduler must not take it for finished
        sys.exit(128 + stopped_by)
