"""The arms of a comparison. An arm is a named line: a config or another arm's name, with settings.
In a line, {name} is the folder of another arm's model, and --flops=name stands for as many steps as
that arm's FLOPs pay for. A line may also begin with a command, such as `cut {baseline} 2-2-2`.
Usage: Arms({'baseline': 'config/baseline.py'}, Path('out/mine')).argv('baseline', seed=0)
"""
import dataclasses
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from nanodepth.commands.cost import planned
from nanodepth.common.errors import Refused, nearest
from nanodepth.models import checkpoint
from nanodepth.scoring.scores import is_there
from nanodepth.text.loader import how_to_prepare, make_toy_data
from nanodepth.train import Config, in_steps, read

COMMANDS = [path.stem for path in Path(__file__).parent.glob('[!_]*.py')]


@dataclass
class Arm:
    words: list[str]        # of its command, with {name} where another arm's folder will stand
    root: str               # the arm whose best rate it takes: itself, or what it is a variant of
    command: str            # train, or what makes a model that is not asked
    flops: str | None       # the arm whose FLOPs it has
    begins: set[str]        # the arms whose models must be there before it can be planned


def read_arm(name, lines):
    root, words = name, shlex.split(lines[name])
    while words and words[0] in lines and words[0] != root:         # a variant, maybe of a variant
        root, given = words[0], words[1:]
        words = shlex.split(lines[root]) + given
        if root == name or len(words) > 1000:
            raise Refused(f'{name} is a variant of itself')
    command = 'train'
    if not words or not words[0].endswith('.py') and not words[0].startswith('--'):
        command = words.pop(0) if words else ''
        if command not in COMMANDS:
            raise Refused(f'{name}: {command!r} is no config, arm or command'
                          f'{nearest(command, [*lines, *COMMANDS])}')
    flops = [word.partition('=')[2] for word in words if word.startswith('--flops=')]
    words = [word for word in words if not word.startswith('--flops=')]
    begins = {*re.findall(r'\{([^{}]+)\}', ' '.join(words))} - {'seed'}
    return Arm(words, root, command, flops[-1] if flops else None, begins)


class Arms(dict):
    "{name: Arm}, in an order in which each arm stands behind those that it needs."

    def __init__(self, lines, out, more=(), partners=False):
        super().__init__()
        self.out, self.more = out, [*more]
        self.factors = {}       # {root: the factor of its own rate that was best}
        self.totals = {}        # {(arm, seed): what its model costs}
        left = {name: read_arm(name, lines) for name in lines}
        needs = {}
        for name, arm in left.items():
            needs[name] = arm.begins | ({arm.root, arm.flops} - {None, name})
            for other in needs[name]:
                if other not in left:
                    raise Refused(f'{name}: there is no arm {other}{nearest(other, left)}')
        while left:
            free = next((name for name in left if needs[name] <= self.keys()), None)
            if free is None:
                raise Refused(f'{", ".join(left)}: each needs another one of these first')
            self[free] = left.pop(free)
            if flops := self[free].flops:       # what that one begins from says what it costs
                self[free].begins |= self[flops].begins
        for name in self.trained():
            self.refuse(name)
        if partners:
            self.add_partners()

    def trained(self):
        return [name for name, arm in self.items() if arm.command == 'train']

    def factor(self, name):
        return self.factors.get(self[name].root, 1.0)

    def folder(self, name, seed, factor=None):
        "Where a run is; at the best rate of its arm, unless a factor is named."
        factor = self.factor(name) if factor is None else factor
        rate = '' if factor == 1 else f'_rate{factor:g}'
        stem = re.sub(r'[^\w.=+-]+', '_', name)
        return self.out / f'{stem}{rate}-{seed}'

    def config(self, name, seed=0, factor=None):
        "(the config of an arm as its line has it, the words for it with the folders of this seed)"
        def fill(match):
            return str(seed if match[1] == 'seed' else self.folder(match[1], seed))
        words = [re.sub(r'\{([^{}]+)\}', fill, word) for word in self[name].words]
        folder = self.folder(name, seed, factor)
        if self[name].command != 'train':
            return None, [*words, f'--out={folder}']
        words += [*self.more, f'--seed={seed}', f'--out_dir={folder}']
        return read(Config, [*words, '--resume=false']), words      # whatever is in the folder

    def argv(self, name, seed, factor=None):
        "What its command is given. The models that it begins from must be there."
        arm = self[name]
        config, words = self.config(name, seed, factor)
        if arm.command != 'train':
            return words
        if arm.flops:
            words += [f'--{key}={value}' for key, value in
                      self.with_flops(name, config, self.total(arm.flops, seed)).items()]
        factor = self.factor(name) if factor is None else factor
        if factor != 1:
            words += [f'--{key}={factor * value:.6g}' for key in ('lr', 'adamw_lr')
                      if (value := getattr(config, key))]
        return words

    # ------------------------------------------------------------------------------ what it costs

    def total(self, name, seed):
        "The training FLOPs of its model, with all that it begins from."
        key = name, seed if self[name].begins else 0
        if key not in self.totals:
            config = read(Config, self.argv(name, seed))
            self.totals[key] = planned(config) + inherited(config)
        return self.totals[key]

    def with_flops(self, name, config, flops):
        """The settings with which a config costs so many FLOPs: its steps, its own warm-up if that
        fits, and a cool-down in proportion, unless the line has one. In a model that grows the cost
        is not quite in proportion to the steps, so it is tried again."""
        settings = dict(steps=config.steps)
        keeps = [word for word in self[name].words if word.startswith('--decay_steps=')]
        for _ in range(20):
            now = dataclasses.replace(config, **settings)
            steps = round(now.steps * (flops - inherited(config)) / planned(now))
            if steps < 1:
                raise Refused(f'{name}: the FLOPs of {self[name].flops} pay for less than a step')
            shorter = in_proportion(config, steps)
            decay = in_steps(config.decay_steps, config.steps) if keeps else shorter['decay_steps']
            warmup = in_steps(config.warmup_steps, config.steps)
            if warmup + decay > steps:
                warmup = shorter['warmup_steps']
            before, settings = settings, dict(steps=steps, warmup_steps=warmup, decay_steps=decay)
            if settings == before:
                break
        return settings

    def refuse(self, name):
        "Refuse what can be known before the first run."
        try:
            config, _ = self.config(name)
            make_toy_data([config.data, config.cooldown_data])
            for data in filter(None, (config.data, config.cooldown_data)):
                if not is_there(data):
                    raise Refused(f'there is no dataset at {data}; {how_to_prepare(data)}')
            if not self[name].begins:
                self.total(name, 0)
        except Refused as error:
            raise Refused(str(error) if name in str(error) else f'{name}: {error}') from None

    def add_partners(self):
        """For each arm that costs more or less than the first one, the first one with as many
        FLOPs. Arms of equal cost share a partner."""
        first, *others = self.trained()
        costs = [self.total(first, 0)] if not self[first].begins else []
        for name in others:
            begins = self[name].begins
            if self[name].flops or not begins and any(is_same(self.total(name, 0), cost)
                                                      for cost in costs):
                continue
            partner = f'{first}, FLOPs of {name}'
            self[partner] = dataclasses.replace(self[first], flops=name,
                                                begins=begins | self[first].begins)
            if not begins:
                self.refuse(partner)
                costs.append(self.total(name, 0))


def in_proportion(config, steps):
    "Warm-up and decay of a run of so many steps: the same shares of them as in its config."
    warmup, decay = (in_steps(length, config.steps)
                     for length in (config.warmup_steps, config.decay_steps))
    return dict(warmup_steps=warmup * steps // config.steps,
                decay_steps=max(round(decay * steps / config.steps), min(1, decay)))


def inherited(config):
    "The FLOPs of what a run begins from; of a published model they are unknown and count as none."
    if not config.init_from:
        return 0
    flops = checkpoint.cost_of(checkpoint.state_of(config.init_from))
    return 0 if math.isnan(flops) else flops


def is_same(flops, others):
    "Are two costs compared as equal ones? Steps are whole, so they are never quite equal."
    return abs(flops - others) <= 0.02 * others
