"""Save and load a run's state, and open any checkpoint as a model.

The idea: a checkpoint is written beside the old one, forced to the disk, and then takes its name in
one step, so a run that is killed at any moment leaves the last good one. It is a torch.save file, a
zip archive with a checksum of every tensor: all are checked before anything is loaded, and only
tensors and plain values are, so that a file from a stranger cannot run code.

Usage:
    save('out/run', model=model.state_dict(), step=100)     # out/run/ckpt.pt, atomically
    state = load('out/run')                                 # a dict, or an error in one line
    # the model itself, whatever kind it is, or a Hugging Face folder's
    model = load_model('out/run')
"""
import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import torch

from common.errors import Refused
from data.tokenizer import on_hub
from loop import fit_loop
from model import LM, ModelConfig
from retrofit import Recurrent

FILE = 'ckpt.pt'


def save(folder, **state):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / (FILE + '.tmp')
    with open(fresh, 'wb') as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, folder / FILE)        # only now is this the checkpoint
    if os.name == 'posix':                      # the new name must reach the disk too
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def save_parts(folder, world, model, optimizers, step, about):
    """All processes write what they hold into a new folder; then `ckpt.pt` points to it; then the
    old folder is removed."""
    from engine import sharded
    folder = Path(folder)
    names = (f'parts_{step}_{i}' for i in range(10**6))
    name = [next(n for n in names if not (folder / n).exists()) if world.first else None]
    torch.distributed.broadcast_object_list(name)
    sharded.write_parts(folder / name[0], model, optimizers)
    if world.first:
        described = describe(model)
        del described['model']
        save(folder, **described, parts=name[0],
             optimizers=[o.state_dict() | dict(state={}) for o in optimizers], **about)
        for old in folder.glob('parts_*'):
            if old.name != name[0]:
                shutil.rmtree(old)


def exists(folder):
    return (Path(folder) / FILE).exists()


def load(folder, whole=True):
    """The state that `save` was given. `folder` may name the file itself, or a Hugging Face
    checkpoint. Where it points to tensors in parts (sharded.py), they are put together, unless
    `whole` is false."""
    path = Path(folder)
    if (path / 'config.json').exists() and not exists(path) or on_hub(folder):
        return dict(kind='hf', folder=str(folder))
    path = path if path.is_file() else path / FILE
    if not path.exists():
        raise Refused(f'there is no checkpoint at {folder} (no {path})')
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise Refused(f'{path} ({path.stat().st_size:,} bytes) is empty, cut short or no '
                      f'checkpoint: {error}') from None
    if broken:
        raise Refused(f'{path} is damaged: the checksum of {broken} is wrong')
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        reason = next((line for line in str(error).splitlines()
                       if 'nsupported' in line or 'GLOBAL' in line), '')
        raise Refused(f'{path} holds more than tensors and plain values, so it was not loaded. '
                      f'{reason}'.strip()) from None
    if 'parts' in state and whole:
        from engine.sharded import load_whole
        state['model'] = load_whole(path.parent / state['parts'], state['optimizers'])
    return state


def load_model(path, device='cpu'):
    "Any checkpoint of ours, or of Hugging Face's, as a model that is ready to run."
    return build_model(load(path), path).to(device).eval()


def build_model(state, path):
    "The model that a loaded state describes, with its weights if they are whole."
    kind = state.get('kind')
    if kind == 'hf':
        from engine.raven import open_hf  # needs safetensors, an optional package
        return open_hf(state['folder'])
    if kind not in ('lm', 'recurrent'):
        raise Refused(f'{path} holds a model of kind {kind!r}; this version knows lm, recurrent '
                      'and hf')
    model = LM(ModelConfig(**state['model_config']))
    if kind == 'recurrent':
        model = Recurrent(model, **state['recurrent'])
    if 'model' in state:
        model.load_state_dict(state['model'])
    return model


def describe(model):
    "What build_model needs of a model, for `save`."
    about = dict(model=model.state_dict(), model_config=dataclasses.asdict(model.config))
    if isinstance(model, Recurrent):
        fields = ('prelude', 'core', 'coda', 'inject', 'start', 'fresh', 'state_std', 'mean',
                  'backprop_depth')
        return about | dict(kind='recurrent',
                            recurrent={name: getattr(model, name) for name in fields})
    return about | dict(kind='lm')


def fingerprint(model):
    "A hash of all that a model computes with: settings and every weight."
    about = (describe(model) if isinstance(model, (LM, Recurrent))
             else dict(config=model.config.to_dict()))
    about.pop('model', None)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for name, t in model.state_dict().items():
        digest.update(name.encode())
        digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def set_depth(model, *, loop=None, r=None):
    """Apply --loop and --r: an LM runs its layers in another order, a Recurrent its core r
    times."""
    if isinstance(model, Recurrent):
        if loop:
            raise Refused(
                f'loop={loop!r} is for ordinary models: a recurrent core is run more often by r')
        if r is not None and r < 1:
            raise Refused(f'r={r}: the core runs at least once')
        model.mean = model.mean if r is None else r
    elif r is not None:
        raise Refused(f'r={r} is for models with a recurrent core, and this one has none: loop '
                      'runs its layers in another order')
    elif loop:
        model.config.order = fit_loop(loop, len(model.layers))
    return model
