"Test grow.py: the layer from which each layer of a grown model is copied, and untied looping."
import copy
import json
from itertools import chain

import numpy as np
import pytest
import torch
from helpers import same
from own_spans import GatedLoop, names

from grow import double, growth_plan, lidas, midas, prop_schedule, stack, states_of_copies, untie
from model import Refused
from retrofit import core_of, surgery
from training.optimizers import load_states, make_optimizers, states_of
from training.plan import Config
from training.settings import read


def test_growth_operators_of_the_papers():
    """With blocks of four layers, from 4 -> 8 up to 28 -> 32. `starts` are the first layers of the
    slices that are copied."""
    for operator, starts in ((midas, [0, 0, 4, 4, 8, 8, 12]), (lidas, [0, 2, 4, 6, 8, 10, 12])):
        for n, start in zip(range(4, 32, 4), starts):
            assert operator(n, 4) == [*range(start + 4), *range(start, n)]
    assert lidas(6, 3) == [0, 1, 2, 3, 4, 2, 3, 4, 5] and midas(3, 1) == [0, 1, 1, 2]
    assert stack(4, 2) == [0, 1, 2, 3, 2, 3]
    assert double(3, 3) == [0, 1, 2, 0, 1, 2]
    for wrong in (lambda: lidas(4, 0), lambda: lidas(4, 5), lambda: midas(5, 2)):
        with pytest.raises(Refused):
            wrong()


@pytest.mark.parametrize('order', [[0, 1, 2, 3, 2, 3], lidas(4, 2), [3, 1], [2, 2, 2]], ids=str)
@pytest.mark.parametrize('fields', [dict(),
                                    dict(tie_embeddings=False, ln_scaling=True, n_kv_head=2)],
                         ids=['tied', 'untied'])
def test_untie_computes_what_the_looped_model_does(tiny, order, fields):
    "It shares no memory with that model, which stays as it was."
    model = tiny(**fields)
    tokens = torch.randint(50, (2, 9))
    before = copy.deepcopy(model.state_dict())
    new = untie(model, order)
    assert torch.equal(new(tokens), model(tokens, order=order))
    assert new.order == list(range(len(order)))
    assert new.config.n_layer == len(new.layers) == len(order)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    memory = [p.data_ptr() for each in (model, new) for p in each.parameters()]
    assert len(memory) == len({*memory})
    assert (new.head.weight is new.embed.weight) == model.config.tie_embeddings
    assert new.flops_per_token() == model.flops_per_token(order)


@pytest.mark.parametrize('core', [False, True])
@pytest.mark.parametrize('kind', ['--optimizer=muon', '--optimizer=adamw', 'config/adamw_star.py'])
def test_untied_layers_get_copies_of_the_optimizer_states(tiny, kind, core):
    model, order = tiny(), [0, 1, 2, 1, 2, 3]
    given = order
    if core:
        model = surgery(model, '1-2-1', r=3)
        core_of(model).items = [1, 2, 1, 2]
        given = model.order
    optimizers = make_optimizers(model, read(Config, [kind, '--lr=1e-2']))
    tokens = torch.randint(50, (2, 9))
    for _ in range(3):
        model(tokens, tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    old = states_of(optimizers, model)
    want, untouched = model(tokens, order=given), str(given)
    new = untie(model, given)
    assert torch.equal(new(tokens), want) and str(given) == untouched
    if core:
        assert str(new.order) == "[0, Core([1, 2, 3, 4], {'r': 3, 'backprop_depth': 8}), 5]"
    optimizers = make_optimizers(new, read(Config, [kind, '--lr=1e-2']))
    copies = {name: states_of_copies(states, given) for name, states in old.items()}
    assert load_states(optimizers, new, copies) == 0
    found = states_of(optimizers, new)
    assert {*chain.from_iterable(found.values())} == {name for name, _ in new.named_parameters()}
    memory = [value.data_ptr() for states in old.values() for state in states.values()
              for value in state.values()]
    for name, states in found.items():
        for parameter, state in states.items():
            top, _, rest = parameter.partition('.')
            if top == 'layers':
                i, _, rest = rest.partition('.')
                parameter = f'layers.{order[int(i)]}.{rest}'
            assert same(state, old[name][parameter]) and state
            memory += [value.data_ptr() for value in state.values()]
    assert len({*memory}) == len(memory)


def test_growth_plan_by_hand():
    assert prop_schedule(100, 4, 0) == [25, 25, 25, 25]
    assert prop_schedule(111, 3, -1) == [60, 30, 21]
    assert growth_plan('double', 2, 8, 2, 70) == [(11, double(2, 2)), (34, double(4, 2))]
    assert growth_plan('stack', 4, 6, 2, 90) == [(30, stack(4, 2))]
    [(_, order)] = growth_plan(lambda n, block: np.r_[0:n, 0:block], 2, 4, 2, 9)
    assert json.dumps(order) == '[0, 1, 0, 1]'          # numbers of numpy become int


@pytest.mark.parametrize('grow, start, end, block, message', [
    ('double', 3, 8, 3, 'double grows to 3, 6, 12 layers, and n_layer=8 is not one of these'),
    ('lidas', 0, 32, 0, 'lidas cannot grow from 0 layers to 32 in blocks of 0'),
    ('midas', 8, 4, 8, 'midas cannot grow from 8 layers to 4'),
    ('lidas', 8, 8, 2, 'lidas cannot grow from 8 layers to 8'),
    (lambda n, block: [*range(n)], 2, 8, 2, 'must return more than 2 layers'),
    (lambda n, block: [*range(n + block)], 2, 8, 2, 'must return more than 2 layers')])
def test_a_growth_that_misses_its_depth_is_refused(grow, start, end, block, message):
    with pytest.raises(Refused, match=message):
        growth_plan(grow, start, end, block, 3)


TEXTS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def test_a_span_is_copied_with_its_weights_and_states(tiny):
    model = tiny(order=[0, GatedLoop([1, 2]), 3])
    optimizers = make_optimizers(model, Config(lr=1e-2))
    for _ in range(2):
        model(TEXTS, TEXTS).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twin = copy.deepcopy(model)
    assert twin.spans[0] is twin.order[1] and twin.spans[0] is not model.spans[0]
    assert torch.equal(twin(TEXTS), model(TEXTS))
    new = untie(model, model.order)
    assert torch.equal(new(TEXTS), model(TEXTS))
    assert new.spans[0].vectors is not model.spans[0].vectors
    states = states_of(optimizers, model)
    copies = {kind: states_of_copies(of_kind, model.order) for kind, of_kind in states.items()}
    assert same(copies['AdamW']['spans.0.vectors'], states['AdamW']['spans.0.vectors'])
    assert {*copies['AdamW'], *copies['Muon']} == {*names(new)}
