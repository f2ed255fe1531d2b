"""A way of running a model, as one value: its layers in another order, a window looped by the
wrapper, or a recurrent core some number of times. Each command that takes a model takes the same
options for it (`Ways`), and makes a `Way` of them.
Usage: with Way(loop='3-2x2-3').apply(model): model(tokens)         # ours, or transformers'
"""
import contextlib
import copy
import itertools
from dataclasses import dataclass, fields

from nanodepth.common.errors import Refused
from nanodepth.loop import fit_loop, parse_loop
from nanodepth.looping.caches import Window
from nanodepth.looping.layers import layers_of
from nanodepth.looping.orders import in_order, layers_run, order_of, put
from nanodepth.models.checkpoint import Brought
from nanodepth.report.tables import PLAIN
from nanodepth.retrofit import core_of


@dataclass(kw_only=True)
class Ways(Brought):
    "How the models run. Several values, as in --r=1,2,4, are several ways."
    loop: tuple[str, ...] = ()      # the layers in another order, such as 3-2x2-3
    r: tuple[int, ...] = ()         # how often a recurrent core runs
    # the wrapper, with any of these: which window it loops (3-5, mid4, or a fraction of the depth),
    # by which solver (rk; with options as euler(tol=0.1)), in how many steps (3), which end at
    # which time (1)
    window: tuple[str, ...] = ()
    solver: tuple[str, ...] = ()
    K: tuple[int, ...] = ()
    T: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()    # the share of the plain output; the solver's own (rk 0.5)
    cache: tuple[str, ...] = ()     # what later tokens see of looped layers (first)
    decode: tuple[str, ...] = ()    # full; bypass: only prompts are looped
    mode: tuple[str, ...] = ()      # the window as one block, or layer by layer (block)
    pin: tuple[str, ...] = ()       # mixture: keep the experts of the first evaluation

    def __post_init__(self):
        super().__post_init__()
        solvers = []            # a comma within brackets is of one solver's options
        for part in self.solver:
            if solvers and solvers[-1].count('(') > solvers[-1].count(')'):
                solvers[-1] += f',{part}'
            else:
                solvers.append(part)
        self.solver = tuple(solvers)


ALONE = 'loop', 'r'         # each is a way by itself; all others are of one window


def read_ways(options):
    "The ways that the options name: none if there is no such option."
    given = {each.name: getattr(options, each.name) for each in fields(Ways)}
    several = {name: values for name, values in given.items() if values and name != 'classes'}
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
    "loop, r, or settings of nanodepth.looped; nothing: the model as it is."

    def __init__(self, **settings):
        self.settings = {name: each for name, each in settings.items() if each is not None}
        self.loop, self.r = settings.get('loop'), settings.get('r')
        dials = {name: value for name, value in self.settings.items() if name not in ALONE}
        has_window, self.window = bool(dials), dials.pop('window', None)
        # what cannot be is refused before a model is opened
        self.span = Window([], **dials) if has_window else None
        if isinstance(self.loop, str):
            parse_loop(self.loop)

    def order(self, model):
        "What a model runs in this way."
        order, core = order_of(model), core_of(model)
        if self.r is not None and not core:
            raise Refused(f'r={self.r} is for models with a recurrent core, and this one has none: '
                          'loop runs its layers in another order')
        if self.loop and core:
            raise Refused(f'{self} is for ordinary models: a recurrent core is run more often by r')
        if self.r is not None:      # the same order, whose core, wherever it stands, is another one
            order, core = copy.deepcopy((order, core))
            core.r = self.r
            core.with_gradient()                # which refuses r = 0
        elif isinstance(self.loop, str):        # each layer of a notation must run
            order = fit_loop(self.loop, len(layers_of(model)))
        elif self.loop:
            order = self.loop
        return put(self.span, order, self.window) if self.span else order

    def apply(self, model):
        "The model runs in this way inside a `with`."
        order = self.order(model)
        return in_order(model, order) if order != order_of(model) else contextlib.nullcontext(model)

    def cost(self, model):
        "How many layers run for each token. (Scoring fills no cache.)"
        return layers_run(self.order(model))

    def __str__(self):
        return as_typed(self.settings) or PLAIN


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
