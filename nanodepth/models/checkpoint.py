"""Save and load a run's state, and open any checkpoint as a model. A checkpoint takes its name when
all of it is on the disk, so a run that is killed at any moment leaves the last good one. Only
tensors and plain values are loaded, so a file from a stranger cannot run code.
Usage: model = load_model('out/run')        # or a Hugging Face folder
"""
import dataclasses
import itertools
import math
import os
import re
import runpy
import shutil
import zipfile
from pathlib import Path

import torch

from nanodepth.common.errors import Refused, nearest, say
from nanodepth.common.files import fresh, load_tensors, on_hub, read_json, reading, replacing
from nanodepth.looping.layers import is_ours
from nanodepth.model import LM, ModelConfig, Step
from nanodepth.report.tables import run_names
from nanodepth.retrofit import Core, core_of, new_adapter
from nanodepth.text.tokenizer import local_folder
from nanodepth.wrapper import Window

FILE = 'ckpt.pt'


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
    with fresh(folder / FILE) as file:
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
    path = Path(folder) / f'ckpt-{step}.pt'
    with replacing(path) as new:
        try:
            os.link(Path(folder) / FILE, new)       # save() writes a new file, and none into this
        except OSError:                             # no such links on this file system
            shutil.copyfile(Path(folder) / FILE, new)


def stages_of(folder):
    """{layers: the last checkpoint of so many that was kept of the run in a folder, and not of
    another that has lain there}."""
    stages = {}
    for path in kept_in(folder, r'ckpt-(\d+)\.pt'):
        state = load(path, checked=True)
        if run_of(state) == run_of(load(folder, checked=True)):
            with reading(path):
                stages[state['model_config']['n_layer']] = path
    return stages


def kept_in(folder, pattern):
    "The paths in a run's folder that have such a name, in the order of their numbers."
    paths = {path: re.fullmatch(pattern, path.name) for path in Path(folder).iterdir()}
    return sorted((path for path, match in paths.items() if match),
                  key=lambda path: int(paths[path][1]))


def run_of(state):
    "What all checkpoints of a run have in common."
    config = state.get('config') or {}
    return [*(config.get(name) for name in ('seed', 'init_from', 'n_embd')), state.get('data')]


def cost_of(state):
    "The training FLOPs of a checkpoint and all that it was made of; nan of a published one."
    return state.get('flops', math.nan) + state.get('inherited_flops', 0)


def exists(folder):
    return (Path(folder) / FILE).exists()


def is_run(folder):
    "Has a run begun in this folder?"
    return any((Path(folder) / name).exists() for name in (FILE, 'run.json', 'log.jsonl'))


def move_aside(folder):
    "A run's whole folder becomes FOLDER.1, or the next name that is free; an empty one is left."
    names = (folder.with_name(f'{folder.name}.{i}') for i in itertools.count(1))
    moved = folder.rename(next(free for free in names if not free.exists()))
    folder.mkdir()
    (moved / 'lock').rename(folder / 'lock')        # this process still holds it
    say(f'--resume=false: the run that was in {folder} is now in {moved}')


def file_of(folder):
    "A run's checkpoint; `folder` may name the file itself."
    path = Path(folder)
    path = path if path.suffix == '.pt' else path / FILE
    if not path.exists():
        parent = Path(folder).parent
        beside = [str(p) for p in parent.iterdir() if p != Path(folder)] if parent.is_dir() else []
        raise Refused(f'there is no checkpoint at {folder} (no {path}){nearest(folder, beside)}')
    return path


def named_models(paths):
    """{name: path} of checkpoints. The first is opened at once; that the others are there is asked
    now, before the work on it."""
    for path in paths[1:]:
        refuse_missing(path)
    return run_names(paths)


def refuse_missing(path):
    if not is_hugging_face(path):
        file_of(path)


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
    if is_hugging_face(Path(folder)):
        return dict(kind='hf', folder=str(folder))
    path = file_of(folder)
    if not checked:
        check(folder)
    state = load_tensors(path)
    with reading(path):
        if not isinstance(state, dict):
            raise Refused(f'{path} holds no model of ours')
        if 'mean' in {*(state.get('recurrent') or ()), *(state.get('start') or ())}:
            raise Refused(f'{path} is of an older form, which was last read at a8c26fc')
    return state


def refuse_not_finite(model, path):
    "A weight that is not a number would still give ordinary scores: chance."
    for name, t in model.state_dict().items():
        if t.is_floating_point() and not t.is_meta and not torch.isfinite(t).all():
            raise Refused(f'{path}: {name} holds numbers that are not finite: it cannot be used')


def load_model(path, device='cpu', others=False, classes=()):
    """Any checkpoint of ours, or of Hugging Face's, as a model that is ready to run. With `others`,
    transformers' own of another family. `classes`: of Steps that are neither a Core nor a Window,
    or the file in which they stand."""
    return build_model(load(path), path, others, classes).to(device).eval()


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


def build_model(state, path, others=False, classes=()):
    "The model that a loaded state describes, with its weights."
    if state.get('kind') != 'hf':
        with reading(path):
            model = model_of(state, path, classes_in(classes))
    else:
        from nanodepth.models import hf, hf_recurrent       # a run of ours never needs them
        if family_of(path) == hf_recurrent.FAMILY:
            model = hf_recurrent.load_raven(local_folder(path))
        else:
            model = hf.load_hf(path, others)
    refuse_not_finite(model, path)
    return model


def model_of(state, path, classes=()):
    if 'order' not in state:
        raise Refused(f'{path} is of an older form, last read at a8c26fc')
    model = LM(ModelConfig(**state['model_config']))
    model.order = read_order(state['order'], path, classes)
    has_weights = 'adapter.weight' in state['model']
    if has_weights or core_of(model):       # an adapter stays when its Core leaves the order
        model.adapter = new_adapter(model.config.n_embd, 'identity' if has_weights else 'add')
    model.load_state_dict(state['model'])
    return model


# The Steps that a checkpoint may name. Others are brought by who opens it: no file is run because a
# checkpoint names it.
KNOWN = {'Step': Step, 'Core': Core, 'Window': Window}
BROUGHT = []            # those of a command's --classes=FILE.py


def classes_in(given):
    "Classes of Steps; given may be the file in which they stand."
    if isinstance(given, (str, Path)):
        given = [each for each in runpy.run_path(str(given)).values()
                 if isinstance(each, type) and issubclass(each, Step)]
    return given


def written(order):
    "An order as a checkpoint has it: numbers, and of a Step its class's name and its settings."
    items = []
    for item in order:
        if not isinstance(item, int):
            name = type(item).__name__
            if KNOWN.get(name, type(item)) is not type(item):
                raise Refused(f'{item} is not the {name} that a checkpoint knows: call its class '
                              'something else')
            if not issubclass(owner(item, 'settings'), owner(item, '__init__')):
                raise Refused(f'{name} has no settings of its own, which say what its __init__ got')
            item = dict(step=name, items=written(item.items), settings=item.settings())
        items.append(item)
    return items


def owner(step, name):
    "The class from which it has a method."
    return next(kind for kind in type(step).__mro__ if name in vars(kind))


def read_order(items, path, classes=()):
    "The order that `written` gave."
    known = {each.__name__: each for each in (*BROUGHT, *classes)} | KNOWN
    order = []
    for item in items:
        if not isinstance(item, int):
            if item['step'] not in known:
                raise Refused(f'{path} has a Step {item["step"]}: --classes=FILE.py, where its '
                              'class stands')
            inside = read_order(item['items'], path, classes)
            item = known[item['step']](inside, **item['settings'])
        order.append(item)
    return order


def describe(model):
    "What build_model needs of a model, for `save`."
    config = dataclasses.replace(model.config, order=None)
    return dict(model=model.state_dict(), model_config=dataclasses.asdict(config),
                order=written(model.order))
