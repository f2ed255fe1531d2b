"""What the Plan of train.py leans on: what a run must remember of its parent, and its settings.
Usage: plan = Plan(config, Parent.of(model))        # in train.py
"""
import hashlib
import inspect
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace

from nanodepth.common.errors import Refused, refusing, which_process
from nanodepth.common.files import read_run
from nanodepth.common.options import only_fields
from nanodepth.model import ModelConfig
from nanodepth.models import checkpoint
from nanodepth.retrofit import core_of


@dataclass
class Parent:
    "What init_from gives. It goes into the checkpoint, so that a resume needs no parent."
    n_layer: int
    order: list[int] | None = None      # its own; None: each layer once
    recurrence: int | None = None       # of a recurrent core, which averages one run more,
    backprop_depth: int | None = None   # and through how many of its last runs gradients go

    @classmethod
    def of(cls, model):
        if core := core_of(model):
            return cls(len(model.layers), recurrence=core.r,
                       backprop_depth=core.backprop_depth)
        once = [*range(len(model.layers))]
        return cls(len(model.layers), order=None if model.order == once else model.order)

    @classmethod
    def of_saved(cls, saved):
        "The parent that a run's checkpoint remembers, or None."
        if saved['config'].get('init_from'):
            return cls(**only_fields(cls, saved['start']))


# What is the model's own: of a parent, init_from decides it.
MODEL_SETTINGS = {field.name for field in fields(ModelConfig)} - {'context'}


def model_config(config, **more):
    "The ModelConfig of a run's config; `more` adds fields or replaces them."
    return ModelConfig(**{each.name: getattr(config, each.name) for each in fields(ModelConfig)
                          if hasattr(config, each.name)} | more)


SCHEDULE = 'warmup_steps', 'decay_steps'


def in_proportion(config, steps):
    "Warm-up and decay of a run of so many steps: the same shares of them as in its config."
    decay = round(config.decay_steps * steps / config.steps)
    return dict(warmup_steps=config.warmup_steps * steps // config.steps,
                decay_steps=max(decay, min(1, config.decay_steps)))


def shortened(cls, in_files, named, tell=None):
    """The settings of config files and of a command line. If the steps are too few for warm-up and
    decay, these become shorter in proportion, except where the command line names them. A run that
    is resumed keeps what it began with."""
    defaults = {each.name: each.default for each in fields(cls)}
    own = SimpleNamespace(**defaults | in_files)
    if not in_files.keys() & {*SCHEDULE}:
        own.steps = defaults['steps']       # for which the default warm-up and decay are made
    now = SimpleNamespace(**defaults | in_files | named)
    steps = now.steps
    if now.resume and checkpoint.exists(now.out_dir):
        steps = (read_run(now.out_dir).get('config') or {}).get('steps', steps)
    if now.steps < now.warmup_steps + now.decay_steps <= steps:
        raise Refused(f'{now.out_dir} holds a run of {steps:,} steps, and {now.steps:,} are too '
                      'few for its warm-up and decay: choose another --out_dir, or --resume=false')
    if now.warmup_steps + now.decay_steps <= steps or own.steps <= steps:
        return in_files | named
    shorter = {name: value for name, value in in_proportion(own, steps).items()
               if name not in named}
    if tell and shorter and which_process()[0] == 0:
        is_now = ' and '.join(f'{name}={value}' for name, value in shorter.items())
        tell(f'{steps:,} steps are too few for a warm-up of {now.warmup_steps:,} and a decay of '
             f'{now.decay_steps:,}, which go with {own.steps:,}: in proportion, {is_now}')
    return in_files | named | shorter


def operator(grow):
    "What grows a model: a name, a function, or the orders that a function gave (a file has those)."
    if not isinstance(grow, list):
        return grow
    return lambda n_layer, block: min((order for order in grow if len(order) > n_layer), key=len)


def settings_of(plan):
    """The config as files keep it, without functions: the orders that `grow` gave, and of `init`
    and `metric` the name with a mark of the source."""
    settings = asdict(plan.config)
    if callable(settings['grow']):
        settings['grow'] = [*plan.growths.values()]
    for name in ('init', 'metric'):
        if callable(settings[name]):
            with refusing(OSError, TypeError, AttributeError, why=lambda error: f'{name} must be a '
                          f'function that is written in a file: {error}'):
                source = inspect.getsource(settings[name])
                mark = hashlib.sha256(source.encode()).hexdigest()[:12]
                settings[name] = f'{settings[name].__name__} {mark}'
    return settings
