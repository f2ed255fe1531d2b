"""Open any checkpoint as a model: one that train.py has saved, or a Hugging Face folder.
Usage: model = load_model('out/run')
"""
import math
from pathlib import Path

import torch

from nanodepth.common.errors import Refused, nearest, as_refusal, say
from nanodepth.common.files import checkpoint_file, read_json, read_run
from nanodepth.common.origin import file_of, is_ours, on_hub
from nanodepth.model import require
from nanodepth.models import authors, hf, joined, raven     # noqa: F401 (AuthorsCore gets known)
from nanodepth.report.tables import run_names
from nanodepth.text.tokenizer import fingerprint, get_tokenizer
from nanodepth.training.checkpoint import load

OURS = 'ours'       # the kind of a checkpoint that train.py has saved


def kind_of(path):
    """Return the kind of the checkpoint at a path or under a name on the hub: OURS, or the name of
    its family in a Hugging Face checkpoint, such as 'llama'. If there is none, it is refused."""
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
    """Return {name: path} of checkpoints. A path without a checkpoint is refused now, before the
    work on the first one begins."""
    for path in paths[1:]:
        kind_of(path)
    return run_names(paths)


def state_of(path):
    "Return what a checkpoint stores next to its weights. For a Hugging Face one this is {}."
    return read_run(path) if kind_of(path) == OURS else {}


def open_path(path, others=False):
    """Return what a checkpoint stores next to its weights, and its model. With `others`, a model of
    another family is opened as transformers' own."""
    kind, state = kind_of(path), {}
    if kind == OURS:
        try:
            model, state = load(path)
        except Refused as error:        # a Span, say, whose file has not been run
            raise Refused(f'{path}: {error}') from None
    elif kind == raven.FAMILY:
        model = raven.load_raven(path)
    elif kind == joined.FAMILY:
        model = joined.load_joined(path)
    else:
        model = hf.load_hf(path, others)
    for name, t in model.state_dict().items():          # its scores would look like chance
        require(not t.is_floating_point() or t.is_meta or t.isfinite().all(),
                f'{path}: {name} has numbers that are not finite, so the model '
                'cannot be used')
    return state, model


def load_model(path, device='cpu', others=False):
    """Return the model of any checkpoint, ready to run. With `others`, this includes models of
    other families, which are transformers' own."""
    return open_path(path, others)[1].to(device).eval()


def pick_device(name='auto'):
    "Return a device. 'auto' is cuda if there is one, otherwise mps, otherwise cpu."
    if name == 'auto':
        name = ('cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available()
                else 'cpu')
    with as_refusal(RuntimeError, AssertionError, NotImplementedError, why=lambda error:
                  f'device={name!r} cannot be used: {str(error).splitlines()[0][:150]}'):
        torch.zeros(1, device=name).item()
    # cuDNN plans every new shape for 30 ms, and each token of a text is a new shape
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(name)


def open_any(path, device='cpu', dtype='auto', others=True):
    """Return what a checkpoint stores next to its weights, and the model, ready to run. `dtype` is
    the type that the weights get. With 'auto', a checkpoint that was published in 16 bits computes
    in bfloat16 if the device is fast at it, and otherwise in float32. All others stay as they are.
    Tables of positions keep their precision."""
    state, model = open_path(path, others)
    device = torch.device(device)
    stored = next(model.parameters()).dtype
    wanted = None if dtype == 'auto' else getattr(torch, dtype)
    if dtype == 'auto' and stored in (torch.bfloat16, torch.float16):
        wanted = torch.bfloat16 if fast_in_bfloat16(device) else torch.float32
        say(f'{path}: computed in {str(wanted)[6:]} (--dtype changes this)')
    if is_ours(model) or all(buffer.dtype != stored for buffer in model.buffers()):
        for p in model.parameters() if wanted else ():
            if p.dtype == stored:       # weights that are packed or in float32 stay as they are
                p.data = p.data.to(wanted)
    elif wanted not in (None, stored):
        # A buffer in the type of the weights, such as Gemma's scale, was rounded to 16 bits when
        # it was made, so the model is opened again in the wanted type.
        model = hf.open_theirs(path, dtype=wanted)
    return state, model.to(device).eval()


def fast_in_bfloat16(device):
    "Return whether the device multiplies faster in bfloat16. (Older ones only emulate it.)"
    if device.type == 'cuda':
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == 'cpu' and (torch.cpu._is_amx_tile_supported()
                                     or torch.cpu._is_avx512_bf16_supported())


def data_of(path, state):
    """Return a description of the data that a checkpoint was trained on, or otherwise of its
    tokenizer alone. A run that begins with the checkpoint must have data with the same
    tokenizer."""
    if 'data' in state:
        return state['data']
    return dict(data=[dict(tokenizer=str(path), fingerprint=fingerprint(get_tokenizer(path)))])


def cost_of(state):
    """Return the training FLOPs of a checkpoint and of everything that it was made from. They are
    nan if it was made from a published model, whose state is {}."""
    return math.nan if state.get('published', not state) else spent_on(state)


def spent_on(state):
    "Return the training FLOPs, without those of a published model."
    return state.get('flops', 0) + state.get('inherited_flops', 0)
