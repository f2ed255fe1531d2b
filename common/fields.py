"""Values from outside, from a command line, a config or a file: their names, types and bounds.

The idea: a dataclass says which names there are and of which type each is, and one table says what
numbers may be. Whatever comes from outside is held against both, before anything is made of it.

Usage:
    shape = fill(ModelConfig, dict(n_layer=4), 'out/lidas/ckpt.pt')
    check_bounds(dict(n_layer=0))               # Refused: n_layer=0 must be at least 1
"""
import math
import reprlib
import types
import typing
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path

from common.errors import Refused, check_choice, nearest

COMMAND_LINE = 'the command line'

ANY, ONE, SOME = (-2 ** 63, 2 ** 63 - 1), (1, 10 ** 9), (0, 10 ** 9)
SHARE, RATE = (0.0, 1.0), (0.0, 1e6)
BOUNDS = dict(
    # a model's shape
    n_layer=(1, 10_000), n_embd=(1, 2 ** 20), n_head=(1, 2 ** 16), n_kv_head=(1, 2 ** 16),
    head_dim=(2, 2 ** 16), ffn_dim=(1, 2 ** 24), vocab_size=(2, 2 ** 24), context=(2, 2 ** 24),
    rope_theta=(1.0, 1e15), norm_eps=(0.0, 1.0),
    # a run
    batch_size=(1, 2 ** 22), grad_accum=(1, 2 ** 22), steps=ONE, warmup_steps=SOME,
    decay_steps=SOME, lr_decay_steps=SOME, lr=RATE, adamw_lr=RATE, lr_floor=SHARE, grad_clip=RATE,
    weight_decay=RATE, star_decay=RATE, beta2=(0.0, 0.9999999), eval_every=ONE, eval_batches=ONE,
    log_every=ONE, save_every=ONE, seed=ANY, step=SOME,
    # depth
    relax_rank=(0, 2 ** 20), grow_block=(1, 10_000), grow_alpha=(0.0, 100.0), block=(1, 10_000),
    alpha=(0.0, 100.0), recurrence=(1, 10_000), loop_mean=(1, 100), mean=(1, 10_000),
    backprop_depth=(1, 10_000), r=(1, 10_000), curriculum=SHARE, backprop_curriculum=SHARE,
    state_std=RATE, K=(1, 10_000), beta=SHARE, T=(1e-6, 1e3),
    # what is measured, and on how much
    n=(1, 10 ** 7), batches=(1, 10 ** 6), limit=ONE, shots=(0, 1000), best=(1, 10 ** 6),
    count=(1, 10 ** 6), length=(2, 2 ** 24), max_length=(2, 2 ** 24), lens_steps=ONE,
    documents=ONE, text=(0.0, 0.99), tokens=(1, 10 ** 10),
    port=(0, 65535), jobs=(1, 1000), temperature=(0.0, 1e6), top_k=(1, 2 ** 24))


def check_bounds(values, prefix='', bounds=BOUNDS):
    "Every number in `values` that has a name in the table must lie between its bounds."
    for name, value in values.items():
        least, most = bounds.get(name, (None, None))
        for number in value if isinstance(value, tuple) else [value]:
            if least is None or type(number) not in (int, float):
                continue
            if not number >= least:
                raise Refused(f'{prefix}{name}={short(number)} must be at least {least:g}')
            if number > most or not math.isfinite(number):
                raise Refused(f'{prefix}{name}={short(number)} must be at most {most:,}')


# the types of values, as a message calls them
IN_WORDS = {int: 'a whole number', float: 'a number', bool: 'true or false', str: 'text',
            list: 'a list', tuple: 'a list', dict: 'names with values', Path: 'a path',
            types.NoneType: 'none'}


def within(least, most, **default):
    "A field with bounds of its own."
    return field(metadata=dict(bounds=(least, most)), **default)


def short(value):
    "A value as a few words: one from a file may be a list of 2^40 lists."
    text = reprlib.repr(value)
    return text if len(text) < 200 else f'{text[:200]} ...'


def fill(cls, values, where, others=False):
    "An instance of the dataclass. `others`: names that it does not have are left out."
    fitted = fit_fields(cls, values, where, others)
    for each in fields(cls):
        needed = each.default is MISSING and each.default_factory is MISSING
        if needed and each.name not in fitted:
            raise Refused(f'{where} does not say {each.name!r}')
    try:
        return cls(**fitted)
    except Refused as error:
        raise Refused(f'{error}' if where == COMMAND_LINE else f'{where}: {error}') from None


def fit_fields(cls, values, where, others=False):
    "{name: value} of those fields that are given, each of its type and within its bounds."
    if not isinstance(values, dict):
        raise Refused(f'{where} holds a {type(values).__name__}, not names with values')
    types_of = typing.get_type_hints(cls)
    fitted = {}
    for name, value in values.items():
        if name in types_of:
            fitted[name] = fit(name, value, types_of[name], where)
        elif not others:
            raise Refused(f'{where}: there is no setting {short(name)}{nearest(name, types_of)}')
    own = {each.name: each.metadata['bounds'] for each in fields(cls)
           if 'bounds' in each.metadata}
    check_bounds(fitted, prefix_of(where), BOUNDS | own)
    return fitted


def prefix_of(where):
    "How a message about a value of this place begins: --steps=0 ..., or config/x.py: steps=0 ..."
    return '--' if where == COMMAND_LINE else f'{where}: '


def fit(name, value, wanted, where):
    "The value as the type that is wanted: an int serves for a float, 1e4 for an int."
    union = typing.get_origin(wanted) in (types.UnionType, typing.Union)
    choices = typing.get_args(wanted) if union else (wanted,)
    for choice in choices:
        kind = typing.get_origin(choice) or choice
        inner = typing.get_args(choice)
        if kind is typing.Literal:
            if any(type(value) is type(word) and value == word for word in inner):
                return value
        elif kind is float:
            if type(value) is float or type(value) is int and abs(value) < 2 ** 1000:
                return float(value)
        elif kind is int:
            if type(value) is int or type(value) is float and value.is_integer():
                return int(value)
        elif kind is list:
            if type(value) in (list, tuple):
                return [fit(name, item, inner[0], where) for item in value] if inner else [*value]
        elif kind is tuple:
            items = value if type(value) in (tuple, list) else (value,)
            return tuple(fit(name, item, inner[0], where) for item in items)
        elif kind is dict and inner:
            if isinstance(value, dict):
                return {fit(name, key, inner[0], where): fit(name, item, inner[1], where)
                        for key, item in value.items()}
        elif kind is Path and isinstance(value, (str, Path)):
            if not Path(value).name:
                raise Refused(f'{prefix_of(where)}{name}={value} does not name a file or a folder')
            return Path(value)
        elif is_dataclass(kind):
            return fill(kind, value, where, others=True)
        elif isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            return value
    words = [word for choice in choices if typing.get_origin(choice) is typing.Literal
             for word in typing.get_args(choice)]
    others = [choice for choice in choices if typing.get_origin(choice) is not typing.Literal]
    if words and others in ([], [types.NoneType]):
        check_choice(f'{prefix_of(where)}{name}', value, words)
    names = [IN_WORDS.get(typing.get_origin(choice) or choice, str(choice)) for choice in others]
    raise Refused(f'{prefix_of(where)}{name} must be {" or ".join(words + names)}, not '
                  f'{short(value)}')
