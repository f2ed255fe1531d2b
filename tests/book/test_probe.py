"Test probe.py, which finds the layers that a model uses, the tuned lens, and `nanodepth probe`."
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import restored, save_run

from nanodepth import probe
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import probe as page
from nanodepth.grow import lidas, untie
from nanodepth.probe import block_similarity, depth_score, future_effects, residual_norms
from nanodepth.model import Pass, Refused, Span
from nanodepth.report.tables import read_rows
from nanodepth.retrofit import core_of, surgery
from nanodepth.wrapper import wrapped
from nanodepth.training.loader import Loader
from nanodepth.scoring import lens as lens_file
from nanodepth.scoring.lens import TunedLens, exit_at, quality, train_lens

pytestmark = pytest.mark.usefixtures('undrawn')


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def tokens(n=9, batch=3):
    return torch.randint(50, (batch, n), generator=torch.Generator().manual_seed(0))


def added(model, d, i, x, erase=(), upto=-1):
    """What the attention and the MLP of layer i add to a stream at depth d, with `erase` of them
    taken away for the tokens up to `upto`."""
    T = x.shape[1]
    rope = model.cos[:T, None], model.sin[:T, None]
    block, scale = model.layers[i], (d + 1) ** -0.5 if model.config.ln_scaling else 1.0
    a = block.attn(block.attn_norm(x) * scale, rope).clone()
    if 'attn' in erase:
        a[:, :upto + 1] = 0
    m = block.mlp(block.mlp_norm(x + a) * scale).clone()
    if 'mlp' in erase:
        m[:, :upto + 1] = 0
    return a, m


def slow(model, t, order, *, erase=None, part='layer', upto=0):
    """(inputs, attention updates, MLP updates, output distribution), with layer `erase` taken away
    for the tokens up to `upto`."""
    x, inputs, attn, mlp = model.embed(t), [], [], []
    parts = ('attn', 'mlp') if part == 'layer' else (part,)
    for d, i in enumerate(order):
        a, m = added(model, d, i, x, parts if d == erase else (), upto)
        inputs.append(x)
        attn.append(a)
        mlp.append(m)
        x = x + a + m
    return inputs, attn, mlp, model.head(model.norm(x)).softmax(-1)


def relative(new, old):
    return (new - old).norm(dim=-1) / old.norm(dim=-1)


@pytest.mark.parametrize('shape', ['plain', 'looped', 'scaled'])
@pytest.mark.parametrize('part', ['layer', 'attn', 'mlp'])
def test_effects_and_score_against_the_slow_form(tiny, shape, part):
    model = tiny(n_layer=3, order=[0, 1, 2, 1, 2] if shape == 'looped' else None,
                 ln_scaling=shape == 'scaled')
    t, order = tokens(), model.order
    D, T = len(order), t.shape[1]
    inputs, attn, mlp, out = slow(model, t, order)
    contribution = dict(layer=[a + m for a, m in zip(attn, mlp)], attn=attn, mlp=mlp)[part]
    for future in (True, False):
        boundaries = [0, 3, 7] if future else [T - 1]
        want, local, moved = torch.zeros(D, D), torch.zeros(D, D), torch.zeros(D, len(t))
        for s in range(D):
            for b in boundaries:
                seen = slice(b + 1, None) if future else slice(None)
                _, attn2, mlp2, out2 = slow(model, t, order, erase=s, part=part, upto=b)
                moved[s] = torch.maximum(moved[s], (out2 - out).norm(dim=-1)[:, seen].amax(1))
                for d in range(s + 1, D):
                    old = attn[d] + mlp[d]
                    want[s, d] = max(want[s, d], relative(attn2[d] + mlp2[d], old)[:, seen].max())
                    x = inputs[d].clone()
                    x[:, :b + 1] -= contribution[s][:, :b + 1]
                    a, m = added(model, d, order[d], x)
                    local[s, d] = max(local[s, d], relative(a + m, old)[:, seen].max())
        options = dict(part=part, future=future, boundaries=boundaries if future else None)
        assert torch.allclose(future_effects(model, t, **options), want, atol=1e-5, rtol=1e-5)
        assert torch.allclose(future_effects(model, t, propagate=False, **options), local,
                              atol=1e-5, rtol=1e-5)
        if part == 'layer' and future:
            score, per_layer = depth_score(model, t, boundaries=boundaries)
            assert torch.allclose(per_layer, moved.mean(1), atol=1e-5)
            assert score == pytest.approx((torch.arange(D) * per_layer).sum().item()
                                          / per_layer.sum().item(), rel=1e-5)


def test_layer_that_does_nothing_scores_nothing(tiny):
    model, t = tiny(n_layer=4), tokens()
    for layer in (model.layers[1], model.layers[3]):
        layer.attn.o.weight.zero_(), layer.mlp.down.weight.zero_()
    with restored(model):
        # after layer 2 nothing carries its result on
        assert (depth_score(model, t)[1] > 0).tolist() == [True, False, False, False]
        for propagate in (True, False):
            matrix = future_effects(model, t, propagate=propagate)
            assert matrix[1].abs().max() == 0 and matrix[0, 2] > 0 and not matrix.isnan().any()


def test_norms_and_cosines_by_hand(tiny):
    model, t = tiny(n_layer=3), tokens()
    found = residual_norms(model, t)
    cosine = lambda u, v: (u * v).sum(-1) / u.norm(dim=-1) / v.norm(dim=-1)
    for d, (h, a, m) in enumerate(zip(*slow(model, t, model.order)[:3])):
        for name, value in (('stream', h.norm(dim=-1)),
                            ('attn share', a.norm(dim=-1) / h.norm(dim=-1)),
                            ('mlp share', m.norm(dim=-1) / (h + a).norm(dim=-1)),
                            ('layer share', (a + m).norm(dim=-1) / h.norm(dim=-1)),
                            ('attn cosine', cosine(a, h)), ('mlp cosine', cosine(m, h + a)),
                            ('layer cosine', cosine(a + m, h)),
                            ('layer angle', cosine(h, h + a + m).arccos().rad2deg())):
            assert found[name][d].item() == pytest.approx(value.mean().item(), abs=1e-5), name


def test_block_similarity_of_grown_layers(tiny):
    model = untie(tiny(n_layer=4), lidas(4, 2))
    origin = torch.tensor([0, 1, 2, 1, 2, 3])
    copies, same = origin[:, None] == origin, block_similarity(model)
    assert (same[copies] > 0.999).all() and (same[~copies].abs() < 0.2).all()
    flat = [torch.cat([p.flatten() for p in layer.mlp.parameters()]) for layer in model.layers]
    by_hand = torch.cosine_similarity(torch.cat(flat[:2]), torch.cat(flat[2:4]), dim=0).item()
    assert block_similarity(model, 2)[0, 1].item() == pytest.approx(by_hand, abs=1e-5)


def test_depth_score_of_a_recurrent_model(tiny):
    parent, t = tiny(n_layer=4), tokens()
    model = surgery(parent, '1-2-1', r=2)
    torch.nn.init.normal_(core_of(model).adapter.weight, std=0.2)
    late = (torch.arange(9) > 2)[:, None]
    hidden = model.hidden(t, tap=lambda depth, part, x, u: u * late if depth == 3 else u)
    by_hand = model.head(model.norm(hidden)).softmax(-1)
    change = (by_hand - model(t).softmax(-1)).norm(dim=-1)[:, 3:].amax(1).mean().item()
    _, per_layer = depth_score(model, t, boundaries=[2])
    assert per_layer.shape == (6,) and per_layer[3].item() == pytest.approx(change, abs=1e-5)
    # r = 1, the adapter as it begins: the parent
    once = surgery(parent, '1-3-0', r=1)
    assert torch.allclose(future_effects(once, t), future_effects(parent, t), atol=1e-6)


SIX, FORTY = [*range(6)], [4, 6, 8, 10, 12, 14, 17, 18, *range(21, 26), 27, 29, 34]


@pytest.mark.parametrize('function, arguments, value', [
    (probe.swap_blocks, [SIX, 1, 2], [0, 3, 4, 1, 2, 5]),
    (probe.swap_blocks, [SIX, 0, 1], [1, 0, 2, 3, 4, 5]),
    (probe.skip_blocks, [SIX, 2, 3], [0, 1, 5]),
    (probe.reverse_block, [SIX, 1, 4], [0, 4, 3, 2, 1, 5]),
    (probe.reverse_block, [SIX, 0, 1], SIX),
    (probe.pick_boundaries, [32], [*range(31)]), (probe.pick_boundaries, [40], FORTY)])
def test_orders_and_boundaries_by_hand(function, arguments, value):
    assert [*function(*arguments)] == value and SIX == [*range(6)]


def test_order_sweep_runs_each_order_once(tiny):
    model, look = tiny(n_layer=3), lambda model: dict(order=tuple(model.order))
    for change, sizes, orders in ((probe.skip_blocks, (1, 3), [(1, 2), (0, 2), (0, 1)]),
                                  (probe.swap_blocks, (1, 2), [(1, 0, 2), (0, 2, 1)])):
        rows = probe.order_sweep(model, look, change, sizes)
        assert model.order == [0, 1, 2]
        assert [row['order'] for row in rows] == [(0, 1, 2), *orders]

    def refuses(order, start, length):
        raise Refused('a change of yours, which has a mistake')
    with pytest.raises(Refused, match='a change of yours'):
        probe.order_sweep(model, look, refuses, (1,))


def test_probes_refuse_what_has_no_one_effect(tiny):
    "A Window has no one update; behind an adapter is no sum of them; noise has effects, too."
    model, t = tiny(), tokens()
    recurrent = surgery(model, '1-2-1', r=2)
    class Draws(Span):
        def __call__(self, run, x):
            return run(x + torch.randn_like(x), self.items)

    for look in (depth_score, future_effects, residual_norms):
        with wrapped(model, (1, 2)), pytest.raises(Refused, match='runs each depth once'):
            look(model, t)
    with pytest.raises(Refused, match='propagate=False is for an order of layers alone'):
        future_effects(recurrent, t, propagate=False)
    for look in (depth_score, future_effects):
        with pytest.raises(Refused, match='two forward passes of this model differ'):
            look(tiny(order=[0, Draws([1, 2]), 3]), t)
    with pytest.raises(Refused, match='at least one of the 9 tokens must follow'):
        depth_score(model, t, boundaries=[-1])


@pytest.fixture
def looped_model(tiny):
    return tiny(vocab_size=257, n_layer=4, order=[0, 1, 2, 1, 3])


def test_lens_begins_as_the_logit_lens(looped_model):
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
def test_lens_is_trained_as_in_one_backward(looped_model, data):
    "Against the sum of all depths' divergences in one backward pass; the model stays as it is."
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


@torch.enable_grad()
def test_probe_writes_pictures_and_numbers(tiny, data, tmp_path, capsys):
    model, out = tiny(vocab_size=257), tmp_path / 'page'
    models = dict(plain=model, loop=tiny(vocab_size=257, n_layer=2, order=[0, 1, 0, 1]),
                  cut=surgery(model, '1-2-1', r=2))
    runs = [save_run(tmp_path / name, model, data) for name, model in models.items()]
    nanodepth('probe', [*runs, f'--out={out}', '--count=4', '--length=10', '--n=6', '--batches=1',
                        '--lens_steps=3', '--tasks=toy_assign/1', '--device=cpu'])
    said, about = capsys.readouterr()
    for name in page.PROBES:
        assert (out / f'{name}.png').exists()
        assert f'{name}: {page.PROBES[name].__doc__.splitlines()[0]}' in said
        rows = read_rows(out / f'{name}.csv')
        missing = 'cut' if name in ('swap', 'skip', 'reverse') else None
        assert {row['run'] for row in rows} == {'plain', 'loop', 'cut'} - {missing}
    assert 'loop: 4 layers deep (0 1 0 1), ' in about and 'swap leaves out cut' in about
    for name, sizes in (('swap', {0, 1, 2}), ('skip', {0, 1, 2}), ('reverse', {0, 2, 4})):
        assert {row['size'] for row in read_rows(out / f'{name}.csv')} == sizes
    score = {row['run']: row['score'] for row in read_rows(out / 'depth_score.csv')}
    tokens = Loader(data, 4, 16, 'val', seed=1).batch(0)[0][:4, :10]
    assert score['plain'] == pytest.approx(probe.depth_score(model, tokens)[0], rel=1e-5)
    assert f'plain: depth score {score["plain"]:.3f}' in said


def test_heatmap_is_what_its_titles_say(tiny):
    model, tokens = tiny(), torch.arange(12)[None]
    rows = page.heatmap_attn(SimpleNamespace(model=model, tokens=tokens))
    titles = [f'{which} tokens, {how}' for which in ('future', 'all')
              for how in ('propagated', 'local')]
    assert [row['setting'] for row in rows] == [title for title in titles for _ in range(6)]
    wanted = {title: probe.future_effects(model, tokens, part='attn', future='future' in title,
                                          propagate='propagated' in title) for title in titles}
    for row in rows:
        assert row['change'] == wanted[row['setting']][row['erased'], row['observed']]


@torch.enable_grad()
def test_lens_is_trained_on_rows_not_looked_at(data, tiny, tmp_path, monkeypatch):
    "49 rows in batches of 4: 40 examples take 10 batches, and nine rows are left."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=16), data)
    trained = []

    def train_lens(model, rows, *_, batches, **how):
        for step in batches:
            trained.extend(map(tuple, rows.batch(step)[0].tolist()))
        return TunedLens(4, 32)

    def opened(count):
        return page.opened(run, page.Options(models=[run], count=count, n=2, batches=1, tasks='',
                                             device='cpu'))
    monkeypatch.setattr(page, 'train_lens', train_lens)
    it = opened(40)
    assert page.early_exit(it)
    looked_at = [*map(tuple, it.tokens.tolist())]
    assert len({*trained}) == 9 and len(looked_at) == 40 and not {*trained} & {*looked_at}
    assert page.early_exit(opened(49)) == []
