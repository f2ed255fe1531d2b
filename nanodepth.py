"""The door: every command of the repo by its name.

Usage:
    python nanodepth.py                     # the commands, in the order in which one meets them
    python nanodepth.py sample out/lidas    # one of them
    python nanodepth.py sample --help
"""
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))        # so that it works from any folder

COMMANDS = {        # name: (module, what it does)
    'train': ('train', 'train a model by a config: ordinary, grown, looped or recurrent'),
    'plot': ('report.plot', 'the pictures of runs, side by side, and a table'),
    'sample': ('tools.sample', 'generate text from a checkpoint'),
    'grow': ('grow', 'which layer came from which, and what growing saves'),
    'loop': ('loop', 'looped runs against their partners; every block repeated'),
    'primitives': ('data.primitives', 'accuracy on copying and variable assignment'),
    'export': ('engine.hf', 'a checkpoint as a Hugging Face folder'),
    'evaluate': ('tools.evaluate', 'lm-eval on any checkpoint'),
    'retrofit': ('retrofit', 'cut a checkpoint into prelude, core and coda; measure it against r'),
    'wrap': ('wrapper', 'a frozen model with its middle looped, side by side with itself'),
    'sweep': ('tools.sweep', 'many ways of looping, screened on one part of the data, judged on another'),
    'probe': ('probe', 'which layers models use: a page of pictures'),
    'lens': ('variants.lens', 'train a tuned lens'),
    'check_data': ('data.tokens', 'what is in a dataset, every shard against its checksum'),
    'bench': ('tools.bench', 'speed and memory, each thing against its peer'),
    'gpu': ('tools.gpu', 'the same questions for a GPU, in nine minutes'),
}


def main(name=None, argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if name is None:
        if not argv or argv[0] not in COMMANDS:
            print(__doc__)
            print('\n'.join(f'  {name:12} {about}' for name, (_, about) in COMMANDS.items()))
            raise SystemExit(2 if argv and argv[0] not in ('-h', '--help') else 0)
        name, *argv = argv
        sys.argv[0] = f'nanodepth.py {name}'            # what --help calls itself
    importlib.import_module(COMMANDS[name][0]).main(argv)


if __name__ == '__main__':
    main()
