"""The entry point: it finds a command by its name, and turns a user's mistake into one line.
In a clone without an install, write `python -m nanodepth` instead of `nanodepth`.
    nanodepth                       # lists the commands
    nanodepth sample out/lidas      # runs one of them (with --help it says more)
    nanodepth mine.py sample out/mine   # the same, after mine.py has been run: its Spans are known
"""
import importlib
import sys

COMMANDS = {        # name: (module, what it does)
    'train': ('commands.train', 'train a model by a config: ordinary, grown, looped or recurrent'),
    'plot': ('commands.plot', 'the pictures of runs, side by side, and a table'),
    'sample': ('commands.sample', 'generate text from a checkpoint'),
    'play': ('extras.play', 'a page on which you move layers and see what it does'),
    'export': ('commands.export', 'a checkpoint as a Hugging Face folder'),
    'evaluate': ('commands.evaluate', 'how good models are, run in these ways'),
    'compare': ('commands.compare', 'is an idea better, at equal tokens and FLOPs, over seeds?'),
    'cut': ('commands.cut', 'another model of a trained one: recurrent, or with untied layers'),
    'sweep': ('commands.sweep', 'try many ways of running, judge the best on other data'),
    'probe': ('commands.probe', 'which layers models use: a page of pictures'),
}


def main(name=None, argv=None):
    own_file = None
    if argv is None:            # a command line, and not a call from Python
        argv = sys.argv[1:]
        for stream in (sys.stdout, sys.stderr):         # a terminal may lack a ±
            if hasattr(stream, 'reconfigure'):          # not in a notebook, or closed
                stream.reconfigure(errors='replace')
    if name is None:
        if argv and argv[0].endswith('.py'):
            own_file, *argv = argv
        if not argv or argv[0] in ('-h', '--help'):
            lines = [f'  {name:12}{about}' for name, (_, about) in COMMANDS.items()]
            return print(__doc__ or '', *lines, sep='\n')
        name, *argv = argv
    elif {'-h', '--help'} & set(argv):
        print(f'This is the command nanodepth {name}.\n')
    from nanodepth.common.errors import Refused, nearest, refusals
    with refusals(name if name in COMMANDS else 'nanodepth'):
        if name not in COMMANDS:
            raise Refused(f'there is no command {name!r}{nearest(name, COMMANDS)}')
        if own_file:
            run_own_file(own_file)
        try:
            importlib.import_module(f'nanodepth.{COMMANDS[name][0]}').main(argv)
        finally:
            sys.stdout.flush()      # in here: a pipe may be closed already


def run_own_file(path):
    """Run a file of the user's, so that its Spans, solvers and measures are known to the command.
    Its function `metric`, if there is one, becomes the measure `metric`."""
    from nanodepth.common.options import lent_names
    from nanodepth.training.settings import find, run_file
    file = find(path).resolve()
    with lent_names(file.parent):
        names = vars(run_file(file))
    if 'metric' in names:
        from nanodepth.scoring.rows import MEASURES
        MEASURES['metric'] = names['metric']


if __name__ == '__main__':
    main()
