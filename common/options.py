"""Every command line of this repo: --name=value for the fields of a dataclass, plain words for the
field that takes them, and config files, which are Python that assigns the same names.

The idea: a command's options are a dataclass, with a type, a default and a comment each, and --help
prints it as it stands in its file. What has another name, type or size is refused in a line.

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
from dataclasses import MISSING, field, fields
from pathlib import Path

from common.errors import Refused, nearest, parse
from common.fields import COMMAND_LINE, fill, fit_fields
from common.files import find


def words(least=1, most=10 ** 6):
    "A field that takes the words of a command line that are no options."
    return field(default_factory=list, metadata=dict(words=(least, most)))


def read(cls, argv, about=None):
    "The command line as an instance of the dataclass; --help prints both, and ends."
    argv = sys.argv[1:] if argv is None else argv
    if {'-h', '--help'} & set(argv):
        print(about or '', inspect.getsource(cls), sep='\n\n')
        raise SystemExit(0)
    return fill(cls, given(cls, argv), COMMAND_LINE)


def given(cls, argv):
    "{name: value} of what a config file and then the command line say."
    known = {each.name: each for each in fields(cls)}
    takes = next((each for each in fields(cls) if 'words' in each.metadata), None)
    plain = [arg for arg in argv if not arg.startswith('--')]
    values = {}
    if takes:
        least, most = takes.metadata['words']
        if len(plain) < least:
            raise Refused(f'{takes.name}: give at least {least} (--help says more)')
        if len(plain) > most:
            raise Refused(f'{plain[most]}: one argument too many')
        values[takes.name] = plain
    else:
        for path in plain:
            values |= fit_fields(cls, run_file(path), path)
    for arg in argv:
        if arg.startswith('--'):
            name, value = option(arg, known)
            values |= fit_fields(cls, {name: value}, COMMAND_LINE)
    for name, each in known.items():
        if name not in values and each.default is MISSING and each.default_factory is MISSING:
            raise Refused(f'--{name}=... must be given (--help says more)')
    return values


def option(arg, known):
    "'--tokens=8' as ('tokens', 8)."
    name, equals, text = arg[2:].partition('=')
    if name not in known or 'words' in known[name].metadata:
        raise Refused(f'there is no option --{name}{nearest(name, known)} (--help lists all)')
    if not equals and known[name].default is False:
        return name, True
    if not equals:
        raise Refused(f'{arg}: write --{name}=VALUE')
    return name, parse(text)


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
