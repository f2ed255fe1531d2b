"grow.py: which layer a grown one is a copy of, and that growing is untied looping."
import copy
import dataclasses
import runpy
import sys

import pytest
import torch
from conftest import ROOT

from nanodepth.commands.cost import empty, planned
from nanodepth.grow import GROWTH, double, growth_plan, lidas, midas, prop_schedule, stack, untie
from nanodepth.model import Refused
from nanodepth.train import Config, make_optimizers, read, stages


def test_origins_of_the_papers_stages():
    "Blocks of four: the start of the slice that stands there twice, for 4 -> 8 up to 28 -> 32."
    for operator, starts in ((midas, [0, 0, 4, 4, 8, 8, 12]), (lidas, [0, 2, 4, 6, 8, 10, 12])):
        for n, start in zip(range(4, 32, 4), starts):
            assert operator(n, 4) == [*range(start + 4), *range(start, n)]
    assert midas(8, 4) == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert lidas(8, 4) == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7]


def test_by_hand():
    assert lidas(6, 3) == [0, 1, 2, 3, 4, 2, 3, 4, 5]
    assert midas(6, 3) == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert stack(4, 2) == [0, 1, 2, 3, 2, 3]
    assert double(3) == [0, 1, 2, 0, 1, 2]
    for wrong in (lambda: lidas(4, 0), lambda: lidas(4, 5), lambda: lidas(4, -1),
                  lambda: midas(5, 2)):
        with pytest.raises(AssertionError):
            wrong()


ORDERS = [[0, 1, 2, 3], [0, 1, 2, 3, 2, 3], lidas(4, 2), midas(4, 2), double(4), [3, 1], [2, 2, 2],
          [3, 2, 1, 0, 0]]


@pytest.mark.parametrize('order', ORDERS, ids=str)
@pytest.mark.parametrize('fields', [dict(),
                                    dict(tie_embeddings=False, ln_scaling=True, n_kv_head=2)],
                         ids=['tied', 'untied'])
def test_growing_is_untied_looping(tiny, order, fields):
    model = tiny(**fields)
    tokens = torch.randint(50, (2, 9))
    before = copy.deepcopy(model.state_dict())
    new = untie(model, order)
    assert torch.equal(new(tokens), model(tokens, order=order))
    assert (new.order == list(range(len(order))) and new.config.n_layer == len(new.layers)
            == len(order))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    old_memory = {p.data_ptr() for p in model.parameters()}
    new_memory = [p.data_ptr() for p in new.parameters()]
    assert not old_memory & set(new_memory) and len(new_memory) == len(set(new_memory))
    assert (new.head.weight is new.embed.weight) == model.config.tie_embeddings
    assert new.flops_per_token() == model.flops_per_token(order)


def test_tied_gradients_are_the_sums_of_the_untied_ones(tiny):
    model, order = tiny().double(), [0, 1, 2, 1, 2, 3, 2]
    new = untie(model, order)
    tokens, targets = torch.randint(50, (2, 2, 9))
    model(tokens, targets, order=order).backward()
    new(tokens, targets).backward()
    for i, layer in enumerate(model.layers):
        for (name, p) in layer.named_parameters():
            total = sum(new.layers[d].get_parameter(name).grad for d in range(7) if order[d] == i)
            torch.testing.assert_close(p.grad, total, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.embed.weight.grad, new.embed.weight.grad, rtol=1e-10,
                               atol=1e-12)


@pytest.mark.parametrize('kind', ['--optimizer=muon', '--optimizer=adamw', 'config/adamw_star.py'])
def test_every_copy_has_its_sources_optimizer_state_and_shares_nothing(tiny, kind):
    model, order = tiny(), [0, 1, 2, 1, 2, 3]
    optimizers = make_optimizers(model, read(Config, [kind, '--lr=1e-2']))
    tokens = torch.randint(50, (2, 9))
    for _ in range(3):
        model(tokens, tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    old_state = {p: s for o in optimizers for p, s in o.state.items()}
    groups = lambda: [(group['peak'], group['weight_decay'], list(group['params']))
                      for o in optimizers for group in o.param_groups]
    old_groups = groups()
    new = untie(model, order, optimizers)
    source = {new.layers[d].get_parameter(name): p for d, i in enumerate(order)
              for name, p in model.layers[i].named_parameters()}
    source |= {new.embed.weight: model.embed.weight, new.norm.weight: model.norm.weight}
    new_state = {p: s for o in optimizers for p, s in o.state.items()}
    assert {id(p) for p in new_state} == {id(p) for p in new.parameters()}
    memory = set()
    for p, state in new_state.items():
        assert torch.equal(p, source[p]) and state.keys() == old_state[source[p]].keys() and state
        for key, value in state.items():
            old = old_state[source[p]][key]
            assert torch.equal(value, old) and value.data_ptr() != old.data_ptr()
            assert value.data_ptr() not in memory
            memory.add(value.data_ptr())
    for (peak, decay, params), (old_peak, old_decay, old_params) in zip(groups(), old_groups):
        assert (peak, decay) == (old_peak, old_decay)
        assert {id(source[p]) for p in params} == {id(p) for p in old_params}
    assert sum(len(params) for *_, params in groups()) == len(list(new.parameters()))


@pytest.mark.parametrize('grows, ordinary, parameters, grown, full, lengths', [
    ('360m_lidas', '360m_baseline', 361_821_120, 476_147.897, 613_527.488,
     [4722, 9444, 14166, 18888, 23611, 28333, 33055, 37781]),
    ('1b7_lidas', '1b7_baseline', 1_711_376_384, 3_736_608.182, 4_813_222.102,
     [8095, 16190, 24285, 32380, 40476, 48574])])
def test_table_7_comes_out_of_the_configs_to_the_last_digit(grows, ordinary, parameters, grown,
                                                            full, lengths):
    run, deep = (read(Config, [f'config/smollm_{name}.py']) for name in (grows, ordinary))
    assert empty(run, run.n_layer).num_params() == parameters
    assert round(planned(run) / 1e15, 3) == grown and round(planned(deep) / 1e15, 3) == full
    assert prop_schedule(170_000, len(lengths)) == lengths
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    assert [first for first, *_ in stages(run)] == starts


def test_schedules_by_hand():
    assert prop_schedule(100, 4, 0) == [25, 25, 25, 25]
    assert prop_schedule(100, 3, 2) == [7, 28, 65]
    assert prop_schedule(111, 3, -1) == [60, 30, 21]
    assert prop_schedule(10, 1) == [10]
    assert growth_plan('double', 8, 2, 70) == [(0, None, 2), (11, double(2), 4), (34, double(4), 8)]
    assert growth_plan('lidas', 6, 3, 90) == [(0, None, 3), (30, lidas(3, 3), 6)]
    assert growth_plan(lidas, 6, 3, 90) == growth_plan('lidas', 6, 3, 90)
    assert growth_plan('stack', 2, 2, 90) == [(0, None, 2)]
    assert growth_plan('stack', 6, 2, 90, start=4) == [(0, None, 4), (30, stack(4, 2), 6)]
    firsts = [(first, n_layer) for first, _, n_layer in growth_plan('lidas', 32, 4, 90)]
    for name in {*GROWTH} - {'double'}:         # a block more in each stage, also in the first
        plan = growth_plan(name, 32, 4, 90)
        assert [(first, n_layer) for first, _, n_layer in plan] == firsts
        assert [order for _, order, _ in plan[1:]] == [GROWTH[name](n, 4) for n in range(4, 32, 4)]
    with pytest.raises(Refused,
                       match='double from 3 layers does not reach n_layer=8, but 3, 6, 12'):
        growth_plan('double', 8, 3, 100)
    with pytest.raises(Refused, match='3 steps before the decay are too few'):
        growth_plan('lidas', 8, 2, 3)
    with pytest.raises(AssertionError):         # it does not grow at all
        growth_plan(lambda n_layer, block: [*range(n_layer)], 8, 2, 100)


def test_the_isoflops_baseline_costs_what_lidas_costs():
    lidas, baseline = (read(Config, [f'config/{name}.py', '--vocab_size=257'])
                       for name in ('lidas', 'baseline'))
    shorter = dataclasses.replace(baseline, steps=482)          # as docs/FIGURES.md says
    assert abs(planned(shorter) - planned(lidas)) <= planned(baseline) / baseline.steps / 2


def test_the_script_says_every_growth_to_the_last(capsys, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['grow.py', '32', '4'])
    runpy.run_path(str(ROOT / 'grow.py'), run_name='__main__')
    lines = capsys.readouterr().out.splitlines()
    last = [line.split(':')[1] for line in lines if line.strip().startswith('28 ->  32')]
    assert [*map(int, last[lines[0].startswith('midas')].split())] == lidas(28, 4)
