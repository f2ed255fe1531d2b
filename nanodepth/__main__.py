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
from pathlib import Path

from nanodepth.common.errors import Refused, nearest, refusals

PACKAGE = Path(__file__).parent
COMMANDS = {        # name: (module, what it does)
    'train': ('commands.train', 'train a model by a config: ordinary, grown, looped or recurrent'),
    'plot': ('commands.plot', 'the pictures of runs, side by side, and a table'),
    'sample': ('commands.sample', 'generate text from a checkpoint'),
    'grow': ('grow', 'which layer came from which'),
    'play': ('extras.play', 'a page on which you move layers and see what it does'),
    'export': ('commands.export', 'a checkpoint as a Hugging Face folder'),
    'evaluate': ('commands.evaluate', 'how good models are, run in these ways'),
    'compare': ('commands.compare', 'is an idea better, at equal tokens and FLOPs, over seeds?'),
    'cut': ('commands.cut', 'another model of a trained one: recurrent, or with untied layers'),
    'sweep': ('commands.sweep', 'try many ways of running, judge the best on other data'),
    'probe': ('commands.probe', 'which layers models use: a page of pictures'),
    'results': ('extras.results', 'the tables of docs/RESULTS.md, from the rows of seeds'),
}


# Threads of OpenMP spin at each of thousands of barriers, so that two commands slow each other down
# fifty times. So many turns are enough, and then a thread sleeps.
SPINS = '1000'


def main(name=None, argv=None):
    if argv is None:            # a command line, and not a call from Python
        argv = sys.argv[1:]
        os.environ.setdefault('GOMP_SPINCOUNT', SPINS)      # before a command loads torch
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
        module = COMMANDS[name][0]
        if module.startswith('extras') and not (PACKAGE / 'extras').is_dir():
            raise Refused(f'{name} is one of the extras, and nanodepth/extras is not here')
        importlib.import_module(f'nanodepth.{module}').main(argv)


if __name__ == '__main__':
    main()
