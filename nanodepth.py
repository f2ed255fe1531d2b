"""The entry point: every command by name; the one place that turns a user's error into a line.

The idea: a command is a `main(argv)`, train.py's or one in tools/. What it cannot do it
refuses by raising Refused; here that becomes a line and exit status 2. Any other exception keeps
its traceback.

Usage:
    python nanodepth.py                     # lists the commands
    python nanodepth.py sample out/lidas    # one of them; --help says more
    python loop.py out/lidas                # an idea is a script: the same as nanodepth.py loop
    from nanodepth import looped            # after `pip install -e .` in a clone, from any folder
"""
import importlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OURS = ('common', 'report', 'data', 'model', 'variants', 'grow', 'loop', 'retrofit', 'wrapper',
        'probe', 'engine', 'train', 'tools')


def find_ours():
    """From here on our files can be imported from any folder. Another's files come first, so that
    theirs are never hidden by ours; if theirs hide ours, that is said."""
    if not (ROOT / 'common').is_dir():
        raise ImportError(f'{__file__} is here without the files that it needs: clone the '
                          'repository and run `pip install -e .` in the clone')
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    for name in OURS:
        module = sys.modules.get(name)
        spec = module.__spec__ if module else importlib.util.find_spec(name)
        file = spec.origin if spec else getattr(module, '__file__', None)
        if not file or ROOT not in Path(file).resolve().parents:
            raise ImportError(f'nanodepth needs its own {name}, but {file or name} has that name '
                              'and is found first: rename it, or start Python in another folder')


find_ours()

from common.errors import Refused, nearest, refusals  # noqa: E402

# what `from nanodepth import ...` gives, and where it stands
NAMES = dict(looped='wrapper', patch='wrapper', unpatch='wrapper', load_model='engine.checkpoint',
             save_hf='engine.hf')

COMMANDS = {        # name: (module, and its function if that is not main; what it does)
    'train': ('train', 'train a model by a config: ordinary, grown, looped or recurrent'),
    'plot': ('tools.plot', 'the pictures of runs, side by side, and a table'),
    'sample': ('tools.sample', 'generate text from a checkpoint'),
    'grow': ('tools.grow', 'which layer came from which, and what growing saves'),
    'loop': ('tools.loop', 'looped runs beside their partners; every block repeated'),
    'play': ('tools.play', 'a page on which you move layers and see what it does'),
    'primitives': ('tools.primitives', 'accuracy on copying and variable assignment'),
    'export': ('tools.export', 'a checkpoint as a Hugging Face folder'),
    'evaluate': ('tools.evaluate', 'lm-eval on any checkpoint'),
    'retrofit': ('tools.retrofit', 'cut a checkpoint into prelude, core, coda; --eval: loss by r'),
    'wrap': ('tools.wrapper', 'a frozen model, plain and with its middle looped, scored'),
    'sweep': ('tools.wrapper:sweep', 'try many ways of looping, judge the best on other data'),
    'probe': ('tools.probe', 'which layers models use: a page of pictures'),
    'lens': ('tools.lens', 'train a tuned lens for a checkpoint'),
    'check_data': ('tools.check_data', 'what is in a dataset; checks every checksum'),
    'study': ('tools.study', 'a seed of the runs that docs/RESULTS.md judges'),
    'record': ('tools.record', 'train a config on eight seeds, judge it against the record'),
    'results': ('tools.results', 'the tables of docs/RESULTS.md, from the rows of seeds'),
    'diagrams': ('tools.diagrams', 'the diagrams of README.md, from the real orders'),
    'bench': ('tools.bench', 'speed and memory, each compared with a peer'),
}


def __getattr__(name):
    if name not in NAMES:
        raise AttributeError(f'nanodepth has no {name!r}, but {", ".join(NAMES)}')
    return getattr(importlib.import_module(NAMES[name]), name)


def main(name=None, argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if name is None:
        if not argv or argv[0] in ('-h', '--help'):
            lines = [f'  {name:12}{about}' for name, (_, about) in COMMANDS.items()]
            return print(__doc__ or '', *lines, sep='\n')
        name, *argv = argv
        sys.argv[0] = f'nanodepth.py {name}'        # the name that --help prints
    with refusals(name if name in COMMANDS else 'nanodepth'):
        if name not in COMMANDS:
            raise Refused(f'there is no command {name!r}{nearest(name, COMMANDS)}')
        module, _, function = COMMANDS[name][0].partition(':')
        getattr(importlib.import_module(module), function or 'main')(argv)


if __name__ == '__main__':
    main()
