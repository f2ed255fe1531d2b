"""What train.py's plan is made of beside its page: the settings that are rarely changed, and what a
run must remember of its parent.

Usage:
    plan = Plan(config, Parent.of(model))   # train.py
"""
from dataclasses import dataclass, fields
from typing import Literal

from nanodepth.common.options import only_fields
from nanodepth.model import ModelConfig


@dataclass
class Rare:
    "The settings of train.py's Config that are rarely changed."
    adamw_lr: float | None = None       # with muon, the peak rate of the rest; None: lr
    keep_stages: bool = False           # keep the model before each growth, as out_dir/stage_2 ...
    vocab_size: int | None = None       # None: as many as the data's tokenizer has
    ln_scaling: bool = False            # the norms of the d-th layer are scaled by 1/sqrt(d)
    lr_shape: Literal['1-sqrt', 'cosine', 'constant'] = '1-sqrt'        # how the rate falls
    # muon's steps are as large as AdamW's, or as the first Muon's
    muon_scaling: Literal['match_rms_adamw', 'original'] = 'match_rms_adamw'
    curriculum_shape: Literal['linear', '1-sqrt'] = 'linear'
    backprop_curriculum: float = 0.0    # over this part of the steps backprop_depth rises from 1


@dataclass
class Parent:
    "What init_from gives. It goes into the checkpoint, so that a resume needs no parent."
    n_layer: int
    order: list[int] | None = None      # its own; None: each layer once
    mean: int | None = None             # of a recurrent core: the mean that it is given,
    backprop_depth: int | None = None   # and through how many of its last runs gradients go

    @classmethod
    def of(cls, model):
        if model.recurs:
            return cls(len(model.layers), mean=model.mean, backprop_depth=model.backprop_depth)
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
