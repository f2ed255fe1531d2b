"""The package: `from nanodepth import looped`, and every file of ours as nanodepth.NAME.

In a clone the seven ideas, config/ and data/ stand beside this folder, in an installed copy inside
it. Both are found under the same names, such as nanodepth.model, so no file of ours can hide one of
yours, nor be hidden by it.
"""
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent      # where the seven, config/ and data/ are
if not (ROOT / 'model.py').exists():        # a clone
    ROOT = ROOT.parent
    __path__.append(str(ROOT))

NAMES = dict(looped='wrapper', patch='wrapper', unpatch='wrapper', load_model='models.checkpoint',
             save_hf='models.hf')


def __getattr__(name):
    "What people import is read when it is asked for: `import nanodepth` imports no torch."
    if name not in NAMES:
        raise AttributeError(f'nanodepth has no {name!r}, but {", ".join(NAMES)}')
    return getattr(importlib.import_module(f'nanodepth.{NAMES[name]}'), name)
