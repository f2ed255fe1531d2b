"""The four places of a step that are slow or large as torch has them, and how they are made small: the norm, the rotation, the gate, the loss.

The idea: on a CPU a step waits for memory, so each pass over the residual stream that is saved is time saved. Autograd keeps
what every elementwise operation of a norm or a rotation has read, and walks through all of it again; written as one function
with its gradient by hand, the norm takes half the time, the rotation too, and the gate keeps less. The logits of a large vocabulary are the largest tensor of all,
so their loss is computed in pieces.

Here: on a GPU torch's own norm is one kernel, and in a compiled Block the compiler fuses all this by itself: then the plain forms
run. bench.py measures what it brings; every form computes the same function (tests/test_ops.py).

Usage:
    y = rms_norm(x, weight, eps)                # x / rms(x) * weight over the last dimension
    q = rotate(q, (cos, sin))                   # rotary positions: each pair of channels (i, i + hd/2) turned by its angle
    h = gated(gate, up)                         # SwiGLU: silu(gate) * up
    loss = mean_loss(x, head.weight, targets)   # the mean cross-entropy of x @ weight.T
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def by_hand(x):
    "Is x where the forms of this file are the faster ones?"
    return x.device.type == 'cpu' and x.dtype == torch.float32 and not torch.compiler.is_compiling()


# ---------------------------------------------------------------------------------------------- the norm

class RMSNorm(nn.RMSNorm):
    "torch's module and parameter, with the function below."

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x, weight, eps):
    if not by_hand(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    # Without a gradient to come the same arithmetic is called as it is: for a single token a Function costs more than its work.
    return _Norm.apply(x, weight, eps) if torch.is_grad_enabled() else _norm(x, weight, eps)[0]


def _norm(x, weight, eps):
    r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()       # (..., 1)
    return (x * r).mul_(weight), r


class _Norm(torch.autograd.Function):
    """With n = x r and r = 1/rms(x), y = n w. A change of x along n changes nothing, as the norm takes it out again: so its
    gradient is r (h - n mean(h n)), where h = g w is what arrives at n."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, r = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, weight, r = ctx.saved_tensors
        n, h = x * r, g * weight
        d_weight = torch.linalg.vecdot(g.flatten(0, -2), n.flatten(0, -2), dim=0) if ctx.needs_input_grad[1] else None
        along = torch.linalg.vecdot(h, n).unsqueeze(-1).div_(-x.shape[-1])
        return h.addcmul_(n, along).mul_(r), d_weight, None


# ---------------------------------------------------------------------------------------------- the rotation

def rotate(x, rope):
    "Turn each pair of channels (i, i + hd/2) of x (..., T, hd) by its position's angle: rope is cos, sin (T, hd/2) each."
    cos, sin = rope
    if by_hand(x):
        return _Turn.apply(x, cos, sin) if torch.is_grad_enabled() else _turn(x, cos, sin, 1)
    a, b = x.chunk(2, dim=-1)                                                   # (..., T, hd/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class _Turn(torch.autograd.Function):
    "A rotation's gradient is the rotation back."

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return _turn(g, *ctx.saved_tensors, -1), None, None


def _turn(x, cos, sin, sign):
    y, (a, b) = torch.empty(x.shape, dtype=x.dtype), x.chunk(2, dim=-1)
    left, right = y.chunk(2, dim=-1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=right).addcmul_(a, sin, value=sign)
    return y


# ---------------------------------------------------------------------------------------------- the gate

def gated(gate, up):
    "silu(gate) * up."
    return _Gated.apply(gate, up) if by_hand(gate) and torch.is_grad_enabled() else F.silu(gate) * up


class _Gated(torch.autograd.Function):
    "Keeps gate and up, not silu(gate) as well: a quarter of what an MLP keeps, for one more pass over the gate."

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(g * up, gate), F.silu(gate).mul_(g)


# ---------------------------------------------------------------------------------------------- the loss

# From this size of vocabulary on the loss is computed in pieces, where torch can (2.12 on).
LARGE_VOCABULARY = 16_384
PIECES = dict(cpu=512)      # tokens of a piece: torch's own choice takes a dozen on a CPU, and five times as long
PIECE = 4096                # ... on anything else


def in_pieces(vocabulary):
    return vocabulary >= LARGE_VOCABULARY and hasattr(nn, 'LinearCrossEntropyOptions')


def piece_on(device):
    return PIECES.get(device, PIECE)


def mean_loss(x, weight, targets, ignore_index=-1):
    "Mean cross-entropy over the targets that count, 0 if none does: x (B, T, C), weight (V, C), targets (B, T)."
    x, targets = x.flatten(0, -2), targets.flatten()                            # (B*T, C), (B*T,)
    options = dict(ignore_index=ignore_index, reduction='sum')
    if in_pieces(len(weight)):
        if torch.is_autocast_enabled(x.device.type):        # autocast does not know this function
            x, weight = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (x, weight))
        if x.dtype != torch.float32:
            options['reduction'] = 'none'       # its own sum adds up in bfloat16, and loses half of it: summed here, below
        pieces = nn.LinearCrossEntropyOptions(batch_chunk_size=piece_on(x.device.type))
        loss = F.linear_cross_entropy(x, weight, targets, options=pieces, **options)
    else:
        loss = F.cross_entropy(F.linear(x, weight).float(), targets, **options)
    return loss.float().sum() / (targets != ignore_index).sum().clamp(min=1)
