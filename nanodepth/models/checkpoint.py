"""Any checkpoint as a model: a run's, which train.py has saved, or a Hugging Face folder.
Usage: model = load_model('out/run')
"""
import math
from pathlib import Path

import torch

from nanodepth.common.errors import Refused, nearest, as_refusal, say
from nanodepth.common.files import checkpoint_file, read_json, read_run
from nanodepth.common.whose import file_of, is_ours, on_hub
from nanodepth.model import require
from nanodepth.models import authors, hf, joined, raven     # noqa: F401 (a run may hold the first's)
from nanodepth.report.tables import run_names
from nanodepth.text.tokenizer import fingerprint, get_tokenizer
from nanodepth.training.checkpoint import load

OURS = 'ours'       # the kind of what train.py has saved


def kind_of(path):
    """What stands at a path, or on the hub under such a name: OURS, or the word for its family in
    a Hugging Face checkpoint, such as 'llama'. A line says that nothing is there."""
    file = checkpoint_file(path)
    if file.exists():
        return OURS
    if config := file_of(path, 'config.json'):
        return read_json(config).get('model_type')
    parent = Path(path).parent
    beside = [str(p) for p in (parent.iterdir() if parent.is_dir() else ()) if p != Path(path)
              and (p.is_dir() or p.suffix == '.pt')]
    hub = ', and the hub did not give it' if on_hub(path) else ''
    raise Refused(f'there is no checkpoint at {path} (no {file}){hub}{nearest(path, beside)}')


def named_models(paths):
    """{name: path} of checkpoints. The first is opened at once; that the others are there is asked
    now, before the work on it."""
    for path in paths[1:]:
        kind_of(path)
    return run_names(paths)


def state_of(path):
    "What a checkpoint says beside its weights; of a Hugging Face one nothing."
    return read_run(path) if kind_of(path) == OURS else {}


def open_path(path, others=False):
    """(what a checkpoint says beside its weights, its model). With `others`, transformers' own of
    another family than ours."""
    kind, state = kind_of(path), {}
    if kind == OURS:
        try:
            model, state = load(path)
        except Refused as error:        # such as a Span or a solver that nobody has imported
            raise Refused(f'{path}: {error}') from None
    elif kind == raven.FAMILY:
        model = raven.load_raven(path)
    elif kind == joined.FAMILY:
        model = joined.load_joined(path)
    else:
        model = hf.load_hf(path, others)
    for name, t in model.state_dict().items():          # its scores would look ordinary: chance
        require(not t.is_floating_point() or t.is_meta or t.isfinite().all(),
                f'{path}: {name} holds numbers that are not finite: it cannot be used')
    return state, model


def load_model(path, device='cpu', others=False):
    """Any checkpoint of ours, or of Hugging Face's, as a model that is ready to run. `others`: also
    of another family than ours."""
    return open_path(path, others)[1].to(device).eval()


def pick_device(name='auto'):
    "cuda, else mps, else cpu; or the one that is named, if it is there."
    if name == 'auto':
        name = ('cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available()
                else 'cpu')
    with as_refusal(RuntimeError, AssertionError, NotImplementedError, why=lambda error:
                  f'device={name!r} cannot be used: {str(error).splitlines()[0][:150]}'):
        torch.zeros(1, device=name).item()
    # cuDNN plans every new shape for 30 ms: each token of a text
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(name)


def open_any(path, device='cpu', dtype='auto', others=True):
    """(what a checkpoint says beside its weights, the model, ready to run) of any path. `dtype`:
    what its weights become. auto: a checkpoint that was published in 16 bits computes in bfloat16
    where the device is fast at it, else in float32; all others stay as they are. Tables of
    positions keep their precision."""
    state, model = open_path(path, others)
    device = torch.device(device)
    stored = next(model.parameters()).dtype
    wanted = None if dtype == 'auto' else getattr(torch, dtype)
    if dtype == 'auto' and stored in (torch.bfloat16, torch.float16):
        wanted = torch.bfloat16 if fast_in_bfloat16(device) else torch.float32
        say(f'{path}: computed in {str(wanted)[6:]} (--dtype says otherwise)')
    if is_ours(model) or all(buffer.dtype != stored for buffer in model.buffers()):
        for p in model.parameters() if wanted else ():
            if p.dtype == stored:       # what is packed, or was kept in float32, stays so
                p.data = p.data.to(wanted)
    elif wanted not in (None, stored):
        # it was computed in the type of the weights and would keep its rounding: Gemma's scale
        model = hf.open_theirs(path, dtype=wanted)
    return state, model.to(device).eval()


def fast_in_bfloat16(device):
    "Does the device multiply faster in bfloat16? Older ones only emulate it."
    if device.type == 'cuda':
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == 'cpu' and (torch.cpu._is_amx_tile_supported()
                                     or torch.cpu._is_avx512_bf16_supported())


def data_of(path, state):
    """What a checkpoint knows of the data that it was trained on; else its tokenizer alone, which
    the data of a run that begins with it must have, too."""
    if 'data' in state:
        return state['data']
    return dict(data=[dict(tokenizer=str(path), fingerprint=fingerprint(get_tokenizer(path)))])


def cost_of(state):
    """The training FLOPs of a checkpoint and of all that it was made of; nan if it was made of a
    published model, whose state is {}."""
    return math.nan if state.get('published', not state) else spent_on(state)


def spent_on(state):
    "The training FLOPs, but for those of a published model."
    return state.get('flops', 0) + state.get('inherited_flops', 0)
