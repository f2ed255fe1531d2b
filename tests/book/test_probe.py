"Test probe.py: which layers a model uses."
import runpy
import sys

import pytest
import torch
from helpers import ROOT, restored, save_run, state_of

import probe
from grow import lidas, untie
from model import Refused, Span
from probe import block_similarity, depth_score, future_effects, residual_norms
from retrofit import core_of, surgery
from wrapper import wrapped

pytestmark = pytest.mark.usefixtures('no_gradients')


def test_data_that_changed_since_the_training_are_refused(tiny, data, tmp_path, monkeypatch):
    run = save_run(tmp_path / 'run', tiny(vocab_size=257), data)
    torch.save(state_of(run) | dict(data=dict(val=['as it was'])), f'{run}/ckpt.pt')
    monkeypatch.setattr(sys, 'argv', ['probe.py', run])
    with pytest.raises(SystemExit, match='^probe: .* has changed since .*run was trained'):
        runpy.run_path(str(ROOT / 'probe.py'), run_name='__main__')


def tokens(n=9, batch=3):
    "Return rows of n drawn tokens."
    return torch.randint(50, (batch, n), generator=torch.Generator().manual_seed(0))


def added(model, d, i, x, erase=(), upto=-1):
    """Return what the attention and the MLP of layer i add to a stream at depth d. The parts in
    `erase` add nothing for the tokens up to `upto`."""
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
    """Return the inputs of all layers, their attention updates, their MLP updates and the output
    distribution. The layer at depth `erase` adds nothing for the tokens up to `upto`."""
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
    "Return the relative change of vectors."
    return (new - old).norm(dim=-1) / old.norm(dim=-1)


@pytest.mark.parametrize('shape', ['plain', 'looped', 'scaled'])
@pytest.mark.parametrize('part', ['layer', 'attn', 'mlp'])
def test_effects_and_depth_score_are_those_of_the_slow_form(tiny, shape, part):
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


def test_a_layer_that_adds_nothing_has_no_effect(tiny):
    model, t = tiny(n_layer=4), tokens()
    for layer in (model.layers[1], model.layers[3]):
        layer.attn.o.weight.zero_(), layer.mlp.down.weight.zero_()
    with restored(model):
        # no layer after layer 2 adds anything, so layer 2 has no effect either
        assert (depth_score(model, t)[1] > 0).tolist() == [True, False, False, False]
        for propagate in (True, False):
            matrix = future_effects(model, t, propagate=propagate)
            assert matrix[1].abs().max() == 0 and matrix[0, 2] > 0 and not matrix.isnan().any()


def test_residual_norms_by_hand(tiny):
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


def test_depth_score_of_a_recurrent_model_by_hand(tiny):
    parent, t = tiny(n_layer=4), tokens()
    model = surgery(parent, '1-2-1', r=2)
    torch.nn.init.normal_(core_of(model).adapter.weight, std=0.2)
    late = (torch.arange(9) > 2)[:, None]
    hidden = model.hidden(t, tap=lambda depth, part, x, u: u * late if depth == 3 else u)
    by_hand = model.head(model.norm(hidden)).softmax(-1)
    change = (by_hand - model(t).softmax(-1)).norm(dim=-1)[:, 3:].amax(1).mean().item()
    _, per_layer = depth_score(model, t, boundaries=[2])
    assert per_layer.shape == (6,) and per_layer[3].item() == pytest.approx(change, abs=1e-5)
    # with r = 1 and a new adapter, the model is its parent
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
    "A mistake in your own change is not hidden."
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


def test_probes_refuse_models_in_which_a_layer_has_no_single_effect(tiny):
    """A Window runs a layer several times, an adapter is not a sum of updates, and noise changes
    the output, too."""
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
