"losses.py: the loss in pieces is the whole one, value and gradient."
import pytest
import torch
import torch.nn.functional as F

from nanodepth.common import losses


def gradients(function, *inputs):
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).sin())
    return [y.detach(), *(t.grad for t in inputs)]


def same(found, wanted, most=1e-6):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a.double() - b).abs().max() <= most * b.abs().max()


@pytest.mark.parametrize('piece', [3, 512])
def test_the_loss_in_pieces_is_the_whole_one(monkeypatch, piece):
    if not hasattr(torch.nn, 'LinearCrossEntropyOptions'):
        pytest.skip('torch computes the loss in pieces from 2.12 on')
    torch.manual_seed(0)
    x, w, y = torch.randn(2, 5, 8), torch.randn(40, 8), torch.randint(40, (2, 5))
    y[0, 1:4] = -1
    plain = gradients(lambda x, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), y.flatten(),
                                                   ignore_index=-1), x.double(), w.double())
    same(gradients(lambda x, w: losses.mean_loss(x, w, y), x, w), plain)
    calls, real = [], F.linear_cross_entropy
    monkeypatch.setattr(F, 'linear_cross_entropy', lambda *a, **k: calls.append(k) or real(*a, **k))
    monkeypatch.setattr(losses, 'LARGE_VOCABULARY', 40)
    monkeypatch.setitem(losses.PIECES, 'cpu', piece)
    same(gradients(lambda x, w: losses.mean_loss(x, w, y), x, w), plain)
    assert calls[0]['options'].batch_chunk_size == piece and calls[0]['reduction'] == 'sum'
    found = losses.mean_loss(x.bfloat16(), w.bfloat16(), y)      # summed in float32, token by token
    assert calls[1]['reduction'] == 'none' and abs(found - plain[0]) < 0.03


@pytest.mark.parametrize('piece', [3, 7, 512])
def test_the_loss_of_a_gpu_is_the_whole_one(monkeypatch, piece):
    "In pieces that the backward pass computes again."
    torch.manual_seed(0)
    x, w, y = torch.randn(14, 8), torch.randn(40, 8), torch.randint(40, (14,))
    y[2:5] = -1
    plain = gradients(lambda x, w: F.cross_entropy(F.linear(x, w), y, ignore_index=-1,
                                                   reduction='sum'), x.double(), w.double())
    monkeypatch.setattr(losses, 'PIECE', piece)
    calls = []
    monkeypatch.setitem(losses.compiled, 'cpu', lambda *args: (
        calls.append(len(args[0])), losses.loss_of_a_piece(*args))[1])
    same(gradients(lambda x, w: losses.loss_by_recomputing(x, w, y, -1), x, w), plain, 2e-6)
    assert max(calls) <= piece and sum(calls) == 2 * 14         # forward, and once more


def test_no_target_at_all_is_a_loss_of_zero():
    x = torch.randn(1, 4, 8, requires_grad=True)
    loss = losses.mean_loss(x, torch.randn(10, 8), torch.full((1, 4), -1))
    loss.backward()
    assert loss == 0 and torch.equal(x.grad, torch.zeros_like(x))
