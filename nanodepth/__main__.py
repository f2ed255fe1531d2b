"""The entry point: every command by name; the one place that turns a user's error into a line.

The idea: a command is a `main(argv)`, train.py's or one in commands/ or study/. What it cannot do
it refuses by raising Refused; here that becomes a line and exit status 2. Any other exception
keeps its traceback.

Usage:
    nanodepth                           # lists the commands
    nanodepth sample out/lidas          # one of them; --help says more
    python -m nanodepth sample out/lidas        # the same, in a clone without an install too
    python loop.py out/lidas            # an idea is a script: the same as nanodepth loop
"""
import importlib
import sys

from nanodepth.common.errors import Refused, nearest, refusals

COMMANDS = {        # name: (module, and its function if that is not main; what it does)
    'train': ('train', 'train a model by a config: ordinary, grown, looped or recurrent'),
    'plot': ('commands.plot', 'the pictures of runs, side by side, and a table'),
    'sample': ('commands.sample', 'generate text from a checkpoint'),
    'grow': ('commands.grow', 'which layer came from which, and what growing saves'),
    'loop': ('commands.loop', 'looped runs beside their partners; every block repeated'),
    'play': ('commands.play', 'a page on which you move layers and see what it does'),
    'primitives': ('commands.primitives', 'accuracy on copying and variable assignment'),
    'export': ('commands.export', 'a checkpoint as a Hugging Face folder'),
    'evaluate': ('commands.evaluate', 'lm-eval on any checkpoint'),
    'retrofit': ('commands.retrofit', 'prelude, core and coda of a checkpoint; --eval: loss by r'),
    'wrap': ('commands.wrapper', 'a frozen model, plain and with its middle looped, scored'),
    'sweep': ('commands.wrapper:sweep', 'try many ways of looping, judge the best on other data'),
    'probe': ('commands.probe', 'which layers models use: a page of pictures'),
    'lens': ('commands.lens', 'train a tuned lens for a checkpoint'),
    'check_data': ('commands.check_data', 'what is in a dataset; checks every checksum'),
    'study': ('study.jobs', 'a seed of the runs that docs/RESULTS.md judges'),
    'record': ('study.record', 'train a config on eight seeds, judge it against the record'),
    'results': ('study.results', 'the tables of docs/RESULTS.md, from the rows of seeds'),
    'diagrams': ('commands.diagrams', 'the diagrams of README.md, from the real orders'),
    'bench': ('commands.bench', 'speed and memory, each compared with a peer'),
}


def main(name=None, argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if name is None:
        if not argv or argv[0] in ('-h', '--help'):
            lines = [f'  {name:12}{about}' for name, (_, about) in COMMANDS.items()]
            return print(__doc__ or '', *lines, sep='\n')
        name, *argv = argv
    with refusals(name if name in COMMANDS else 'nanodepth'):
        if name not in COMMANDS:
            raise Refused(f'there is no command {name!r}{nearest(name, COMMANDS)}')
        module, _, function = COMMANDS[name][0].partition(':')
        getattr(importlib.import_module(f'nanodepth.{module}'), function or 'main')(argv)


if __name__ == '__main__':
    main()
