"""Heads that find a token by the one before it, so that one layer can look a name up.

The idea: what does `?d` ask for in `... dz ... ?d`? The model must find the token that comes after
the first `d`. An ordinary model needs two layers for this: in the first, `z` notes that `d` stands
before it, and in the second a head looks for that note. Here, at every token that it could read,
such a head compares its query with the key of the token before that one. So the query of the last
`d` meets the key of the first `d`, and reads the value of `z`. The step back is built in, and only
the matching is left to learn.

Paper: none of the four. Olsson et al., "In-context Learning and Induction Heads" (smeared keys);
modded-nanogpt's "partial key offset" moves half of each head's channels.
Here: whole heads, by exactly one token. A key keeps the rotation of the position that it comes
from. The first token, which has none before it, gets a key of zeros.

Usage:
    offset_keys(model, heads=2)         # in place: the first two key-value heads of every layer
    python train.py config/lidas.py --key_offset=2 --out_dir=out/offset
"""
import torch
import torch.nn.functional as F

from nanodepth.common.errors import Refused
from nanodepth.model import Attention


class Offset:
    "A slot of the KV cache, or none, that gives the keys of the first `heads` heads one later."

    def __init__(self, slot, heads):
        self.slot, self.heads = slot, heads

    def update(self, k, v):
        if self.slot is not None:       # it keeps every key where it is
            k, v = self.slot.update(k, v)
        before = F.pad(k[:, :self.heads], (0, 0, 1, 0))[:, :, :-1]              # (B, heads, S, hd)
        return torch.cat((before, k[:, self.heads:]), dim=1), v


class OffsetAttention(Attention):
    def forward(self, x, rope, slot=None):
        return super().forward(x, rope, Offset(slot, self.heads))


def offset_keys(model, heads):
    "Give the model's layers such heads, in place. Copies of the layers keep them."
    most = model.config.n_kv_head
    if not 0 <= heads <= most:
        raise Refused(f'key_offset={heads}: this model has {most} heads with keys, so 0 to {most}')
    for layer in model.layers if heads else []:
        layer.attn.__class__ = OffsetAttention          # the same weights, read in another way
        layer.attn.heads = heads
        # among the weights, so that a checkpoint knows it, and nothing loads it as an ordinary one
        layer.attn.register_buffer('key_offset', torch.tensor(heads))


def offset_of(model):
    "How many heads of each layer find a token by the one before it."
    return getattr(model.layers[0].attn, 'heads', 0)


def refuse_offset(model):
    "No family of transformers has such heads, so an exported copy would compute something else."
    if offset_of(model):
        raise Refused(f'key_offset={offset_of(model)}: no published format has heads that find a '
                      'token by the one before it, so this model cannot be exported')
