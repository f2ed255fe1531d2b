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
import os
import pickle
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common.errors import Refused
from common.fields import fill, fit_fields, short, within
from common.files import aside, fresh, on_hub, read_json, reading, refuse_hollow
from model import LM, ModelConfig

FILE = 'ckpt.pt'


@dataclass
class State:
    "What a checkpoint may hold; a model's has the first three, a run's all that concern it."
    kind: Literal['lm', 'recurrent', 'relaxed']
    model: dict[str, torch.Tensor]
    model_config: dict
    recurrent: dict                     # what Recurrent is made with
    rank: int = within(1, 2 ** 20)      # what Relaxed is made with
    optimizers: list[dict]
    config: dict | None                 # the settings of the run
    start: dict                         # engine.plan.Start
    tokenizer: str
    data: list[dict]                    # checksums of what it has read
    cooldown_data: list[dict]
    step: int
    tokens: int = within(0, 2 ** 62)
    flops: int | float = within(0, 1e60)
    seconds: float = within(0, 1e12)
    inherited_flops: int | float = within(0, 1e60)


@dataclass
class Recurrence:
    "What a Recurrent is made with beside its LM."
    prelude: list[int]
    core: list[int]
    coda: list[int]
    inject: str
    start: str
    fresh: bool
    state_std: float
    mean: int
    backprop_depth: int


def save(folder, **state):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with fresh(folder / FILE) as file:          # from its end on, and not before, it is there
        try:
            torch.save(state, file)
        except RuntimeError as error:           # torch does not say what the disk said
            file.write(bytes(2 ** 20))
            file.flush()
            raise Refused(f'{folder / FILE} cannot be written: {error}') from None
    if os.name == 'posix':                      # the new name must reach the disk too
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def exists(folder):
    return (Path(folder) / FILE).exists()


def is_hugging_face(folder):
    "Is this a Hugging Face folder and no run of ours, or a name on the hub?"
    return (Path(folder) / 'config.json').exists() and not exists(folder) or on_hub(folder)


def move_aside(folder, resumes, say):
    "A new run begins: what an older one has left in the folder is kept beside it."
    log = folder / 'log.jsonl'
    if exists(folder) and not resumes:
        moved = aside(folder)
        shutil.copytree(folder, moved)
        for path in (folder / FILE, log):
            path.unlink(missing_ok=True)
        for stage in folder.glob('stage_*'):
            shutil.rmtree(stage)
        say(f'--resume=false: the run that was in {folder} is now in {moved}')
    if not exists(folder) and log.is_file() and log.stat().st_size:
        kept = aside(log)
        log.rename(kept)
        say(f'{folder} has a log and no checkpoint: a new run begins, and the log that was there '
            f'is kept as {kept}')


def load(folder):
    """The state that `save` was given. `folder` may name the file itself, or a Hugging Face
    checkpoint."""
    path = Path(folder)
    if is_hugging_face(path):
        refuse_looped(path)
        return dict(kind='hf', folder=str(folder))
    path = path if path.suffix == '.pt' else path / FILE
    if not path.exists():
        raise Refused(f'there is no checkpoint at {folder} (no {path})')
    with reading(path):
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type for part in archive.infolist()):
                raise ValueError('it is compressed, which torch.save never does')
            if broken := archive.testzip():
                raise ValueError(f'the checksum of {broken} is wrong')
        try:
            state = torch.load(path, map_location='cpu', weights_only=True)
        except pickle.UnpicklingError as error:     # it says how to load it all the same
            named = [line for line in str(error).splitlines() if 'GLOBAL' in line]
            raise Refused(f'{path} holds more than tensors and plain values, so it was not loaded. '
                          f'{"".join(named[:1])[:200]}'.strip()) from error
        if 'parts' in state:
            raise Refused(f'{path} keeps its tensors in parts, in other files: this version reads '
                          'only checkpoints that are one file')
        return state | fit_fields(State, state, path, others=True)


def refuse_looped(folder):
    "A folder that `export --window` wrote is a plain model to all but its own code."
    config = Path(folder) / 'config.json'
    if config.exists() and (settings := read_json(config).get('nanodepth')):
        raise Refused(f"{folder} loops its layers by code of its own ({short(settings)}), which "
                      "transformers and lm-eval's hf run with trust_remote_code=True; here, loop "
                      'the checkpoint that it was made from (python nanodepth.py wrap)')


def refuse_not_finite(model, path):
    "A weight that is not a number would still give ordinary scores: chance."
    for name, t in model.state_dict().items():
        if t.is_floating_point() and not t.is_meta and not torch.isfinite(t).all():
            raise Refused(f'{path}: {name} holds numbers that are not finite: it cannot be used')


def load_model(path, device='cpu', merged=True):
    "Any checkpoint of ours, or of Hugging Face's, as a model that is ready to run."
    return build_model(load(path), path, merged).to(device).eval()


def build_model(state, path, merged=True):
    """The model that a loaded state describes, with its weights. merged: one with differences
    (variants/relaxed.py) becomes the ordinary model that computes the same."""
    if state.get('kind') == 'hf':
        from engine.raven import open_hf  # needs safetensors, an optional package
        model = open_hf(state['folder'])
    else:
        with reading(path):
            model = model_of(state, path)
    refuse_not_finite(model, path)
    if model.rank and merged:
        from variants.relaxed import merge
        return merge(model)
    return model


def model_of(state, path):
    "Everything is checked before memory is taken for what the file only claims."
    for name in 'kind', 'model', 'model_config':
        if name not in state:
            raise Refused(f'{path} holds no model: it does not say {name!r}')
    # recurrent models once kept the names of their layers behind 'lm.'
    weights = {name.removeprefix('lm.'): t for name, t in state['model'].items()}
    for name, t in weights.items():
        refuse_hollow(name, t, path)
    config = fill(ModelConfig, state['model_config'], path)
    n = len({name.partition('layers.')[2].split('.')[0] for name in weights if 'layers.' in name})
    if n != config.n_layer:
        raise Refused(f'{path} has weights of {n} layers, but n_layer={config.n_layer}')

    def empty():
        if state['kind'] == 'lm':
            return LM(config)
        if state['kind'] == 'relaxed':
            from variants.relaxed import Relaxed
            return Relaxed(config, state['rank'])
        from retrofit import Recurrent
        return Recurrent(config, **vars(fill(Recurrence, state['recurrent'], path)))
    with torch.device('meta'):
        shapes = {name: t.shape for name, t in empty().state_dict().items()}
    if shapes != {name: t.shape for name, t in weights.items()}:
        raise Refused(f'{path}: its weights have not the shapes that its model_config says')
    model = empty()
    model.load_state_dict(weights)
    return model


def describe(model):
    "What build_model needs of a model, for `save`."
    state = dict(model=model.state_dict(), model_config=dataclasses.asdict(model.config))
    if model.recurs:
        return state | dict(kind='recurrent', recurrent={
            field.name: getattr(model, field.name) for field in dataclasses.fields(Recurrence)})
    if model.rank:
        return state | dict(kind='relaxed', rank=model.rank)
    return state | dict(kind='lm')
