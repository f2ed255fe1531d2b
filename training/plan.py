"""Define the settings of a run, and compute from them what each step does.

The idea: a run is a list of steps, and a list of changes of its model's order. `plan(c, step)`
returns what happens at a step, such as the learning rate and the batch, and it depends on nothing
but the settings and the number of the step. `changes(c)` lists the steps at which the model grows
or begins to loop. train.py carries out both.
"""
import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch

from grow import GROWTH, growth_plan
from loop import fit_loop
from model import LM, ModelConfig, Span, require, spans_in
from retrofit import Core, ramp, sample_recurrence
from wrapper import Window


@dataclass
class Config:
    # the model that is trained, its data, and the folder of the run
    out_dir: str = 'out/run'
    seed: int = 0                       # of every random draw
    init_from: str | None = None        # begin with the model of this run or checkpoint
    cut: str | None = None              # make the model recurrent: 2-2-2 is prelude, core, coda
    core: Callable | None = None        # the class of the core that `cut` makes; None: Core
    branch_from: str | None = None      # continue this run or checkpoint in out_dir
    data: str | list[str] = 'data/toy'  # a folder, or a mixture with its shares: a@0.9,b@0.1
    context: int = 64                   # tokens of a training row
    batch_size: int = 32                # rows of a step, over all processes
    # the model
    vocab_size: int | None = None       # None: as many as the data's tokenizer has
    n_layer: int = 8                    # unique layers; at the end, if the model grows
    n_embd: int = 128
    n_head: int = 4
    n_kv_head: int | None = None        # None: n_head
    head_dim: int | None = None         # None: n_embd / n_head
    ffn_dim: int | None = None          # None: 8/3 of n_embd
    tie_embeddings: bool = False        # the depth papers tie; a toy learns faster untied
    ln_scaling: bool = False            # scale the norms at depth d by 1/sqrt(d + 1)
    # the schedule: linear warm-up, constant, decay
    steps: int = 600
    warmup_steps: int | float = 1 / 12  # a whole number is steps, a float a share (1.0 is all)
    decay_steps: int | float = 0.2      # the last steps, after all growing: the cool-down
    lr: float = 4e-3                    # the peak rate
    lr_shape: Literal['1-sqrt', 'cosine', 'constant'] | Callable = '1-sqrt'     # or f(c, step)
    optimizer: Literal['muon', 'adamw'] | Callable = 'muon'     # or a function (model, c)
    loss: Callable | None = None        # loss(model, tokens, targets), a mean (docs/EXTEND.md)
    weight_decay: float = 0.01
    grad_clip: float = 1.0              # 0: none
    adamw_lr: float | None = None       # with muon, the peak rate of the rest; None: lr
    muon_scaling: Literal['match_rms_adamw', 'original'] = 'match_rms_adamw'    # of Muon's steps
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'      # auto: bfloat16 on GPUs fast at it
    # growing, with an operator of grow.py or your own function like these; None: no growing
    grow: Literal[*GROWTH] | Callable | None = None
    grow_block: int = 2                 # the layers that a growth adds (`double` adds all)
    grow_from: int | None = None        # layers to begin with; None: a block, or init_from's
    grow_alpha: float = 1.0             # stage i gets a share i^alpha of the steps before the decay
    init: Callable | None = None        # (new_layer, old_layer) changes a copy; None: exact copies
    # looping
    loop: str | None = None             # the order, such as 2x4 or 2-2x2-2; None: each runs once
    order: list[int | Span] | None = None   # the order as a list; only a config can put Spans in it
    cooldown_loop: str | None = None    # the order from the first step of the decay on
    cooldown_data: str | list[str] | None = None    # read from that step on; None: data
    # a recurrent core, which `cut` makes; None: as the core has it
    recurrence: int | None = None       # r in validation; in training r is 1 + Poisson of this mean
    backprop_depth: int | None = None   # at most this many of the last runs get gradients
    curriculum: float = 0.25            # over this part of the steps `recurrence` rises from 1
    curriculum_shape: Literal['linear', '1-sqrt'] = 'linear'
    backprop_curriculum: float = 0.0    # over this part of the steps backprop_depth rises from 1
    recompute: bool = False             # save memory: compute its runs again in the backward pass
    # measuring and keeping; 0 is never, but the first and the last step are always measured
    eval_every: int = 25
    eval_batches: int = 12              # batches of validation data per evaluation; 0: all
    metric: Callable | None = None      # (model, val loader): {name: a mean over rows}, logged
    log_every: int = 10
    save_every: int = 200
    keep_every: int = 0                 # every n steps, keep a checkpoint as ckpt-STEP.pt
    keep_stages: bool = False           # keep a checkpoint before each growth, too
    wandb: bool = False                 # show the log online, too (pip install wandb)
    # the machine
    device: Literal['auto', 'cuda', 'mps', 'cpu'] = 'auto'
    compile: bool | Literal['auto'] = 'auto'    # auto: on for cuda
    grad_accum: int = 1                 # each process computes its rows in this many pieces

    def __post_init__(self):            # from here on, these two settings are numbers of steps
        for name in ('warmup_steps', 'decay_steps'):
            if isinstance(getattr(self, name), float):
                setattr(self, name, round(getattr(self, name) * self.steps))
        for name, value in vars(self).items():
            least = 1 if name in POSITIVE else 0
            is_number = isinstance(value, (int, float)) and name not in ('seed', 'grow_alpha')
            require(not is_number or value >= least, f'{name}={value} is below {least}')


# {a part: the settings that have no effect without it}. Your own optimizer may read muon's.
NEEDED_BY = dict(cut='core', grow='init grow_block grow_from grow_alpha',
                 muon='adamw_lr muon_scaling',
                 recurrence='curriculum curriculum_shape backprop_curriculum recompute')
POSITIVE = set('steps batch_size context grad_accum n_layer n_embd n_head grow_block grow_from '
               'recurrence backprop_depth'.split())
# A resume may change these: places of files, what is measured, kept and shown, and the machine.
FREE = set('out_dir data cooldown_data device compile grad_accum recompute eval_every eval_batches '
           'metric log_every save_every keep_every keep_stages wandb'.split())


class Change(NamedTuple):
    "From the beginning of a step on, the model runs another order."
    step: int
    order: list
    copies: bool    # True, if each entry of the order gets its own copy of its layer (growing)


def changes(c):
    """Return the Changes of a run, from the first to the last. A Change of step 0 is the order that
    a new model begins with."""
    all_changes = []
    if c.grow:
        growths = growth_plan(c.grow, first_n_layer(c), c.n_layer, c.grow_block,
                              c.steps - c.decay_steps, c.grow_alpha)
        all_changes = [Change(step, order, True) for step, order in growths]
    if c.loop:
        all_changes.append(Change(0, fit_loop(c.loop, c.n_layer), False))
    if c.order:     # a copy, because the model gives weights to the Spans that it gets
        all_changes.append(Change(0, copy.deepcopy(c.order), False))
    if c.cooldown_loop:
        order = fit_loop(c.cooldown_loop, c.n_layer)
        all_changes.append(Change(c.steps - c.decay_steps, order, False))
    return all_changes


def first_n_layer(c):
    "Return how many layers a new model begins with."
    return (c.grow_from or c.grow_block) if c.grow else c.n_layer


class Plan(NamedTuple):
    "What happens at a step."
    step: int
    rate: float                 # the share of the peak rate
    data: str                   # the data that the step reads: 'data' or 'cooldown_data'
    batch: int                  # the number of the batch in these data
    r: int | None               # how often a core runs
    backprop_depth: int | None  # through how many of these runs gradients flow


def plan(c, step):
    """Return the Plan of a step. `c` must include the settings that the model decides (see the
    function `decided` in training/start.py)."""
    first_of_decay = c.steps - c.decay_steps
    data, batch = 'data', step
    if step >= first_of_decay and c.cooldown_data:
        # batches of a cool-down's data are numbered from 0, even if the data is the same
        data, batch = 'cooldown_data', step - first_of_decay
    r = backprop_depth = None
    if c.recurrence:
        mean_r = ramp(step, c.steps, c.recurrence, c.curriculum, c.curriculum_shape)
        r = sample_recurrence(mean_r, generator_for(c.seed, 'recurrence', step))
        most = ramp(step, c.steps, c.backprop_depth, c.backprop_curriculum)
        backprop_depth = min(most, mean_r)      # not more than mean_r, as the authors do
    return Plan(step, rate(c, step), data, batch, r, backprop_depth)


def training_flops(model, loss, context):
    """Return the training FLOPs of one token, in rows of `context` tokens. A loss that computes
    more than the model's own has an attribute `flops`, a function that counts all of them."""
    count = getattr(loss, 'flops', LM.flops_per_token)
    return count(model, context=context)


def has_own_parts(model, c):
    "Return whether a run has a loss or a Span that is not from these files, but a user's."
    own_spans = [span for span in spans_in(model.order) if type(span) not in (Span, Core, Window)]
    return bool(c.loss or own_spans)


def seed_for(seed, purpose, step=0):
    """Return 63 bits that depend on these three alone. All random draws of training use such seeds,
    so no generator is ever saved."""
    digest = hashlib.blake2b(f'{seed} {purpose} {step}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') >> 1


def generator_for(seed, purpose, step=0, device='cpu'):
    "Return a random generator with the seed of seed_for."
    return torch.Generator(device).manual_seed(seed_for(seed, purpose, step))


def model_config(c, n_layer, n_vocab):
    "Return the ModelConfig of a new model."
    names = {field.name for field in fields(ModelConfig)} & vars(c).keys()
    shape = {name: getattr(c, name) for name in names}
    return ModelConfig(**shape | dict(n_layer=n_layer, vocab_size=n_vocab))


def rate(c, step):
    """Return the share of the peak learning rate at a step: linear warm-up, then constant, then the
    decay over the last decay_steps, as 1 - sqrt, or as half a cosine that ends at a thousandth (as
    in the retrofit authors' code)."""
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
