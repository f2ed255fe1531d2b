"""What train.py's plan is made of beside its page: what a run must remember of its parent.

Usage:
    plan = Plan(config, Parent.of(model))   # train.py
    save(config=settings_of(plan))
"""
import hashlib
import inspect
from dataclasses import asdict, dataclass, fields

from nanodepth.common.errors import refusing
from nanodepth.common.options import only_fields
from nanodepth.model import ModelConfig
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
            return cls(len(model.layers), recurrence=core.recurrence,
                       backprop_depth=core.backprop_depth)
        return cls(len(model.layers), order=model.config.order)

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
