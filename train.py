"""The training loop of every run: plain, growing, looped or recurrent.

The idea: what happens at a step is a function of the step's number alone. `Plan.at` below says it:
how deep the model is, in which order its layers run, at which rate it learns, which batch it reads.
The loop asks it and does it. So a run is its config and its seed, and a run that was stopped goes
on as if nothing had happened.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A: linear warm-up, a constant
plateau, and a 1-sqrt decay; AdamW, gradients clipped at 1. A loop and other data from the decay on:
"From Growing to Looping", section 5.2.
Differs: the defaults are the toy's, with Muon for the layers' matrices and AdamW for the rest.

Usage:
    python train.py config/baseline.py --steps=600      # minutes; any setting by --name=value
    python train.py config/smollm_360m_lidas.py --dry_run       # FLOPs, hours
    torchrun --standalone --nproc_per_node=8 train.py config/smollm_360m_lidas.py
"""
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

if __name__ == '__main__':
    # A thread of torch that waits for work keeps its core busy, and slows the run beside this one
    # down. So it gives up after 1,000 turns. It must be said before torch is loaded.
    os.environ.setdefault('GOMP_SPINCOUNT', '1000')

import torch

from nanodepth.common.errors import say
from nanodepth.common.options import by_source, check_bounds
from nanodepth.common.seeds import seed_for, row_generators
from nanodepth.grow import GROWTH, growth_plan, untie
from nanodepth.loop import fit_loop
from nanodepth.model import LM, loss_of_piece
from nanodepth.models import checkpoint
from nanodepth.retrofit import core_of, recurrence_curriculum, sample_recurrence
from nanodepth.training import refuse, run       # what is refused, and the folder of a run
from nanodepth.training.measure import measure, numbers_of
from nanodepth.training.optimizers import load_optimizers, make_optimizers
from nanodepth.training.plan import Parent, model_config, operator, settings_of, shortened
from nanodepth.training.processes import World


@dataclass
class Config:
    # what is trained, on what, and where it is kept
    out_dir: str = 'out/run'            # where the run is kept
    seed: int = 0                       # of every random draw
    init_from: str | None = None        # a checkpoint, which decides all of "the model"
    data: str | list[str] = 'data/toy'          # a folder, or a list of them
    context: int = 64                   # tokens of a training row
    batch_size: int = 32                # rows of a step, over all processes
    # the model
    n_layer: int = 8
    n_embd: int = 128
    n_head: int = 4
    n_kv_head: int | None = None
    head_dim: int | None = 64           # None: n_embd / n_head
    ffn_dim: int | None = None
    tie_embeddings: bool = False        # the papers tie; a toy learns three times as fast untied
    # the schedule: linear warm-up, constant, decay
    steps: int = 600
    warmup_steps: int = 50
    decay_steps: int = 120              # the last steps: growing is over, the cool-down begins
    lr: float = 4e-3
    # the optimizer: 'muon' for the layers' matrices and AdamW for the rest, or one for everything
    optimizer: Literal['muon', 'adamw', 'adamw_star'] = 'muon'  # adamw_star: training/
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    # growing: n_layer is the depth at the end; a model from init_from grows once, by grow_block
    # an operator of grow.py, or a function like them; None: full depth at once
    grow: Literal['midas', 'lidas', 'stack', 'double'] | Callable | None = None
    grow_block: int = 2                 # the layers to begin with, and those that a growth adds
    grow_alpha: float = 1.0             # PROP-alpha: stage i gets a share i^alpha of the plateau
    # a function (new_layer, old_layer) that says what a copy begins as; None: an exact copy
    init: Callable | None = None
    # looping: n_layer counts the unique layers
    loop: str | None = None             # their order, such as 2x4 or 2-2x2-2; None: each runs once
    cooldown_loop: str | None = None    # the order from the first step of the decay on
    cooldown_data: str | list[str] | None = None        # what is read from there on; None: data
    # a recurrent core, which retrofit.py made: None is the model's own
    recurrence: int | None = None       # it runs r times, at random; r averages this number + 1
    backprop_depth: int | None = None   # at most so many last runs get gradients (<= recurrence)
    recompute: bool = False             # less memory: its runs are computed anew in the backward
    curriculum: float = 0.25            # over this part of the steps `recurrence` rises from 1
    # what is measured and kept
    eval_every: int = 25
    eval_batches: int = 12              # batches of validation data per evaluation
    metric: Callable | None = None      # (model, val loader) gives {name: number} more for the log
    log_every: int = 10
    save_every: int = 200
    keep_every: int | None = None       # of so many steps a checkpoint stays, as ckpt-STEP.pt
    resume: bool = True                 # false: move the run in out_dir aside and start over
    wandb: bool = False                 # show the log online, too (pip install wandb)
    # the machine
    device: str = 'auto'                # auto: cuda, else mps, else cpu
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'      # bfloat16 on GPUs fast at it
    compile: bool | Literal['auto'] = 'auto'    # auto: on for cuda
    grad_accum: int = 1                 # a process computes its rows in this many pieces
    # what is rarely changed
    adamw_lr: float | None = None       # with muon, the peak rate of the rest; None: lr
    muon_scaling: Literal['match_rms_adamw', 'original'] = 'match_rms_adamw'    # of its steps
    lr_shape: Literal['1-sqrt', 'cosine', 'constant'] = '1-sqrt'        # how the rate falls
    curriculum_shape: Literal['linear', '1-sqrt'] = 'linear'
    backprop_curriculum: float = 0.0    # over this part of the steps backprop_depth rises from 1
    ln_scaling: bool = False            # norms at position d are scaled by 1/sqrt(d + 1)
    vocab_size: int | None = None       # None: as many as the data's tokenizer has
    keep_stages: bool = False           # keep a checkpoint before each growth, as ckpt-STEP.pt

    def __post_init__(self):
        check_bounds(vars(self))
        if not self.init_from:      # with it, a plan needs the checkpoint
            Plan(self)              # train makes the one that counts: this one only may refuse


# ----------------------------------------------------------------------------- what a step does

class Step(NamedTuple):
    lr_fraction: float                  # of the peak rate
    n_layer: int
    growth: list | None                 # the order of the stage before that this one has untied
    order: list | None                  # in which the layers run; None: a recurrent core's own
    data: str                           # the loader: 'data' or 'cooldown_data'
    batch: int                          # which of its batches
    r: int | None = None                # how often a recurrent core runs,
    backprop_depth: int | None = None   # and through how many of these gradients go back

    @property
    def how(self):
        "Keyword arguments of a recurrent model's forward and flops_per_token; {} for others."
        return {} if self.r is None else dict(r=self.r, backprop_depth=self.backprop_depth)


class Plan:
    def __init__(self, config, parent=None):
        c = self.config = config
        self.parent = parent                    # what init_from gives; None: a new model
        refuse.what_excludes(c, parent)
        self.cooldown_start = c.steps - c.decay_steps   # growing is over, and the rate falls
        # what training begins with
        begins = parent or Parent(c.grow_block if c.grow else c.n_layer)

        # growing: a new model up to n_layer, a parent once
        self.stages = [(0, begins.n_layer)]             # [(first step, layers)]
        self.growths = {}                               # {layers: the order that they grew by}
        if c.grow:
            grow, ends = operator(c.grow), c.n_layer
            if parent:
                ends = len((GROWTH.get(grow) or grow)(parent.n_layer, c.grow_block))
            stages = growth_plan(grow, ends, c.grow_block, self.cooldown_start, c.grow_alpha,
                                 start=begins.n_layer)
            self.stages = [(first, n_layer) for first, _, n_layer in stages]
            self.growths = {n_layer: order for _, order, n_layer in stages[1:]}

        # looping: None is each layer once
        deepest = self.stages[-1][1]
        self.main_order = fit_loop(c.loop, deepest) if c.loop else begins.order
        self.cooldown_order = self.main_order
        if c.cooldown_loop:
            self.cooldown_order = fit_loop(c.cooldown_loop, deepest)

        # a recurrent core
        self.recurrence = c.recurrence or begins.recurrence
        self.backprop_depth = c.backprop_depth or begins.backprop_depth

    def at(self, step):
        "What this step does."
        c = self.config
        cools = step >= self.cooldown_start
        n_layer = [n_layer for first, n_layer in self.stages if first <= step][-1]
        order = (self.cooldown_order if cools else self.main_order) or [*range(n_layer)]
        data, batch = 'data', step
        if cools and c.cooldown_data:
            data, batch = 'cooldown_data', step - self.cooldown_start
        r = backprop_depth = None
        if self.recurrence is not None:
            # A recurrent core runs equally often on every rank. As in the authors' code, gradients
            # go back through no more of its runs than the step's mean.
            order = None                # it stands in the model's own order
            mean = recurrence_curriculum(step, c.steps, self.recurrence, c.curriculum,
                                         c.curriculum_shape)
            most = recurrence_curriculum(step, c.steps, self.backprop_depth, c.backprop_curriculum)
            r, backprop_depth = sample_recurrence(mean, step, c.seed), min(most, mean)
        return Step(lr_fraction(c, step), n_layer, self.growths.get(n_layer), order, data, batch,
                    r, backprop_depth)


def lr_fraction(c, step):
    """The share of the peak rate: linear up, constant, then down over the last decay_steps: by
    1 - sqrt, or by half a cosine to a thousandth, as the retrofit's authors have it."""
    if step < c.warmup_steps:
        return (step + 1) / c.warmup_steps
    t = max(0, step - (c.steps - c.decay_steps)) / max(1, c.decay_steps)
    if c.lr_shape == 'constant':
        return 1.0
    if c.lr_shape == 'cosine':
        return 0.001 + 0.999 * (1 + math.cos(math.pi * t)) / 2
    return 1 - math.sqrt(t)


# ------------------------------------------------------------------------------ parts of a step

class Batch(NamedTuple):
    tokens: torch.Tensor                # (B, T): this process's rows of a step's batch
    targets: torch.Tensor               # (B, T), -1 where no answer is asked for
    count: int                          # how many of these targets count


def get_batch(world, data, now):
    tokens, targets = data[now.data].batch(now.batch)
    count = (targets != -1).sum().item()        # here, where it does not wait for a GPU
    if world.cuda:                      # pinned memory is sent while the GPU works
        tokens, targets = tokens.pin_memory(), targets.pin_memory()
    return Batch(tokens.to(world.device, non_blocking=world.cuda),
                 targets.to(world.device, non_blocking=world.cuda), count)


def autocast(c, world):
    "Matrix products in bfloat16, where that is asked for or (auto) where a GPU is fast at it."
    half = c.dtype == 'bfloat16' or (c.dtype == 'auto' and world.has_bfloat16)
    return torch.autocast(world.device.type, torch.bfloat16, enabled=half)


def wrap(world, model):
    """A model as it is trained: each Block compiled by itself, so that no growth and no order
    compiles one again; and in DDP where there are several processes."""
    if world.compiles:
        for block in model.layers:
            block.compile()
    if world.compiles and world.cuda:
        model.piece_loss = torch.compile(loss_of_piece, dynamic=False)
    return world.ddp(model) if world.size > 1 else model


def backward(c, world, model, batch, total, step, recurrence):
    """Forward and backward over this process's rows, in pieces: its share of the batch's loss. That
    is one sum over the targets of all processes, divided by their number, `total`. A mean for each
    piece would give the tokens of short answers more weight."""
    tokens, targets, _ = batch
    loss = 0.0
    for i, (x, y) in enumerate(zip(tokens.chunk(c.grad_accum), targets.chunk(c.grad_accum))):
        how = recurrence
        if how:             # each row's first state is noise, the same however rows are shared out
            first = world.rank * len(tokens) + i * len(x)
            how = how | dict(generator=row_generators(c.seed, step, first, len(x), world.device))
        if world.size > 1:  # DDP exchanges gradients with the last piece alone
            model.require_backward_grad_sync = i == c.grad_accum - 1
        with autocast(c, world):
            # the model's loss is a mean: times its targets it is a sum (0 where none counts)
            share = model(x, y, **how) * (y != -1).sum() / max(1.0, total)
        (share * world.size).backward()     # DDP divides the gradients by the number of processes
        loss += share.detach()
    return loss


# ---------------------------------------------------------------------------------------- the loop

def train(c):
    "Train to the end (returns 0) or until a signal (returns its number); a second call resumes."
    # this is process world.rank of world.size, with its own world.device: cuda, else mps, else cpu
    with World(c.device, c.compile) as world, run.locked(c, world):
        # ---- data: {setting: Loader}. A batch follows from (seed, step), so no place is saved
        data, val = run.open_data(c, world)

        # ---- model: that of this run (resume), of a parent (init_from), or a new one
        totals = dict(step=0, tokens=0, flops=0, seconds=0.0, inherited_flops=0)
        states = []                             # the optimizers'
        resumes = c.resume and checkpoint.exists(c.out_dir)
        if resumes:
            saved = run.read_checkpoint(c.out_dir, world)
            plan = Plan(c, Parent.of_saved(saved))      # as the run's own checkpoint remembers it
            refuse.another_run(plan, saved, data | dict(val=val))
            model = checkpoint.build_model(saved, c.out_dir)    # with the order of its last step
            totals = {name: saved.get(name, 0) for name in totals}
            states = saved.pop('optimizers')
        elif c.init_from:
            saved = run.read_checkpoint(c.init_from, world)
            model = checkpoint.build_model(saved, c.init_from)
            plan = Plan(c, Parent.of(model))
            refuse.unfit_parent(c, model, data)
            if plan.main_order:
                model.order = plan.main_order
            totals['inherited_flops'] = checkpoint.cost_of(saved)
        else:
            plan = Plan(c)
            torch.manual_seed(seed_for(c.seed, 'init'))
            model = LM(model_config(c, vocab_size=c.vocab_size or data['data'].vocab_size,
                                    n_layer=plan.at(0).n_layer, order=plan.main_order))
        if core := core_of(model):      # the config's, or its own where the config says None
            core.r, core.backprop_depth = plan.recurrence, plan.backprop_depth
            core.recompute = c.recompute
        model.to(world.device, torch.float32).train()       # Hugging Face's may be bfloat16
        settings = settings_of(plan)            # the config as its files keep it

        # ---- optimizers: by default Muon for the layers' matrices, and AdamW for the rest
        optimizers = make_optimizers(model, c)
        load_optimizers(optimizers, states, c.out_dir)
        saved = states = None                   # they hold the weights and states once more
        world.let_go()
        wrapped = wrap(world, model)            # what is trained; `model` is what is measured
        step = totals['step']
        log = run.open_log(c, settings, world, data['data'], model, step, resumes)

        # ---- what is measured, and what is kept
        def validate(metric=None):
            "The validation loss, the loss and accuracy on each kind of answer, a config's metric."
            with autocast(c, world):
                loss, kinds = measure(model, val, c.eval_batches, pieces=c.grad_accum)
                return dict(val_loss=loss, kinds=kinds, **numbers_of(metric, model, val))

        def save():
            "All that a resumed run needs; weights that are not finite are not kept."
            refuse.weights_not_finite(c, model, totals['step'])
            log.sync()
            if world.first:
                checkpoint.save(c.out_dir, **checkpoint.describe(model), **totals, config=settings,
                                start=plan.parent and asdict(plan.parent),
                                optimizers=[o.state_dict() for o in optimizers],
                                **run.marks_of(data, val))
            world.wait()

        # ---- the loop
        tokens_a_step = c.batch_size * c.context
        if step == 0:
            log.write(step=0, tokens=0, flops=0, seconds=0, n_layer=len(model.layers),
                      depth=len(model.unrolled()), **validate(c.metric))
        batch = get_batch(world, data, plan.at(step))
        total = world.sum_over_ranks(batch.count)       # its targets, over all processes
        world.listen()                  # from now on Ctrl-C and SIGTERM wait for the step's end
        while step < c.steps:
            now = plan.at(step)
            events = {}                 # what the log will say of this step beside its loss

            if now.n_layer > len(model.layers):                         # the model grows
                before = validate()['val_loss']
                if c.keep_stages:
                    save()
                    world.first_does(lambda: checkpoint.keep(c.out_dir, step))
                wrapped = None          # DDP and its gradients go with the old model
                # the optimizers become the new model's own
                model = untie(model, now.growth, optimizers, c.init)
                world.let_go()          # of the old one's memory
                wrapped = wrap(world, model)
                after = validate()['val_loss']
                events['grown'] = dict(before=before, after=after, origin=now.growth,
                                       init=settings['init'])
            elif now.order not in (None, model.order):                  # it begins to loop
                before = validate()['val_loss']
                model.order = now.order
                events['looped'] = dict(before=before, after=validate()['val_loss'])

            # forward and backward; the next batch comes while the GPU is at work
            began = time.perf_counter()
            loss = backward(c, world, wrapped, batch, total, step, now.how)
            # in the optimizers' order: a sum in another one is another in its last bit
            params = [p for o in optimizers for group in o.param_groups for p in group['params']]
            norm = torch.nn.utils.clip_grad_norm_(params, c.grad_clip or math.inf)
            batch = get_batch(world, data, plan.at(step + 1))
            # Here it waits for the GPU. Over all processes: this step's loss, the targets of the
            # next batch, and the signal that one of them got (asked; 0 if none).
            loss, total, asked = world.share(loss, batch.count)
            norm = norm.item()
            if not math.isfinite(loss + norm):
                # The weights are still those before this step. After a growth in it they are not:
                # a resume would not grow again, and the log would miss it.
                if not events:
                    save()
                refuse.this_step(c, step, loss, norm)

            # update
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group['lr'] = group['peak'] * now.lr_fraction
                optimizer.step()
                # DDP keeps gradients in buckets of its own: there they become 0
                optimizer.zero_grad(set_to_none=world.size == 1)
            step += 1

            # a line of log.jsonl, and of the progress bar
            took = time.perf_counter() - began
            step_flops = tokens_a_step * model.flops_per_token(**now.how, context=c.context)
            usage = world.usage(step_flops, took)       # of the peak, and of the memory
            totals |= dict(step=step, tokens=step * tokens_a_step,
                           flops=totals['flops'] + step_flops, seconds=totals['seconds'] + took)
            if step % c.eval_every == 0 or step == c.steps:
                events |= validate(c.metric)
            if events or step % c.log_every == 0:
                log.write(step=step, tokens=totals['tokens'], flops=totals['flops'],
                          seconds=round(totals['seconds'], 1), n_layer=len(model.layers),
                          depth=len(model.unrolled()), lr=c.lr * now.lr_fraction, loss=loss,
                          grad_norm=norm, tokens_per_s=round(tokens_a_step / took),
                          passes=round(data[now.data].passes(now.batch + 1), 2),
                          **usage, **now.how, **events)
            log.show_step(tokens_a_step / took, usage['mfu'])

            # a checkpoint; and are we asked to stop?
            keeps = c.keep_every and step % c.keep_every == 0
            if step % c.save_every == 0 or keeps or step == c.steps or asked:
                save()
            if keeps and world.first:
                checkpoint.keep(c.out_dir, step)
            if asked:
                break
        log.close()
        run.report(c, world, plan, model, totals)
        return asked if step < c.steps else 0


def read_config(argv, cls=Config, tell=None):
    """Config files, such as config/lidas.py, and then each --name=value, as one Config. If it has
    too few steps for its warm-up and decay, these become shorter, and `tell` is told."""
    return cls(**shortened(cls, *by_source(cls, argv), tell))


def main(argv):
    with refuse.what_does_not_fit():
        stopped = train(read_config(argv, tell=say))
    if stopped:         # make or a scheduler must not take the run for finished
        raise SystemExit(128 + stopped)


if __name__ == '__main__':
    from nanodepth.__main__ import main as nanodepth
    nanodepth('train')
