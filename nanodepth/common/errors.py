"""Turn a user's mistake into one line. Code that cannot do what was asked raises Refused, with what
was given and what is allowed. Each command runs inside `refusals`, which prints that line and exits
with status 2. Any other exception keeps its traceback.
Usage: with refusals('evaluate'): main(argv)
"""
import contextlib
import difflib
import os
import sys

from nanodepth.model import Refused


def nearest(name, names):
    "Return '; did you mean ...?' with the most similar of the names, or '' if none is similar."
    near = difflib.get_close_matches(str(name), [*map(str, names)], 1, 0.5)
    return f'; did you mean {near[0]!r}?' if near else ''


def check_choice(name, value, allowed):
    if value not in allowed:
        raise Refused(f'{name}={value!r} is not one of {", ".join(map(str, allowed))}'
                      f'{nearest(value, allowed)}')


@contextlib.contextmanager
def as_refusal(*kinds, why=str):
    "Inside this `with`, turn other libraries' exceptions into Refused. why(error) is the line."
    try:
        yield
    except kinds as error:
        if isinstance(error, Refused) and Refused not in kinds:
            raise           # it is a line already
        raise Refused(why(error)) from None


def say(text):
    "Print a line that is not a result to stderr."
    print(text, file=sys.stderr)


@contextlib.contextmanager
def refusals(name):
    """Inside this `with`, a Refused, a file error, a missing package or Ctrl-C ends the command
    with one line."""
    try:
        yield
    except BrokenPipeError:         # in `nanodepth ... | head`, head has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(1) from None
    except (Refused, OSError, ModuleNotFoundError) as error:
        if os.environ.get('RANK', '0') == '0':      # torchrun's other processes print nothing
            is_package = isinstance(error, ModuleNotFoundError) and not (
                error.name or '').startswith('nanodepth')
            hint = " (pip install '.[hf,plot]' in a clone installs what commands need)"
            say(f'{name}: {error}{hint if is_package else ""}')
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        say(f'{name}: stopped')
        raise SystemExit(128 + 2) from None
