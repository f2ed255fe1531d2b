"Test retrofit.py: a pretrained model becomes recurrent, with a prelude, a core and a coda."
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from helpers import same
from slow_forms import check_core, check_first_state, gradients

from model import Refused
from retrofit import Core, core_of, ramp, sample_recurrence, surgery
from training.plan import generator_for


def at(model, r, backprop_depth=None):
    "Return the model, whose core runs r times from now on."
    core_of(model).r = r
    core_of(model).backprop_depth = backprop_depth or core_of(model).backprop_depth
    return model


@pytest.fixture
def tokens():
    "Two rows of drawn tokens."
    return torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))


def trained(model):
    "Return a model whose adapter takes something from the state, as it does after some training."
    torch.nn.init.normal_(core_of(model).adapter.weight, std=0.2)
    return model


def test_flops_of_a_core_by_hand(tiny):
    """They are those of r copies of the core's layers, plus the adapter. A recurrence without
    gradients costs a third."""
    parent = tiny(n_layer=6)
    model = surgery(parent, '2-2-2')
    adapter = 6 * 2 * 32 * 32
    layers = parent.flops_per_token([0, 1] + [2, 3] * 3 + [4, 5])
    assert at(model, 3).flops_per_token() == layers + 3 * adapter
    once = parent.flops_per_token([2, 3]) - parent.flops_per_token([]) + adapter
    outside = parent.flops_per_token([0, 1, 4, 5])
    assert at(model, 5, 2).flops_per_token() == outside + 2 * once + 3 * once // 3


@pytest.mark.parametrize('fields', [dict(tie_embeddings=False, n_kv_head=2, qk_norm=True),
                                    dict(ln_scaling=True)])
def test_surgery_without_training_computes_what_the_parent_does(tiny, tokens, fields):
    parent = tiny(n_layer=6, **fields)
    for r in [1] if parent.config.ln_scaling else [1, 3]:       # LN-scaling depends on the depth
        assert torch.equal(surgery(parent, '2-2-2', r=r)(tokens), parent(tokens))
    half = surgery(parent.bfloat16(), '2-2-2')
    assert core_of(half).adapter.weight.dtype == torch.bfloat16


@pytest.mark.parametrize('r, most', [(3, 8), (5, 5), (5, 2), (4, 1)])
def test_core_computes_the_equations_of_the_paper(tiny, tokens, r, most):
    check_core(trained(surgery(tiny(n_layer=6), '2-2-2', r=r, backprop_depth=most)), tokens)


@pytest.mark.parametrize('half', [False, True])
def test_recompute_gives_equal_gradients_from_less_memory(tiny, half):
    model = surgery(tiny(n_layer=6, ln_scaling=half), '2-2-2', r=8, backprop_depth=9)
    tokens, found, memory = torch.arange(24).view(2, 12) % 32, [], []
    for core_of(model).recompute in (False, True):
        kept = {}
        with (torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t),
              torch.autocast('cpu', torch.bfloat16, enabled=half)):
            loss = model(tokens, tokens)
        found.append(gradients(model, loss))
        memory.append(sum(kept.values()))
    assert same(*found) and memory[1] < memory[0] / 3


def test_no_gradient_is_lost_under_autocast(tiny, tokens):
    "A weight that was cast in a recurrence without gradients must be cast again."
    model = trained(surgery(tiny(n_layer=6), '2-2-2', backprop_depth=1))
    found = []
    for cached in (True, False):
        with torch.autocast('cpu', torch.bfloat16, cache_enabled=cached):
            loss = model(tokens, tokens)
            # the stream keeps its precision
            assert model.hidden(tokens).dtype == torch.float32
        found.append(gradients(model, loss))
    assert same(*found) and all(gradient.any() for gradient in found[0].values())


def test_first_state_is_noise_by_position_or_by_row():
    """In evaluation it depends on the position alone. In training each row has a generator, so it
    does not matter in which batch the row is."""
    check_first_state(Core([0]), math.sqrt(2 / (5 * 32)))


def test_first_state_in_blocks_of_64_positions():
    """Checkpoints and exports rely on this gold value. A text that is read in pieces has the same
    noise."""
    e, core = torch.zeros(1, 200, 32), Core([0])
    whole = core.first_state(SimpleNamespace(start=0), e)[0]
    block = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)) * math.sqrt(2 / 160)
    assert torch.equal(whole[128:192], block)
    assert whole[128, :3].tolist() == pytest.approx([-0.1164, 0.1025, -0.1458], abs=1e-4)
    for start, T in ((0, 64), (63, 1), (64, 1), (60, 70), (130, 70)):
        piece = core.first_state(SimpleNamespace(start=start), e[:, :T])[0]
        assert torch.equal(piece, whole[start:start + T])


@pytest.mark.parametrize('mean, variance, median', [(4, 8.544, 4), (32, 322.842, 29)])
def test_recurrences_are_poisson_lognormal(mean, variance, median):
    sample = lambda seed, step: sample_recurrence(mean, generator_for(seed, 'recurrence', step))
    drawn = [sample(3, step) for step in range(4000)]
    assert statistics.mean(drawn) == pytest.approx(mean + 1, abs=4 * math.sqrt(variance / 4000))
    assert abs(statistics.median(drawn) - median) <= 1 + mean // 16 and min(drawn) >= 1
    assert statistics.variance(drawn) == pytest.approx(variance, rel=0.25)
    assert drawn[:50] != [sample(4, step) for step in range(50)]


def test_curriculum_is_a_staircase():
    "Over 3,125 of 6,250 steps the mean r rises to 32, so it rises by one every 97.66 steps."
    table = [ramp(t, 6250, 32, 0.5) for t in range(6250)]
    assert table == sorted(table) and {*table} == {*range(1, 33)}
    assert table[3124:] == [32] * (6250 - 3124)
    assert [table.count(k) for k in (1, 2, 3)] == [97, 98, 97]
    slow = [ramp(t, 6250, 32, 0.5, '1-sqrt') for t in range(6250)]
    assert slow == sorted(slow) and all(a <= b for a, b in zip(slow, table))
    assert slow[1500] < 12 and slow[3124] == 32
    assert {ramp(t, 100, 7, 0) for t in range(100)} == {7}
    # a whole number stays that: 4 x 0.25 is one, and not two
    assert [ramp(t, 8, 4, 1.0) for t in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_cut_or_r_that_does_not_fit_is_refused(tiny, tokens):
    model = tiny()
    core = surgery(model, '1-2-1', r=2)
    for call, message in (
            (lambda: at(core, 0)(tokens), 'r=0, backprop_depth=8: both must be at least 1'),
            (lambda: surgery(model, ([0], [], [3])), 'has no layers in its core'),
            (lambda: surgery(model, ([0], [9], [3])), 'must name layers from 0 to 3'),
            (lambda: surgery(model, ([0, 1], [1], [3])), 'none of them twice'),
            (lambda: surgery(model, '1-2'), 'is not three numbers of layers'),
            (lambda: surgery(model, '1-3-1'), 'than the model, which has 4')):
        with pytest.raises(Refused, match=message):
            call()
