"Test nanodepth/scoring/lens.py: the tuned lens, which reads a model's answer after each layer."
import pytest
import torch
from helpers import restored

from nanodepth.model import Pass
from nanodepth.scoring import lens as lens_file
from nanodepth.scoring.lens import TunedLens, exit_at, quality, train_lens
from nanodepth.training.loader import Loader

pytestmark = pytest.mark.usefixtures('no_gradients')


def tokens(n=9, batch=3):
    "Return rows of n drawn tokens."
    return torch.randint(50, (batch, n), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def looped_model(tiny):
    "An LM with a layer that runs twice."
    return tiny(vocab_size=257, n_layer=4, order=[0, 1, 2, 1, 3])


def test_a_new_lens_is_the_logit_lens(looped_model):
    t, lens = tokens(), TunedLens(5, 32)
    kl, overlap = quality(looped_model, lens, t)
    for a, b in zip((kl, overlap), quality(looped_model, None, t)):
        assert torch.equal(a, b)
    assert kl[-1] == 0 and overlap[-1] == 1
    assert torch.allclose(exit_at(looped_model, 4, lens)(t), looped_model(t), atol=1e-6)
    stream = Pass(looped_model, 9)(looped_model.embed(t), [0, 1, 2])
    early = looped_model.head(looped_model.norm(stream))
    assert torch.allclose(exit_at(looped_model, 2)(t), early, atol=1e-6)
    # divergence and overlap by hand
    p, q = looped_model(t).softmax(-1), early.softmax(-1)
    divergence = (p * (p.log() - q.log())).sum(-1).mean().item()
    assert kl[2].item() == pytest.approx(divergence, abs=1e-5)
    shared = [len({*a.topk(5).indices.tolist()} & {*b.topk(5).indices.tolist()}) / 5
              for a, b in zip(p.flatten(0, 1), q.flatten(0, 1))]
    assert overlap[2].item() == pytest.approx(sum(shared) / len(shared), abs=1e-6)


@torch.enable_grad()
def test_a_lens_is_trained_as_with_one_loss_for_all_depths(looped_model, data):
    "Its training goes depth by depth, which needs less memory. The model stays as it is."
    lens, loader = TunedLens(5, 32), Loader(data, 8, 16)
    with restored(looped_model):
        trained = train_lens(looped_model, loader, 3, lr=1e-2)
    optimizer = torch.optim.Adam(lens.parameters(), lr=1e-2)
    for step in range(3):
        streams = lens_file.streams_behind(looped_model, loader.batch(step)[0])
        logits = [looped_model.head(looped_model.norm(x)).log_softmax(-1) for x in lens(streams)]
        loss = torch.stack([torch.nn.functional.kl_div(
            early, logits[-1].detach(), log_target=True, reduction='none').sum(-1).mean()
            for early in logits[:-1]]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]['lr'] = 1e-2 * (1 - step / 3)
        optimizer.step()
    for a, b in zip(trained.parameters(), lens.parameters()):
        assert torch.allclose(a, b, atol=1e-5) and a.abs().sum() > 0
