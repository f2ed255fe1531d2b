"""Files that others read: written whole or not at all, and locked by one process at a time; and
files of others, which may be damaged.

Usage:
    replace(path, raw)                      # bytes; no reader sees half of them
    about = read_json('out/lidas/run.json')
    with claim('out/lidas'): ...            # nobody else writes into this folder
    with reading(path): ...                 # what goes wrong in here is the file's fault: one line
"""
import contextlib
import errno
import itertools
import json
import os
import re
from pathlib import Path

from nanodepth import ROOT
from nanodepth.common.errors import Refused, say


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
    try:
        yield
    except Refused as error:
        raise Refused(f'{error}{then}') from error
    except OSError:         # it says itself what is wrong
        raise
    except Exception as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0][:200]
        raise Refused(f'{path} is damaged, or not what it should be ({reason}){then}') from error


def read_json(path):
    "The names and values of a JSON file."
    with reading(path):
        value = json.loads(Path(path).read_text(encoding='utf-8'))
        if not isinstance(value, dict):
            raise ValueError(f'a {type(value).__name__}, not names with values')
    return value


def write_json(path, value):
    replace(path, json.dumps(value, indent=1).encode())


def replace(path, raw):
    """Write a file atomically: who has the old one open keeps it, and no reader sees half of the
    new one, even if this process is killed."""
    with fresh(path) as file:
        file.write(raw)


def aside(path):
    "Where the old can be kept beside the new: the first of PATH.1, PATH.2, ... that is free."
    names = (path.with_name(f'{path.name}.{i}') for i in itertools.count(1))
    return next(free for free in names if not free.exists())


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
    refuse_if_lost(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f'{path.name}.{os.getpid()}.tmp')      # each writer has its own
    try:
        yield new
        refuse_if_lost(path)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


held = {}           # {a folder that this process holds: its open lock}


@contextlib.contextmanager
def claim(folder):
    """Hold a folder, because two runs in one would overwrite each other. The lock goes with the
    process that holds it; its file stays, unless a refusal leaves nothing else there."""
    if str(folder) in ('', '.'):        # --out= is no wish to write here
        raise Refused('the folder to write into is empty, or ".": write its name')
    folder = Path(folder).absolute()
    if folder in held:
        yield
        return
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'lock', 'a') as file:
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
        remove_leftovers(folder)
        held[folder] = file
        try:
            yield
        except Refused:
            if is_new and [path.name for path in folder.iterdir()] == ['lock']:
                (folder / 'lock').unlink()
                folder.rmdir()
            raise
        finally:
            del held[folder]


def remove_leftovers(folder):
    "What writers left that were killed, by the names that `replacing` gives, and nobody else's."
    for left in folder.iterdir():
        if re.search(r'\.\d+\.tmp$', left.name) and left.is_file() and not left.is_symlink():
            left.unlink(missing_ok=True)


def refuse_if_lost(path):
    """A folder that this process holds may have been removed or moved away, and another process be
    at work under its name: nothing may be written there."""
    for folder in (folder for folder in path.absolute().parents if folder in held):
        lock = folder / 'lock'
        if not lock.exists() or not os.path.samestat(os.fstat(held[folder].fileno()), lock.stat()):
            raise Refused(f'{folder} was removed or moved while this command was at work in it, so '
                          f'{path.name} is not written')


@contextlib.contextmanager
def new_model(folder, option='choose another folder'):
    "Hold a folder to write a model into: none is there yet, ours or a Hugging Face checkpoint."
    folder = Path(folder)
    if any((folder / name).exists() for name in ('config.json', 'ckpt.pt')):
        raise Refused(f'{folder} holds a checkpoint already: {option}')
    with claim(folder):
        yield folder


def without_lock(folder):
    "A folder that goes out into the world is whole, and nobody writes into it any more."
    with contextlib.suppress(OSError):          # Windows removes no open file
        (Path(folder) / 'lock').unlink()


def refuse_gguf(path):
    if str(path).endswith('.gguf'):
        raise Refused(f'{path} is a GGUF file: nanodepth export {path} FOLDER writes it as a '
                      'folder, which every command opens')


def on_hub(name):
    "Is this owner/name, as on the Hugging Face hub, and no slip in the name of a folder here?"
    path = Path(name)
    return (re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None and not path.exists()
            and not path.parent.is_dir())
