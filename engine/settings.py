"""What a run can be told: every setting with its default, and what cannot be is refused before anything starts.

The idea: a config is a flat list of names and values. A default is the toy's; a file in config/ says what differs, and the command line
has the last word (launch.py reads both). What follows from the settings alone, the stages of growing, the orders of loops, the
learning rate and the recurrences of a step, is worked out here too, so that training and counting its cost (cost.py) agree.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A, for the names; config/smollm_*.py have its values.

Usage:
    config = check(read_config(Config, ['config/lidas.py', '--steps=600']))     # or an error in one line
    print(plan(config))                                                         # [(0, 2), (48, 4), (144, 6), (288, 8)]
"""
import math
from dataclasses import dataclass, fields

from common.errors import Refused, check_choice
from engine.optimizers import OPTIMIZERS
from grow import GROWTH, growth_plan
from loop import fit_loop
from model import ModelConfig
from retrofit import Recurrent, recurrence_curriculum, sample_recurrence


@dataclass
class Config:
    out_dir: str = 'out/run'
    seed: int = 0
    device: str = 'auto'                # auto: cuda, else mps, else cpu
    dtype: str = 'auto'                 # auto: bfloat16 on cuda, else float32
    compile: bool | str = 'auto'        # auto: on for cuda
    shard: bool = False                 # weights and optimizer in parts over all GPUs (FSDP2): for what does not fit into one
    patience: int = 600                 # seconds (more than an evaluation takes) without progress, until the run ends and says whose fault it is
    resume: bool = True                 # go on with the run in out_dir; false: move it out of the way and start anew
    # the model (init_from: a checkpoint to start from; then these are its own)
    init_from: str | None = None
    n_layer: int = 8
    n_embd: int = 128
    n_head: int = 4
    n_kv_head: int | None = None
    head_dim: int | None = 64           # None: n_embd / n_head
    ffn_dim: int | None = None
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False        # the papers' models are tied; at toy size untied learns three times as fast
    ln_scaling: bool = False
    vocab_size: int | None = None       # None: as many as the data's tokenizer has
    # growing: n_layer is the depth at the end
    grow: str | None = None             # midas, lidas, stack or double; None: full depth from the first step on
    grow_block: int = 2                 # the layers to begin with, and those that each growth adds
    grow_alpha: float = 1.0             # PROP-alpha: stage i lasts i^alpha of the steps before the decay
    # looping: n_layer counts the unique layers
    loop: str | None = None             # the order in which they run, such as 2x4 or 2-2x2-2; None: each once
    cooldown_loop: str | None = None    # the order from the first step of the decay on
    cooldown_data: str | list | None = None     # what is read from there on in place of data, in equal shares
    # a recurrent core: init_from is what retrofit.py wrote
    recurrence: int | None = None       # the mean of the random number of recurrences; None: the model's own
    backprop_depth: int | None = None   # gradients go back through the last so many; None: the model's own
    curriculum: float = 0.25            # over this part of the steps the mean rises from 1
    curriculum_shape: str = 'linear'    # or 1-sqrt
    backprop_curriculum: float = 0.0    # and over this part backprop_depth does
    # the data
    data: str | list = 'data/toy'       # a folder, or a list of them
    data_weights: list | None = None    # their shares of the rows; None: equal
    context: int = 64                   # tokens of a sequence
    batch_size: int = 32                # sequences of a step, over all processes
    grad_accum: int = 1                 # pieces in which a process works off its part of them
    # the schedule: linear warm-up, constant, 1 - sqrt
    steps: int = 600
    warmup_steps: int = 50
    decay_steps: int = 120
    lr: float = 4e-3
    # the optimizer: 'adamw' or 'adamw_star' for everything, or 'muon' for the layers' matrices and AdamW for the rest
    optimizer: str = 'muon'
    adamw_lr: float | None = None       # with muon, the rate of the rest; None: lr
    weight_decay: float = 0.01
    beta2: float = 0.95
    grad_clip: float = 1.0
    # what is measured and kept
    eval_every: int = 25
    eval_batches: int = 12              # batches of validation data each time
    log_every: int = 10
    save_every: int = 200


# A run may be resumed under another value of these: they do not change what it computes, or only where.
MAY_DIFFER = {'out_dir', 'device', 'compile', 'grad_accum', 'shard', 'patience', 'resume', 'eval_every', 'eval_batches', 'log_every', 'save_every'}
AHEAD = {'steps', 'decay_steps', 'cooldown_loop', 'cooldown_data'}      # nor do these, as long as the decay has not begun


def check(config):
    "What no type can say."
    c = config
    check_choice('optimizer', c.optimizer, OPTIMIZERS)
    check_choice('grow', c.grow, (None, *GROWTH))
    check_choice('dtype', c.dtype, ('auto', 'float32', 'bfloat16'))
    check_choice('compile', c.compile, ('auto', True, False))
    for name in ('n_layer', 'n_embd', 'n_head', 'n_kv_head', 'ffn_dim', 'vocab_size', 'context', 'batch_size', 'grad_accum', 'steps',
                 'eval_every', 'eval_batches', 'log_every', 'save_every', 'patience'):
        if getattr(c, name) is not None and getattr(c, name) < 1:
            raise Refused(f'{name}={getattr(c, name)} must be at least 1')
    for name in ('recurrence', 'backprop_depth'):
        if getattr(c, name) is not None and (getattr(c, name) < 1 or not c.init_from):
            raise Refused(f'{name}={getattr(c, name)} must be at least 1, for a model with a recurrent core: init_from must be one')
    check_choice('curriculum_shape', c.curriculum_shape, ('linear', '1-sqrt'))
    for name in ('curriculum', 'backprop_curriculum'):
        if not 0 <= getattr(c, name) <= 1:
            raise Refused(f'{name}={getattr(c, name)} is a part of the steps: from 0 to 1')
    for name in ('warmup_steps', 'decay_steps', 'lr', 'adamw_lr', 'weight_decay', 'grad_clip', 'grow_alpha'):
        if getattr(c, name) is not None and not 0 <= getattr(c, name) < 1e9:
            raise Refused(f'{name}={getattr(c, name)} must not be negative, nor without bounds')
    if not 0 <= c.beta2 < 1:
        raise Refused(f'beta2={c.beta2} must be at least 0 and less than 1')
    for name in ('data', 'cooldown_data'):
        folders = getattr(c, name)
        if isinstance(folders, list) and not (folders and all(isinstance(d, str) for d in folders)):
            raise Refused(f'{name}={folders} must be a folder or a list of folders')
    if c.data_weights is not None and not all(isinstance(w, (int, float)) for w in c.data_weights):
        raise Refused(f'data_weights={c.data_weights} must be numbers')
    if c.warmup_steps + c.decay_steps > c.steps:
        raise Refused(f'warmup_steps={c.warmup_steps} and decay_steps={c.decay_steps} do not fit into steps={c.steps}')
    if c.shard and c.optimizer != 'adamw':
        raise Refused(f'shard=True needs optimizer=\'adamw\', not {c.optimizer!r}, which works on whole matrices')
    if c.decay_steps == 0 and (c.cooldown_loop or c.cooldown_data):
        raise Refused('cooldown_loop and cooldown_data begin with the decay, but decay_steps is 0')
    if c.grow and c.loop:
        raise Refused(f'grow={c.grow!r} and loop={c.loop!r} exclude each other: a model that grows may loop in its cool-down')
    if not c.init_from:     # else setup asks the checkpoint how many layers it has
        orders(c, c.n_layer)
    if c.grow and c.init_from:
        raise Refused(f'grow={c.grow!r} begins with a new model of grow_block={c.grow_block} layers, not with init_from')
    try:
        plan(c)
    except (ValueError, OverflowError) as error:
        raise Refused(str(error)) from None
    return c


def shape(config, **more):
    "The ModelConfig of a config, with what it does not say or says otherwise."
    return ModelConfig(**{f.name: getattr(config, f.name) for f in fields(ModelConfig) if hasattr(config, f.name)} | more)


def orders(config, n_layer):
    "The orders of `loop` and `cooldown_loop` (None where there is none) for a model of n_layer unique layers."
    found = []
    for name in ('loop', 'cooldown_loop'):
        try:
            found.append(fit_loop(getattr(config, name), n_layer) if getattr(config, name) else None)
        except ValueError as error:
            raise Refused(f'{name}: {error}') from None
    return found


def plan(config):
    "[(first step, layers)]: growing is over when the decay begins."
    if config.grow is None:
        return [(0, config.n_layer)]
    return growth_plan(config.grow, config.n_layer, config.grow_block, config.steps - config.decay_steps, config.grow_alpha)


# ---------------------------------------------------------------------------------------------- schedule

def learning_rate(config, step):
    "As a fraction of the peak: linear up, constant, then 1 - sqrt, which would be zero one step after the last."
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    into_decay = step - (config.steps - config.decay_steps)
    return 1.0 if into_decay <= 0 else 1 - math.sqrt(into_decay / config.decay_steps)


def recurrences(config, model, step):
    "What a recurrent model's forward is told at a step: {} for any other."
    if not isinstance(model, Recurrent):
        return {}
    mean = recurrence_curriculum(step, config.steps, model.mean, config.curriculum, config.curriculum_shape)
    depth = recurrence_curriculum(step, config.steps, model.backprop_depth, config.backprop_curriculum)
    return dict(r=sample_recurrence(mean, step, config.seed), backprop_depth=depth)
