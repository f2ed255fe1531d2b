"ops.py: each fast form is its plain one, value and gradient, and steps back where the plain one is faster."
import pytest
import torch
import torch.nn.functional as F

import ops


def gradients(function, *inputs):
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).sin())
    return [y.detach(), *(t.grad for t in inputs)]


def plain_rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def same(found, wanted, most=1e-6):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a.double() - b).abs().max() <= most * b.abs().max()


@pytest.mark.parametrize('shape', [(2, 3, 8), (5, 16), (1, 4, 7, 32)])
def test_the_norm_and_its_gradient_are_those_of_the_formula_in_double_precision(shape):
    torch.manual_seed(0)
    x, w = torch.randn(shape) * 3, torch.randn(shape[-1])
    by_formula = lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w     # noqa: E731
    same(gradients(lambda x, w: ops.rms_norm(x, w, 1e-5), x, w), gradients(by_formula, x.double(), w.double()))
    y = ops.rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-5)
    assert torch.equal(y, torch.zeros(1, 8))


def test_a_frozen_norm_weight_gets_no_gradient_and_costs_none():
    x, w = torch.randn(2, 3, 8, requires_grad=True), torch.ones(8)
    ops.rms_norm(x, w, 1e-5).sum().backward()
    assert x.grad is not None and w.grad is None


def test_the_rotation_and_its_gradient_are_those_of_the_formula_and_turn_back():
    torch.manual_seed(0)
    angle = torch.rand(7, 4, dtype=torch.double) * 6
    x = torch.randn(2, 7, 3, 8).transpose(1, 2)                 # as the attention has it: (B, H, T, hd), not contiguous
    cos, sin = angle.cos(), angle.sin()
    found = gradients(lambda x: ops.rotate(x, (cos.float(), sin.float())), x)
    same(found, gradients(lambda x: plain_rotate(x, cos, sin), x.double()))
    back = ops.rotate(found[0], (cos.float(), -sin.float()))
    assert (back - x).abs().max() < 1e-5


def test_the_gate_and_its_gradients_are_those_of_the_formula():
    torch.manual_seed(0)
    gate, up = torch.randn(2, 5, 8) * 4, torch.randn(2, 5, 8)
    found = gradients(ops.gated, gate, up)
    same(found, gradients(lambda gate, up: gate * torch.sigmoid(gate) * up, gate.double(), up.double()))
    with torch.no_grad():
        assert torch.equal(ops.gated(gate, up), found[0])


def test_the_fast_forms_are_left_out_of_other_dtypes_and_of_compiled_code(monkeypatch):
    monkeypatch.setattr(ops._Norm, 'forward', None)             # whoever calls it fails
    x, w = torch.randn(2, 8), torch.randn(8)
    for dtype in (torch.bfloat16, torch.double):
        y = ops.rms_norm(x.to(dtype), w.to(dtype), 1e-5)
        assert torch.equal(y, F.rms_norm(x.to(dtype), (8,), w.to(dtype), 1e-5)) and y.dtype == dtype
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    assert torch.equal(ops.rms_norm(x, w, 1e-5), F.rms_norm(x, (8,), w, 1e-5))


@pytest.mark.parametrize('piece', [3, 512])
def test_the_loss_in_pieces_is_the_whole_one(monkeypatch, piece):
    if not hasattr(torch.nn, 'LinearCrossEntropyOptions'):
        pytest.skip('torch computes the loss in pieces from 2.12 on')
    torch.manual_seed(0)
    x, w, y = torch.randn(2, 5, 8), torch.randn(40, 8), torch.randint(40, (2, 5))
    y[0, 1:4] = -1
    plain = gradients(lambda x, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), y.flatten(), ignore_index=-1), x.double(), w.double())
    same(gradients(lambda x, w: ops.mean_loss(x, w, y), x, w), plain)
    calls, real = [], F.linear_cross_entropy
    monkeypatch.setattr(F, 'linear_cross_entropy', lambda *a, **k: calls.append(k) or real(*a, **k))
    monkeypatch.setattr(ops, 'LARGE_VOCABULARY', 40)
    monkeypatch.setitem(ops.PIECES, 'cpu', piece)
    same(gradients(lambda x, w: ops.mean_loss(x, w, y), x, w), plain)
    assert calls[0]['options'].batch_chunk_size == piece and calls[0]['reduction'] == 'sum'
    found = ops.mean_loss(x.bfloat16(), w.bfloat16(), y)        # summed in float32, token by token
    assert calls[1]['reduction'] == 'none' and abs(found - plain[0]) < 0.03


def test_no_target_at_all_is_a_loss_of_zero():
    x = torch.randn(1, 4, 8, requires_grad=True)
    loss = ops.mean_loss(x, torch.randn(10, 8), torch.full((1, 4), -1))
    loss.backward()
    assert loss == 0 and torch.equal(x.grad, torch.zeros_like(x))
