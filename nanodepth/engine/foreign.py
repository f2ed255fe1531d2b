"""Models of other families, wherever tokens and logits are enough.

The idea: what is not our Llama or Qwen 3 is opened by transformers. It is scored as a function from
tokens to logits, and a block of its layers is run several times by the wrapper, where our own
models take another order (engine/ways.py).

Usage:
    state, model = open_any('gemma-3-1b-pt')            # an LM or Recurrent where ours can be it
    score(answer_of(model))
    start, length, times = repeated_block([0, 1, 2, 1, 2, 3], 4)
"""
import inspect
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
from nanodepth.loop import repeat_block
from nanodepth.model import LM


def family_of(path):
    "What a Hugging Face checkpoint calls its kind of model, or None."
    config = local_folder(path) / 'config.json'
    return read_json(config).get('model_type') if config.exists() else None


def is_foreign(path):
    "Is this a Hugging Face checkpoint that our model cannot be?"
    if not is_hugging_face(path) or family_of(path) in (None, FAMILY):
        return False
    try:
        model_config(local_folder(path) / 'config.json')
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
        self.slices = 'logits_to_keep' in inspect.signature(model.forward).parameters
        self.shares_prompts = self.has_plain_cache()

    @torch.no_grad()
    def __call__(self, tokens):
        return self.model(tokens, use_cache=False).logits

    @torch.no_grad()
    def last_logits(self, tokens, n):
        "(B, n, V): the head, where the family can be asked so, reads the last n positions alone."
        keep = dict(logits_to_keep=n) if self.slices else {}
        return self.model(tokens, use_cache=False, **keep).logits[:, -n:]

    @torch.no_grad()
    def logits_at(self, tokens, start, end):
        "(B, end - start, V) at some positions in the middle."
        if not self.slices:
            return self(tokens)[:, start:end]
        keep = torch.arange(start, end, device=tokens.device)
        return self.model(tokens, use_cache=False, logits_to_keep=keep).logits

    @torch.no_grad()
    def has_plain_cache(self):
        "Is the KV cache a list of keys and values? Then its rows can be repeated for each option."
        plain = ('DynamicLayer', 'DynamicSlidingWindowLayer')
        token = torch.zeros(1, 1, dtype=torch.long, device=next(self.parameters()).device)
        cache = getattr(self.model(token, use_cache=True), 'past_key_values', None)
        return (self.slices and type(cache).__name__ == 'DynamicCache'
                and all(type(layer).__name__ in plain for layer in cache.layers))

    @torch.no_grad()
    def shared(self, prompt, options):
        "As measure.shared."
        B, O, W = options.shape
        read = self.model(prompt, use_cache=True, logits_to_keep=1)
        first = read.logits[:, None].expand(B, O, 1, -1)
        if W == 1:
            return first
        cache = read.past_key_values
        cache.batch_repeat_interleave(O)
        rest = self.model(options[..., :-1].flatten(0, 1), past_key_values=cache, use_cache=True,
                          logits_to_keep=W - 1).logits                          # (B O, W - 1, V)
        return torch.cat((first, rest.unflatten(0, (B, O))), dim=2)


def repeated_block(order, n):
    "(start, length, times) of the block that an order of n layers repeats."
    repeated = [i for i in range(n) if order.count(i) > 1] or [0]
    start, length, times = repeated[0], len(repeated), order.count(repeated[0])
    if repeat_block([*range(n)], start, length, times) == order:
        return start, length, times
    raise Refused('in a model of this family one block can be repeated, as in 8-4x2-20; write any '
                  'other order first (nanodepth export FOLDER OUT --loop=...)')
