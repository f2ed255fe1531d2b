"""Files that others read: written whole or not at all, and locked by one process at a time; and
files of others, which may be damaged.

Usage:
    replace(path, raw)                      # bytes; no reader sees half of them
    about = read_json('out/lidas/run.json')
    with claim('out/lidas'): ...            # nobody else writes into this folder
    with reading(path): ...                 # what goes wrong in here is the file's fault: one line
"""
import contextlib
import glob
import json
import os
import re
from pathlib import Path

import torch

from common.errors import Refused
from common.fields import fill, short

ROOT = Path(__file__).resolve().parents[1]


def find(path):
    "A config or a dataset: in the current folder, else beside the code."
    here = Path(path)
    beside_the_code = ROOT / path
    if not here.exists() and beside_the_code.exists():
        return beside_the_code
    return here


@contextlib.contextmanager
def reading(path, then=''):
    """Whatever goes wrong in here, while a file is being understood, is Refused in one line. This
    stands around the parsing alone, never around a model that runs: a bug of ours keeps its
    traceback. `then`: what to do about it."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise Refused(f'{path} is no ordinary file: it is not opened{then}')
    try:
        yield
    except Refused as error:
        raise Refused(f'{error}{then}') from error
    except (OSError, MemoryError):          # these say themselves what is wrong
        raise
    except Exception as error:
        reason = f'{type(error).__name__}: {str(error)[:1000]}'.splitlines()[0][:200]
        raise Refused(f'{path} is damaged, or not what it should be ({reason}){then}') from error


def refuse_hollow(name, t, path):
    "A tensor that takes more memory than its file: a few bytes of it, repeated for ever."
    plain = t.layout == torch.strided and t.device.type == 'cpu' and not t.is_nested
    if not plain or t.untyped_storage().nbytes() < t.numel() * t.element_size():
        raise Refused(f'{path}: {short(name)} is a tensor that the file does not hold in full')


def read_json(path, kind=dict):
    "The file's value, which must be of this kind."
    with reading(path):
        value = json.loads(Path(path).read_text(encoding='utf-8'))
    if not isinstance(value, kind):
        raise Refused(f'{path} holds a {type(value).__name__}, not a {kind.__name__}')
    return value


def read_fields(cls, path):
    "The fields of a dataclass, of those that a JSON file says, as its instance."
    return fill(cls, read_json(path), path, others=True)


def write_json(path, value):
    replace(path, json.dumps(value, indent=1).encode())


def replace(path, raw):
    """Write a file atomically: who has the old one open keeps it, and no reader sees half of the
    new one, even if this process is killed."""
    with fresh(path) as file:
        file.write(raw)


def aside(path, mark='.'):
    "Where the old can be kept beside the new: the first of PATH.1, PATH.2, ... that is free."
    i = 1
    while path.with_name(f'{path.name}{mark}{i}').exists():
        i += 1
    return path.with_name(f'{path.name}{mark}{i}')


@contextlib.contextmanager
def fresh(path):
    "An open file that becomes `path` when it has been written without an error."
    with replacing(path) as new, open(new, 'wb') as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path):
    "Where a new version of a file is written: it becomes `path` at the end, if all went well."
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f'{glob.escape(path.name)}.*.tmp'):
        if not is_alive(left.name.split('.')[-2]):      # its writer was killed
            left.unlink(missing_ok=True)
    new = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def is_alive(process):
    "Does a process of this number run on this machine? Where nobody can tell, it does."
    if os.name == 'posix' and process.isdigit():
        try:
            os.kill(int(process), 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:         # somebody else's
            pass
    return True


@contextlib.contextmanager
def claim(folder):
    """Hold a folder, because two runs in one would overwrite each other. The lock goes with the
    process that holds it, and so does a new folder in which nothing was written."""
    folder = Path(folder)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = take_lock(folder / 'lock')
    except BlockingIOError:
        raise Refused(f'another run is at work in {folder}; wait for it, or choose another '
                      'folder') from None
    except OSError as error:
        raise Refused(f'{folder} cannot be written: {error.strerror}') from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):      # Windows keeps what is open
            (folder / 'lock').unlink()
        os.close(handle)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()


def take_lock(path):
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            import fcntl
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:         # Windows has no flock: there it is up to you
            return handle
        except OSError:
            os.close(handle)
            raise
        if path.exists() and os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
        os.close(handle)            # its holder has removed it just now


@contextlib.contextmanager
def new_model(folder, option='choose another folder'):
    "Hold a folder to write a model into: none is there yet, ours or a Hugging Face checkpoint."
    folder = Path(folder)
    if folder.is_file():
        raise Refused(f'{folder} is a file: {option}')
    if any((folder / name).exists() for name in ('config.json', 'ckpt.pt')):
        raise Refused(f'{folder} holds a checkpoint already: {option}')
    with claim(folder):
        yield


def on_hub(name):
    "Is this owner/name, as on the Hugging Face hub, and nothing on this disk?"
    return re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None and not Path(name).exists()
