"""What a run is: its settings, what they say of every step, and what a resumed run may change.

The idea: what happens at a step follows from its number. `plan(c, step)` says how deep the model
is, in which order its layers run, how fast it learns and which batch it reads. train.py does it.
"""
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch

from grow import Stage, growth_plan
from loop import fit_loop
from model import ModelConfig, Span, require, unrolled
from retrofit import core_of, ramp, sample_recurrence


@dataclass
class Config:
    # what is trained, on what, and where it is kept
    out_dir: str = 'out/run'
    seed: int = 0                       # of every random draw
    init_from: str | None = None        # another run's folder: its model goes on, with its shape
    data: str | list[str] = 'data/toy'  # a folder, or several in equal parts: a,b
    context: int = 64                   # tokens of a training row
    batch_size: int = 32                # rows of a step, over all processes
    # the model
    vocab_size: int | None = None       # None: as many as the data's tokenizer has
    n_layer: int = 8                    # at the end, if it grows; the unique ones, if it loops
    n_embd: int = 128
    n_head: int = 4
    n_kv_head: int | None = None        # None: n_head
    head_dim: int | None = None         # None: n_embd / n_head
    ffn_dim: int | None = None          # None: 8/3 of n_embd
    tie_embeddings: bool = False        # the papers tie; a toy learns three times as fast untied
    ln_scaling: bool = False            # norms at depth d are scaled by 1/sqrt(d + 1)
    # the schedule: linear warm-up, constant, decay
    steps: int = 600
    warmup_steps: int | float = 1 / 12  # a whole number is steps, a float a share (1.0 is all)
    decay_steps: int | float = 0.2      # the last steps: growing is over, the cool-down begins
    lr: float = 4e-3                    # the peak rate
    lr_shape: Literal['1-sqrt', 'cosine', 'constant'] | Callable = '1-sqrt'     # or f(c, step)
    optimizer: Literal['muon', 'adamw'] | Callable = 'muon'     # or a function (model, c)
    weight_decay: float = 0.01
    grad_clip: float = 1.0              # 0: none
    adamw_lr: float | None = None       # with muon, the peak rate of the rest; None: lr
    muon_scaling: Literal['match_rms_adamw', 'original'] = 'match_rms_adamw'    # of Muon's steps
    # growing, by an operator of grow.py or a function like them; None: full depth at once
    grow: Literal['midas', 'lidas', 'stack', 'double'] | Callable | None = None
    grow_block: int = 2                 # the layers that a growth adds (`double` adds all)
    grow_from: int | None = None        # layers to begin with; None: a block. init_from: its own
    grow_alpha: float = 1.0             # stage i gets a share i^alpha of the steps before the decay
    init: Callable | None = None        # (new_layer, old_layer) changes a copy; None: an exact one
    # looping; n_layer counts the unique layers
    loop: str | None = None             # their order, such as 2x4 or 2-2x2-2; None: each runs once
    order: list[int | Span] | None = None   # the order as a list; only a config can put Spans in it
    cooldown_loop: str | None = None    # the order from the first step of the decay on
    cooldown_data: str | list[str] | None = None    # read from there on, from its start; None: data
    # a recurrent core, which retrofit.py made; None: its own
    recurrence: int | None = None       # r in validation; in training r is 1 + Poisson of this mean
    backprop_depth: int | None = None   # at most so many last runs get gradients
    curriculum: float = 0.25            # over this part of the steps `recurrence` rises from 1
    curriculum_shape: Literal['linear', '1-sqrt'] = 'linear'
    backprop_curriculum: float = 0.0    # over this part of the steps backprop_depth rises from 1
    recompute: bool = False             # less memory: its runs are computed anew in the backward
    # what is measured and kept; "every 0 steps" is never
    eval_every: int = 25
    eval_batches: int = 12              # batches of validation data per evaluation; 0: all
    metric: Callable | None = None      # (model, val loader): {name: a mean over rows}, logged
    log_every: int = 10
    save_every: int = 200
    keep_every: int = 0                 # every so many steps a checkpoint stays, as ckpt-STEP.pt
    keep_stages: bool = False           # one before each growth stays, too
    wandb: bool = False                 # show the log online, too (pip install wandb)
    # the machine
    device: Literal['auto', 'cuda', 'mps', 'cpu'] = 'auto'
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'      # auto: bfloat16 on GPUs fast at it
    compile: bool | Literal['auto'] = 'auto'    # auto: on for cuda
    grad_accum: int = 1                 # a process computes its rows in this many pieces

    def __post_init__(self):            # from here on these two are numbers of steps
        for name in ('warmup_steps', 'decay_steps'):
            if isinstance(getattr(self, name), float):
                setattr(self, name, round(getattr(self, name) * self.steps))
            require(getattr(self, name) >= 0, f'{name} is below 0')
        for name in ('steps', 'batch_size', 'context', 'grad_accum'):
            require(getattr(self, name) >= 1, f'{name} is below 1')


class Plan(NamedTuple):
    step: int
    rate: float                 # the share of the peak rate
    n_layer: int
    grown_from: list | None     # the order that became this stage's model
    order: list | None          # what runs; None: as the model has it
    data: str                   # what it reads, 'data' or 'cooldown_data', ...
    batch: int                  # ... and which batch of that
    r: int | None               # how often a core runs, ...
    backprop_depth: int | None  # ... and through how many of these runs gradients go


def plan(c, step):
    "What a step does. (What the model decides has been filled in by `resolved`.)"
    first_of_decay = c.steps - c.decay_steps
    in_decay = step >= first_of_decay
    stage = [each for each in stages(c) if each.first_step <= step][-1]
    loop = c.cooldown_loop if in_decay and c.cooldown_loop else c.loop
    data, batch = 'data', step
    if in_decay and c.cooldown_data:        # its batches count from 0, even of the same data
        data, batch = 'cooldown_data', step - first_of_decay
    r = backprop_depth = None
    if c.recurrence:
        mean_r = ramp(step, c.steps, c.recurrence, c.curriculum, c.curriculum_shape)
        r = sample_recurrence(mean_r, generator_for(c.seed, 'recurrence', step))
        most = ramp(step, c.steps, c.backprop_depth, c.backprop_curriculum)
        backprop_depth = min(most, mean_r)      # as the authors: not through more than the mean
    order = fit_loop(loop, stage.n_layer) if loop else c.order
    return Plan(step, rate(c, step), stage.n_layer, stage.order, order, data, batch, r,
                backprop_depth)


def seed_for(seed, purpose, step=0):
    "63 bits. Each draw of training is a function of these three, so no generator is ever saved."
    digest = hashlib.blake2b(f'{seed} {purpose} {step}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') >> 1


def generator_for(seed, purpose, step=0, device='cpu'):
    return torch.Generator(device).manual_seed(seed_for(seed, purpose, step))


def stages(c):
    "The Stages of a run: one, if it never grows. The first says how deep a new model is."
    if not c.grow:
        return [Stage(0, None, c.n_layer)]
    return growth_plan(c.grow, c.grow_from or c.grow_block, c.n_layer, c.grow_block,
                       c.steps - c.decay_steps, c.grow_alpha)


def model_config(c, n_layer, n_vocab):
    "The shape of a new model."
    names = {each.name for each in fields(ModelConfig)} & vars(c).keys()
    shape = {name: getattr(c, name) for name in names}
    return ModelConfig(**shape | dict(n_layer=n_layer, vocab_size=n_vocab))


def rate(c, step):
    """The share of the peak rate: linear up, constant, then down over the last decay_steps, by
    1 - sqrt, or by half a cosine to a thousandth, as the retrofit's authors have it."""
    if callable(c.lr_shape):
        return float(c.lr_shape(c, step))
    if step < c.warmup_steps:
        return (step + 1) / c.warmup_steps
    # t goes from 0 to just below 1, so that the last step still learns
    t = max(0, step - (c.steps - c.decay_steps)) / max(1, c.decay_steps)
    if c.lr_shape == '1-sqrt':
        return 1 - math.sqrt(t)
    if c.lr_shape == 'cosine':
        return 0.001 + 0.999 * (1 + math.cos(math.pi * t)) / 2
    return 1.0                          # 'constant'


# ---------------------------------------------------- what is filled in, and what is refused

def resolved(c, model, saved):
    """The settings, with what the model decides filled in: its core's r and depth where they are
    None, and with init_from its shape. saved: what a resumed run's checkpoint says, or {}."""
    if core := core_of(model):
        c = replace(c, recurrence=c.recurrence or core.r,
                    backprop_depth=c.backprop_depth or core.backprop_depth)
    if c.init_from:
        shape = vars(model.config) | dict(grow_from=len(model.layers))
        own = {'context', 'n_layer'} if c.grow else {'context'}     # these the config may say
        names = (shape.keys() & vars(c).keys()) - own
        # (a resumed one may have grown since, and its config knows the first shape)
        c = replace(c, **{name: (saved['config'] if saved else shape)[name] for name in names})
    return c


def refuse_what_does_not_fit(c, model, is_new, size):
    "Settings that are allowed alone, and not together. size: how many processes there are."
    require(c.warmup_steps + c.decay_steps <= c.steps, f'{c.warmup_steps} steps of warm-up and '
            f'{c.decay_steps} of decay are more than steps={c.steps} (a share has a point: 0.2)')
    require(c.decay_steps or not (c.cooldown_loop or c.cooldown_data), 'a cool-down needs a decay')
    require(c.batch_size % (size * c.grad_accum) == 0, f'batch_size={c.batch_size} is no multiple '
            f'of {size} processes x grad_accum={c.grad_accum}')
    orders = [name for name in ('grow', 'loop', 'order') if getattr(c, name)]
    require(len(orders) <= 1, f'{" and ".join(orders)} do not go together')
    core = core_of(model)
    require(not core or not (orders or c.cooldown_loop),
            'grow, loop, order and cooldown_loop are not for a recurrent core')
    require(core or not (c.recurrence or c.backprop_depth),
            'recurrence is for a core: init_from a run of retrofit.py')
    if c.cooldown_loop:
        fit_loop(c.cooldown_loop, c.n_layer)        # refuses now, and not at the decay
    if c.grow and is_new:           # (a resumed one may be looped by its cool-down)
        require(model.order == [*range(len(model.layers))], 'a looped model does not grow')


# What a resume may change: what is measured, kept and shown, paths of equal data, the machine ...
FREE = set('out_dir data device compile grad_accum recompute eval_every eval_batches metric '
           'log_every save_every keep_every keep_stages wandb'.split())
# ... and what is to come, if `plan` says the same of all steps that were taken
AHEAD = {'steps', 'warmup_steps', 'decay_steps', 'cooldown_loop', 'cooldown_data'}


def refuse_another_run(c, config, saved, log):
    "A resume whose settings would have made another run of the steps that were taken."
    step, old = saved['step'], saved['config']
    differ = {name for name in config if config[name] != old.get(name)} - FREE
    if log and not log[-1].get('finite', True):     # its last step was not taken
        differ -= {'lr', 'adamw_lr', 'grad_clip'}
    plans = ''
    for i in range(min(step, c.steps)):
        plans = hash_of_plans(plans, plan(c, i))
    if plans == saved['plans']:
        differ -= AHEAD
    else:               # a function may read what was edited, though its own lines are the same
        require(differ, 'the functions of the config now give another plan than that of the run in '
                f'{c.out_dir}: choose another out_dir')
    lines = [f'{k}={old.get(k)!r:.40} and not {config.get(k)!r:.40}' for k in sorted(differ)]
    require(not differ, f'{c.out_dir} holds a run with {"; ".join(lines)}: choose another out_dir')


def hash_of_plans(before, now):
    "A hash of all plans so far: of the hash before, and of this step's plan."
    layers = now.order and unrolled(now.order)      # (a Span's repr may have an address)
    return hashlib.sha256(f'{before} {now._replace(order=layers)}'.encode()).hexdigest()
