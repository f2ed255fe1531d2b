"""A user's mistake as one line: the one exception, and helpers that suggest the nearest valid
name.

The idea: code that cannot do what was asked raises Refused, with what was given and is allowed. One
place, `refusals`, turns that into a line and exit status 2; nanodepth.py runs each command in it.
Any other exception is a bug of ours, and keeps its traceback.

Usage:
    raise Refused(f'block={block} must be at least 1')
    check_choice('grow', 'lida', ('midas', 'lidas'))        # Refused: ... did you mean 'lidas'?
"""
import ast
import contextlib
import difflib
import os
import sys

from tqdm import tqdm


class Refused(ValueError):
    "What cannot be done, and why. `alone`: maybe only this one of several processes knows."

    def __init__(self, text, alone=False):
        super().__init__(text)
        self.alone = alone


def nearest(name, allowed):
    close = difflib.get_close_matches(str(name), [str(a) for a in allowed], n=1, cutoff=0.5)
    return f'; did you mean {close[0]!r}?' if close else ''


def suggest(name, known):
    "The end of an error about an unknown name: the nearest one, and all there are."
    near = difflib.get_close_matches(str(name), [str(k) for k in known if k], n=1)
    return (f': did you mean {near[0]!r}?' if near
            else '.') + f' There are: {", ".join(map(str, known))}'


def check_choice(name, value, allowed):
    if value not in allowed:
        raise Refused(f'{name}={value!r} is not one of {", ".join(map(str, allowed))}'
                      f'{nearest(value, allowed)}')


def parse(text):
    "A value from the command line: a Python literal where it is one, else the text itself."
    try:
        words = {'true': 'True', 'false': 'False', 'none': 'None'}
        return ast.literal_eval(words.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text


def number_list(name, text, most=10_000, kind=int):
    "'1,2,5' as a list of numbers, whole ones unless another kind is asked for."
    whole = 'whole ' if kind is int else ''
    try:
        found = [kind(part) for part in text.split(',')]
    except ValueError:
        raise Refused(f'{name}={text} must be {whole}numbers, such as 0,1,2') from None
    if not max(map(abs, found)) <= most:        # not a number, too
        raise Refused(f'{name}={text} must be at most {most:,}')
    return found


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


@contextlib.contextmanager
def refusals(name):
    """A Refused in here ends the command, in a line, and so do an error of a file and Ctrl-C. Only
    rank 0 prints what is Refused, unless it is `alone`."""
    rank = os.environ.get('RANK', '0')

    def say(text):
        for bar in list(getattr(tqdm, '_instances', ())):       # the line begins on its own
            bar.close()
        print(text, file=sys.stderr)
    try:
        yield
    except Refused as error:
        if rank == '0' or error.alone:
            say(f'{name}: {error}' + (f' (rank {rank})' if rank != '0' else ''))
        raise SystemExit(2) from None
    except BrokenPipeError:         # ... | head: whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + 13) from None
    except OSError as error:        # a full disk, a folder in the way, no permission
        where = f' ({error.filename})' if error.filename else ''
        say(f'{name}: {error.strerror or error}{where}')
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        say(f'{name}: stopped')
        raise SystemExit(128 + 2) from None
