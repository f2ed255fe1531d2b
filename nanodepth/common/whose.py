"""Whose model is it, ours or another family's, and where do its files lie? Names on the hub are
resolved by transformers; what looks like a path is never asked of it.
Usage: file_of('owner/name', 'config.json')
"""
import re
from pathlib import Path

from nanodepth.common.errors import as_refusal
from nanodepth.common.files import replace

LICENCES = [name + ending for name in ('LICENSE', 'LICENCE', 'NOTICE')
            for ending in ('', '.txt', '.md')]


def width_of(model_like):
    return getattr(getattr(model_like, 'config', None), 'vocab_size', 1)


def device_of(model_like):
    return next((p.device for p in getattr(model_like, 'parameters', list)()), 'cpu')


def is_ours(model):
    "(Not isinstance: the LM of another copy of ours is another class.)"
    return hasattr(model, 'flops_of')


def on_hub(name):
    "Is this owner/name, as on the Hugging Face hub, and no path, nor a slip in one?"
    first = str(name).partition('/')[0]
    return (re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None
            and not Path(first).exists() and first not in ('out', 'data', 'config'))


def file_of(name, file):
    "A file of a checkpoint, a folder or owner/name on the hub; None if it has no such file."
    if not on_hub(name):
        path = Path(name) / file
        return path if path.exists() else None
    from transformers.utils import cached_file
    with as_refusal(OSError, why=lambda error: f'{name}: {str(error).splitlines()[0]}'):
        path = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False)
        return path and Path(path)


def copy_licence(source, target):
    "A licence that lies beside some weights goes with them."
    for name in LICENCES:
        if file := file_of(source, name):
            replace(target / name, file.read_bytes())
