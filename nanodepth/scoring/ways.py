"""Run a model in another way. A way is a dict of settings: its layers in another order, its
recurrent core some number of times, or a window of its layers in the wrapper. {} is the model as
it is.
Usage: with in_way(model, dict(window='mid4', K=2)): model(tokens)        # ours, or transformers'
"""
import contextlib
import copy
import inspect
import itertools
import math
import shlex
from dataclasses import dataclass, fields

from nanodepth.common.origin import is_ours
from nanodepth.loop import fit_loop, in_order
from nanodepth.model import Refused, Span, require, spans_in, unrolled
from nanodepth.models.checkpoint import cost_of
from nanodepth.report.tables import PLAIN
from nanodepth.retrofit import Core, core_of
from nanodepth.training.settings import as_kind, read
from nanodepth.wrapper import Window, pick_window
from nanodepth.wrapping.others import layers_of, wrapped


@dataclass(kw_only=True)
class Ways:
    """How the models run. Several values, as in --r=1,2,4, are several ways; defaults are in
    brackets."""
    loop: tuple[str, ...] = ()      # the layers in another order, such as 3-2x2-3
    r: tuple[int, ...] = ()         # how often a recurrent core runs
    span: tuple[str, ...] = ()      # NAME:VALUE of an argument of the order's Spans: share:0.3
    window: tuple[str, ...] = ()    # what the wrapper runs: 3-5, mid4, or a share of the depth
    solver: tuple[str, ...] = ()    # how the wrapper runs it (anchored)
    K: tuple[int, ...] = ()         # in how many steps of the solver (3)
    T: tuple[float, ...] = ()       # the time at which the steps end (1)
    beta: tuple[float, ...] = ()    # anchored: the share of the plain output (0.5)
    alpha: tuple[float, ...] = ()   # the step of heavy_ball and norm_stab (0.5)
    alphas: tuple[float, ...] = ()  # euler: the length of each step, such as 0.6,0.4: one way
    weights: tuple[float, ...] = ()     # poly_blend, such as 0.25,0.5,0.25: one way
    tol: tuple[float, ...] = ()     # euler: a token that moves less than this share stays (0)
    m: tuple[int, ...] = ()         # anderson's memory (2)
    cache: tuple[str, ...] = ()     # what later tokens see: first, last (first)
    decode: tuple[str, ...] = ()    # full; bypass: only prompts are wrapped
    mode: tuple[str, ...] = ()      # the window as one block, or layer by layer (block)
    pin: tuple[bool, ...] = ()      # later evaluations keep the first one's experts
    also: str = ''                  # more ways, such as '--loop=2x4; --window=mid4 --K=2,3'


def ways_of(options):
    "Return the ways that the options name: {}, and each combination of the settings."
    ways = [{}]
    for line in filter(str.strip, options.also.split(';')):
        ways += ways_of(read(Ways, shlex.split(line)))
    given = {option.name: values for option in fields(Ways)
             if option.name != 'also' and (values := getattr(options, option.name))}
    for name in ('alphas', 'weights'):      # several numbers are one value of these
        if name in given:
            given[name] = [given[name]]
    ways[1:1] = [dict(zip(given, values)) for values in itertools.product(*given.values())]
    return [*{in_words(way): way for way in ways}.values()]


def one_way(options):
    "Return the one way that the options name, or {} if they name none."
    ways = ways_of(options)
    require(len(ways) <= 2, f'these options name {len(ways) - 1} ways of running the model: name '
            'one')
    return ways[-1]


def in_words(way):
    "Return a way as a user types it."
    def text(value):
        if isinstance(value, tuple):
            return ','.join(map(text, value))
        return f'{value:g}' if isinstance(value, float) else str(value)
    return ' '.join(f'--{name}={text(value)}' for name, value in way.items()) or PLAIN


def window_settings(way):
    "Return the settings of a way that are arguments of `wrapped`."
    return {name: value for name, value in way.items() if name not in ('loop', 'r', 'span')}


@contextlib.contextmanager
def in_way(model, way):
    "Inside this `with`, the model runs in a way."
    core = core_of(model)
    with contextlib.ExitStack() as stack:
        if 'span' in way:
            stack.enter_context(in_order(model, with_argument(model, way['span'])))
            core = core_of(model)
        if 'r' in way:
            require(core, f'{in_words(way)}: this model has no recurrent core to run r times')
            require(way['r'] > 0, f'--r={way["r"]} is too small: the core must run at least once')
            stack.callback(setattr, core, 'r', core.r)
            core.r = way['r']
        if 'loop' in way:
            require(is_ours(model) and not core, f'{in_words(way)}: only a model of ours, without '
                    'a recurrent core, runs its layers in another order')
            stack.enter_context(in_order(model, fit_loop(way['loop'], len(model.layers))))
        if window_settings(way):
            stack.enter_context(wrapped(model, **window_settings(way)))
        yield model


def with_argument(model, text):
    """Return the model's order with another value of an argument of its Spans. With 'q:0.3', each
    Span with an argument q is made anew, with q=0.3 and with its old weights."""
    name, _, value = text.partition(':')
    takers = [span for span in spans_in(getattr(model, 'order', ()))
              if name in inspect.signature(type(span)).parameters]
    require(value and name not in ('items', 'r') and takers,
            f'--span={text}: write --span=NAME:VALUE with an argument of a Span in the order '
            f'{getattr(model, "order", "of this model")}' + ' (for r, --r=VALUE)' * (name == 'r'))

    def changed(items):
        return [item if isinstance(item, int) else again(item) for item in items]

    def again(span):
        settings = span.settings()
        if span in takers:
            settings[name] = as_argument(type(span), name, value)
        new = type(span)(changed(span.items), **settings)
        new.train(model.training)
        model.make_weights([new])
        try:
            new.load_state_dict(span.state_dict())
        except RuntimeError:
            raise Refused(f'--span={text}: {name} decides the shape of the weights of '
                          f'{type(span).__name__}, which are trained already') from None
        return new
    return changed(model.order)


def as_argument(kind, name, text):
    """Return a text as the type of an argument of a class, which is its annotation, or else the
    type of its default."""
    argument = inspect.signature(kind).parameters[name]
    annotated = argument.annotation
    kind = type(argument.default) if annotated is argument.empty else annotated
    try:
        return as_kind(text, kind)
    except ValueError:
        raise Refused(f'--span={name}:{text} must be {inspect.formatannotation(kind)}') from None


def layers_run(order):
    """Return how many layers run for each token. (The extra run of cache='last' is not counted,
    because scoring fills no cache.)"""
    layers = 0
    for item in order:
        if not isinstance(item, Span):
            layers += 1
        elif isinstance(item, Window):
            layers += item.evaluations() * layers_run(item.items)
        else:
            # the quotient is how often the Span runs its items
            layers += layers_run(item.items) * len(item.unrolled()) // len(unrolled(item.items))
    return layers


def inference_flops(model, context=None):
    """Return the FLOPs of a forward pass for each token, in rows of `context` tokens. They are a
    third of the FLOPs of a training step in which all runs of a core get gradients."""
    order = copy.deepcopy(model.order)
    for span in spans_in(order):
        if isinstance(span, Core):
            span.backprop_depth = span.r
    return model.flops_per_token(order, context) // 3


def cost_columns(state, model, way, context=None):
    """Return the columns of a Row that tell what runs and what it costs. `state` is what the
    checkpoint stores, and `context` the length of the rows (None: the longest that the model
    reads)."""
    if is_ours(model):
        order, flops = model.order, inference_flops(model, context)
    else:
        order, flops = [*range(len(layers_of(model)))], math.nan
        if window_settings(way):
            a, b = pick_window(way.get('window'), len(order))
            settings = {name: value for name, value in window_settings(way).items()
                        if name not in ('window', 'mode', 'pin')}
            order[a:b + 1] = [Window(order[a:b + 1], **settings)]
    begins_from_another = (state.get('config') or {}).get('init_from')
    return dict(
        layers=layers_run(order), params=sum(p.numel() for p in model.parameters()),
        inference_flops=flops, dtype=str(next(model.parameters()).dtype)[6:],
        training_flops=cost_of(state),      # with those of what the run began from; tokens are nan
        tokens=math.nan if begins_from_another else state.get('tokens', math.nan))
