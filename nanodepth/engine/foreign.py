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

from nanodepth.common.errors import Refused
from nanodepth.common.files import read_json
from nanodepth.data.tokenizer import local_folder
from nanodepth.engine.checkpoint import build_model, is_hugging_face, load, refuse_not_finite
from nanodepth.engine.folders import using_transformers
from nanodepth.engine.hf import model_config
from nanodepth.engine.raven import FAMILY
from nanodepth.loop import repeat_block, running
from nanodepth.model import LM
from nanodepth.wrapper import looped


def is_foreign(path):
    "Is this a Hugging Face checkpoint that our model cannot be?"
    if not is_hugging_face(path):
        return False
    config = local_folder(path) / 'config.json'
    if not config.exists() or read_json(config).get('model_type') == FAMILY:
        return False
    try:
        model_config(config)
    except Refused:
        return True
    return False


def open_any(path, device='cpu'):
    "(what its file says, the model): ours, or transformers' own of another family."
    state = load(path)
    if not is_foreign(path):
        return state, build_model(state, path).to(device).eval()
    with using_transformers(path) as package:
        model = package.AutoModelForCausalLM.from_pretrained(local_folder(path), dtype='auto')
    refuse_not_finite(model, path)
    return state, model.to(device).eval()


def answer_of(model):
    "A model as the scorer wants it: one of ours is it already."
    return model if isinstance(model, LM) else Hooked(model)


class Hooked:
    "Another family's model as a function from tokens to logits."

    def __init__(self, model):
        self.model = model
        about = model.config.get_text_config()
        context = getattr(about, 'max_position_embeddings', None) or math.inf
        self.config = SimpleNamespace(vocab_size=about.vocab_size, context=context)
        self.parameters = model.parameters

    @torch.no_grad()
    def __call__(self, tokens):
        return self.model(tokens, use_cache=False).logits


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
    "(start, length, times) of the block that an order of n layers repeats."
    repeated = [i for i in range(n) if order.count(i) > 1] or [0]
    start, length, times = repeated[0], len(repeated), order.count(repeated[0])
    if repeat_block([*range(n)], start, length, times) == order:
        return start, length, times
    raise Refused('in a model of this family one block can be repeated, as in 8-4x2-20; write any '
                  'other order first (nanodepth export FOLDER OUT --loop=...)')
