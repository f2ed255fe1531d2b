"Test training/measure.py: the loss on validation data, and the FLOPs that a run logs."
import pytest
import torch
import torch.nn.functional as F
from helpers import state_of
from own_spans import GatedLoop, two_heads

from model import LM, ModelConfig, Refused
from train import train
from training.checkpoint import load
from training.measure import losses_of


@torch.no_grad()
def test_losses_of_many_tokens_are_computed_in_pieces():
    "A piece has at most 2^26 logits, which are 4,096 tokens of this vocabulary."
    torch.manual_seed(0)
    model = LM(ModelConfig(vocab_size=16_384, n_layer=1, n_embd=8, n_head=1, context=2050))
    (tokens, targets), sizes = torch.randint(16_384, (2, 2, 2050)), []
    targets[0, 1:40] = -1
    logits = model(tokens)
    wanted = F.cross_entropy(logits.mT, targets, ignore_index=-1, reduction='none')
    model.head.register_forward_hook(lambda head, args, out: sizes.append(len(out)))
    losses, wrong = losses_of(model, tokens, targets)
    torch.testing.assert_close(losses.float(), wanted, rtol=1e-5, atol=5e-5)
    assert torch.equal(wrong, logits.argmax(-1) != targets) and sizes == [4096, 4]


def test_flops_that_differ_from_those_counted_are_refused(config, monkeypatch, tmp_path):
    "They are compared before the first step. If a loss has a function flops, the run uses it."
    order = [0, GatedLoop([1]), 2]
    with pytest.raises(Refused, match='write the method flops of your Span, or loss.flops'):
        train(config(n_layer=3, loss=two_heads))
    monkeypatch.setattr(GatedLoop, 'flops', lambda self, *args: 0)
    with pytest.raises(Refused, match='write the method flops of your Span'):
        train(config(n_layer=3, order=order))
    assert not (tmp_path / 'run').exists()

    def counted(model, context):
        return model.flops_per_token(context=context) + 6 * model.head.weight.numel()
    monkeypatch.setattr(two_heads, 'flops', counted, raising=False)
    c = config('counted', n_layer=3, loss=two_heads)
    train(c)
    model, _ = load(c.out_dir)
    assert state_of(c)['flops'] == c.steps * c.batch_size * c.context * counted(model, c.context)
