"""A user's mistake as one line: the one exception, and the nearest valid name.

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
import re
import sys
import traceback


class Refused(ValueError):
    "What cannot be done, and why. `alone`: maybe only this one of several processes knows."

    def __init__(self, text, alone=False):
        super().__init__(text)
        self.alone = alone


def nearest(name, allowed):
    close = difflib.get_close_matches(str(name), [str(a) for a in allowed], n=1, cutoff=0.5)
    return f'; did you mean {close[0]!r}?' if close else ''


def check_choice(name, value, allowed):
    if value not in allowed:
        raise Refused(f'{name}={value!r} is not one of {", ".join(map(str, allowed))}'
                      f'{nearest(value, allowed)}')


def parse(text):
    "A value from the command line: a Python literal where it is one, else the text itself."
    try:
        words = {'true': 'True', 'false': 'False', 'none': 'None'}
        return ast.literal_eval(words.get(text.lower(), text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


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


def which_process():
    "(its rank, how many there are, its number on this machine): torchrun says so, else 0, 1, 0."
    place = {}
    for name, usual in dict(WORLD_SIZE=1, RANK=0, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1,
                            MASTER_PORT=1).items():
        text = os.environ.get(name, str(usual))
        if not (text.isdecimal() and len(text) < 10):
            raise Refused(f'{name}={text!r} in the environment is no whole number: torchrun sets '
                          'it, so begin this with torchrun, or unset it')
        place[name] = int(text)
    rank, size = place['RANK'], place['WORLD_SIZE']
    if not rank < size:
        raise Refused(f'RANK={rank} in the environment must be below WORLD_SIZE={size}: torchrun '
                      'sets both, so begin this with torchrun, or unset them')
    for name in ('RANK', 'MASTER_ADDR', 'MASTER_PORT') if size > 1 else ():
        if name not in os.environ:
            raise Refused(f'WORLD_SIZE={size} in the environment, but no {name}: torchrun sets '
                          'both, so begin this with torchrun, or unset them')
    return rank, size, place['LOCAL_RANK']


def say(text):
    "A line on the terminal, below the progress bars."
    if 'tqdm' in sys.modules:
        for bar in list(getattr(sys.modules['tqdm'].tqdm, '_instances', ())):
            bar.close()
    print(text, file=sys.stderr)


class Lasting:
    """A stream that may be closed or full: no command ends because nobody can see how far it
    is."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        with contextlib.suppress(OSError, ValueError):
            return self.stream.write(text)

    def flush(self):
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name):
        return getattr(self.stream, name)


@contextlib.contextmanager
def refusals(name):
    """A Refused in here ends the command, in a line, and so do an error of a file, a lack of memory
    and Ctrl-C. Only rank 0 prints what is Refused, unless it is `alone`. With NANODEPTH_DEBUG=1
    the traceback is printed too."""
    try:
        yield
    except Refused as error:
        try:
            rank = which_process()[0]
        except Refused:
            rank = 0
        if rank == 0 or error.alone:
            if os.environ.get('NANODEPTH_DEBUG'):
                traceback.print_exception(error)
            say(f'{name}: {error}' + (f' (rank {rank})' if rank else ''))
        raise SystemExit(2) from None
    except BrokenPipeError:         # ... | head: whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + 13) from None
    except OSError as error:        # a full disk, a folder in the way, no permission
        where = f' ({error.filename})' if error.filename else ''
        say(f'{name}: {error.strerror or error}{where}')
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        amount = re.search(r'allocate ([\d.]+ \w+)', str(error))
        say(f'{name}: there is not enough memory'
            + (f' ({amount[1]} were asked for at once)' if amount else '')
            + ': try a smaller batch or model (python train.py CONFIG --dry_run adds up what a run '
            'needs)')
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        say(f'{name}: stopped')
        raise SystemExit(128 + 2) from None


def lacks_memory(error):
    "torch says it by a RuntimeError, on a CPU in words alone."
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ('allocate memory', 'out of memory'))
