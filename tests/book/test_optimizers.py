"Test training/optimizers.py: which optimizer trains which weight, and what a step computes."
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import same
from own_spans import GatedLoop, SlowCore, names

from model import LM, ModelConfig
from retrofit import surgery
from training.optimizers import Muon, make_optimizers
from training.plan import Config
from training.settings import read


def test_muon_trains_layers_and_the_weights_that_a_span_names(tiny):
    "Each group has its weights in the order of the model, so that states can be copied by name."
    model = surgery(tiny(), '1-2-1', SlowCore)
    model.order = [GatedLoop([0]), *model.order[1:]]
    muon, adamw = make_optimizers(model, Config())
    name_of = {p: name for name, p in model.named_parameters()}
    trained = [name_of[p] for p in muon.param_groups[0]['params']]
    assert trained == [name for name in names(model) if name == 'spans.1.adapter.weight'
                       or name.startswith('layers') and 'norm' not in name]
    for group in adamw.param_groups:
        in_group = [name_of[p] for p in group['params']]
        assert in_group == [name for name in names(model) if name in in_group]


@pytest.mark.parametrize('optimizer', ['muon', 'adamw'])
@pytest.mark.parametrize('tied', [True, False])
def test_each_parameter_is_in_one_group(optimizer, tied):
    model = LM(ModelConfig(n_layer=2, n_embd=32, n_head=2, tie_embeddings=tied))
    optimizers = make_optimizers(model, Config(optimizer=optimizer, lr=1e-3, adamw_lr=1e-4,
                                               weight_decay=0.1, muon_scaling='original'))
    groups = [(type(o).__name__, g) for o in optimizers for g in o.param_groups]
    held = [id(p) for _, g in groups for p in g['params']]
    assert sorted(held) == sorted({id(p) for p in model.parameters()})
    for name, group in groups:
        assert name != 'Muon' or group['adjust_lr_fn'] == 'original'
        assert group['weight_decay'] == (0 if group['params'][0].dim() == 1 else 0.1)
        assert group['peak'] == (1e-4 if optimizer == 'muon' and name == 'AdamW' else 1e-3)
    assert [name for name, _ in groups].count('Muon') == (optimizer == 'muon')


@pytest.mark.parametrize('adjust', ['match_rms_adamw', 'original'])
def test_muon_computes_what_torch_does(adjust, monkeypatch):
    """Compare the change of each step, and the states. One gradient is zero, and one parameter has
    no gradient. Here torch iterates in float64, as ours does on a CPU."""
    monkeypatch.setattr(torch.Tensor, 'bfloat16', torch.Tensor.double)
    shapes = [(24, 16), (16, 24), (16, 16), (24, 16), (16, 24)]
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = [kind(params, lr=0.5, weight_decay=0.1, adjust_lr_fn=adjust)
                  for kind, params in ((Muon, ours), (torch.optim.Muon, theirs))]
    for step in range(3):
        before = [p.detach().clone() for p in (*ours, *theirs)]
        for p, q in zip(ours[1:], theirs[1:]):
            p.grad = torch.randn(p.shape) * (step > 0 or p is not ours[1])
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        moved = [(p - old).detach() for p, old in zip((*ours, *theirs), before)]
        for a, b in zip(moved[:5], moved[5:]):
            assert (a - b).norm() <= 1e-5 * b.norm()
    kept = [optimizer.state_dict()['state'] for optimizer in optimizers]
    assert kept[0].keys() == kept[1].keys() == {1, 2, 3, 4}
    assert all(same(kept[0][i], kept[1][i]) for i in kept[0])


def test_adamw_star_by_hand():
    """The steps are those of the authors' code. The third gradient is a spike, one entry never
    moves, and the squares of the last entry are smaller than the square of eps."""
    values = read(Config, ['config/adamw_star.py'])
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 0.3]))
    [optimizer] = values.optimizer(SimpleNamespace(parameters=lambda: [p]), values)
    for group in optimizer.param_groups:
        group.update(lr=0.1, peak=0.2, weight_decay=0.01)
    w, m, v = p.detach().double(), None, None
    for t, first in enumerate((0.1, 0.1, 5.0, 0.1), 1):
        p.grad = torch.tensor([first, 0.2 - 0.1 * t, 0.0, 5e-7])
        optimizer.step()
        g = p.grad.double()
        m = g if t == 1 else 0.9 * m + 0.1 * g
        v = g * g if t == 1 else 0.95 * v + 0.05 * g * g
        v = v.clamp(min=1e-12)
        rms = (g * g / v).mean().sqrt().item()
        steps = torch.atan2(m, v.sqrt() / math.sqrt(1 - 0.95 ** t))
        steps /= max(1.0, rms) * (1 - 0.9 ** t)
        w = w * (1 - 0.01 * 0.1 / 0.2) - 0.1 * steps
        assert p.tolist() == pytest.approx(w.tolist(), rel=1e-5) and (rms > 1.1) == (t == 3)
