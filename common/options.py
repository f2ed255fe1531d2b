"""Every command line of this repo: a command's options are the fields of a dataclass.

The idea: a dataclass gives each option a name, a type and a default, with a comment beside it. The
command line sets them by --name=value; words without dashes go to the fields that take words, or
are config files, which are Python that assigns the same names. --help prints the dataclass as it
stands in its file. A wrong name, type or size is refused in a line.

Usage:
    @dataclass
    class Options:
        runs: list[str] = words()               # folders that train.py wrote
        tokens: int = 64                        # how many to add
        r: tuple[int, ...] = (1, 2, 4)          # --r=1,2,4
        untie: bool = False                     # --untie, or --untie=true
    options = read(Options, ['out/lidas', '--tokens=8'], __doc__)
"""
import inspect
import runpy
import sys
import types
import typing
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Literal

from common.errors import Refused, nearest, parse
from common.fields import COMMAND_LINE, fill, fit_fields
from common.files import find


def word(**default):
    "A field that takes one of the words that are no options."
    return field(metadata=dict(words=1), **default)


def words(least=1):
    "A field that takes all the words that are left."
    return field(metadata=dict(words='all', least=least), default_factory=list)


def from_text(make, **default):
    "A field whose value is make(the text), such as 10_000_000_000 from 10B."
    no_bounds = None, None      # the table's are for plain numbers, not for what `make` returns
    return field(metadata=dict(make=make, bounds=no_bounds), **default)


def others():
    "A field that takes, as a dict, the options that are no fields."
    return field(metadata=dict(others=True), default_factory=dict)


def read(cls, argv, about=None):
    "The command line as an instance of the dataclass. --help prints both, and ends the command."
    argv = sys.argv[1:] if argv is None else argv
    if {'-h', '--help'} & set(argv):
        print(about or '', inspect.getsource(cls), sep='\n\n')
        raise SystemExit(0)
    return fill(cls, given(cls, argv), COMMAND_LINE)


def given(cls, argv):
    "{name: value} of what config files and then the command line say."
    types_of = typing.get_type_hints(cls)
    known = {each.name: each for each in fields(cls)
             if not each.metadata.keys() & {'words', 'others'}}
    plain = [arg for arg in argv if not arg.startswith('-')]
    takers = [each for each in fields(cls) if 'words' in each.metadata]
    rest = next((each.name for each in fields(cls) if 'others' in each.metadata), None)
    values = {}
    if not takers:
        for path in plain:
            values |= fit_fields(cls, run_file(path), path)
    for arg in (arg for arg in argv if arg.startswith('-')):
        name, text = option(arg, known, types_of, rest, {each.name for each in takers})
        if name not in known:
            values.setdefault(rest, {})[name] = parse(text)
            continue
        value = value_of(text, known[name], types_of[name])
        if typing.get_origin(types_of[name]) is list:       # it may be given several times
            value = values.get(name, []) + [text]
        values |= fit_fields(cls, {name: value}, COMMAND_LINE)
    if takers:
        for name, text in take_words(takers, plain).items():
            value = parse(text) if types_of[name] is int else text
            values |= fit_fields(cls, {name: value}, COMMAND_LINE)
    for name, each in known.items():
        if name not in values and each.default is MISSING and each.default_factory is MISSING:
            raise Refused(f'--{name}=... must be given (--help says more)')
    return values


def option(arg, known, types_of, rest, as_words):
    "'--tokens=8' as ('tokens', '8')."
    name, equals, text = arg.lstrip('-').partition('=')
    if name in as_words:
        raise Refused(f'{arg}: the {name} is given as a word, without --{name}= before it')
    if not (arg.startswith('--') and (name in known or rest and equals)):
        raise Refused(f'there is no option {arg.partition("=")[0]}{nearest(name, known)} '
                      '(--help lists all)')
    if not equals and types_of[name] is bool:
        return name, 'true'
    if not equals:
        raise Refused(f'{arg}: write --{name}=VALUE')
    return name, text


def value_of(text, each, wanted):
    "What the text of an option stands for, where a value of this type is wanted."
    if 'make' in each.metadata:
        try:
            return each.metadata['make'](text)
        except Refused as error:
            raise Refused(f'--{each.name}: {error}') from None
    choices = typing.get_args(wanted)
    literals = [choice for choice in (wanted, *choices) if typing.get_origin(choice) is Literal]
    if any(text in typing.get_args(literal) for literal in literals):
        return text
    if typing.get_origin(wanted) is tuple:
        if not text.strip(',') and each.default:
            raise Refused(f'--{each.name} is empty: give at least one, such as --{each.name}='
                          f'{",".join(map(str, each.default))}')
        return tuple(value_of(part, each, choices[0]) for part in text.split(',') if text)
    value = parse(text)
    readable = list in map(typing.get_origin, choices) and isinstance(value, (list, tuple))
    none = value is None and types.NoneType in choices     # else it is a word like others
    is_text = {str, Path} & {wanted, *choices} and not none and not readable
    return text if is_text else value


def take_words(takers, plain):
    "{name: word or words} of the words that are no options, in the order of the fields."
    values = {}
    left = list(plain)
    for each in takers:
        if each.metadata['words'] == 'all':
            least = each.metadata['least']
            if len(left) < least:
                raise Refused(f'{each.name}: give at least {least} (--help says more)')
            values[each.name], left = left, []
        elif left:
            values[each.name] = left.pop(0)
        elif each.default is MISSING:
            raise Refused(f'{each.name} is missing (--help says more)')
    if left:
        raise Refused(f'{left[0]}: one argument too many')
    return {name: value for name, value in values.items() if value != []}


def run_file(path):
    "The public names that a config file assigns."
    file = find(path)
    if not file.is_file():
        known = [f'config/{p.name}' for p in Path(find('config')).glob('[!_]*.py')]
        raise Refused(f'there is no config {path}{nearest(path, known)} (a setting is written '
                      '--name=value, in one word)')
    try:
        names = runpy.run_path(str(file))
    except (Exception, SystemExit) as error:
        raise Refused(f'{path} does not run: {type(error).__name__}: {error}') from None
    return {name: value for name, value in names.items()
            if not name.startswith('_') and not isinstance(value, types.ModuleType)}
