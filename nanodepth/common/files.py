"""Files that others read: written whole or not at all, locked by one process at a time, and never
over a file of somebody else's; and files of others, which may be damaged.

The idea: a folder that we write into has a file `.written`, a line for each file as sha256sum
prints it. What still has the hash that stands there is ours, and may be written over. All else that
is in the way is kept as NAME.1, with a line.

Usage:
    replace(path, raw)                      # bytes; no reader sees half of them
    about = read_json('out/lidas/run.json')
    with claim('out/lidas'): ...            # nobody else writes into this folder
    with reading(path): ...                 # what goes wrong in here is the file's fault: one line
"""
import contextlib
import errno
import hashlib
import itertools
import json
import os
import pickle
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


def read_run(folder):
    "What a run's run.json says of it; {} without one."
    path = Path(folder) / 'run.json'
    about = read_json(path) if path.exists() else {}
    with reading(path):
        if not (isinstance(about.get('config') or {}, dict)
                and isinstance(about.get('tokenizer', ''), str)):
            raise ValueError('config or tokenizer is of a wrong kind')
    return about


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


def write_json(path, value, known=False):
    replace(path, json.dumps(value, indent=1).encode(), known)


def replace(path, raw, known=False):
    """Write a file atomically: who has the old one open keeps it, and no reader sees half of the
    new one, even if this process is killed. `known`: the caller has seen that the old one is ours,
    as a checkpoint that it has read."""
    with fresh(path, known) as file:
        file.write(raw)


def aside(path):
    "Where the old can be kept beside the new: the first of PATH.1, PATH.2, ... that is free."
    names = (path.with_name(f'{path.name}.{i}') for i in itertools.count(1))
    return next(free for free in names if not free.exists())


# ------------------------------------------------------------------ what is ours, and what is not

WRITTEN = '.written'


def hash_of(path):
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def written_hash(path):
    "The hash of what we last wrote there, or None."
    notes = path.with_name(WRITTEN)
    lines = notes.read_text(encoding='utf-8').splitlines() if notes.is_file() else []
    last = dict(reversed(line.split('  ', 1)) for line in lines if '  ' in line)
    return last.get(path.name)


def is_as_we_left_it(path):
    return path.is_file() and written_hash(path) == hash_of(path)


def make_way(path):
    "Before a file is written, whatever the command: what stands there and is not ours is kept."
    if path.exists() and not path.is_file():
        raise Refused(f'{path} is a folder, or no ordinary file, so nothing is written there')
    if path.exists() and not is_as_we_left_it(path):
        put_aside(path, 'because another file is written there now')


def refuse_unwritable(path):
    "Before the work whose result is to be written there. It makes the folder."
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise Refused(f'{path} is a folder: name a file in it')
    is_new = not path.exists()
    path.open('a').close()
    if is_new:
        path.unlink()


def put_aside(path, why):
    say(f'{path} is kept as {path.rename(aside(path))}, {why}')


def clear(path):
    "What would be read with a new model: it leaves if it is ours, and is put aside if it is not."
    if is_as_we_left_it(path):
        path.unlink()
    elif path.exists():
        put_aside(path, 'because it would be taken for a part of the new model')


def put(new, path):
    "A file that is complete, into its place; and a line that says that it is ours."
    make_way(path)
    digest = hash_of(new)
    if digest != written_hash(path):
        with open(path.with_name(WRITTEN), 'a', encoding='utf-8') as notes:
            notes.write(f'{digest}  {path.name}\n')
    os.replace(new, path)


def put_all(folder, target):
    "All files of a folder; config.json comes last, because without it there is no checkpoint."
    for path in sorted(Path(folder).iterdir(), key=lambda p: p.name == 'config.json'):
        path.chmod(0o644)               # else only its owner could read the weights
        put(path, Path(target) / path.name)


# ---------------------------------------------------------------------------- whole or not at all

@contextlib.contextmanager
def fresh(path, known=False):
    "An open file that becomes `path` when it has been written without an error."
    with replacing(path, known) as new, open(new, 'wb') as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path, known=False):
    "Where a new version of a file is written: it becomes `path` at the end, if all went well."
    path = Path(path)
    refuse_if_lost(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f'{path.name}.{os.getpid()}.nanodepth.tmp')    # each writer has its own
    try:
        yield new
        refuse_if_lost(path)
        (os.replace if known else put)(new, path)
    finally:
        new.unlink(missing_ok=True)


held = {}           # {a folder that this process holds: its open lock}


@contextlib.contextmanager
def claim(folder, wait=False):
    """Hold a folder, because two runs in one would overwrite each other. The lock goes with the
    process that holds it; its file stays, unless a refusal leaves nothing else there. With `wait`,
    another process that holds it is waited for."""
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
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        ours = re.search(r'\.\d+\.nanodepth\.tmp$', left.name)
        if ours and left.is_file() and not left.is_symlink():
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
    lock = Path(folder) / 'lock'
    with contextlib.suppress(OSError):          # Windows removes no open file
        if not lock.stat().st_size:             # ours is empty
            lock.unlink()


def on_hub(name):
    "Is this owner/name, as on the Hugging Face hub, and no slip in the name of a folder here?"
    path = Path(name)
    return (re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None and not path.exists()
            and not path.parent.is_dir())
