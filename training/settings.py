"Fill a dataclass from a command line and from configs, which are Python files."
import contextlib
import difflib
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from model import Refused, require
from training.help import print_fields


def config_file(path, kinds):
    """Return {name: value} of a config: a Python file that assigns settings, and that may have
    _private names. `kinds` is {setting: its type}."""
    file = find(path).resolve()
    require(file.suffix == '.py' and file.is_file(), f'there is no config {path}')
    return {name: setting(name, value, kinds) for name, value in vars(run_file(file)).items()
            if name in kinds or not is_private(name, value, kinds)}


def run_file(file):
    """Run a Python file of the user, and return it as a module. The module stays in sys.modules, so
    that its classes stay known and their source can be read."""
    name = f'_config {file}'
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(file)
    sys.path.insert(0, str(file.parent))        # the file may import the files next to it
    try:
        exec(compile(file.read_text(encoding='utf-8'), str(file), 'exec'), vars(module))
    finally:
        sys.path.remove(str(file.parent))
    return module


def is_private(name, value, kinds):
    """Return whether a name in a config may be ignored, as functions and modules may. A function
    `optimiser` may not, because it is a slip for `optimizer`."""
    if name.startswith('_'):
        return True
    functions = [other for other in kinds if Callable in choices(kinds[other])]
    if inspect.isfunction(value) and difflib.get_close_matches(name, functions, 1, 0.7):
        return False
    return callable(value) or inspect.ismodule(value)


def read(cls, argv, plain_word=config_file):
    """Return a command line as an instance of a dataclass. --name=value or --name value sets a
    field. plain_word(word, kinds) turns a word without dashes into {field: value}. By default such
    a word is a config."""
    if {'-h', '--help'} & {*argv}:
        print_help(cls)
    kinds = {field.name: field.type for field in fields(cls)}
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


def print_help(cls):
    "Print the settings that a command line may have, and end the program."
    print(sys.modules[cls.__module__].__doc__)
    for kind in cls.__mro__[:-1]:
        print_fields(inspect.getsourcefile(kind), kind.__name__)
    sys.exit()


def setting(name, value, kinds):
    "Return the value of a setting in the setting's type. A wrong name or value is refused."
    near = ''.join(f'; did you mean {other}?'
                   for other in difflib.get_close_matches(name, kinds, 1))
    require(name in kinds, f'{name} is not a setting{near} (a config may use _{name} for itself)')
    try:
        return as_kind(value, kinds[name])
    except ValueError:
        raise Refused(f'{name}={value} must be {inspect.formatannotation(kinds[name])}') from None


def choices(kind):
    "Return the types that a value may have: int and NoneType for int | None."
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def as_kind(value, kind):
    """Return a value as this type, or raise a ValueError. On a command line the value is a text,
    and in a config it may be anything."""
    text = str(value)
    inside = get_args(kind)
    if get_origin(kind) in (Union, UnionType):          # the first that fits; None before text
        for choice in sorted(inside, key=lambda choice: choice is not NoneType):
            with contextlib.suppress(ValueError):
                return as_kind(value, choice)
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
    elif kind is int:                                   # 1e3 is an int; 1.0 is not, but a share
        if '.' not in text and float(text).is_integer():
            return int(text) if text.lstrip('-').isdigit() else int(float(text))
    elif kind in (float, Path):
        return kind(text)
    elif isinstance(value, get_origin(kind) or kind):   # a text, a function, a Span, a dict
        return value
    raise ValueError


def find(path):
    "Return the path of a config or of data: in the current folder, or else next to train.py."
    beside = Path(__file__).resolve().parents[1] / path
    return Path(path) if Path(path).exists() or not beside.exists() else beside
