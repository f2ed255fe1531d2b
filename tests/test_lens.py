"The tuned lens: at the last depth it is the model, it learns, it belongs to one model."
import copy

import pytest
import torch

from nanodepth.__main__ import main as nanodepth
from nanodepth.data.tokens import Loader
from nanodepth.variants import lens as lens_file
from nanodepth.variants.lens import TunedLens, exit_at, load_lens, quality, save_lens, train_lens


@pytest.fixture
def model(tiny):
    return tiny(vocab_size=257, n_layer=4, order=[0, 1, 2, 1, 3])


@pytest.fixture
def loader(data):
    return Loader(data, 8, 16, vocab_size=257)


def test_before_training_it_is_the_logit_lens_and_the_last_depth_is_the_model(model, loader):
    t = loader.batch(0)[0]
    lens = TunedLens(5, 32)
    for a, b in zip(quality(model, lens, t), quality(model, None, t)):
        assert torch.equal(a, b)
    kl, overlap = quality(model, lens, t)
    assert (kl.shape == (5,) and kl[-1] == 0 and overlap[-1] == 1 and (kl[:-1] > 0.01).all()
            and (overlap[:-1] < 1).all())
    with torch.no_grad():
        assert torch.allclose(exit_at(model, 4, lens)(t), model(t), atol=1e-6)
        by_hand = model.head(model.norm(model.run(model.embed(t), [0, 1, 2])))
        assert torch.allclose(exit_at(model, 2)(t), by_hand, atol=1e-6)


def test_divergence_and_overlap_by_hand(model, loader):
    t = loader.batch(0)[0][:2]
    with torch.no_grad():
        early, final = exit_at(model, 1)(t), model(t)
    p, q = final.softmax(-1), early.softmax(-1)
    kl, overlap = quality(model, None, t)
    assert kl[1].item() == pytest.approx((p * (p.log() - q.log())).sum(-1).mean().item(), abs=1e-5)
    shared = [len(set(a.topk(5).indices.tolist()) & set(b.topk(5).indices.tolist())) / 5
              for a, b in zip(early.flatten(0, 1), final.flatten(0, 1))]
    assert overlap[1].item() == pytest.approx(sum(shared) / len(shared), abs=1e-6)


def test_it_learns_and_leaves_the_model_alone(model, loader):
    before, t = copy.deepcopy(model.state_dict()), loader.batch(50)[0]
    short, long = (train_lens(model, loader, steps, lr=1e-2) for steps in (5, 60))
    plain, a, b = (quality(model, lens, t)[0][:-1] for lens in (None, short, long))
    assert (a < plain).all() and (b < a).all() and b.mean() < 0.7 * plain.mean()
    assert all(torch.equal(x, y) for x, y in zip(before.values(), model.state_dict().values()))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_one_depth_at_a_time_is_all_at_once(model, loader):
    "Against the sum of all depths' divergences in one backward pass."
    mine, lens = train_lens(model, loader, 3, lr=1e-2), TunedLens(5, 32)
    optimizer = torch.optim.Adam(lens.parameters(), lr=1e-2)
    for step in range(3):
        streams = lens_file.streams_behind(model, loader.batch(step)[0])
        logits = [model.head(model.norm(x)).log_softmax(-1) for x in lens(streams)]
        loss = torch.stack([torch.nn.functional.kl_div(
            early, logits[-1].detach(), log_target=True, reduction='none').sum(-1).mean()
            for early in logits[:-1]]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]['lr'] = 1e-2 * (1 - step / 3)
        optimizer.step()
    for a, b in zip(mine.parameters(), lens.parameters()):
        assert torch.allclose(a, b, atol=1e-5) and a.abs().sum() > 0


def test_the_command_trains_on_rows_that_the_model_has_not_seen(loader):
    from nanodepth.engine.measure import After
    rows = After(loader, 8)
    seen = {tuple(loader.batch(step)[0][0].tolist()) for step in range(rows.first)}
    mine = [tuple(rows.batch(step)[0][0].tolist()) for step in range(3 * rows.n)]
    assert rows.first >= 1 and not seen & set(mine) and mine[0] == mine[rows.n]


def test_a_saved_lens_belongs_to_its_model(model, loader, tiny, tmp_path):
    lens, t = train_lens(model, loader, 3), loader.batch(0)[0]
    save_lens(lens, model, tmp_path / 'lens.pt')
    assert torch.equal(quality(model, load_lens(tmp_path / 'lens.pt', model), t)[0],
                       quality(model, lens, t)[0])
    for other in (tiny(seed=1, vocab_size=257, n_layer=4, order=[0, 1, 2, 1, 3]),
                  tiny(vocab_size=257, n_layer=4)):
        with pytest.raises(ValueError, match='lens.pt is the lens of another model'):
            load_lens(tmp_path / 'lens.pt', other)
    (tmp_path / 'bad.pt').write_bytes(b'nothing')
    for name, message in {'bad.pt': 'bad.pt is damaged, or not', 'none.pt': 'no lens at'}.items():
        with pytest.raises(ValueError, match=message):
            load_lens(tmp_path / name, model)


def test_a_recurrent_model_has_one_too(tiny, loader):
    from nanodepth.retrofit import surgery
    model = surgery(tiny(vocab_size=257, n_layer=4), '1-2-1', mean=2)
    lens = train_lens(model, loader, 3)
    assert quality(model, lens, loader.batch(0)[0])[0].shape == (6,)
