"""Files that others read: written whole or not at all, locked by one process at a time.

Usage:
    replace(path, raw)                      # bytes; no reader sees half of them
    about = read_json('out/lidas/run.json')
    lock = claim(Path('out/lidas'))         # held until the process ends
"""
import contextlib
import json
import os
from pathlib import Path

from common.errors import Refused

ROOT = Path(__file__).resolve().parents[1]


def find(path):
    "A config or a dataset: in the current folder, else beside the code."
    return ROOT / path if not Path(path).exists() and (ROOT / path).exists() else Path(path)


def read_json(path, kind=dict, need=()):
    "The file's value, which must be of this kind, and have these names."
    try:
        value = json.loads(Path(path).read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:       # of text, of numbers, of nesting
        raise Refused(f'{path} is not JSON: {error}') from None
    if not isinstance(value, kind):
        raise Refused(f'{path} holds a {type(value).__name__}, not a {kind.__name__}')
    for name in need:
        if name not in value:
            raise Refused(f'{path} does not say {name!r}')
    return value


def write_json(path, value):
    replace(path, json.dumps(value, indent=1).encode())


def replace(path, raw):
    """Write a file atomically: who has the old one open keeps it, and no reader sees half of the
    new one, even if this process is killed."""
    with fresh(path) as file:
        file.write(raw)


def aside(path, mark='.'):
    "Where the old can be kept beside the new: the first of PATH.1, PATH.2, ... that is free."
    return next(p for i in range(1, 10**6)
                if not (p := path.with_name(f'{path.name}{mark}{i}')).exists())


def must_be_free(folder, option='choose another folder'):
    "Refuse to write a model where one is, ours or a Hugging Face checkpoint."
    folder = Path(folder)
    if folder.is_file():
        raise Refused(f'{folder} is a file: {option}')
    if any((folder / name).exists() for name in ('config.json', 'ckpt.pt')):
        raise Refused(f'{folder} holds a checkpoint already: {option}')


@contextlib.contextmanager
def fresh(path):
    "An open file that becomes `path` when it has been written without an error."
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        with open(beside, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def claim(folder):
    """Lock the folder for this process until it ends: two runs in one folder would overwrite each
    other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / 'lock', 'w')
    except OSError as error:
        raise Refused(f'out_dir={folder} cannot be written: {error.strerror}') from None
    try:
        import fcntl
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:         # Windows has no flock: there it is up to you
        pass
    except BlockingIOError:
        raise Refused(f'another run is at work in {folder}; wait for it, or choose another '
                      '--out_dir') from None
    return handle
