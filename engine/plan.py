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
    plan.at(300)                # Step(lr=1.0, n_layer=8, origin=(0, 1, 2, 3, 2, 3, 4, 5), ...)
"""
import bisect
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.errors import Refused, refusing
from grow import GROWTH, growth_plan
from loop import fit_loop
from retrofit import recurrence_curriculum, sample_recurrence

# The settings that only enter the plan: a resume compares the plans step by step, not these
# values.
ANSWERED = ('steps', 'warmup_steps', 'decay_steps', 'lr_shape', 'lr_decay_steps', 'lr_floor',
            'n_layer', 'grow', 'grow_block', 'grow_alpha', 'loop', 'cooldown_loop',
            'cooldown_data', 'recurrence', 'backprop_depth', 'curriculum', 'curriculum_shape',
            'backprop_curriculum')


@dataclass
class Start:
    "What a run begins with. It goes into the checkpoint, so that a resume needs no parent."
    kind: Literal['lm', 'recurrent']
    n_layer: int
    order: list[int] | None = None      # the parent's own; None: each layer once
    mean: int | None = None             # of a recurrent parent: the mean of its recurrences,
    backprop_depth: int | None = None   # and through how many of them gradients go back

    @classmethod
    def of(cls, model):
        if hasattr(model, 'core'):
            return cls('recurrent', len(model.layers), None, model.mean, model.backprop_depth)
        return cls('lm', len(model.layers), model.config.order)


class Step(NamedTuple):
    lr: float                   # as a fraction of the peak
    n_layer: int
    origin: tuple | None        # the order of the stage before that these layers are copies of
    order: tuple | None         # None: a recurrent core's own
    data: str                   # the setting that names it
    batch: int                  # which one of it
    mean: int | None            # of the random number of recurrences
    backprop_depth: int | None


class Plan:
    def __init__(self, config, start=None):
        c = self.config = config
        self.start = start = start or Start('lm', c.n_layer)
        # from this step on the rate falls, and growing is over
        self.decay = c.steps - c.decay_steps
        loops = {name: getattr(c, name) for name in ('loop', 'cooldown_loop') if getattr(c, name)}
        if start.kind == 'recurrent' and loops:
            raise Refused(f'{c.init_from} has a recurrent core, which loops by itself: leave loop '
                          'and cooldown_loop out')
        if start.kind != 'recurrent' and (c.recurrence or c.backprop_depth):
            raise Refused(f'recurrence={c.recurrence} and backprop_depth={c.backprop_depth} are '
                          f'for a model with a recurrent core, but {c.init_from} has none: '
                          f'python retrofit.py {c.init_from} 2-4-2 makes one')
        self.mean = c.recurrence or start.mean
        self.backprop_depth = c.backprop_depth or start.backprop_depth
        # (first step, layers)
        self.stages = [(0, start.n_layer if c.init_from else c.n_layer)]
        if c.grow:
            with refusing(OverflowError):
                self.stages = growth_plan(c.grow, c.n_layer, c.grow_block, self.decay, c.grow_alpha)
        self.firsts, depths = map(list, zip(*self.stages))
        self.origins = [None,
                        *(tuple(GROWTH[c.grow](depth, c.grow_block)) for depth in depths[:-1])]
        for name in loops:
            try:
                loops[name] = tuple(fit_loop(loops[name], depths[-1]))
            except ValueError as error:
                raise Refused(f'{name}: {error}') from None
        own = tuple(start.order) if start.order else None
        self.loop, self.late = loops.get('loop') or own, loops.get('cooldown_loop')
        self.orders = [None if start.kind == 'recurrent' else self.loop or tuple(range(depth))
                       for depth in depths]

    def at(self, step):
        c, late = self.config, step >= self.decay
        stage = bisect.bisect_right(self.firsts, step) - 1
        order = self.late if late and self.late else self.orders[stage]
        data, batch = 'data', step
        if late and c.cooldown_data:
            data, batch = 'cooldown_data', step - self.decay
        return Step(self.rate(step), self.stages[stage][1], self.origins[stage], order, data, batch,
                    *self.recurrence(step))

    def recurrence(self, step):
        """(mean of r, through how many recurrences gradients go back): None for any other model.
        The latter is never more than the former, as in the authors' code."""
        c = self.config
        if not self.mean:
            return None, None
        mean = recurrence_curriculum(step, c.steps, self.mean, c.curriculum, c.curriculum_shape)
        depth = recurrence_curriculum(step, c.steps, self.backprop_depth, c.backprop_curriculum)
        return mean, min(depth, mean)

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

    def told(self, step):
        """What a recurrent model's forward is told at a step, the same on every rank; {} for any
        other."""
        if not self.mean:
            return {}
        mean, depth = self.recurrence(step)
        return dict(r=sample_recurrence(mean, step, self.config.seed), backprop_depth=depth)

    def stretches(self):
        """[(first step, end)] of steps alike except the rate: the stages, and the decay where it
        loops or ends the growing."""
        c = self.config
        decays = (self.late or c.grow) and c.decay_steps
        edges = [*self.firsts, *[self.decay] * bool(decays), c.steps]
        return [(first, end) for first, end in zip(edges, edges[1:]) if end > first]
