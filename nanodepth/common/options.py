"""Read the options of a command with training/settings.py. Words without dashes set some of them.
Usage: options = read(Options, argv, ['run', 'shape'])
"""
import contextlib
import re
import sys
from typing import get_origin

from nanodepth import BOOK
from nanodepth.model import Refused, require
from nanodepth.training import settings


OWN_FILES = []      # the user's files that this command has run first: nanodepth mine.py COMMAND


def read(cls, argv=None, positional=()):
    """Return a command line as an instance of a dataclass. Arguments without dashes fill the fields
    in `positional`, in this order, and a list takes all that are left. If `positional` is empty,
    arguments without dashes are config files."""
    argv = sys.argv[1:] if argv is None else argv
    fields_left, values = list(positional), {}

    def plain_word(word, kinds):
        if not positional:
            return config_file(word, kinds)
        require(fields_left, f'{word} is one word too many (--help lists the options)')
        if get_origin(kinds[fields_left[0]]) is list:
            values.setdefault(fields_left[0], []).append(word)
        else:
            name = fields_left.pop(0)
            values[name] = settings.setting(name, word, kinds)
        return values
    try:
        return settings.read(cls, argv, plain_word)
    except TypeError as error:
        if 'required' not in str(error):
            raise
        missing = re.findall("'(.+?)'", str(error))
        raise Refused(f'{" and ".join(missing)} must be given (--help lists the options)') from None


def config_file(path, kinds):
    "Return the settings in a config file, which may import the book and the files next to it."
    with lent_names(settings.find(path).resolve().parent):
        return settings.config_file(path, kinds)


@contextlib.contextmanager
def lent_names(folder):
    """Inside this `with`, a config may write `from loop import repeat_block`, and import the files
    next to it. In a wheel loop.py is nanodepth.loop, and `loop` may be another package's name. So
    at the end all these names mean again what they meant before."""
    names_in_folder = {path.stem for path in folder.glob('*.py')}
    before = {name: sys.modules.pop(name, None) for name in {*BOOK} | names_in_folder}
    sys.modules.update({name: sys.modules[f'nanodepth.{name}'] for name in BOOK})
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
