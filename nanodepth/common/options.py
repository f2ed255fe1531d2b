"""How commands read their options: by training/settings.py, with plain words for some fields.
Usage: options = read(Options, argv, ['run', 'shape'])
"""
import contextlib
import sys
import sysconfig
from pathlib import Path
from typing import get_origin

from nanodepth import BOOK, HERE
from nanodepth.model import Refused
from nanodepth.training import settings


STDLIB = sysconfig.get_path('stdlib')


def read(cls, argv=None, words=(), files=None):
    """A command line as an instance of a dataclass. What has no dashes goes to the fields that
    `words` names, of which a list takes all that are left; without `words` it is configs. files: a
    set that gets the files of these, and of what they import of yours."""
    argv = sys.argv[1:] if argv is None else argv
    if {'-h', '--help'} & {*argv}:
        settings.print_help(cls, words)
    left, values = list(words), {}

    def plain_word(word, kinds):
        if not words:
            return config_file(word, kinds, files)
        if not left:
            raise Refused(f'{word} is one word too many')
        if get_origin(kinds[left[0]]) is list:
            values.setdefault(left[0], []).append(word)
        else:
            name = left.pop(0)
            values[name] = settings.setting(name, word, kinds)
        return values
    try:
        return settings.read(cls, argv, plain_word)
    except TypeError as error:
        if 'required' not in str(error):
            raise
        raise Refused(f'{str(error).partition("missing ")[2]} (--help says more)') from None


def config_file(path, kinds, files=None):
    "That of settings.py. files: as in `read`."
    file = settings.find(path).resolve()
    with lent_names(file, files):
        return settings.config_file(path, kinds)


@contextlib.contextmanager
def lent_names(file, files=None):
    """In here a file of yours may say `from loop import repeat_block`. In a wheel loop.py is
    nanodepth.loop, and `loop` may be somebody else's. So meanwhile the book's files have their bare
    names, and files beside yours are found by theirs. Afterwards all names are what they were, and
    what was imported of yours is forgotten: the next file reads it anew. files: a set that gets the
    file, and those of what it imported of yours."""
    beside = {each.stem for each in file.parent.glob('*.py')}
    yours = {name for name in [*sys.modules] if is_yours(name)}
    lent = {name: sys.modules.pop(name, None) for name in {*BOOK} | beside | yours}
    sys.modules.update({name: sys.modules[f'nanodepth.{name}'] for name in BOOK})
    there, search = {*sys.modules}, sys.path[:]
    sys.path.insert(0, str(file.parent))
    try:
        yield
    finally:
        brought = {name: own_file(sys.modules[name]) for name in sys.modules.keys() - there
                   if is_yours(name)}
        if files is not None:
            files |= {file, *brought.values()}
        sys.path[:] = search
        for name in lent.keys() | brought.keys():
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in lent.items() if module})


def is_yours(name):
    stay = '__main__', 'nanodepth', 'torch', 'numpy', 'tqdm'        # wherever they were built
    return name.partition('.')[0] not in stay and own_file(sys.modules[name])


def own_file(module):
    """Its file, if a module is yours: not of the package, nor of Python, nor among the packages of
    others. Of a folder without an __init__.py, the folder."""
    says = getattr(module, '__dict__', {})      # (asked by getattr, some would import others)
    file = says.get('__file__') or next(iter(says.get('__path__', ())), HERE)
    file = str(file)                        # text: there are thousands
    if file.startswith(STDLIB) or 'site-packages' in file or 'dist-packages' in file:
        return None
    return None if Path(file).resolve().is_relative_to(HERE) else Path(file).absolute()
