"""A run is its plan: what each step does, as a function of its number alone.

The idea: the learning rate, how many layers there are and where they came from, the order in which
they run, which batch of which data is read, how often a recurrent core runs: all of it follows from
the config and from what the run begins with. So training asks the plan and does it, the cost adds
it up (cost.py), and a run may be resumed under another config if both plans agree on every step
taken. What lies ahead may change.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A (warm-up, constant, 1-sqrt;
growing before the decay); "From Growing to Looping", section 5.2 (a loop and other data from the
decay on); "Retrofitted Recurrence", section 4.2.

Usage:
    plan = Plan(config)         # of a new model; Plan(config, Start.of(model)) of another's
    plan.at(300)                # Step(lr_fraction=1.0, n_layer=8, ...)
"""
import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from nanodepth.common.errors import Refused
from nanodepth.grow import GROWTH, growth_plan, prop_schedule
from nanodepth.model import ModelConfig


@dataclass
class Start:
    "The parent of a run. It goes into the checkpoint, so that a resume needs no parent."
    kind: Literal['lm', 'recurrent']
    n_layer: int                        # of a new model: the depth at the end
    order: list[int] | None = None      # the parent's own; None: each layer once
    mean: int | None = None             # of a recurrent parent: the mean that it is given,
    backprop_depth: int | None = None   # and through how many of its last runs gradients go

    @classmethod
    def of(cls, model):
        if model.recurs:
            return cls('recurrent', len(model.layers), None, model.mean, model.backprop_depth)
        return cls('lm', len(model.layers), model.config.order)


class Step(NamedTuple):
    lr_fraction: float                  # of the peak rate
    n_layer: int
    origin: list | None                 # the layers of the stage before that these are copies of
    order: list | None                  # None: a recurrent core's own
    data: str                           # the setting that names what is read,
    batch: int                          # and which batch of it
    r: int | None = None                # how often a recurrent core runs,
    backprop_depth: int | None = None   # and through how many of these gradients go back

    @property
    def how(self):
        "What the model is given to run and to count this step."
        return {} if self.r is None else dict(r=self.r, backprop_depth=self.backprop_depth)


class Plan:
    def __init__(self, config, start=None):
        c = self.config = config
        self.start = start or Start('lm', c.n_layer)
        # from here on growing is over; the rate falls too, unless lr_decay_steps says otherwise
        self.cooldown_start = c.steps - c.decay_steps
        self.mean = c.recurrence or self.start.mean
        self.backprop_depth = c.backprop_depth or self.start.backprop_depth
        self.refuse_what_excludes()
        # [(first step, layers)] of each stage
        self.stages = [(0, self.start.n_layer if c.init_from else c.n_layer)]
        if c.grow and c.init_from:      # a parent grows once
            deeper = len(GROWTH[c.grow](self.start.n_layer, c.grow_block))
            first, _ = prop_schedule(self.cooldown_start, 2, c.grow_alpha)
            self.stages.append((first, deeper))
        elif c.grow:
            self.stages = growth_plan(c.grow, c.n_layer, c.grow_block, self.cooldown_start,
                                      c.grow_alpha)
        self.main_order = self.order_of('loop') or self.start.order     # None: each layer once
        self.cooldown_order = self.order_of('cooldown_loop')            # None: the same as before

    def refuse_what_excludes(self):
        "Settings that each may be, and not together."
        c = self.config
        recurs = self.start.kind == 'recurrent'
        falls = max(c.decay_steps, c.lr_decay_steps or 0)
        no_core = 'init_from must be one'
        if c.init_from:
            no_core = f'{c.init_from} has none: nanodepth cut {c.init_from} 2-4-2 makes one'
        for wrong, why in (
                (c.warmup_steps + falls > c.steps, f'warmup_steps={c.warmup_steps} and a decay '
                 f'over {falls} steps do not fit into steps={c.steps}'),
                (c.decay_steps == 0 and (c.cooldown_loop or c.cooldown_data),
                 'cooldown_loop and cooldown_data begin with the decay, but decay_steps is 0'),
                (c.grow and c.loop, f'grow={c.grow!r} and loop={c.loop!r} exclude each other: a '
                 'model that grows may loop in its cool-down'),
                (recurs and (c.loop or c.cooldown_loop), f'{c.init_from} has a recurrent core, '
                 'which loops by itself: leave loop and cooldown_loop out'),
                (c.init_from and c.grow and (recurs or self.start.order), f'grow={c.grow!r}: '
                 f'{c.init_from} loops its layers, and what grows runs each of its own once'),
                (not recurs and (c.recurrence or c.backprop_depth),
                 f'recurrence={c.recurrence} and backprop_depth={c.backprop_depth} are for a model '
                 f'with a recurrent core: {no_core}')):
            if wrong:
                raise Refused(why)

    def refuse_other_run(self, old, state, data, set_by_parent):
        """Refuse to go on with a run of other settings: `old` are those that it had, `state` is
        where it stands, and `set_by_parent` are settings that its parent decides."""
        c = self.config
        old_plan = Plan(old, self.start)
        at = state['step']
        if at > old.steps:
            raise Refused(f'{c.out_dir} is damaged: it holds step {at} of {old.steps}')
        if at > c.steps:
            raise Refused(f'{c.out_dir} has taken {at} steps, more than steps={c.steps}: choose '
                          'another --out_dir')
        taken = range(max(1, at))       # what it began with counts as taken too
        agree = all(self.at(step) == old_plan.at(step) for step in taken)
        move = 'choose another --out_dir, or move that run out of the way by --resume=false'
        free = MAY_DIFFER | set_by_parent | (MAY_DIFFER_AHEAD if agree else set())
        for name, value in vars(c).items():
            if value != getattr(old, name) and name not in free:
                raise Refused(f'{c.out_dir} holds a run with {name}={getattr(old, name)!r}, but '
                              f'this config has {value!r}: {move}')
        for name in {'data', *(self.at(step).data for step in taken)}:
            if state.get(name) != data[name].checksums():
                raise Refused(f'the data has changed since the run in {c.out_dir} began (other '
                              f'checksums): {move}')
            was = state.get('shares', {}).get(name)         # older runs do not say
            if was and was != data[name].shares():
                raise Refused(f'the shares of the data have changed since the run in {c.out_dir} '
                              f'began, from {was} to {data[name].shares()}: {move}')

    def order_of(self, setting):
        "The order that a setting such as loop='2x4' asks for; None if it is not set."
        loop = getattr(self.config, setting)
        if not loop:
            return None
        from nanodepth.loop import fit_loop
        try:
            return fit_loop(loop, self.stages[-1][1])
        except ValueError as error:
            raise Refused(f'{setting}: {error}') from None

    def set_up(self, model):
        "A model that the run begins with takes its settings from the plan."
        if model.recurs:
            model.mean, model.backprop_depth = self.mean, self.backprop_depth
        elif self.main_order:
            model.config.order = self.main_order

    def at(self, step):
        "What this step does."
        c = self.config
        cools = step >= self.cooldown_start
        stage = max(i for i, (first, _) in enumerate(self.stages) if first <= step)
        n_layer = self.stages[stage][1]
        origin = None
        if stage:
            origin = GROWTH[c.grow](self.stages[stage - 1][1], c.grow_block)
        order = None
        if self.start.kind == 'lm':
            order = self.main_order or [*range(n_layer)]
            if cools and self.cooldown_order:
                order = self.cooldown_order
        data, batch = 'data', step
        if cools and c.cooldown_data:
            data = 'cooldown_data'
            batch = step - self.cooldown_start
        now = Step(self.rate(step), n_layer, origin, order, data, batch)
        return now if self.mean is None else now._replace(**self.recurrences(step))

    def recurrences(self, step):
        """How often a recurrent core runs, the same on every rank, and through how many of these
        gradients go back: never more than the step's mean, as in the authors' code."""
        from nanodepth.retrofit import recurrence_curriculum, sample_recurrence
        c = self.config
        mean = recurrence_curriculum(step, c.steps, self.mean, c.curriculum, c.curriculum_shape)
        depth = recurrence_curriculum(step, c.steps, self.backprop_depth, c.backprop_curriculum)
        return dict(r=sample_recurrence(mean, step, c.seed), backprop_depth=min(depth, mean))

    def rate(self, step):
        """Linear up, constant, then down over the last lr_decay_steps: 1 - sqrt, or half a cosine,
        to a floor that would be reached one step after the last."""
        c = self.config
        if step < c.warmup_steps:
            return (step + 1) / c.warmup_steps
        falls = c.decay_steps if c.lr_decay_steps is None else c.lr_decay_steps
        t = max(0, step - (c.steps - falls)) / max(1, falls)
        down = (1 + math.cos(math.pi * t)) / 2 if c.lr_shape == 'cosine' else 1 - math.sqrt(t)
        return c.lr_floor + (1 - c.lr_floor) * down


def refuse_void(config, given):
    """Refuse settings that were given on the command line and have no effect there. A config file
    may hold what a flag beside it makes void."""
    c = config
    without = [
        (not c.grow, 'grow', ('grow_block', 'grow_alpha', 'keep_stages')),
        (c.optimizer != 'muon', 'optimizer=muon', ('adamw_lr', 'muon_scaling')),
        (c.optimizer != 'adamw_star', 'optimizer=adamw_star', ('star_decay',)),
        (c.optimizer == 'adamw_star', 'another optimizer', ('weight_decay',)),
        (not c.init_from, 'init_from, a model with a recurrent core',
         ('curriculum', 'curriculum_shape', 'backprop_curriculum'))]
    for is_missing, needed, names in without:
        for name in names:
            if is_missing and name in given:
                raise Refused(f'--{name} has no effect without {needed}: leave it out')


# What a resumed run may change, for it changes only speed, rounding, and what is measured or kept.
MAY_DIFFER = {'out_dir', 'device', 'compile', 'grad_accum', 'resume', 'eval_every', 'eval_batches',
              'log_every', 'save_every', 'keep_stages'}
# What it may change too if the plan of every step taken stays the same.
MAY_DIFFER_AHEAD = {
    'steps', 'warmup_steps', 'decay_steps', 'lr_shape', 'lr_decay_steps', 'lr_floor', 'n_layer',
    'grow', 'grow_block', 'grow_alpha', 'loop', 'cooldown_loop', 'cooldown_data', 'recurrence',
    'backprop_depth', 'curriculum', 'curriculum_shape', 'backprop_curriculum'}


def model_config(config, **more):
    "The ModelConfig of a run's config; `more` adds fields or replaces them."
    return ModelConfig(**{each.name: getattr(config, each.name) for each in fields(ModelConfig)
                          if hasattr(config, each.name)} | more)
