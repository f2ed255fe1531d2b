"""Run a command by its name, and turn a user's mistake into one line. In a clone without an
install, write `python -m nanodepth` instead of `nanodepth`.
    nanodepth                       # lists the commands
    nanodepth sample out/lidas      # runs a command (with --help it lists the options)
    nanodepth mine.py sample out/mine   # the same, after running mine.py, so its Spans are known
"""
import ast
import importlib
import sys
from pathlib import Path

COMMANDS = {        # name: (module, what it does)
    'train': ('commands.train', 'train a model: ordinary, grown, looped or recurrent'),
    'plot': ('commands.plot', 'draw the curves of runs, side by side, and a table'),
    'sample': ('commands.sample', 'generate text from a checkpoint'),
    'play': ('extras.play', 'make a page on which you move layers and see what they do'),
    'export': ('commands.export', 'write a checkpoint as a Hugging Face folder'),
    'evaluate': ('commands.evaluate', 'score models, as they are and in other ways of running'),
    'compare': ('commands.compare', 'is an idea better, at equal tokens and FLOPs, over seeds?'),
    'cut': ('commands.cut', 'make a recurrent model of a trained one, or untie its layers'),
    'sweep': ('commands.sweep', 'try many ways of running, judge the best on other data'),
    'probe': ('commands.probe', 'which layers do models use? pictures and numbers'),
}
HERE = Path(__file__).parent
# the files with options that several commands share
SHARED = dict(Ways='scoring/ways.py', ScoreOptions='scoring/rows.py', Config='training/plan.py')


def main(name=None, argv=None):
    "Run the command `name` with the words argv. Without them, both come from the command line."
    own_files = []
    if argv is None:            # a command line, and not a call from Python
        argv = sys.argv[1:]
        for stream in (sys.stdout, sys.stderr):         # some terminals cannot print ±
            if hasattr(stream, 'reconfigure'):          # not in a notebook, or closed
                stream.reconfigure(errors='replace')
    if name is None:
        while argv and argv[0].endswith('.py'):
            own_files.append(argv[0])
            argv = argv[1:]
        if not argv or argv[0] in ('-h', '--help'):
            lines = [f'  {name:12}{about}' for name, (_, about) in COMMANDS.items()]
            return print(__doc__ or '', *lines, sep='\n')
        name, *argv = argv
    if name in COMMANDS and {'-h', '--help'} & {*argv}:
        return print_help(name)
    from nanodepth.common.errors import Refused, nearest, refusals
    from nanodepth.common.options import OWN_FILES
    OWN_FILES[:] = own_files
    with refusals(name if name in COMMANDS else 'nanodepth'):
        if name not in COMMANDS:
            raise Refused(f'there is no command {name!r}{nearest(name, COMMANDS)} (`nanodepth` '
                          'alone lists the commands)')
        for path in own_files:
            run_own_file(path)
        try:
            importlib.import_module(f'nanodepth.{COMMANDS[name][0]}').main(argv)
        finally:
            sys.stdout.flush()      # inside `refusals`, because a pipe may be closed already


def print_help(name):
    "Print a command's docstring and options, which are read from its source."
    from nanodepth.training.help import print_fields
    file = HERE / f'{COMMANDS[name][0].replace(".", "/")}.py'
    tree = ast.parse(file.read_text(encoding='utf-8'))
    [options] = [node for node in tree.body if getattr(node, 'name', '') == 'Options']
    print(f'nanodepth {name}: {ast.get_docstring(tree)}\n')
    print_fields(file, 'Options')
    for base in (node.id for node in options.bases):
        shared = HERE / SHARED[base]
        print_fields(shared if shared.exists() else HERE.parent / SHARED[base], base)


def run_own_file(path):
    """Run a file of the user, so that the command knows its Spans, solvers and measures. If the
    file has a function `metric`, that becomes the measure `metric`."""
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
