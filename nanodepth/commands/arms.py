"""The arms of a comparison. An arm is a named line: a config or another arm's name, with settings.
In a line, {name} is the folder of another arm's model, {seed} the seed, and --flops=name stands for
as many steps as that arm's FLOPs pay for. A line may also begin with `cut`, as a command does.
Usage: Arms({'baseline': 'config/baseline.py'}, Path('out/mine')).folder('baseline', seed=0)
"""
import hashlib
import json
import math
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from nanodepth.commands import cut
from nanodepth.commands.cost import planned, stretches
from nanodepth.common.errors import Refused, nearest, refusing
from nanodepth.model import steps_in
from nanodepth.models import checkpoint
from nanodepth.report.contrasts import is_same
from nanodepth.scoring.rows import files_of, sources_of
from nanodepth.scoring.scores import is_there
from nanodepth.text.loader import how_to_prepare
from nanodepth.train import (FREE, KNOWN, Config, Loader, as_written, find, in_steps, make_toy_data,
                             read, refuse_what_does_not_fit, train)

SCHEDULE = {'steps', 'warmup_steps', 'decay_steps'}


@dataclass
class Arm:
    words: list[str]        # of its command, with {name} where another arm's folder will stand
    is_cut: bool            # it makes a model that is not asked
    flops: str | None       # the arm whose FLOPs it has
    begins: set[str]        # the arms whose models must be there before it can be planned
    needs: set[str]         # the arms that must be known before it


def read_arm(name, lines):
    words, needs = shlex.split(lines[name]), set()
    while words and words[0] in lines and words[0] != 'cut':        # a variant, maybe of a variant
        if words[0] in needs | {name}:
            raise Refused(f'{name} is a variant of itself')
        needs.add(words[0])
        words = shlex.split(lines[words[0]]) + words[1:]
    if not words or words[0] != 'cut' and not words[0].startswith('--') and (
            not words[0].endswith('.py')):
        first = words[0] if words else ''
        raise Refused(f'{name}: {first!r} is no config, no other arm and not `cut`'
                      f'{nearest(first, lines)}')
    if any(word.partition('=')[0] == '--seed' for word in words) and words[0] != 'cut':
        raise Refused(f'{name}: which seeds are trained is --seeds, and no setting of a line')
    flops = [word.partition('=')[2] for word in words if word.startswith('--flops=')]
    words = [word for word in words if not word.startswith('--flops=')]
    begins = {*re.findall(r'\{([^{}]+)\}', ' '.join(words))} - {'seed'}
    needs |= begins | {*flops[-1:]}
    for other in needs:
        if other not in lines:
            raise Refused(f'{name}: there is no arm {other}{nearest(other, lines)}')
    is_cut = words[0] == 'cut'
    return Arm(words[is_cut:], is_cut, flops[-1] if flops else None, begins, needs)


class Arms(dict):
    "{name: Arm}, in an order in which each arm stands behind those that it needs."

    def __init__(self, lines, out, more=(), partners=False):
        super().__init__()
        self.out, self.more = out, [*more]
        left = {name: read_arm(name, lines) for name in lines}
        while left:
            free = next((name for name in left if left[name].needs <= self.keys()), None)
            if free is None:
                raise Refused(f'{", ".join(left)}: each needs another one of these first')
            self[free] = left.pop(free)
            if flops := self[free].flops:       # what that one begins from says what it costs
                self[free].begins |= self[flops].begins
        if not self.trained():
            raise Refused('no arm is trained: an arm is a config with settings')
        for name in self.trained():
            self.refuse(name)
        if partners:
            self.add_partners()

    def trained(self):
        return [name for name, arm in self.items() if not arm.is_cut]

    def config(self, name, seed=0):
        "(the settings as an arm's line has them, the words for them with the folders of this seed)"
        def fill(match):
            return str(seed if match[1] == 'seed' else self.folder(match[1], seed))
        words = [re.sub(r'\{([^{}]+)\}', fill, word) for word in self[name].words]
        if self[name].is_cut:
            return read(cut.Options, words, ['run', 'shape']), words
        # a line's own settings have the last say
        configs = [word for word in words if word[0] != '-' and word.endswith('.py')]
        own = [word for word in words if word not in configs]
        words = [*configs, *self.more, *own, f'--seed={seed}']
        return read(Config, words), words

    def mark(self, name, seed=0):
        """Eight letters of all that decides what an arm's model is, but for its seed: settings, the
        source of train.py and what it imports and of functions and Steps, what the data say of
        themselves, and what it begins from."""
        arm = self[name]
        config, _ = self.config(name, seed)
        settings, functions, data = vars(config) | dict(words=arm.words), [cut.main], []
        if not arm.is_cut:
            settings = as_written(config)
            functions = [each for each in vars(config).values() if callable(each)]
            functions += {*map(type, steps_in(config.order or ()))} - {*KNOWN.values()}
            functions += [find(word) for word in arm.words if word.endswith('.py')]
            data = [Loader(config, each).description()
                    for each in (config.data, config.cooldown_data) if each]
        left = FREE | {'seed', 'out', 'run', 'init_from'}
        parent = config.run if arm.is_cut else config.init_from
        is_an_arms = parent and any(Path(parent) == self.folder(other, seed)
                                    for other in arm.begins)
        files = files_of(parent) if parent and not is_an_arms else None
        others = [self.mark(other, seed) for other in sorted({*arm.begins, arm.flops} - {None})]
        said = [{key: value for key, value in settings.items() if key not in left},
                sources_of([train, *functions]), data, files, others, arm.is_cut]
        return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:8]

    def folder(self, name, seed):
        short = re.sub(r'[^\w.=+-]+', '_', name)[:30]
        return self.out / f'{short}-{self.mark(name, seed)}-{seed}'

    def argv(self, name, seed):
        """(the settings of a run, the words of its command but for its folder). The models that it
        begins from must be there."""
        config, words = self.config(name, seed)
        if flops := self[name].flops:
            settings = self.with_flops(name, config, self.total(flops, seed))
            words += [f'--{key}={value}' for key, value in settings.items()]
            config = replace(config, **settings)
        return config, words

    # ------------------------------------------------------------------------------ what it costs

    def total(self, name, seed):
        "The training FLOPs of its model, with all that it begins from."
        config, _ = self.argv(name, seed)
        return planned(config) + inherited(config)

    def with_flops(self, name, config, flops):
        """The settings with which a config costs so many FLOPs: its steps, its own warm-up if that
        fits, and a cool-down in proportion, unless the line has one. In a model that grows the cost
        is not quite in proportion to the steps, so it is tried again."""
        settings = dict(steps=config.steps)
        named = {word.partition('=')[0] for word in self[name].words}
        for _ in range(20):
            now = replace(config, **settings)
            steps = round(now.steps * (flops - inherited(config)) / planned(now))
            if steps < 1:
                raise Refused(f'{name}: the FLOPs of {self[name].flops} pay for less than a step')
            warmup, decay = (in_steps(length, config.steps)
                             for length in (config.warmup_steps, config.decay_steps))
            if '--decay_steps' not in named:
                decay = max(round(decay * steps / config.steps), min(1, decay))
            if warmup + decay > steps:
                warmup = warmup * steps // config.steps
            before, settings = settings, dict(steps=steps, warmup_steps=warmup, decay_steps=decay)
            if settings == before:
                break
        return settings

    def refuse(self, name):
        "Refuse what can be known before the first run."
        try:
            config, _ = self.config(name)
            make_toy_data(config)
            data = {key: value for key in ('data', 'cooldown_data')
                    if (value := getattr(config, key))}
            for each in data.values():
                if not is_there(each):
                    raise Refused(f'there is no dataset at {each}; {how_to_prepare(each)}')
            if self[name].begins:
                return
            config, _ = self.argv(name, 0)
            model = stretches(config)[-1][1]
            parent = checkpoint.state_of(config.init_from) if config.init_from else {}
            lengths = {key: in_steps(getattr(config, key), config.steps)
                       for key in ('warmup_steps', 'decay_steps')}
            loaders = {key: Loader(config, each) for key, each in data.items()}
            with refusing(AssertionError):
                refuse_what_does_not_fit(replace(config, **lengths), model, loaders, parent)
        except Refused as error:
            raise Refused(str(error) if name in str(error) else f'{name}: {error}') from None

    def add_partners(self):
        """For each arm that costs more or less than the first one, the first one with as many
        FLOPs. Arms of equal cost share a partner; what an arm costs that begins from a model, may
        be another number for each seed."""
        first, *others = self.trained()
        fixed = {name: not (self[name].begins or self.config(name)[0].init_from)
                 for name in (first, *others)}
        costs = [self.total(first, 0)] if fixed[first] else []
        for name in others:
            if self[name].flops or fixed[name] and any(is_same(self.total(name, 0), cost)
                                                       for cost in costs):
                continue
            partner = f'{first} with the FLOPs of {name}'
            self[partner] = replace(self[first], flops=name,
                                    begins=self[name].begins | self[first].begins)
            if fixed[name]:
                costs.append(self.total(name, 0))
            self.refuse(partner)

    def partners_of(self, name):
        "The arms that are another one with other FLOPs, and perhaps with a cool-down of their own."
        def settings(other):
            words = self.config(other)[0]
            return {key: value for key, value in as_written(words).items() if key not in SCHEDULE}
        return [other for other in self.trained()
                if self[other].flops and not self[name].flops and settings(other) == settings(name)]


def inherited(config):
    "The FLOPs of what a run begins from; of a published model they are unknown and count as none."
    if not config.init_from:
        return 0
    flops = checkpoint.cost_of(checkpoint.state_of(config.init_from))
    return 0 if math.isnan(flops) else flops
