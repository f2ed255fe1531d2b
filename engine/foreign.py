"""Models of other families, wherever tokens and logits are enough.

The idea: what is not our Llama or Qwen 3 is opened by transformers. It is scored as a function from
tokens to logits, and a block of its layers is run several times by the wrapper, where our own
models take another order.

Usage:
    state, model = open_any('gemma-3-1b-pt')            # an LM or Recurrent where ours can be it
    score(answer_of(model))
    with repeated(model, start=4, block=2, times=3): score(answer_of(model))
"""
import contextlib
import math
from types import SimpleNamespace

import torch

from common.errors import Refused, refusing
from common.files import read_json
from engine.checkpoint import build_model, load, refuse_not_finite
from engine.folders import local
from engine.hf import model_config
from engine.raven import FAMILY
from loop import repeat_block, running
from model import LM
from wrapper import looped


def is_foreign(path):
    "Is this a Hugging Face checkpoint that our model cannot be?"
    if load(path)['kind'] != 'hf':
        return False
    config = local(path) / 'config.json'
    if config.exists() and read_json(config).get('model_type') == FAMILY:
        return False
    try:
        model_config(config)
    except Refused:
        return config.exists()
    return False


def open_any(path, device='cpu'):
    "(what its file says, the model): ours, or transformers' own of another family."
    if not is_foreign(path):
        state = load(path)
        return state, build_model(state, path).to(device).eval()
    with refusing(ImportError, why=lambda error: f'{path} is of a family that needs transformers '
                  f'({error})'):
        from transformers import AutoModelForCausalLM
    with refusing(Exception, why=lambda error: f'{path}: transformers does not open it: '
                  f'{type(error).__name__}: {(str(error).splitlines() or [""])[0]}'):
        model = AutoModelForCausalLM.from_pretrained(local(path), dtype='auto')
    refuse_not_finite(model, path)
    return load(path), model.to(device).eval()


def answer_of(model):
    "A model as the scorer wants it: one of ours is it already."
    if isinstance(model, LM):
        return model

    @torch.no_grad()
    def answer(tokens):
        return model(tokens, use_cache=False).logits
    about = model.config.get_text_config()
    answer.config = SimpleNamespace(
        vocab_size=about.vocab_size,
        context=getattr(about, 'max_position_embeddings', None) or math.inf)
    answer.parameters = model.parameters
    return answer


@contextlib.contextmanager
def repeated(model, start, block, times):
    "The `block` layers from `start` on run several times in here."
    if isinstance(model, LM):
        with running(model, repeat_block(model.order, start, block, times)):
            yield
    elif times == 1:
        yield
    else:
        with looped(model, (start, start + block - 1), 'naive', times):
            yield


def repeated_block(order, n):
    "(start, block, times) of an order of n layers in which one block is repeated."
    for a in range(n):
        for b in range(a, n):
            block, more = [*range(a, b + 1)], len(order) - n
            times = 1 + more // len(block)
            if order == [*range(a), *block * times, *range(b + 1, n)]:
                return a, len(block), times
    raise Refused('in a model of this family one block can be repeated, as in 8-4x2-20; write any '
                  'other order first (nanodepth.py export FOLDER OUT --loop=...)')
