"""Read and write files. A file or a model's folder is written under another name first and renamed
at the end, so no reader ever sees half of it.
Usage: with whole(path) as new: new.write_text(text)
"""
import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

from nanodepth.common.errors import Refused
from nanodepth.model import require
from nanodepth.training.checkpoint import whole


def checkpoint_file(folder):
    "Return a run's ckpt.pt. The path of a checkpoint itself is returned as it is."
    path = Path(folder)
    return path if path.suffix == '.pt' and not path.is_dir() else path / 'ckpt.pt'


def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding='utf-8'))
    except ValueError as error:
        raise Refused(f'{path} is not JSON: {error}') from None


def read_run(path):
    "Return what a run's checkpoint holds or, if only run.json was copied, what that holds."
    import torch
    file = checkpoint_file(path)
    if file.exists():           # tensors and plain values only
        return torch.load(file, map_location='cpu', weights_only=True, mmap=os.name == 'posix')
    beside = file.with_name('run.json')
    return read_json(beside) if beside.exists() else {}


def hash_of(path):
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def replace(path, raw):
    "Write bytes to a file, whose folder may not exist yet."
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as new:
        new.write_bytes(raw)


def write_json(path, value):
    replace(path, json.dumps(value, indent=1).encode())


@contextlib.contextmanager
def new_folder(folder):
    "Inside this `with`, write a model's folder. It gets its name at the end, if that is free."
    folder = Path(folder).absolute()
    require(not folder.exists() or folder.is_dir() and not any(folder.iterdir()),
            f'{folder} exists already, and a model is written into a new folder: name another one')
    beside = folder.with_name(f'{folder.name}.unfinished')
    shutil.rmtree(beside, ignore_errors=True)       # left by a command that was killed
    beside.mkdir(parents=True)
    try:
        yield beside
        beside.replace(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
