"""Whose model is it, ours or another family's, and where does it lie?
Usage: if is_ours(model): ...
"""
import functools
import re
from pathlib import Path

from nanodepth.common.errors import refusing
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
    "Is this owner/name, as on the Hugging Face hub, and no slip in the name of a folder here?"
    path = Path(name)
    return (re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None and not path.exists()
            and not path.parent.is_dir() and path.parts[0] not in ('out', 'data', 'config'))


@functools.cache            # it asks the hub each time
def from_hub(name):
    "The local copy of a checkpoint on the hub, fetched if need be."
    # each version of the package has names of its own for what went wrong
    with refusing(Exception, why=lambda error: f'there is no {name} here, and the Hugging Face hub '
                  f'did not give it ({type(error).__name__}): on a machine without a network or '
                  'huggingface_hub, give the folder of a download'):
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(str(name),
                                      allow_patterns=['*.json', '*.safetensors', '*.jinja',
                                                      *LICENCES]))


def local_folder(name):
    "The folder of a checkpoint: as it is named, or fetched from the hub."
    return Path(name) if Path(name).is_dir() else from_hub(name)


def copy_licence(source, target):
    "A licence that lies beside some weights goes with them."
    folder = Path(source).parent if Path(source).is_file() else local_folder(source)
    for name in LICENCES:
        if (folder / name).is_file():
            replace(target / name, (folder / name).read_bytes())
