"""A user's mistake as one line. Code that cannot do what was asked raises Refused, which says what
was given and what is allowed. `refusals` turns that into a line and exit status 2, and nanodepth
runs each command in it. Any other exception keeps its traceback.
Usage: require(block >= 1, f'block={block} must be at least 1')
"""
import contextlib
import difflib
import os
import sys

from nanodepth.model import Refused


def nearest(name, names):
    near = difflib.get_close_matches(str(name), [str(each) for each in names], 1, 0.5)
    return f'; did you mean {near[0]!r}?' if near else ''


def check_choice(name, value, allowed):
    if value not in allowed:
        raise Refused(f'{name}={value!r} is not one of {", ".join(map(str, allowed))}'
                      f'{nearest(value, allowed)}')


@contextlib.contextmanager
def refusing(*kinds, why=str):
    "Turn other libraries' exceptions in here into Refused: why(error) is the line."
    try:
        yield
    except kinds as error:
        if isinstance(error, Refused):
            raise
        raise Refused(why(error)) from None


def say(text):
    print(text, file=sys.stderr)


@contextlib.contextmanager
def refusals(name):
    "What is refused in here, an error of a file, a package that lacks and Ctrl-C end in a line."
    try:
        yield
    except BrokenPipeError:         # of `nanodepth ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None
    except (Refused, OSError, ModuleNotFoundError) as error:
        if os.environ.get('RANK', '0') == '0':      # what every process refuses, one prints
            hint = " (pip install '.[hf,plot]' brings what commands need)"
            say(f'{name}: {error}{hint if isinstance(error, ModuleNotFoundError) else ""}')
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        say(f'{name}: stopped')
        raise SystemExit(128 + 2) from None
