"""The package: every file is imported as nanodepth.NAME, so none of ours can hide one of yours.
In a clone the seven ideas, config/ and data/ stand beside this folder, and in an installed copy
they stand inside it. Both are found under the same names.
Usage: from nanodepth import looped
"""
import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_loader
from pathlib import Path

__version__ = '0.2.0'
ROOT = Path(__file__).resolve().parent      # where the seven, config/ and data/ are
if not (ROOT / 'model.py').exists():        # a clone
    ROOT = ROOT.parent
    __path__.append(str(ROOT))
IDEAS = 'model', 'grow', 'loop', 'retrofit', 'wrapper', 'probe', 'train'


class SameModule:
    """In a clone `import model` and `import nanodepth.model` are one module, so that LM is one
    class. A model.py of somebody else's that Python finds first stays theirs."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = PathFinder.find_spec(name) if name in IDEAS and path is None else None
        if found and Path(found.origin or '').resolve() == ROOT / f'{name}.py':
            return spec_from_loader(name, cls, origin=found.origin)

    @staticmethod
    def create_module(spec):
        return importlib.import_module(f'nanodepth.{spec.name}')

    @staticmethod
    def exec_module(module):
        "It ran as nanodepth.NAME."


def same_modules():
    "An idea that is being loaded by a bare name, or runs as a script, and so imports us."
    for name in (*IDEAS, '__main__'):
        module = sys.modules.get(name)
        path = Path(getattr(module, '__file__', None) or '').resolve()
        if path.parent == ROOT and path.stem in IDEAS:
            sys.modules[f'nanodepth.{path.stem}'] = module
            globals()[path.stem] = module


same_modules()
if ROOT != Path(__file__).resolve().parent:
    sys.meta_path.insert(0, SameModule)

NAMES = dict(looped='wrapper', patch='wrapper', unpatch='wrapper', load_model='models.checkpoint',
             save_hf='models.hf')


def __getattr__(name):
    "What people import is read when it is asked for: `import nanodepth` imports no torch."
    if name not in NAMES:
        raise AttributeError(f'nanodepth has no {name!r}, but {", ".join(NAMES)}')
    return getattr(importlib.import_module(f'nanodepth.{NAMES[name]}'), name)
