"""A way of running a model, as one value: its layers in another order, a window of them in the
wrapper, or a recurrent core some number of times. Each command that takes a model takes the same
options for it (`Ways`), and makes a `Way` of them.
Usage: with Way(loop='3-2x2-3').apply(model): model(tokens)         # ours, or transformers'
"""
import contextlib
import copy
import itertools
from dataclasses import dataclass, fields

from nanodepth.common.errors import Refused
from nanodepth.common.whose import is_ours
from nanodepth.loop import fit_loop, in_order, parse_loop
from nanodepth.model import Span, require, unrolled
from nanodepth.models.checkpoint import Positive
from nanodepth.report.tables import PLAIN
from nanodepth.retrofit import core_of
from nanodepth.wrapper import Window, pick_window
from nanodepth.wrapping.others import layers_of, wrapped


@dataclass(kw_only=True)
class Ways(Positive):
    "How the models run. Several values, as in --r=1,2,4, are several ways."
    loop: tuple[str, ...] = ()      # the layers in another order, such as 3-2x2-3
    r: tuple[int, ...] = ()         # how often a recurrent core runs
    # the wrapper, with any of these: which window it runs (3-5, mid4, or a share of the depth), by
    # which solver (rk), in how many steps (3), which end at which time (1)
    window: tuple[str, ...] = ()
    solver: tuple[str, ...] = ()
    K: tuple[int, ...] = ()
    T: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()    # the share of the plain output (rk: 0.5), or a solver's own
    alpha: tuple[float, ...] = ()   # heavy_ball's step (0.5)
    m: tuple[int, ...] = ()         # anderson's memory (2)
    cache: tuple[str, ...] = ()     # what later tokens see: first, last (first)
    decode: tuple[str, ...] = ()    # full; bypass: only prompts are wrapped
    mode: tuple[str, ...] = ()      # the window as one block, or layer by layer (block)
    pin: tuple[bool, ...] = ()      # of a mixture, keep the experts of the first evaluation


ALONE = 'loop', 'r'         # each is a way by itself; all others are of one window


def read_ways(options):
    "The ways that the options name: none if there is no such option."
    given = {each.name: getattr(options, each.name) for each in fields(Ways)}
    several = {name: values for name, values in given.items() if values}
    kinds = {f'--{name}' if name in ALONE else 'the wrapper': None for name in several}
    if len(kinds) > 1:
        raise Refused(f'{" and ".join(kinds)} are different ways of running a model: give one '
                      '(export writes one way into a folder, which takes another)')
    ways = [Way(**dict(zip(several, cell))) for cell in itertools.product(*several.values())
            if several]
    return [*{str(way): way for way in ways}.values()]      # what is named twice is one way


def read_way(options):
    "The one way that the options name: the model as it is, if there is no such option."
    ways = read_ways(options) or [Way()]
    if len(ways) > 1:
        raise Refused(f'{", ".join(map(str, ways))}: this takes one way of running the model')
    return ways[0]


class Way:
    "loop, r, or settings of nanodepth.wrapped; nothing: the model as it is."

    def __init__(self, **settings):
        self.settings = {name: each for name, each in settings.items() if each is not None}
        self.loop, self.r = settings.get('loop'), settings.get('r')
        self.wrapped = {name: value for name, value in self.settings.items() if name not in ALONE}
        # what cannot be is refused before a model is opened
        of_model = 'window', 'mode', 'pin'
        Window([], **{name: each for name, each in self.wrapped.items() if name not in of_model})
        require(self.wrapped.get('mode', 'block') in ('block', 'layer'), f'{self}: block or layer')
        if isinstance(self.loop, str):
            parse_loop(self.loop)

    def apply(self, model):
        "The model runs in this way inside a `with`."
        core = core_of(model)
        if self.r is not None:
            require(core, f'r={self.r} is for models with a recurrent core, and this one has none: '
                    'loop runs its layers in another order')
            order, core = copy.deepcopy((model.order, core))    # the core, wherever it stands
            core.r = self.r
            return in_order(model, order)
        if self.loop:
            require(not core, f'{self}: a recurrent core is run more often by r')
            require(is_ours(model), f'{self}: layers of another family run in their own order. '
                    '--window runs some of them several times')
            of_notation = isinstance(self.loop, str)    # each layer of a notation must run
            return in_order(model, fit_loop(self.loop, len(model.layers)) if of_notation
                            else self.loop)
        return wrapped(model, **self.wrapped) if self.wrapped else contextlib.nullcontext(model)

    def cost(self, model):
        "How many layers run for each token. (Scoring fills no cache.)"
        if is_ours(model):
            with self.apply(model):
                return layers_run(model.order)
        n = len(layers_of(model))
        if not self.wrapped:
            return n
        a, b = pick_window(self.wrapped.get('window'), n)
        own = {name: self.wrapped[name] for name in ('solver', 'K') if name in self.wrapped}
        return n + (Window([], **own).evaluations() - 1) * (b + 1 - a)

    def __str__(self):
        return as_typed(self.settings) or PLAIN


def layers_run(order):
    layers = 0
    for item in order:
        if not isinstance(item, Span):
            layers += 1
        elif isinstance(item, Window):
            layers += item.evaluations() * layers_run(item.items)
        else:
            layers += layers_run(item.items) * len(item.unrolled()) // len(unrolled(item.items))
    return layers


def as_typed(settings):
    return ' '.join(f'--{name}={shown(value)}' for name, value in settings.items())


def notation(order):
    "An order in the notation, or layer by layer where it has none; '1,' is layer 1 alone."
    try:
        return format_loop(order)
    except Refused:
        return ' '.join(map(str, order)) + ',' * (len(order) == 1)


def format_loop(order):
    "An order in the notation: the inverse of parse_loop, with neighbouring plain segments joined."
    parts, new = [], 0          # layers below `new` are written
    rest = list(order)
    while rest:
        times = max(1, rest.count(new))
        size = rest.index(new, 1) if times > 1 else 1       # the block lasts until it returns
        block = [*range(new, new + size)] * times
        if rest[:len(block)] != block:
            raise Refused(f'the order {list(order)} is not a loop of blocks in the order of their '
                          'layers, so it has no notation')
        rest = rest[len(block):]
        if times == 1 and parts and parts[-1][1] == 1:
            parts[-1][0] += 1
        else:
            parts.append([size, times])
        new += size
    return '-'.join(f'{size}x{times}' if times > 1 else str(size) for size, times in parts)


def shown(value):
    "A value as a user types it."
    if isinstance(value, list):
        return notation(value)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
