"""The entry point: every command by name; the one place that turns a user's error into a line.

The idea: a command is a `main(argv)`, train.py's or one in commands/ or extras/. What it cannot do
it refuses by raising Refused; here that becomes a line and exit status 2. Any other exception
keeps its traceback.

Usage:
    nanodepth                           # lists the commands
    nanodepth sample out/lidas          # one of them; --help says more
    python -m nanodepth sample out/lidas        # the same, in a clone without an install too
    python probe.py out/lidas           # an idea is a script, here of nanodepth probe
"""
import importlib
import os
import sys
import tempfile
from pathlib import Path

import nanodepth
from nanodepth import ROOT
from nanodepth.common.errors import Refused, nearest, refusals

COMMANDS = {        # name: (module, what it does)
    'train': ('commands.train', 'train a model by a config: ordinary, grown, looped or recurrent'),
    'plot': ('commands.plot', 'the pictures of runs, side by side, and a table'),
    'sample': ('commands.sample', 'generate text from a checkpoint'),
    'grow': ('commands.grow', 'which layer came from which'),
    'play': ('extras.play', 'a page on which you move layers and see what it does'),
    'export': ('commands.export', 'a checkpoint as a Hugging Face folder'),
    'evaluate': ('commands.evaluate', 'how good models are, run in these ways'),
    'cut': ('commands.cut', 'another model of a trained one: recurrent, or with untied layers'),
    'sweep': ('commands.sweep', 'try many ways of running, judge the best on other data'),
    'probe': ('commands.probe', 'which layers models use: a page of pictures'),
    'atlas': ('extras.atlas', 'what each layer of a published model does for its loss'),
    'results': ('extras.results', 'the tables of docs/RESULTS.md, from the rows of seeds'),
    'table': ('extras.table', "README's toy table: the next of eight seeds"),
    'gpu_runs': ('extras.gpu_runs', 'growing at 102 million weights: the next runs without a row'),
    'bench': ('extras.bench', 'speed and memory, each compared with a peer'),
}


def share_the_machine():
    """Begin again with threads that wait passively, if other work is going on. OpenMP's threads
    spin at each of thousands of barriers: two commands that do so slow each other down fifty times,
    while a passive one alone takes a fifth more. The library asks once, when torch is loaded."""
    if 'OMP_WAIT_POLICY' in os.environ or 'GOMP_SPINCOUNT' in os.environ or os.name != 'posix':
        return
    # only a program of ours may begin again: a notebook would lose all that it holds
    program = Path(sys.argv[0]).resolve()
    ours = program.parent in (ROOT, Path(__file__).resolve().parent) or program.name == 'nanodepth'
    if not ours or not program.is_file() or 'IPython' in sys.modules:
        return
    if os.environ.get('OMP_NUM_THREADS') == '1':
        return                  # nothing to wait for
    busy = (int(os.environ.get('WORLD_SIZE', 1)) > 1
            or os.getloadavg()[0] > os.cpu_count() / 2)
    if not busy:
        import fcntl            # the first of several that begin together holds this until it ends
        name = f'nanodepth-{os.getuid()}.lock'
        try:
            path = os.path.join(tempfile.gettempdir(), name)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = True
        except OSError:         # no such folder, or somebody else's file: it was only about speed
            return
    if busy:
        os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'
        os.execv(sys.executable, sys.orig_argv)


def not_twice(script):
    "python train.py: nanodepth.train is the file that runs, and no second copy of it is loaded."
    idea = Path(script.__file__).stem
    sys.modules[f'nanodepth.{idea}'] = script
    setattr(nanodepth, idea, script)


def main(name=None, argv=None):
    if argv is None:            # a command line, and not a call from Python
        argv = sys.argv[1:]
        share_the_machine()
        if name is not None:
            not_twice(sys.modules['__main__'])
        for stream in (sys.stdout, sys.stderr):         # a terminal may lack a ±
            if hasattr(stream, 'reconfigure'):          # not in a notebook, or closed
                stream.reconfigure(errors='replace')
    if name is None:
        if not argv or argv[0] in ('-h', '--help'):
            lines = [f'  {name:12}{about}' for name, (_, about) in COMMANDS.items()]
            return print(__doc__ or '', *lines, sep='\n')
        name, *argv = argv
    elif {'-h', '--help'} & set(argv):
        print(f'This is the command nanodepth {name}.\n')
    with refusals(name if name in COMMANDS else 'nanodepth'):
        if name not in COMMANDS:
            raise Refused(f'there is no command {name!r}{nearest(name, COMMANDS)}')
        importlib.import_module(f'nanodepth.{COMMANDS[name][0]}').main(argv)


if __name__ == '__main__':
    main()
