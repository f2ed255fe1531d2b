"""Models of other families, wherever tokens and logits are enough.

The idea: what is not our Llama or Qwen 3 is opened by transformers. It is scored as a function from
tokens to logits, and a block of its layers is run several times by the wrapper, where our own
models take another order.

Usage:
    state, model = open_any('gemma-3-1b-pt')            # an LM or Recurrent where ours can be it
    score(answer_of(model))
    with repeated(model, start=4, block=2, times=3): score(answer_of(model))
    logits, before, after = Hooked(model).listen(tokens)        # the streams around every layer
"""
import contextlib
import math
from types import SimpleNamespace

import torch

from common.errors import Refused
from common.files import read_json
from data.tokenizer import local_folder
from engine.checkpoint import build_model, is_hugging_face, load, refuse_not_finite
from engine.folders import using_transformers
from engine.hf import model_config
from engine.raven import FAMILY
from loop import repeat_block, running
from model import LM
from variants.hosts import depth_of
from wrapper import looped


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


NUMBERS = 2 ** 27       # logits that are held at once


class Hooked:
    """Another family's model as a function from tokens to logits. Its layers can be put in another
    order, left out for some tokens, and listened to: all by hooks on its list of layers."""
    recurs = False

    def __init__(self, model):
        self.model = model
        self.layers, self.plain = depth_of(model)
        self.about = model.config.get_text_config()
        self.home = next((module, name) for module in model.modules()
                         for name, child in module.named_children() if child is self.layers)
        context = getattr(self.about, 'max_position_embeddings', None) or math.inf
        self.config = SimpleNamespace(vocab_size=self.about.vocab_size, context=context, order=None)
        self.parameters = model.parameters

    @property
    def order(self):
        return self.config.order or self.plain

    @torch.no_grad()
    def __call__(self, tokens):
        with self.placed():
            return self.model(tokens, use_cache=False).logits

    @contextlib.contextmanager
    def placed(self):
        "The layers in this order, for one forward."
        if self.order == self.plain:
            yield
            return
        kinds = getattr(self.about, 'layer_types', None)
        module, name = self.home
        try:
            setattr(module, name, torch.nn.ModuleList(self.layers[i] for i in self.order))
            self.about.num_hidden_layers = len(self.order)
            if kinds:
                self.about.layer_types = [kinds[i] for i in self.order]
            yield
        finally:
            setattr(module, name, self.layers)
            self.about.num_hidden_layers = len(self.plain)
            if kinds:
                self.about.layer_types = kinds

    def listen(self, tokens, change=lambda depth, x, y: y):
        """(logits, what went into each layer, what came out), after change(depth, in, out) of each:
        (B, T, V), and (D, B, T, C) twice."""
        before, after = [], []

        def hook(module, args, kwargs, output):
            x, y = streams_of(args, kwargs, output)
            y = change(len(after), x, y)
            before.append(x)
            after.append(y)
            return put_back(output, y)
        hooks = [layer.register_forward_hook(hook, with_kwargs=True) for layer in self.layers]
        try:
            logits = self(tokens)
        finally:
            for each in hooks:
                each.remove()
        return logits, torch.stack(before), torch.stack(after)

    def moved_without(self, tokens, boundaries, progress=iter):
        """(D,): how far the output at later tokens moves without each layer at the tokens up to t,
        the furthest over the boundaries t, a mean over the examples; as probe.depth_score."""
        logits, streams, _ = self.listen(tokens)
        plain = logits.float().softmax(-1)
        B, T = tokens.shape
        gone = (torch.arange(T) <= torch.tensor([*boundaries])[:, None]).to(tokens.device)
        parts = gone.split(max(1, NUMBERS // plain.numel()))                    # (n, T) each
        nothing = torch.zeros_like(gone[:1])
        half = len(self.order) // 2
        # What is before a layer does not change, so it is not run again. In some families it must
        # be, because layers hand on more than the stream, or because their kinds cannot be set.
        try:
            again = self.without(half, half, streams, tokens, nothing)
            shared = torch.allclose(again, logits, atol=1e-3)
        except (RuntimeError, AttributeError, TypeError, IndexError, KeyError):
            shared = False
        weights = []
        for erased in progress(range(len(self.order))):
            furthest = torch.zeros(B, device=tokens.device)
            for rows in parts:
                output = self.without(erased, erased if shared else 0, streams, tokens, rows)
                moved = (output.float().softmax(-1).view(-1, *plain.shape) - plain).norm(dim=-1)
                moved = moved.masked_fill(rows[:, None], 0)                     # (n, B, T)
                furthest = torch.maximum(furthest, moved.amax(dim=(0, 2)))
            weights.append(furthest.mean())
        return torch.stack(weights)

    def without(self, erased, first, streams, tokens, gone):
        """The logits, (n B, T, V), where a layer adds nothing at the tokens that are gone, (n, T).
        The run begins at the layer `first`, with the stream that went into it."""
        n = len(gone)
        order = self.order
        gone = gone.repeat_interleave(len(tokens), 0)[:, :, None]               # (n B, T, 1)
        layer_runs = []

        def enter(module, args, kwargs):
            if first == 0 or layer_runs:
                return args, kwargs
            x = streams[first].repeat(n, 1, 1)
            return ((x, *args[1:]), kwargs) if args else (args, kwargs | dict(hidden_states=x))

        def leave(module, args, kwargs, output):
            layer_runs.append(module)
            if len(layer_runs) - 1 != order[first:erased].count(order[erased]):
                return output
            x, y = streams_of(args, kwargs, output)
            return put_back(output, torch.where(gone, x, y))
        hooks = [self.layers[order[first]].register_forward_pre_hook(enter, with_kwargs=True),
                 self.layers[order[erased]].register_forward_hook(leave, with_kwargs=True)]
        try:
            with running(self, order[first:]):
                return self(tokens.repeat(n, 1))
        finally:
            for hook in hooks:
                hook.remove()

    def reader(self, tokens):
        "What reads logits off a stream, or None if that is not known: tried on these tokens."
        module, _ = self.home
        norm = next((getattr(module, name) for name in FINAL_NORMS if hasattr(module, name)), None)
        head = self.model.get_output_embeddings()
        if norm is None or head is None:
            return None
        logits, _, after = self.listen(tokens)

        @torch.no_grad()
        def read(stream):
            return head(norm(stream))
        return read if torch.allclose(read(after[-1]), logits, atol=1e-3) else None


FINAL_NORMS = 'norm', 'final_layer_norm', 'final_layernorm', 'ln_f', 'norm_f'


def streams_of(args, kwargs, output):
    "What went into a layer and what came out, as a hook is told of them."
    return (args[0] if args else kwargs['hidden_states'],
            output[0] if isinstance(output, tuple) else output)


def put_back(output, stream):
    "A layer's output with another stream."
    return (stream, *output[1:]) if isinstance(output, tuple) else stream


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
                  'other order first (nanodepth.py export FOLDER OUT --loop=...)')
