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
import math
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import torch

from nanodepth.common.errors import Refused, nearest, say
from nanodepth.common.files import (aside, fresh, on_hub, read_json, reading, refuse_gguf,
                                    replacing)
from nanodepth.common.options import only_fields
from nanodepth.looping.layers import is_ours
from nanodepth.model import LM, ModelConfig
from nanodepth.text.tokenizer import TOKENIZER_FILES, local_folder

FILE = 'ckpt.pt'


# what a Recurrent is made with beside its LM
RECURRENCE = ('prelude', 'core', 'coda', 'inject', 'start', 'fresh', 'state_std', 'recurrence',
              'backprop_depth')


def is_hugging_face(folder):
    "Is this a Hugging Face folder and no run of ours, or a name on the hub?"
    path = Path(folder)
    is_theirs = (path / 'config.json').exists() and not (path / 'ckpt.pt').exists()
    return is_theirs or on_hub(folder)


def family_of(path):
    "What a Hugging Face checkpoint calls its kind of model, or None."
    config = local_folder(path) / 'config.json'
    return read_json(config).get('model_type') if config.exists() else None


def save(folder, **state):
    folder = Path(folder)
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


def keep(folder, step):
    "The checkpoint of this step under a name of its own, which no later one takes away."
    with replacing(Path(folder) / f'ckpt-{step}.pt') as new:
        try:
            os.link(Path(folder) / FILE, new)       # save() writes a new file, and none into this
        except OSError:                             # no such links on this file system
            shutil.copyfile(Path(folder) / FILE, new)


def stages_of(folder):
    """{layers: the last checkpoint that was kept of so many} in a run's folder. (Older runs kept a
    folder for each.)"""
    stages = {int(path.name.removeprefix('stage_')): path for path in
              Path(folder).glob('stage_[0-9]*')}
    for path in sorted(Path(folder).glob('ckpt-*.pt'), key=lambda p: int(p.stem[5:])):
        stages[load(path, checked=True)['model_config']['n_layer']] = path
    return stages


def cost_of(state):
    "The training FLOPs of a checkpoint and all that it was made of; nan of a published one."
    return state.get('flops', math.nan) + state.get('inherited_flops', 0)


def exists(folder):
    return (Path(folder) / FILE).exists()


def move_aside(folder, resumes, say):
    "A new run begins: what an older one has left in the folder is kept beside it."
    log = folder / 'log.jsonl'
    if exists(folder) and not resumes:
        moved = aside(folder)
        shutil.copytree(folder, moved)
        for path in (folder / FILE, log, *folder.glob('ckpt-*.pt'),
                     *(folder / name for name in TOKENIZER_FILES)):
            path.unlink(missing_ok=True)
        for stage in folder.glob('stage_*'):
            shutil.rmtree(stage)
        say(f'--resume=false: the run that was in {folder} is now in {moved}')
    if not resumes:         # else the tokenizer of the older run would be taken for this one's
        for path in (folder / name for name in TOKENIZER_FILES):
            if path.exists():
                say(f'{path} is kept as {path.rename(aside(path))}')
    if not exists(folder) and log.is_file() and log.stat().st_size:
        kept = aside(log)
        log.rename(kept)
        say(f'{folder} has a log and no checkpoint: a new run begins, and the log that was there '
            f'is kept as {kept}')


def file_of(folder):
    "A run's checkpoint; `folder` may name the file itself."
    path = Path(folder)
    path = path if path.suffix == '.pt' else path / FILE
    if not path.exists():
        parent = Path(folder).parent
        beside = [str(p) for p in parent.iterdir() if p != Path(folder)] if parent.is_dir() else []
        raise Refused(f'there is no checkpoint at {folder} (no {path}){nearest(folder, beside)}')
    return path


def check(folder):
    "Read the whole file once, and refuse it if a checksum is wrong."
    path = file_of(folder)
    with reading(path), zipfile.ZipFile(path) as archive:
        if broken := archive.testzip():
            raise ValueError(f'the checksum of {broken} is wrong')


def load(folder, checked=False):
    """The state that `save` was given, mapped from its file: what nobody reads takes no memory.
    `folder` may name the file itself, or a Hugging Face checkpoint. `checked`: another process
    has looked at the checksums."""
    refuse_gguf(folder)
    if is_hugging_face(Path(folder)):
        return dict(kind='hf', folder=str(folder))
    path = file_of(folder)
    if not checked:
        check(folder)
    with reading(path):
        try:
            state = torch.load(path, map_location='cpu', weights_only=True,
                               mmap=os.name == 'posix')   # Windows could not replace it then
            if not isinstance(state, dict):
                raise Refused(f'{path} holds no model of ours')
            for part in ('recurrent', 'start'):     # older files call a core's recurrence its mean
                if 'mean' in (state.get(part) or ()):
                    state[part]['recurrence'] = state[part].pop('mean')
            return state
        except pickle.UnpicklingError as error:     # it says how to load it all the same
            named = [line for line in str(error).splitlines() if 'GLOBAL' in line]
            raise Refused(f'{path} holds more than tensors and plain values, so it was not loaded. '
                          f'{"".join(named[:1])[:200]}'.strip()) from error


def refuse_not_finite(model, path):
    "A weight that is not a number would still give ordinary scores: chance."
    for name, t in model.state_dict().items():
        if t.is_floating_point() and not t.is_meta and not torch.isfinite(t).all():
            raise Refused(f'{path}: {name} holds numbers that are not finite: it cannot be used')


def load_model(path, device='cpu', others=False):
    """Any checkpoint of ours, or of Hugging Face's, as a model that is ready to run. With `others`,
    transformers' own of another family."""
    return build_model(load(path), path, others).to(device).eval()


def open_any(path, device='cpu', dtype='auto', others=True):
    """(what its file says, the model, ready to run) of any path: ours or, with `others`,
    transformers' own of another family. `dtype`: what its weights become. auto: a checkpoint that
    was published in 16 bits computes in bfloat16 where the device is fast at it, else in float32;
    all others stay as they are. Tables of positions keep their precision."""
    state = load(path)
    model = build_model(state, path, others)
    device = torch.device(device)
    stored = next(model.parameters()).dtype
    wanted = None if dtype == 'auto' else getattr(torch, dtype)
    if dtype == 'auto' and stored in (torch.bfloat16, torch.float16):
        wanted = torch.bfloat16 if fast_in_bfloat16(device) else torch.float32
        say(f'{path}: computed in {str(wanted)[6:]} (--dtype says otherwise)')
    if (wanted not in (None, stored) and not is_ours(model)
            and any(buffer.dtype == stored for buffer in model.buffers())):
        # it was computed in the type of the weights and would keep its rounding: Gemma's scale
        from nanodepth.models.hf import open_theirs
        model = open_theirs(path, dtype=wanted)
    for p in model.parameters() if wanted else ():
        p.data = p.data.to(wanted)
    return state, model.to(device).eval()


def fast_in_bfloat16(device):
    "Does the device multiply faster in bfloat16? Older ones only emulate it."
    if device.type == 'cuda':
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == 'cpu' and (torch.cpu._is_amx_tile_supported()
                                     or torch.cpu._is_avx512_bf16_supported())


def build_model(state, path, others=False):
    "The model that a loaded state describes, with its weights."
    if state.get('kind') != 'hf':
        with reading(path):
            model = model_of(state, path)
    else:
        from nanodepth.models import hf, hf_recurrent       # a run of ours never needs them
        if family_of(path) == hf_recurrent.FAMILY:
            model = hf_recurrent.load_raven(local_folder(path))
        else:
            model = hf.load_hf(path, others)
    refuse_not_finite(model, path)
    return model


def model_of(state, path):
    config = ModelConfig(**only_fields(ModelConfig, state['model_config']))
    if state['kind'] == 'lm':
        model = LM(config)
    else:
        from nanodepth.retrofit import Recurrent
        model = Recurrent(config, **state['recurrent'])
    model.load_state_dict(state['model'])
    return model


def describe(model):
    "What build_model needs of a model, for `save`."
    state = dict(model=model.state_dict(), model_config=dataclasses.asdict(model.config))
    if model.recurs:
        return state | dict(kind='recurrent', recurrent={
            name: getattr(model, name) for name in RECURRENCE})
    return state | dict(kind='lm')
