"Test Spans with weights, losses of a user, and what both may rely on."
import copy
import gc
import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
from helpers import ROOT, log_of, same, state_of
from torch import nn

from nanodepth.grow import states_of_copies, untie
from nanodepth.loop import in_order
from nanodepth.model import LM, ModelConfig, Refused, Span
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import Core, core_of, surgery
from nanodepth.scoring.ways import in_way
from nanodepth.train import train
from nanodepth.training.optimizers import make_optimizers, states_of
from nanodepth.training.plan import Config
from nanodepth.wrapper import wrapped

TOKENS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


class GatedLoop(Span):
    "A vector for each iteration, a matrix that AdamW trains, and a note for the loss."

    def __init__(self, items, times=2, strength=0.5):
        super().__init__(items, times)
        self.strength = strength

    def make_weights(self, model):
        self.vectors = nn.Parameter(torch.randn(self.times, model.config.n_embd))
        self.gate = nn.Linear(model.config.n_embd, 1)

    def forward(self, run, x):
        for vector in self.vectors:
            new = run(x + vector, self.items)
            x = torch.lerp(x, new, self.strength * self.gate(new).sigmoid())
            run.notes['last'] = x
        return x


class DropsOut(Span):
    def make_weights(self, model):
        self.drop = nn.Dropout(0.5)

    def forward(self, run, x):
        return self.drop(run(x, self.items))


class SlowCore(Core):
    def __init__(self, items, r=4, backprop_depth=8, share=0.5):
        super().__init__(items, r, backprop_depth)
        self.share = share

    def step(self, run, s, e, depth):
        return torch.lerp(s, super().step(run, s, e, depth), self.share)


def penalty(model, tokens, targets):
    notes = {}
    ordinary = model.mean_loss(model.hidden(tokens, notes=notes), targets)
    return ordinary + 0.1 * notes['last'].square().mean()


def two_heads(model, tokens, targets):
    x = model.hidden(tokens)
    return model.mean_loss(x, targets) + model.mean_loss(2 * x, targets)


def names(model):
    return [name for name, _ in model.named_parameters()]


def test_an_order_registers_the_spans_that_have_weights(tiny):
    "A temporary Window registers nothing and renames nothing."
    model = tiny()
    plain = names(model)
    model.order = [0, 1, 1, 2]
    assert names(model) == plain and type(model.order) is list
    model.order = [0, GatedLoop([1, 2]), 3]
    assert names(model) == [*plain, 'spans.0.vectors', 'spans.0.gate.weight', 'spans.0.gate.bias']
    with wrapped(model, window=(0, 1), K=2):
        assert len(names(model)) == len(plain) + 3 and names(model)[-3] == 'spans.0.vectors'
    with in_order(model, [0, 1, 2, 3]):
        assert names(model) == plain
    assert names(model)[-3] == 'spans.0.vectors'
    model(TOKENS, order=[0, GatedLoop([1]), 2])
    assert len(names(model)) == len(plain) + 3


def test_deepcopy_and_untie_copy_a_span_with_its_weights_and_states(tiny):
    model = tiny(order=[0, GatedLoop([1, 2]), 3])
    optimizers = make_optimizers(model, Config(lr=1e-2))
    for _ in range(2):
        model(TOKENS, TOKENS).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twin = copy.deepcopy(model)
    assert twin.spans[0] is twin.order[1] and twin.spans[0] is not model.spans[0]
    assert torch.equal(twin(TOKENS), model(TOKENS))
    new = untie(model, model.order)
    assert torch.equal(new(TOKENS), model(TOKENS))
    assert new.spans[0].vectors is not model.spans[0].vectors
    states = states_of(optimizers, model)
    copies = {kind: states_of_copies(of_kind, model.order) for kind, of_kind in states.items()}
    assert same(copies['AdamW']['spans.0.vectors'], states['AdamW']['spans.0.vectors'])
    assert {*copies['AdamW'], *copies['Muon']} == {*names(new)}


def test_muon_trains_layers_and_what_a_span_names_in_the_order_of_the_model(tiny):
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


def test_a_span_has_the_mode_of_the_model(tiny):
    "Even one without weights, and one of a single call."
    model, order = tiny(), [0, DropsOut([1]), 2]
    for how in (dict(order=order), {}):
        assert torch.equal(model(TOKENS, **how), model(TOKENS, **how))
        model.train()
        assert not torch.equal(model(TOKENS, **how), model(TOKENS, **how))
        model.eval()
        model.order = order


def test_a_span_has_the_dtype_and_device_of_the_model(tiny):
    model = tiny().bfloat16()
    model.order = [0, GatedLoop([1]), 2]
    assert model.spans[0].vectors.dtype == torch.bfloat16
    assert model.float().spans[0].gate.weight.dtype == torch.float32
    with torch.device('meta'):
        model = LM(ModelConfig(n_layer=3, n_embd=32, n_head=2))
        model.order = [0, GatedLoop([1]), 2]
    assert all(p.is_meta for p in model.parameters())


def test_an_order_holds_a_span_once(tiny):
    model, span = tiny(), GatedLoop([1])
    with pytest.raises(Refused, match='holds one Span twice: use copy.deepcopy'):
        model.order = [0, span, span]
    assert model.order == [0, 1, 2, 3]
    model.order = [0, span, copy.deepcopy(span)]
    assert len(model.spans) == 2


def test_settings_are_the_arguments_that_were_kept():
    class Forgets(Span):
        def __init__(self, items, rank=4):
            super().__init__(items)
            self.thin = rank
    assert GatedLoop([1], strength=0.25).settings() == dict(times=2, strength=0.25)
    assert Span([1]).settings() == {} and Span([1], 3).settings() == dict(times=3)
    with pytest.raises(AttributeError, match='rank'):
        Forgets([1]).settings()


def test_times_of_a_core_is_r():
    core = Core([1, 2], r=3)
    assert core.times == 3 and core.unrolled() == [1, 2] * 3
    core.r = 5
    assert core.times == 5 and len(core.unrolled()) == 10


@pytest.mark.parametrize('recompute', [False, True])
def test_notes_reach_the_loss_through_a_recomputed_core(tiny, recompute):
    model = tiny(order=[0, Core([GatedLoop([1]), 2], r=3), 3])
    core_of(model).recompute = recompute
    notes = {}
    x = model.hidden(TOKENS, notes=notes)
    (model.mean_loss(x, TOKENS) + notes['last'].square().mean()).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert found['spans.1.vectors'].abs().sum() > 0
    core_of(model).recompute = False
    model.zero_grad()
    notes = {}
    x = model.hidden(TOKENS, notes=notes)
    (model.mean_loss(x, TOKENS) + notes['last'].square().mean()).backward()
    assert all(torch.equal(found[name], p.grad) for name, p in model.named_parameters())


def test_nothing_of_a_loss_is_held_after_it(tiny):
    model, notes = tiny(order=[0, GatedLoop([1]), 2]), {}
    model.hidden(TOKENS, notes=notes)
    last = weakref.ref(notes['last'])
    del notes
    gc.collect()
    assert last() is None
    copy.deepcopy(model)


def test_a_loss_in_pieces_is_the_loss(tiny):
    model, targets = tiny(), TOKENS.clone()
    targets[0, :9] = -1
    n = (targets != -1).sum()
    whole = model(TOKENS, targets, loss=two_heads)
    pieces = sum(model(x, y, loss=two_heads) * (y != -1).sum() / n
                 for x, y in zip(TOKENS.chunk(2), targets.chunk(2)))
    assert torch.allclose(whole, pieces)
    assert torch.equal(model(TOKENS, targets, loss=lambda model, x, y: model(x, y)),
                       model(TOKENS, targets))


def test_a_span_of_a_config_gets_no_weights(config):
    "So a second run in one process begins as the first one did."
    order = [0, GatedLoop([1]), 2]
    one, two = (config(name, n_layer=3, order=order, loss=penalty) for name in ('one', 'two'))
    train(one)
    assert not order[1].state_dict()
    train(two)
    assert same(state_of(one)['model'], state_of(two)['model'])
    assert all('val_loss' in line for line in (log_of(one)[0], log_of(one)[-1]))


def test_a_branch_brings_weights_into_a_plain_trunk(config):
    "And a branch of that run drops them again."
    train(config('trunk', n_layer=3, steps=6, decay_steps=0))
    trunk = config('trunk').out_dir
    c = config('gated', n_layer=3, order=[0, GatedLoop([1]), 2], branch_from=trunk)
    assert train(c) == 0
    assert 'spans.0.vectors' in state_of(c)['model']
    # its optimizers have a state of each weight
    states = state_of(c)['optimizers']
    assert {*states['Muon'], *states['AdamW']} == {*names(load_model(c.out_dir))}
    back = config('back', n_layer=3, steps=16, order=[0, 1, 2], branch_from=c.out_dir)
    assert train(back) == 0
    assert not [name for name in state_of(back)['model'] if 'spans' in name]


def test_flops_that_are_counted_wrongly_are_refused(config, monkeypatch, tmp_path):
    "Before the first step. A loss may count its own, and then the run logs what it counts."
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
    model = load_model(c.out_dir)
    assert state_of(c)['flops'] == c.steps * c.batch_size * c.context * counted(model, c.context)


def test_a_config_chooses_the_class_of_the_core(config):
    c = config(n_layer=4, cut='1-2-1', core=SlowCore, recurrence=3, curriculum=0.0)
    train(c)
    core = core_of(load_model(c.out_dir))
    assert type(core) is SlowCore and core.r == 3
    assert json.loads((ROOT / c.out_dir / 'run.json').read_text())['config']['core'] == 'SlowCore'
    for wrong in (GatedLoop, penalty):
        with pytest.raises(Refused, match='must be a subclass of Core'):
            train(config('wrong', n_layer=4, cut='1-2-1', core=wrong))
    with pytest.raises(Refused, match='has no effect without cut'):
        train(config('uncut', core=SlowCore))


def test_span_sets_an_argument_of_the_spans_in_the_order(tiny):
    "And undoes it. An argument that shaped the weights, and one that nobody takes, are refused."
    model = tiny(order=[0, GatedLoop([1, SlowCore([2], r=2)]), 3])
    plain = model(TOKENS)
    with in_way(model, dict(span='strength:0.0')):
        assert torch.equal(model(TOKENS), model(TOKENS, order=[0, 3]))
    with in_way(model, dict(span='share:0.25', r=3)):
        inner = core_of(model)
        assert (inner.share, inner.r) == (0.25, 3)
        assert inner.adapter.weight.equal(model.spans[1].adapter.weight)
        assert not torch.equal(model(TOKENS), plain)
    assert torch.equal(model(TOKENS), plain)
    for text, message in (('times:3', 'times decides the shape of the weights of GatedLoop'),
                          ('rank:3', 'write --span=NAME:VALUE with an argument of a Span'),
                          ('r:3', r'for r, --r=VALUE'), ('share', 'write --span=NAME:VALUE'),
                          ('share:much', 'must be float')):
        with pytest.raises(Refused, match=message), in_way(model, dict(span=text)):
            pass


STORED = ROOT / 'tests/stored/a78e6da'


@pytest.mark.parametrize('name', ['plain', 'grown', 'looped', 'window', 'recurrent', 'authors'])
def test_checkpoints_of_a78e6da_are_read(name, config, tmp_path):
    "They compute what they computed, and a new run may begin with them."
    drawn = torch.nn.init.trunc_normal_(torch.empty(1), a=-3, b=3,
                                        generator=torch.Generator().manual_seed(0))
    if name == 'authors' and abs(drawn.item() - 1.541) > 1e-3:
        pytest.skip('this version of torch draws the first states of the authors otherwise')
    expected = torch.load(STORED / 'expected.pt')[name]
    model = load_model(STORED / name)
    tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.allclose(model(tokens)[:, ::8], expected['logits'], atol=1e-5)
    assert torch.equal(model.generate(tokens[:, :6], 12, temperature=0), expected['text'])
    c = config(init_from=str(STORED / name), steps=1, warmup_steps=0, decay_steps=0)
    assert train(c) == 0
    first = torch.load(f'{c.out_dir}/ckpt.pt', weights_only=True)
    assert first['model'].keys() == model.state_dict().keys()


TWICE = '''
import os
import sys

import torch

sys.path.insert(0, {ideas!r})
from ouro import *      # noqa: E402, F403


def metric(model, loader):
    torch.save(model.state_dict(), f"weights-{{os.environ.get('RANK', 'one')}}.pt")
    return {{}}
'''


def test_a_loss_of_ones_own_in_two_processes(data, tmp_path):
    """Two processes log what one does, and have equal weights after 20 steps: DDP also averages
    the gradients of the gate, which nothing but the loss reads."""
    (tmp_path / 'twice.py').write_text(TWICE.format(ideas=str(ROOT / 'config/ideas')))
    words = [str(ROOT / 'train.py'), 'twice.py', f'--data={data}', '--n_embd=32', '--n_head=2',
             '--context=16', '--batch_size=4', '--steps=20', '--log_every=1', '--eval_every=100',
             '--device=cpu']
    # two runs in the same two processes, one after the other
    (tmp_path / 'runs.py').write_text(f'import sys\nsys.path.insert(0, {str(ROOT)!r})\n'
                                      'import train\nfor name in ("first", "2"):\n'
                                      '    words = [*sys.argv[1:], f"--out_dir={name}"]\n'
                                      '    train.train(train.read(train.Config, words))\n')
    for n in (1, 2):
        words[0] = words[0] if n == 1 else 'runs.py'
        start = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}']
        subprocess.run([sys.executable, *start * (n > 1), *words,
                        *[f'--out_dir={n}'] * (n == 1)], check=True,
                       cwd=tmp_path, env=os.environ | dict(OMP_NUM_THREADS='1'),
                       capture_output=True)
    one, two = (log_of(Config(out_dir=str(tmp_path / str(n)))) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert {key: a[key] for key in ('loss', 'grad_norm') if key in a} == pytest.approx(
            {key: b[key] for key in ('loss', 'grad_norm') if key in b}, rel=1e-3)
    first, second, alone = (torch.load(tmp_path / f'weights-{rank}.pt') for rank in (0, 1, 'one'))
    assert same(first, second)
    gate = 'spans.0.gate.weight'
    assert torch.allclose(first[gate], alone[gate], atol=1e-4) and first[gate].abs().sum() > 0
