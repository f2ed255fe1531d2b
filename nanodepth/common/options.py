"""How commands read their options: by training/settings.py, with plain words for some fields.
Usage: options = read(Options, argv, ['run', 'shape'])
"""
import contextlib
import sys
from typing import get_origin

from nanodepth import BOOK
from nanodepth.model import Refused, require
from nanodepth.training import settings


def read(cls, argv=None, words=(), files=None):
    """A command line as an instance of a dataclass. What has no dashes goes to the fields that
    `words` names, of which a list takes all that are left; without `words` it is configs. files: a
    set that gets the files of these, and those beside them that they import."""
    argv = sys.argv[1:] if argv is None else argv
    left, values = list(words), {}

    def plain_word(word, kinds):
        if not words:
            return config_file(word, kinds, files)
        require(left, f'{word} is one word too many')
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
    with lent_names(file.parent) as imported:
        values = settings.config_file(path, kinds)
    if files is not None:
        files |= {file, *(file.with_name(f'{name}.py') for name in imported)}
    return values


@contextlib.contextmanager
def lent_names(folder):
    """In here a config may say `from loop import repeat_block`, and import the files beside it. In
    a wheel loop.py is nanodepth.loop, and `loop` may be somebody else's. So afterwards all these
    names are whoever's they were. The list gets what was imported from the folder."""
    beside, imported = {each.stem for each in folder.glob('*.py')}, []
    before = {name: sys.modules.pop(name, None) for name in {*BOOK} | beside}
    sys.modules.update({name: sys.modules[f'nanodepth.{name}'] for name in BOOK})
    try:
        yield imported
    finally:
        imported += [name for name in beside - {*BOOK} if name in sys.modules]
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
