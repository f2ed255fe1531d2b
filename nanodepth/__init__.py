"""The package: `from nanodepth import wrapped`, and each file of the book as nanodepth.NAME.

The *book* are the files at the top of the repository, model.py to train.py, and training/. They
import each other by bare names, such as `from model import LM`. This file loads each of them once,
and lets it use these names while it loads. Afterwards `import model` finds what it found before, so
a user's own model.py is not touched.
"""
import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

__version__ = '0.2.0'
HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / 'model.py').exists() else HERE.parent    # in a wheel the book is in HERE
if ROOT != HERE:
    __path__.append(str(ROOT))      # in a clone, config/ and data/ are nanodepth.config and .data
# each file of the book, after the files that it imports
BOOK = ('model', 'loop', 'grow', 'retrofit', 'wrapper', 'probe', 'training', 'training.machine',
        'training.help', 'training.settings', 'training.plan', 'training.loader',
        'training.optimizers', 'training.measure', 'training.checkpoint', 'training.start',
        'training.picture', 'train')
LAZY_NAMES = dict(wrapped='wrapping.others', load_model='models.checkpoint', save_hf='models.hf')


def file_of(name):
    "Return the file of a module of the book."
    return ROOT / (f'{name}/__init__.py' if name == 'training' else f'{name.replace(".", "/")}.py')


def is_of_book(path, name):
    "Return whether a module's path is the file of this module of the book."
    return path is not None and Path(path).resolve() == file_of(name)


def load_book():
    "Load each file of the book as nanodepth.NAME."
    before = {name: sys.modules.get(name) for name in BOOK}
    for name in BOOK:
        # A module may be loaded already: as the script in `python train.py`, or by `import model`
        # in a clone.
        loaded = [module for module in (before[name], sys.modules.get('__main__'))
                  if is_of_book(getattr(module, '__file__', None), name)]
        spec = spec_from_file_location(f'nanodepth.{name}', file_of(name))
        module = loaded[0] if loaded else module_from_spec(spec)
        sys.modules[name] = sys.modules[f'nanodepth.{name}'] = module
        folder, _, last_part = name.rpartition('.')
        setattr(sys.modules[folder or 'nanodepth'], last_part, module)
        if not loaded:
            spec.loader.exec_module(module)
    for name, module in before.items():
        # The bare name gets its old module. If there was none, the book's stays only if `import
        # NAME` would find the book's file anyway, as in a clone.
        found = PathFinder.find_spec(name.partition('.')[0])
        if module is not None:
            sys.modules[name] = module
        elif found is None or not is_of_book(found.origin, name.partition('.')[0]):
            del sys.modules[name]


IS_HELP = not sys.argv[1:] or {'-h', '--help'} & {*sys.argv}
if not (Path(sys.argv[0]).name in ('nanodepth', '-m') and IS_HELP):
    load_book()         # (--help is printed without it, because loading torch takes seconds)
    importlib.import_module('nanodepth.wrapping.solvers')       # adds its solvers to SOLVERS


def __getattr__(name):
    "Import what LAZY_NAMES lists when it is first used."
    if name not in LAZY_NAMES:
        raise AttributeError(f'nanodepth has no {name!r}: import {", ".join(LAZY_NAMES)}, or a '
                             'module such as nanodepth.model')
    return getattr(importlib.import_module(f'nanodepth.{LAZY_NAMES[name]}'), name)
