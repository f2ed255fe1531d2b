"""Files that others read, and files of others, which may be damaged. A file is written beside the
old one, forced to the disk, and then takes its name, so that no reader sees half of it.
Usage: replace(path, raw)
"""
import contextlib
import errno
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

from nanodepth.common.errors import Refused, say


@contextlib.contextmanager
def reading(path):
    """Whatever goes wrong in here, while a file is being understood, is Refused in one line. This
    stands around the parsing alone, never around a model that runs: a bug of ours keeps its
    traceback."""
    try:
        yield
    except (Refused, OSError):      # it says itself what is wrong
        raise
    except Exception as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0][:200]
        raise Refused(f'{path} is damaged, or not what it should be ({reason})') from error


def checkpoint_file(folder):
    "What stands for a run: its ckpt.pt, or the checkpoint that is named itself."
    path = Path(folder)
    return path if path.suffix == '.pt' and not path.is_dir() else path / 'ckpt.pt'


def read_json(path):
    "The names and values of a JSON file."
    with reading(path):
        value = json.loads(Path(path).read_text(encoding='utf-8'))
        if not isinstance(value, dict):
            raise ValueError(f'a {type(value).__name__}, not names with values')
    return value


def load_tensors(path):
    "What torch.save has written, mapped from its file; tensors and plain values only."
    import torch
    with reading(path):
        try:
            return torch.load(path, map_location='cpu', weights_only=True,
                              mmap=os.name == 'posix')     # Windows could not replace it then
        except pickle.UnpicklingError as error:     # it says how to load it all the same
            named = [line for line in str(error).splitlines() if 'GLOBAL' in line]
            raise Refused(f'{path} holds more than tensors and plain values, so it was not loaded. '
                          f'{"".join(named[:1])[:200]}'.strip()) from error


def read_run(path):
    "What a run says of itself: its checkpoint or, where that was not copied along, its run.json."
    file = checkpoint_file(path)
    if file.exists():
        return load_tensors(file)
    beside = file.with_name('run.json')
    return read_json(beside) if beside.exists() else {}


def write_json(path, value):
    replace(path, json.dumps(value, indent=1).encode())


def replace(path, raw):
    """Write a file atomically: who has the old one open keeps it, and no reader sees half of the
    new one, even if this process is killed."""
    with fresh(path) as file:
        file.write(raw)


def hash_of(path):
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


# ---------------------------------------------------------------------------- whole or not at all

@contextlib.contextmanager
def fresh(path):
    "An open file that becomes `path` when it has been written without an error."
    path = Path(path)
    if path.exists() and not path.is_file():
        raise Refused(f'{path} is a folder, or no ordinary file, so nothing is written there')
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f'{path.name}.{os.getpid()}.nanodepth.tmp')    # each writer has its own
    try:
        with open(new, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def claim(folder):
    """Hold a folder, because two runs in one would overwrite each other. The lock goes with the
    process that holds it; its file stays, unless it is new and something is refused."""
    if str(folder) in ('', '.'):        # --out= is no wish to write here
        raise Refused('the folder to write into is empty, or ".": write its name')
    lock = Path(folder) / 'lock'
    is_new = not lock.exists()
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, 'a') as file:
        try:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:         # Windows has no flock: there it is up to you
            pass
        except BlockingIOError:
            raise Refused(f'another run is at work in {folder}; wait for it, or choose another '
                          'folder') from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            say(f'{folder}: its file system has no locks, so keep two runs out of it yourself')
        try:
            yield
        except Refused:
            if is_new:
                lock.unlink()
                with contextlib.suppress(OSError):      # it is not empty
                    lock.parent.rmdir()
            raise


@contextlib.contextmanager
def new_folder(folder):
    """Where a model's folder is written: beside its place, whose name it takes when all went well.
    What is there already is never written over."""
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f'{folder} is there already, and a model is written into a new folder')
    beside = folder.with_name(f'{folder.name}.{os.getpid()}.nanodepth.tmp')
    beside.mkdir(parents=True)
    try:
        yield beside
        if folder.exists():             # an empty one may be in its place
            folder.rmdir()
        beside.replace(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
