"""Every command line and every config of this repo is a dataclass, whose fields are the options.
Words without dashes go to the fields that WORDS names. Without WORDS they are config files, which
are Python that assigns the same names. --help prints the dataclass as it stands in its file.
Usage: options = read(Options, ['out/lidas', '--tokens=8'], __doc__)
"""
import ast
import contextlib
import dataclasses
import inspect
import math
import numbers
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import Literal

from nanodepth import ROOT
from nanodepth.common.errors import Refused, nearest
from nanodepth.common.files import find

# What lies outside would be another run or another measurement without a word, or none at all:
# the smallest value of each count and size, and the range of each share.
AT_LEAST = dict(
    # a model
    n_layer=1, n_embd=1, n_head=1, n_kv_head=1, head_dim=2, ffn_dim=1, vocab_size=1, context=1,
    grow_block=1, block=1,
    # training
    steps=1, warmup_steps=0, decay_steps=0, batch_size=1, grad_accum=1, lr=0,
    adamw_lr=0, weight_decay=0, grad_clip=0, recurrence=1, backprop_depth=1,
    eval_every=1, eval_batches=1, log_every=1, save_every=1, keep_every=1,
    # measuring
    r=1, times=1, blocks=1, K=1, tol=0, m=1, n=1, batches=1, limit=1, shots=0, max_length=2,
    length=2, count=1, best=1, lens_steps=1, lens_lr=0, tokens=1, temperature=0, top_k=1,
    # data and machines
    documents=1, depths=0, val_every=2, workers=1, rows=1, threads=1, minutes=0)
SHARES = dict(
    curriculum=(0, 1), backprop_curriculum=(0, 1), beta=(0, 1),
    T=(1e-3, 1e3), rates=(1e-3, 1e3), text=(0, 0.99), grow_alpha=(-20, 20))


def read(cls, argv, about=None):
    "The command line as an instance of the dataclass. --help prints both, and ends the command."
    argv = sys.argv[1:] if argv is None else argv
    if {'-h', '--help'} & set(argv):
        print(about or '', *map(inspect.getsource, filter(dataclasses.is_dataclass, cls.__mro__)),
              sep='\n\n')
        raise SystemExit(0)
    values = given(cls, argv)
    for each in dataclasses.fields(cls):
        if each.name not in values and each.default is each.default_factory is MISSING:
            raise Refused(f'{each.name}: none is given (--help says more)')
    return cls(**values)


def given(cls, argv):
    "{name: value} of what config files and then the command line say."
    in_files, named = by_source(cls, argv)
    return in_files | named


def by_source(cls, argv):
    "({name: value} of config files, {name: value} of the command line)"
    kinds = typing.get_type_hints(cls)
    words = getattr(cls, 'WORDS', None)
    options = kinds.keys() - set(words or ())
    plain, named = [], {}
    left = list(argv)
    while left:
        arg = left.pop(0)
        if not arg.startswith('-'):
            plain.append(arg)
            continue
        name, equals, text = arg.removeprefix('--').partition('=')
        if name not in options:
            raise Refused(f'there is no option --{name.lstrip("-")}{nearest(name, options)} '
                          '(--help lists all)')
        if not equals and bool in choices_of(kinds[name]):      # it may stand alone
            text = 'true'
        elif not equals:
            if not left or left[0].startswith('--'):
                raise Refused(f'{arg}: write --{name}=VALUE')
            text = left.pop(0)
        named |= fitted(kinds, {name: text}, '--')
    for name in words or ():
        if plain and typing.get_origin(kinds[name]) is list:        # it takes all that are left
            named |= fitted(kinds, {name: plain}, '')
            plain = []
        elif plain:
            named |= fitted(kinds, {name: plain.pop(0)}, '')
    if words is not None and plain:
        raise Refused(f'{plain[0]}: one argument too many')
    values = {}
    for path in plain:
        values |= fitted(kinds, run_file(path, kinds), f'{path}: ')
    return values, named


def fitted(kinds, values, where):
    "The values, each of its field's type and within its bounds. `where`: how a message begins."
    result = {}
    for name, value in values.items():
        if name not in kinds:
            raise Refused(f'{where}there is no setting {name}{nearest(name, kinds)}')
        try:
            result[name] = fit(value, kinds[name])
        except ValueError:
            words = [word for choice in choices_of(kinds[name])
                     if typing.get_origin(choice) is Literal for word in typing.get_args(choice)]
            kind = inspect.formatannotation(kinds[name])
            raise Refused(f'{where}{name}={value} must be {kind}'
                          f'{nearest(value, words)}') from None
    check_bounds(result, where)
    return result


def check_bounds(values, where=''):
    "Refuse numbers outside what their names allow, infinite ones, and what is not a number."
    for name, value in values.items():
        least, (low, high) = AT_LEAST.get(name), SHARES.get(name, (-math.inf, math.inf))
        for number in value if isinstance(value, (tuple, list)) else [value]:
            if not isinstance(number, numbers.Real) or isinstance(number, bool):    # numpy's, too
                continue
            if not math.isfinite(number):
                raise Refused(f'{where}{name}={number} must be finite')
            if least is not None and number < least:
                raise Refused(f'{where}{name}={number} must be at least {least}')
            if not low <= number <= high:
                raise Refused(f'{where}{name}={number} must be from {low} to {high}')


# ---------------------------------------------------------------------------------- text to values

def choices_of(kind):
    "The types that a field may have: of int | None, both."
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def fit(value, kind):
    """A value as one of a field's types, or a ValueError. On a command line all values are texts:
    600 stands for a number, none for None, and a comma for a list."""
    choices = choices_of(kind)
    lists = [choice for choice in choices if typing.get_origin(choice) in (list, tuple)]
    if lists and (str not in choices or not isinstance(value, str) or ',' in value):
        choices = [choice for choice in choices if choice in (*lists, types.NoneType)]
    narrow = [Literal, types.NoneType]          # before str, which would take any word
    for choice in sorted(choices, key=lambda c: (typing.get_origin(c) or c) not in narrow):
        with contextlib.suppress(ValueError):
            return fit_one(value, choice)
    raise ValueError


def fit_one(value, kind):
    origin = typing.get_origin(kind) or kind
    inside = typing.get_args(kind)
    if origin in (list, tuple):
        items = [part for part in value.split(',') if part] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise ValueError
        return origin(fit(item, inside[0]) for item in items)
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError
        return {str(name): fit(item, inside[1]) for name, item in value.items()}
    text = str(value)
    if kind is Path and not text:       # Path('') would be the current folder
        raise ValueError
    if kind is types.NoneType:
        if text.lower() != 'none':
            raise ValueError
        return None
    if kind is Callable and callable(value):
        return value
    if value is None or callable(value) or kind is Callable:
        raise ValueError
    if isinstance(value, (list, tuple, dict)):
        raise ValueError
    if origin is Literal:
        return inside[list(map(str, inside)).index(text)]
    if kind is bool:
        return bool(['false', 'true'].index(text.lower()))
    return kind(text)


def run_file(path, kinds):
    """The public names that a config file assigns. What it imports or defines, such as a function
    or a class, is its own, unless it is called as a setting."""
    file = find(path)
    if not file.is_file():
        known = [f'config/{p.name}' for p in (ROOT / 'config').glob('[!_]*.py')]
        raise Refused(f'there is no config {path}{nearest(path, known)} (a setting is written '
                      '--name=value, in one word)')
    if file.suffix != '.py':        # a checkpoint is a zip, in which a stranger may have put code
        raise Refused(f'{path} is no config: that is a file that ends in .py')
    names = dict(__name__='config', __file__=str(file))
    tree = ast.parse(file.read_text(encoding='utf-8'), file)
    exec(compile(tree, file, 'exec'), names)
    own = {name for name, value in names.items()
           if callable(value) or isinstance(value, types.ModuleType)}
    for line in tree.body:              # constants, too
        if isinstance(line, (ast.Import, ast.ImportFrom)):
            own |= {alias.asname or alias.name for alias in line.names}
    return {name: value for name, value in names.items()
            if not name.startswith('_') and (name in kinds or name not in own)}


def docstring_of(path):
    "What a config says of itself."
    return ast.get_docstring(ast.parse(Path(path).read_text(encoding='utf-8'))) or ''


def only_fields(cls, values):
    "Those of the values that are fields of the dataclass: a file may be older than its fields."
    return {each.name: values[each.name] for each in dataclasses.fields(cls) if each.name in values}
