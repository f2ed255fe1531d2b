"""An order's items are numbers and steps, and a step holds items: each nesting by hand.

Promised: the four lines of README compute what the slow forms of their files do; a window in a
core, a core in a window and a window in a window are those loops written out; a grown core computes
what its parent does; a window in another family's order is the same window by hand; and what an old
attribute did is done or refused.
"""
import copy

import pytest
import torch
from families import tiny as family

from nanodepth.common.errors import Refused
from nanodepth.grow import untie
from nanodepth.loop import running
from nanodepth.model import ModelConfig
from nanodepth.models import checkpoint
from nanodepth.models.orders import in_order
from nanodepth.probe import future_effects, order_sweep, skip_blocks
from nanodepth.retrofit import Core, core_of, surgery
from nanodepth.wrapper import looped, Window, naive, rk

TOKENS = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[False, True], ids=['plain', 'ln_scaling'])
def six(tiny, request):
    model = tiny(n_layer=6, ln_scaling=request.param)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return model


def said(model, x, position):
    "Logits of the layers 4 and 5, the first of which stands at a position."
    return model.head(model.norm(model.run(x, [4, 5], position=position)))


def half_steps(g, x):
    "rk with K = 2 and beta = 0.5, written out."
    plain = g(x)
    x = torch.lerp(x, plain, 0.5)
    x = torch.lerp(x, g(x), 0.5)
    return torch.lerp(x, plain, 0.5)


def test_the_four_ways_to_write_the_list(six):
    looping = copy.deepcopy(six)
    looping.order = [0, 1, 2, 1, 2, 3]
    grown = untie(looping, looping.order)
    assert torch.equal(grown(TOKENS), looping(TOKENS)) and len(grown.layers) == 6
    core = copy.deepcopy(six)
    core.order = [0, 1, Core([2, 3], r=4), 4, 5]
    assert torch.equal(core(TOKENS), surgery(six, '2-2-2')(TOKENS))
    window = copy.deepcopy(six)
    window.order = [0, 1, 2, Window([3, 4], rk, K=3), 5]
    with looped(six, (3, 4), 'rk', 3):
        assert torch.equal(window(TOKENS), six(TOKENS))
    assert str(window.order) == "[0, 1, 2, Window([3, 4], 'rk', K=3), 5]"
    assert window.flops_per_token() - six.flops_per_token() == 4 * (
        six.flops_per_token([0]) - six.flops_per_token([]))


@torch.no_grad()
def test_a_window_in_a_core(six):
    model = surgery(six, '2-2-2', recurrence=3, inject='linear')
    core = core_of(model)
    core.items = [2, Window([3], rk, K=2)]
    model.order = model.order
    e = model.run(model.embed(TOKENS), [0, 1])
    s = core.first_state(e, 0, None)
    for i in range(3):
        x = model.run(model.adapter(torch.cat((s, e), -1)), [2], position=2 + 2 * i)
        s = half_steps(lambda x: model.run(x, [3], position=3 + 2 * i), x)
    assert torch.equal(said(model, s, 8), model(TOKENS)) and len(model.unrolled()) == 10
    with pytest.raises(Refused, match='has other steps'):
        checkpoint.describe(model)


@torch.no_grad()
def test_a_core_in_a_window_and_a_window_in_a_window(six):
    model = surgery(six, '2-2-2', recurrence=2)
    core = core_of(model)
    model.order = [0, Window([1, core], rk, K=2), 4, 5]
    x = model.run(model.embed(TOKENS), [0])
    x = half_steps(lambda x: model.run(x, [1, core], position=1), x)
    assert torch.equal(said(model, x, 6), model(TOKENS))
    model = copy.deepcopy(six)
    model.order = [0, Window([1, Window([2], naive, K=2), 3], rk, K=2), 4, 5]

    def g(x):
        x = model.run(x, [1], position=1)
        for _ in range(2):
            x = model.run(x, [2], position=2)
        return model.run(x, [3], position=3)
    x = half_steps(g, model.run(model.embed(TOKENS), [0]))
    assert torch.equal(said(model, x, 4), model(TOKENS))


def test_a_core_grows_with_its_optimizer(six):
    model = surgery(six, '2-2-2', recurrence=3, inject='linear')
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(TOKENS, TOKENS).backward()
    optimizer.step()
    order = [0, 1, Core([2, 3, 2, 3], r=3, inject='linear'), 4, 5]
    longer = copy.deepcopy(model)
    longer.order = order
    states = {name: optimizer.state[p]['exp_avg'].clone() for name, p in model.named_parameters()}
    grown = untie(model, order, optimizer)
    with torch.no_grad():
        assert torch.equal(grown(TOKENS), longer(TOKENS))
    assert core_of(grown).items == [2, 3, 4, 5] and len(grown.layers) == 8
    names = dict(grown.named_parameters())
    for new, old in (('layers.4.attn.q.weight', 'layers.2.attn.q.weight'),
                     ('adapter.weight', 'adapter.weight')):
        assert torch.equal(optimizer.state[names[new]]['exp_avg'], states[old])
    assert {*map(id, optimizer.param_groups[0]['params'])} == {*map(id, names.values())}
    assert not hasattr(untie(model, [0, 1, 2, 3, 4, 5]), 'adapter')


@torch.no_grad()
@pytest.mark.parametrize('name', ['llama', 'gpt2', 'gemma3_text'])
def test_a_window_in_another_familys_order(name):
    "By hand: each layer is a function from stream to stream, with the arguments that it was given."
    model = family(name)
    tokens = TOKENS % 97
    layers = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)
              and len(module) == 6][0]
    before = model(tokens).logits
    given, ends = {}, {}
    hooks = [layer.register_forward_pre_hook(
        lambda layer, args, kwargs, i=i: given.update({i: (args, kwargs)}), with_kwargs=True)
        for i, layer in enumerate(layers)]
    model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()

    def run(i, x):
        out = layers[i](x, *given[i][0][1:], **given[i][1])
        return out[0] if isinstance(out, tuple) else out
    x = given[0][0][0] if given[0][0] else given[0][1]['hidden_states']
    for i in (0, 1, 2, 1):
        x = run(i, x)
    x = half_steps(lambda x: run(3, run(2, x)), x)
    for i in (4, 5):
        x = run(i, x)
    hooked = layers[5].register_forward_hook(lambda layer, args, out: ends.update(
        stream=out[0] if isinstance(out, tuple) else out))
    with in_order(model, [0, 1, 2, 1, Window([2, 3], rk, K=2), 4, 5]):
        model(tokens, use_cache=False)
    hooked.remove()
    assert torch.equal(ends['stream'], x)
    assert torch.equal(model(tokens).logits, before)


@torch.no_grad()
@pytest.mark.parametrize('name', ['llama', 'gpt2'])
def test_hidden_states_of_a_looped_model_of_another_family(name):
    "Within the window those of the model's own pass, behind it those of the loop."
    model = family(name)
    plain = model(TOKENS, output_hidden_states=True)
    with looped(model, (2, 3)):
        want = model(TOKENS).logits
        for each in (model, copy.deepcopy(model)):
            now = each(TOKENS, output_hidden_states=True, use_cache=True)
            assert torch.equal(now.logits, want)
            for i in range(4):          # the embedding, and the layers 0 to 2
                assert torch.equal(now.hidden_states[i], plain.hidden_states[i])
            assert not torch.equal(now.hidden_states[4], plain.hidden_states[4])
    assert not model._forward_pre_hooks


def test_what_an_old_attribute_did_is_done_or_refused(six):
    core = surgery(six, '2-2-2', inject='linear')
    before = core(TOKENS)
    core.recurrence = 2
    assert core_of(core).recurrence == 2 and not torch.equal(core(TOKENS), before)
    assert (core.prelude, core.core, core.coda) == ([0, 1], [2, 3], [4, 5])
    with pytest.raises(Refused, match='coda belongs to the order'):
        core.coda = []
    core.config.order = [0, 1, 2, 3, 4, 5]
    with pytest.raises(Refused, match='config.order was set beside an order with steps'):
        core(TOKENS)
    for name in ('recurrence', 'fresh', 'recompute', 'table', 'backprop_depth'):
        with pytest.raises(Refused, match=f'{name} is a setting of a recurrent core'):
            setattr(six, name, 3)
    with pytest.raises(Refused, match='r: such settings are for'):
        six(TOKENS, r=3)
    with looped(six, (2, 3)):
        with pytest.raises(Refused, match='r: such settings are for'):
            six(TOKENS, r=3)
        with pytest.raises(Refused, match='has a Window in it'):
            six(TOKENS, order=[0, 1, 2])
        with pytest.raises(Refused, match='has a Window in it'), running(six, [0, 1, 2]):
            pass
        with pytest.raises(Refused, match='a looped window|has other steps'):
            checkpoint.describe(six)
    with pytest.raises(Refused, match='an order has one core'):
        six.order = [0, Core([1]), Core([2])]


def test_recompute_with_ln_scaling_keeps_every_position(six):
    model = surgery(six, '2-2-2', inject='linear')
    grads = []
    for model.recompute in (False, True):
        model.zero_grad()
        model(TOKENS, TOKENS, r=5, backprop_depth=4).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_an_order_for_one_call_or_for_good_is_run_or_refused(six):
    with pytest.raises(Refused, match='a core brings an adapter into the model: set model.order'):
        six(TOKENS, order=[0, Core([1], r=2), 2])
    with pytest.raises(Refused, match='a config holds numbers'):
        ModelConfig(n_layer=2, order=[0, Window([1], naive, K=2)])
    own = [0, Window([1, 2], naive, K=2), 3, 4, 5]
    once = six(TOKENS, order=own)
    six.order = own
    assert torch.equal(six(TOKENS), once)
    with running(six, [0, Window([3], naive, K=2)]):
        assert not torch.equal(six(TOKENS), once)
    assert six.order == own and torch.equal(six(TOKENS), once)


def test_an_effect_of_an_order_that_is_given_is_that_of_the_models_own(six):
    core = [0, Core([1, 2], r=2), 3]
    core[1].fresh = False
    six.order = core
    own = future_effects(six, TOKENS)
    six.order = range(6)                # the adapter stays
    assert torch.equal(future_effects(six, TOKENS, order=core), own)
    with pytest.raises(Refused, match='local effects'):
        future_effects(six, TOKENS, order=core, propagate=False)


def test_what_a_core_brings_fits_the_model_or_is_refused(six, tmp_path):
    with pytest.raises(Refused, match='adapter.weight is new in this order'):
        untie(six, [0, Core([1]), 2], torch.optim.SGD(six.parameters()))
    plain = six(TOKENS)
    six.order = [0, 1, Core([2, 3], r=2, inject='linear'), 4, 5]
    with pytest.raises(Refused, match="inject='add' does not fit the adapter"):
        six.order = [0, Core([1], inject='add'), 2]
    with pytest.raises(Refused, match='backprop_depth=0 is too small'):
        six(TOKENS, backprop_depth=0)
    six.order = range(6)                # the adapter stays, and no file has it
    opened = checkpoint.build_model(checkpoint.describe(six), tmp_path)
    assert torch.equal(opened(TOKENS), plain)
    assert not any('adapter' in name for name in untie(six, [0, 1]).state_dict())


def test_a_sweep_leaves_out_what_would_lose_the_core(six, tiny):
    six.order = [0, 1, Core([2, 3], r=2), 4]
    rows = order_sweep(six, lambda model: dict(logits=model(TOKENS)), skip_blocks, [1])
    assert [(row['size'], row['start']) for row in rows] == [(0, 0), (1, 0), (1, 1), (1, 3)]
    with running(six, [0, six.order[2], 4]):
        assert torch.equal(rows[2]['logits'], six(TOKENS))
    with pytest.raises(Refused, match='in a model of another width'):
        tiny(n_embd=64).order = [0, six.order[2]]
