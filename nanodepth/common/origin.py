"""Tell models of model.py from models of transformers, and find the files of a checkpoint, which is
a folder or a name on the hub. A name that looks like a path is never looked up on the hub.
Usage: file_of('owner/name', 'config.json')
"""
import re
from pathlib import Path

from nanodepth.common.errors import as_refusal
from nanodepth.common.files import replace

LICENCES = [name + ending for name in ('LICENSE', 'LICENCE', 'NOTICE')
            for ending in ('', '.txt', '.md')]


def vocab_size_of(model_like):
    "Return the size of a model's vocabulary, or 1 for a function, whose batches need no limit."
    return getattr(getattr(model_like, 'config', None), 'vocab_size', 1)


def device_of(model_like):
    "Return the device of a model's weights, or 'cpu' for a function without weights."
    return next((p.device for p in getattr(model_like, 'parameters', list)()), 'cpu')


def is_ours(model):
    """Return whether a model is an LM of model.py. (isinstance would not know the LM of another
    copy of model.py, which is another class.)"""
    return hasattr(model, 'flops_of')


def on_hub(name):
    "Return whether a name is owner/name, as on the Hugging Face hub, and not a path."
    first = str(name).partition('/')[0]
    return (re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None
            and not Path(first).exists() and first not in ('out', 'data', 'config'))


def file_of(name, file):
    "Return the path of a file of a checkpoint, or None if the checkpoint has no such file."
    if not on_hub(name):
        path = Path(name) / file
        return path if path.exists() else None
    from transformers.utils import cached_file
    with as_refusal(OSError, why=lambda error: f'{name}: {str(error).splitlines()[0]}'):
        path = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False)
        return path and Path(path)


def copy_licence(source, target):
    "Copy the licence of some weights, if there is one, into the folder of their copies."
    for name in LICENCES:
        if file := file_of(source, name):
            replace(target / name, file.read_bytes())
