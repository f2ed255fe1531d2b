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
import zipfile
from pathlib import Path

import torch

from common.bounds import check_bounds
from common.errors import Refused, refusing
from common.files import fresh
from data.tokenizer import on_hub
from loop import fit_loop
from model import LM, ModelConfig
from retrofit import Recurrent

FILE = 'ckpt.pt'


def save(folder, **state):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # from the end of this on, and not before, it is the checkpoint
    with refusing(RuntimeError, why=lambda error: f'{folder / FILE} cannot be written: {error}'):
        with fresh(folder / FILE) as file:
            torch.save(state, file)
    if os.name == 'posix':                      # the new name must reach the disk too
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def exists(folder):
    return (Path(folder) / FILE).exists()


def load(folder):
    """The state that `save` was given. `folder` may name the file itself, or a Hugging Face
    checkpoint."""
    path = Path(folder)
    if (path / 'config.json').exists() and not exists(path) or on_hub(folder):
        return dict(kind='hf', folder=str(folder))
    path = path if path.is_file() else path / FILE
    if not path.exists():
        raise Refused(f'there is no checkpoint at {folder} (no {path})')
    try:
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type for part in archive.infolist()):
                raise ValueError('it is compressed, which torch.save never does')
            broken = archive.testzip()
    except Exception as error:      # a flipped bit makes a name unreadable, or a file encrypted
        raise Refused(f'{path} ({path.stat().st_size:,} bytes) is empty, cut short or no '
                      f'checkpoint: {error}') from None
    if broken:
        raise Refused(f'{path} is damaged: the checksum of {broken} is wrong')
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:      # whatever a damaged pickle or a name in the archive makes of it
        reason = next((line for line in str(error).splitlines()
                       if 'nsupported' in line or 'GLOBAL' in line), '')
        raise Refused(f'{path} holds more than tensors and plain values, so it was not loaded. '
                      f'{reason}'.strip()) from None
    if not isinstance(state, dict):
        raise Refused(f'{path} holds a {type(state).__name__}, not a checkpoint')
    if 'parts' in state:
        raise Refused(f'{path} keeps its tensors in parts, in other files: this version reads '
                      'only checkpoints that are one file')
    return state


def check_state(state, path):
    "Is this a state that `save` was given? Checked before any model is made of it."
    def need(holds, what):
        if not holds:
            raise Refused(f'{path} is damaged, or no checkpoint of this program: {what}')
    kind, about, counts = state.get('kind'), state.get('model_config'), state.get('step', 0)
    if kind not in ('lm', 'recurrent'):
        raise Refused(f'{path} holds a model of kind {kind!r}; this version knows lm, recurrent '
                      'and hf')
    need(isinstance(about, dict), 'it has no model_config')
    need(type(counts) is int, f'step={counts!r}')
    check_bounds(about | dict(step=counts))
    config = state.get('config') or {}
    need(isinstance(config, dict) and counts <= config.get('steps', counts), f'step={counts}')
    optimizers = state.get('optimizers', [])
    need(isinstance(optimizers, list) and all(isinstance(o, dict) for o in optimizers),
         'its optimizers are not a list of states')
    weights = state.get('model')
    need(isinstance(weights, dict) and all(isinstance(t, torch.Tensor) for t in weights.values()),
         'it has no weights')
    layers = {name.partition('layers.')[2].split('.')[0] for name in weights if 'layers.' in name}
    need(len(layers) == about.get('n_layer'),
         f'weights of {len(layers)} layers, but n_layer={about.get("n_layer")!r}')


def refuse_not_finite(model, path):
    "A weight that is not a number would still give ordinary scores: chance."
    for name, t in model.state_dict().items():
        if t.is_floating_point() and not t.is_meta and not torch.isfinite(t).all():
            raise Refused(f'{path}: {name} holds numbers that are not finite: it cannot be used')


def load_model(path, device='cpu'):
    "Any checkpoint of ours, or of Hugging Face's, as a model that is ready to run."
    return build_model(load(path), path).to(device).eval()


def build_model(state, path):
    "The model that a loaded state describes, with its weights."
    kind = state.get('kind')
    if kind == 'hf':
        from engine.raven import open_hf  # needs safetensors, an optional package
        model = open_hf(state['folder'])
        refuse_not_finite(model, path)
        return model
    check_state(state, path)

    def empty():
        model = LM(ModelConfig(**state['model_config']))
        return Recurrent(model, **state['recurrent']) if kind == 'recurrent' else model
    try:
        # before memory is taken for what the file only claims
        with torch.device('meta'):
            shapes = {name: t.shape for name, t in empty().state_dict().items()}
        if shapes != {name: t.shape for name, t in state['model'].items()}:
            raise ValueError('its weights have not the shapes that its model_config says')
        model = empty()
        model.load_state_dict(state['model'])
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        why = (str(error).splitlines() or [''])[0][:200]
        raise Refused(f'{path} is damaged, or of another version: {type(error).__name__}: '
                      f'{why}') from None
    refuse_not_finite(model, path)
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
