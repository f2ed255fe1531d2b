"Skip this, a general tool: a command line and configs, which are Python, fill a dataclass."
import contextlib
import difflib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from model import Refused, require


def config_file(path, kinds):
    "{name: value} of a config: Python that assigns settings, and may have _names of its own."
    file = find(path).resolve()
    require(file.suffix == '.py' and file.is_file(), f'there is no config {path}')
    names = dict(__name__='config', __file__=str(file))
    sys.path.insert(0, str(file.parent))        # it may import its neighbours
    try:
        exec(compile(file.read_text(encoding='utf-8'), str(file), 'exec'), names)
    finally:
        sys.path.remove(str(file.parent))
    return {name: setting(name, value, kinds) for name, value in names.items()
            if name in kinds or not is_private(name, value, kinds)}


def is_private(name, value, kinds):
    "Is it a config's own business? A function `optimiser` is not: it should be `optimizer`."
    if name.startswith('_'):
        return True
    functions = [each for each in kinds if Callable in choices(kinds[each])]
    if inspect.isfunction(value) and difflib.get_close_matches(name, functions, 1, 0.7):
        return False
    return callable(value) or inspect.ismodule(value)


def read(cls, argv, plain_word=config_file):
    """A command line as an instance of a dataclass: --name=value or --name value for its fields.
    A word without dashes is a config, or what a nanodepth command's plain_word makes of it."""
    if {'-h', '--help'} & {*argv}:
        print_help(cls)
    kinds = {each.name: each.type for each in fields(cls)}
    values, options, words = {}, {}, list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith('--'):
            values |= plain_word(word, kinds)
            continue
        name, has_value, text = word[2:].partition('=')
        if not has_value and name in kinds:
            after = words[0].lower() if words else '--'
            is_flag = bool in choices(kinds[name]) and after not in ('true', 'false', 'auto')
            require(is_flag or not after.startswith('--'), f'{word} has no value')
            text = 'true' if is_flag else words.pop(0)          # --wandb is --wandb=true
        options[name] = setting(name, text, kinds)
    return cls(**values | options)


def print_help(cls, words=()):
    "The settings, each with what it takes, its comment and [its default]; `words` have no dashes."
    left, above = {each.name: each for each in fields(cls)}, []
    lines = [sys.modules[cls.__module__].__doc__]
    for line in '\n'.join(map(inspect.getsource, cls.__mro__[:-1])).splitlines():
        match = re.match(r'    (\w+): .+?(?:\s+# (.*))?$', line)
        if line.startswith('    # '):
            above.append(line)
        elif match:
            name, comment = match.groups()
            its = left.pop(name, None)          # (None: a class below has it, too)
            if its and get_origin(its.type) is not dict:
                shown = name.upper() if name in words else f'--{name}={in_words(its.type)}'
                lines += [*above, f'  {shown:34} {comment or ""} {as_typed(its.default)}'.rstrip()]
            above = []
    print('\n'.join(lines))
    sys.exit()


def in_words(kind):
    "What a setting takes: N, X and TEXT are a whole number, a number and a text."
    if get_origin(kind) is Literal:
        return '|'.join(get_args(kind))
    if Callable in (kind, get_origin(kind)):
        return 'FUNCTION'
    inside = [in_words(each) for each in get_args(kind) if each not in (NoneType, ...)]
    if get_origin(kind) in (list, tuple):
        return f'{inside[0]},...'
    known = {int: 'N', float: 'X', str: 'TEXT', bool: 'true|false', Path: 'PATH'}
    return known.get(kind) or '|'.join(inside) or kind.__name__


def as_typed(default):
    if default in (None, MISSING, '', ()):
        return ''
    text = ','.join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f'[{text.lower() if isinstance(default, bool) else text}]'


def setting(name, value, kinds):
    "A setting's value as its kind, or a line that says what is wrong."
    near = ''.join(f'; did you mean {each}?' for each in difflib.get_close_matches(name, kinds, 1))
    require(name in kinds, f'{name} is no setting{near} (a config writes _{name} for its own)')
    try:
        return as_kind(value, kinds[name])
    except ValueError:
        raise Refused(f'{name}={value} must be {inspect.formatannotation(kinds[name])}') from None


def choices(kind):
    "The kinds that a value may have: of int | None, both."
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def as_kind(value, kind):
    "A value as this kind, or a ValueError. On a command line it is a text, in a config anything."
    text = str(value)
    inside = get_args(kind)
    if get_origin(kind) in (Union, UnionType):          # the first that fits: None before a text
        for each in sorted(inside, key=lambda each: each is not NoneType):
            with contextlib.suppress(ValueError):
                return as_kind(value, each)
    elif get_origin(kind) is Literal:
        if text in inside:
            return text
    elif get_origin(kind) in (list, tuple):
        items = value if isinstance(value, (list, tuple)) else text.split(',')
        return get_origin(kind)(as_kind(item, inside[0]) for item in items if item != '')
    elif kind in (bool, NoneType):
        known = dict(true=True, false=False) if kind is bool else dict(none=None)
        if text.lower() in known:
            return known[text.lower()]
    elif kind is int:                                   # 1e3 is one; of steps, 1.0 is a share
        if '.' not in text and float(text).is_integer():
            return int(text) if text.lstrip('-').isdigit() else int(float(text))
    elif kind in (float, Path):
        return kind(text)
    elif isinstance(value, get_origin(kind) or kind):   # a text, a function, a Span, a dict
        return value
    raise ValueError


def find(path):
    "A config or data: in the current folder, else in that of train.py."
    beside = Path(__file__).resolve().parents[1] / path
    return Path(path) if Path(path).exists() or not beside.exists() else beside
