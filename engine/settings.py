"""Every setting of a run with its default; values that cannot work are refused before anything
starts.

The idea: a config is a flat list of names and values. Defaults are the toy's; a file in config/
says what differs, and the command line has the last word. What follows from them is in plan.py.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A, for the names.

Usage:
    config = check(read_config(Config, ['config/lidas.py', '--steps=600']))     # or a line why not
    Plan(config).stages                         # [(0, 2), (48, 4), (144, 6), (288, 8)]
"""
import runpy
import types
from dataclasses import dataclass, fields
from typing import Literal

from common.errors import Refused, check_choice, nearest, parse
from common.fields import COMMAND_LINE, fit_fields
from common.files import find
from engine.optimizers import OPTIMIZERS
from engine.plan import Plan
from grow import GROWTH
from model import ModelConfig


@dataclass
class Config:
    out_dir: str = 'out/run'
    seed: int = 0
    device: str = 'auto'                # auto: cuda, else mps, else cpu
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'      # auto: bfloat16 on cuda
    compile: bool | Literal['auto'] = 'auto'    # auto: on for cuda
    patience: int = 600                 # seconds without progress until the run ends (watch.py)
    # resume the run in out_dir; false: move it away and start anew
    resume: bool = True
    # the model (init_from: a checkpoint to start from; then these are its own)
    init_from: str | None = None
    n_layer: int = 8
    n_embd: int = 128
    n_head: int = 4
    n_kv_head: int | None = None
    head_dim: int | None = 64           # None: n_embd / n_head
    ffn_dim: int | None = None
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False        # the papers tie; a toy learns three times as fast untied
    ln_scaling: bool = False
    vocab_size: int | None = None       # None: as many as the data's tokenizer has
    # growing: n_layer is the depth at the end
    grow: str | None = None             # by grow.py's midas, lidas, ...; None: full depth at once
    grow_block: int = 2                 # the layers to begin with, and a growth's block
    grow_alpha: float = 1.0             # PROP-alpha: stage i gets a share i^alpha of the steps
    # looping: n_layer counts the unique layers
    loop: str | None = None             # their order, such as 2x4 or 2-2x2-2; None: each once
    cooldown_loop: str | None = None    # the order from the first step of the decay on
    cooldown_data: str | list[str] | None = None        # read from there on instead of data
    # a recurrent core: init_from is what retrofit.py wrote
    recurrence: int | None = None       # the mean of the random number; None: the model's own
    backprop_depth: int | None = None   # gradients go back through the last so many; None: its own
    curriculum: float = 0.25            # over this part of the steps the mean rises from 1
    curriculum_shape: Literal['linear', '1-sqrt'] = 'linear'
    backprop_curriculum: float = 0.0    # and over this part backprop_depth does
    # the data
    data: str | list[str] = 'data/toy'          # a folder, or a list of them
    data_weights: list[float] | None = None     # their shares of the rows; None: equal
    context: int = 64                   # tokens of a sequence
    batch_size: int = 32                # sequences of a step, over all processes
    grad_accum: int = 1                 # pieces in which a process computes its part
    # the schedule: linear warm-up, constant, decay
    steps: int = 600
    warmup_steps: int = 50
    decay_steps: int = 120              # the last so many; growing is over, cool-downs begin
    lr: float = 4e-3
    lr_shape: Literal['1-sqrt', 'cosine'] = '1-sqrt'            # how the rate falls
    lr_decay_steps: int | None = None   # over the last so many steps; None: decay_steps
    lr_floor: float = 0.0               # to this share of lr
    # the optimizer: 'adamw' or 'adamw_star' for everything, or 'muon' for the layers' matrices and
    # AdamW for the rest
    optimizer: Literal[OPTIMIZERS] = 'muon'
    adamw_lr: float | None = None       # with muon, the rate of the rest; None: lr
    # a step as large as AdamW's, or the first Muon's
    muon_scaling: Literal['match_rms_adamw', 'original'] = 'match_rms_adamw'
    weight_decay: float = 0.01
    star_decay: float = 1e-4            # adamw_star's, a step at the peak, whatever the rate is
    beta2: float = 0.95
    grad_clip: float = 1.0
    # what is measured and kept
    eval_every: int = 25
    eval_batches: int = 12              # batches of validation data each time
    log_every: int = 10
    save_every: int = 200


# What a model looks like. With init_from, its checkpoint says so.
SHAPE = ('vocab_size', 'n_layer', 'n_embd', 'n_head', 'n_kv_head', 'head_dim', 'ffn_dim',
         'rope_theta', 'tie_embeddings', 'ln_scaling')
# A resumed run may change these: they do not affect what it computes, at most where.
MAY_DIFFER = {'out_dir', 'device', 'compile', 'grad_accum', 'patience', 'resume', 'eval_every',
              'eval_batches', 'log_every', 'save_every'}


def check(config):
    "What no type can say."
    c = config
    fit_fields(Config, vars(c), 'the config')
    check_choice('grow', c.grow, (None, *GROWTH))
    for name in ('recurrence', 'backprop_depth'):
        if getattr(c, name) is not None and not c.init_from:
            raise Refused(f'{name}={getattr(c, name)} is for a model with a recurrent core: '
                          'init_from must be one')
    if not c.out_dir.strip():
        raise Refused("out_dir='' must name a folder")
    for name in ('data', 'cooldown_data'):
        folders = getattr(c, name)
        if folders == []:
            raise Refused(f'{name}=[] must be a folder or a list of folders')
    if not all(0 < weight < 1e9 for weight in c.data_weights or ()):
        raise Refused(f'data_weights={c.data_weights} must be numbers above 0')
    for name in ('decay_steps', 'lr_decay_steps'):
        if c.warmup_steps + (getattr(c, name) or 0) > c.steps:
            raise Refused(f'warmup_steps={c.warmup_steps} and {name}={getattr(c, name)} do not fit '
                          f'into steps={c.steps}')
    if c.decay_steps == 0 and (c.cooldown_loop or c.cooldown_data):
        raise Refused('cooldown_loop and cooldown_data begin with the decay, but decay_steps is 0')
    if c.grow and c.loop:
        raise Refused(f'grow={c.grow!r} and loop={c.loop!r} exclude each other: a model that '
                      'grows may loop in its cool-down')
    if c.grow and c.init_from:
        raise Refused(f'grow={c.grow!r} begins with a new model of grow_block={c.grow_block} '
                      'layers, not with init_from')
    if not c.init_from:     # else the plan needs the checkpoint
        Plan(c)
    return c


def shape(config, **more):
    "The ModelConfig of a config; `more` adds fields or replaces them."
    return ModelConfig(**{f.name: getattr(config, f.name) for f in fields(ModelConfig)
                          if hasattr(config, f.name)} | more)


# --------------------------------------------------------------------- configs and the command line

def read_config(cls, argv):
    """A config file first, if there is one, then --name=value overrides, as an instance of the
    dataclass."""
    values = {}
    for arg in sorted(argv, key=lambda arg: arg.startswith('--')):
        if arg.startswith('--'):
            name, equals, text = arg[2:].partition('=')
            if not equals:
                raise Refused(f'{arg}: write --{name}=VALUE')
            values |= fit_fields(cls, {name: parse(text)}, COMMAND_LINE)
        else:
            values |= fit_fields(cls, run_file(arg), arg)
    if values.get('init_from'):
        refuse_a_shape(values)
    return cls(**values)


def refuse_a_shape(values):
    "The checkpoint of init_from decides what the model looks like."
    for name in SHAPE:
        if name in values:
            raise Refused(f'{name}={values[name]} has no effect beside init_from='
                          f'{values["init_from"]}: that checkpoint decides the shape of the model, '
                          f'so leave {name} out')


def run_file(path):
    "The public names that a config file assigns."
    file = find(path)
    if not file.is_file():
        known = [f'config/{p.name}' for p in find('config').glob('[!_]*.py')]
        raise Refused(f'there is no config {path}{nearest(path, known)} (a setting is written '
                      '--name=value, in one word)')
    try:
        found = runpy.run_path(str(file))
    except (Exception, SystemExit) as error:
        raise Refused(f'{path} does not run: {type(error).__name__}: {error}') from None
    return {k: v for k, v in found.items()
            if not k.startswith('_') and not isinstance(v, types.ModuleType)}
