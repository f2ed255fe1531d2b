"""The package: `from nanodepth import wrapped`, and each file of the book as nanodepth.NAME. These
import each other by bare names. They are loaded here once, by their files, and lent these names
while they load, so that a model.py of somebody else's stays theirs.
"""
import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

__version__ = '0.2.0'
HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / 'model.py').exists() else HERE.parent    # a wheel has the seven in here
if ROOT != HERE:
    __path__.append(str(ROOT))              # a clone: config/ and data/ are nanodepth.config, .data
# in an order in which each stands behind those that it imports
BOOK = ('model', 'loop', 'grow', 'retrofit', 'wrapper', 'probe', 'training', 'training.machine',
        'training.help', 'training.settings', 'training.plan', 'training.loader',
        'training.optimizers', 'training.measure', 'training.checkpoint', 'training.start',
        'training.picture', 'train')
NAMES = dict(wrapped='wrapping.others', load_model='models.checkpoint', save_hf='models.hf')


def file_of(name):
    return ROOT / (f'{name}/__init__.py' if name == 'training' else f'{name.replace(".", "/")}.py')


def load_book():
    before, main = {name: sys.modules.get(name) for name in BOOK}, sys.modules.get('__main__')
    is_ours = lambda path, name: path is not None and Path(path).resolve() == file_of(name)
    for name in BOOK:
        # in `python train.py`, or beside `import model` in a clone, one of them is there already
        ours = [module for module in (before[name], main)
                if is_ours(getattr(module, '__file__', None), name)]
        spec = spec_from_file_location(f'nanodepth.{name}', file_of(name))
        module = ours[0] if ours else module_from_spec(spec)
        sys.modules[name] = sys.modules[f'nanodepth.{name}'] = module
        folder, _, own = name.rpartition('.')
        setattr(sys.modules[folder or 'nanodepth'], own, module)
        if not ours:
            spec.loader.exec_module(module)
    for name, module in before.items():         # each bare name is whoever's it was, or would be
        found = PathFinder.find_spec(name.partition('.')[0])
        if module is not None:
            sys.modules[name] = module
        elif found is None or not is_ours(found.origin, name.partition('.')[0]):
            del sys.modules[name]


IS_HELP = not sys.argv[1:] or {'-h', '--help'} & {*sys.argv}
if not (Path(sys.argv[0]).name in ('nanodepth', '-m') and IS_HELP):
    load_book()                         # what prints help needs none of it, and no torch
    importlib.import_module('nanodepth.wrapping.solvers')       # which makes six more known


def __getattr__(name):
    "What people import is read when it is asked for."
    if name not in NAMES:
        raise AttributeError(f'nanodepth has no {name!r}, but {", ".join(NAMES)}')
    return getattr(importlib.import_module(f'nanodepth.{NAMES[name]}'), name)
