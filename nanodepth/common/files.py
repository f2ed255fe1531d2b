"""Files: read as what they are, and written whole. A folder of a model is written beside its place,
and takes its name at the end.
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
    "What stands for a run: its ckpt.pt, or the checkpoint that is named itself."
    path = Path(folder)
    return path if path.suffix == '.pt' and not path.is_dir() else path / 'ckpt.pt'


def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding='utf-8'))
    except ValueError as error:
        raise Refused(f'{path} is no JSON: {error}') from None


def read_run(path):
    "What a run says of itself: its checkpoint or, where that was not copied along, its run.json."
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
    "Write a file, in a folder that may be new: no reader sees half of it."
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as new:
        new.write_bytes(raw)


def write_json(path, value):
    replace(path, json.dumps(value, indent=1).encode())


@contextlib.contextmanager
def new_folder(folder):
    "Where a model's folder is written. What is there already is never written over."
    folder = Path(folder).absolute()
    require(not folder.exists() or folder.is_dir() and not any(folder.iterdir()),
            f'{folder} is there already, and a model is written into a new folder')
    beside = folder.with_name(f'{folder.name}.unfinished')
    shutil.rmtree(beside, ignore_errors=True)       # of a command that was killed
    beside.mkdir(parents=True)
    try:
        yield beside
        beside.replace(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
