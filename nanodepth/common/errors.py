"""A user's mistake as one line. Code that cannot do what was asked raises Refused, which says what
was given and what is allowed. `refusals` turns that into a line and exit status 2, and nanodepth
runs each command in it. Any other exception keeps its traceback.
Usage: raise Refused(f'block={block} must be at least 1')
"""
import contextlib
import difflib
import os
import sys
import traceback

from nanodepth.model import Refused
from nanodepth.training.machine import RANK


def nearest(name, names):
    near = difflib.get_close_matches(str(name), [str(each) for each in names], 1, 0.5)
    return f'; did you mean {near[0]!r}?' if near else ''


def check_choice(name, value, allowed):
    if value not in allowed:
        raise Refused(f'{name}={value!r} is not one of {", ".join(map(str, allowed))}'
                      f'{nearest(value, allowed)}')


@contextlib.contextmanager
def refusing(*kinds, why=str):
    """Turn other libraries' exceptions in here, such as OSError, into Refused: why(error) is the
    line."""
    try:
        yield
    except Refused:
        raise
    except kinds as error:
        raise Refused(why(error)) from None


def say(text):
    "A line on the terminal, below the progress bars."
    if 'tqdm' in sys.modules:
        for bar in list(getattr(sys.modules['tqdm'].tqdm, '_instances', ())):
            bar.close()
    print(text, file=sys.stderr)


@contextlib.contextmanager
def refusals(name):
    """A Refused in here ends the command, in a line, and so do an error of a file and Ctrl-C. What
    every process refuses, only rank 0 prints. With NANODEPTH_DEBUG=1 the traceback is printed
    too."""
    try:
        yield
    except Refused as error:
        if RANK == 0:
            if os.environ.get('NANODEPTH_DEBUG'):
                traceback.print_exception(error)
            say(f'{name}: {error}')
        raise SystemExit(2) from None
    except BrokenPipeError:         # as by | head: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:        # a full disk, a folder in the way, no permission
        where = f' ({error.filename})' if error.filename else ''
        say(f'{name}: {error.strerror or error}{where}')
        raise SystemExit(2) from None
    except ModuleNotFoundError as error:        # a package that only some commands need
        ours = 'matplotlib', 'transformers', 'safetensors', 'tokenizers', 'lm_eval', 'scipy'
        hint = " (pip install '.[hf,plot]' in the clone)" if error.name in ours else ''
        say(f'{name}: {error}{hint}')
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        say(f'{name}: stopped')
        raise SystemExit(128 + 2) from None
