"""An order's items are numbers and Steps, and a Step holds items: each nesting by hand.

Promised: a plain Step is as if it were not there, and a Step of one's own is the order that it
unrolls to; the four lines of README compute what the slow forms of their files do; a window in a
core, a core in a window and a window in a window are those loops written out; a grown core computes
what its parent does; a window in another family's order is the same window by hand.
"""
import copy

import pytest
import torch
from families import tiny as family

from nanodepth.grow import untie
from nanodepth.loop import running
from nanodepth.looping.patch import looped
from nanodepth.model import Refused, Step, seen, unrolled
from nanodepth.models.orders import in_order
from nanodepth.probe import depth_score, future_effects, order_sweep, skip_blocks
from nanodepth.retrofit import Core, core_of, new_adapter, parts_of, surgery
from nanodepth.train import load, save
from nanodepth.wrapper import Window, naive, rk

TOKENS = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[False, True], ids=['plain', 'ln_scaling'])
def six(tiny, request):
    model = tiny(n_layer=6, ln_scaling=request.param)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    return model


def last_two(model, x, depth):
    "Logits of the layers 4 and 5, the first of which stands at a depth."
    return model.head(model.norm(model.run(x, [4, 5], depth)))


def half_steps(g, x):
    "rk with K = 2 and beta = 0.5, written out."
    plain = g(x)
    x = torch.lerp(x, plain, 0.5)
    x = torch.lerp(x, g(x), 0.5)
    return torch.lerp(x, plain, 0.5)


def in_pieces(model, order, pieces=(5, 1, 4, 1, 1)):
    "Logits with a cache, and the cache."
    cache = {}
    out = [model(piece, order=order, cache=cache) for piece in TOKENS.split(pieces, dim=1)]
    return torch.cat(out, dim=1), cache


class Again(Step):
    "Its items twice, one run after the other."

    def __call__(self, model, x, depth, **how):
        for _ in range(2):
            x = model.run(x, self.items, depth, **how)
            depth += len(unrolled(self.items, how.get('r')))
        return x

    def unrolled(self, r=None):
        return 2 * super().unrolled(r)

    def flops(self, model, context, r=None, backprop_depth=None):
        return 2 * super().flops(model, context, r, backprop_depth)


@torch.no_grad()
def test_a_plain_step_is_as_if_it_were_not_there(six):
    order, plain = [0, Step([1, Step([2, 1])]), 3, Step([]), 5], [0, 1, 2, 1, 3, 5]
    assert six.unrolled(order) == plain
    assert torch.equal(six(TOKENS, order=order), six(TOKENS, order=plain))
    (logits, cache), (plain_logits, plain_cache) = in_pieces(six, order), in_pieces(six, plain)
    assert torch.equal(logits, plain_logits) and [*cache] == ['layers', *range(6)]
    for d in range(6):
        assert torch.equal(cache[d][0], plain_cache[d][0])
        assert torch.equal(cache[d][1], plain_cache[d][1])
    assert six.flops_per_token(order) == six.flops_per_token(plain)
    grown = untie(six, order)
    assert grown.order[1].items[1].items == [2, 3] and len(grown.layers) == 6
    assert torch.equal(grown(TOKENS), six(TOKENS, order=plain))
    scores = []
    for each in (order, plain):
        with running(six, each):
            scores.append(depth_score(six, TOKENS)[1])
    assert torch.equal(*scores)


@torch.no_grad()
def test_a_step_of_ones_own_is_the_order_that_it_unrolls_to(six):
    order = [0, Again([1, Again([2]), 3]), 4, 5]
    by_hand = [0, 1, 2, 2, 3, 1, 2, 2, 3, 4, 5]
    whole = six(TOKENS, order=order)
    assert six.unrolled(order) == by_hand
    assert torch.equal(whole, six(TOKENS, order=by_hand))
    assert six.flops_per_token(order) == six.flops_per_token(by_hand)
    logits, cache = in_pieces(six, order)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    assert [*cache] == ['layers', *range(11)] and seen(cache, 10) == 12
    slow = TOKENS
    for _ in range(5):
        slow = torch.cat((slow, six(slow, order=by_hand)[:, -1:].argmax(-1)), 1)
    assert torch.equal(six.generate(TOKENS, 5, temperature=0, order=order), slow)
    grown = untie(six, [0, Again([1, 2]), 2, 5])        # layers of a Step's own: each item once
    assert len(grown.layers) == 5 and grown.unrolled() == [0, 1, 2, 1, 2, 3, 4]
    assert torch.equal(grown(TOKENS), six(TOKENS, order=[0, 1, 2, 1, 2, 2, 5]))


def test_a_core_in_a_model_without_an_adapter_is_an_error(six):
    order = [0, Core([1], r=2), 2]
    with pytest.raises(Refused, match='a Core needs an adapter, .* surgery makes one'):
        six(TOKENS, order=order)
    six.order = order
    with pytest.raises(Refused, match='surgery makes one'):
        six(TOKENS)
    six.adapter = new_adapter(32)
    assert torch.isfinite(six(TOKENS)).all()


@torch.no_grad()
def test_two_windows_are_run_one_after_the_other(six):
    six.order = [0, Window([1, 2], rk, K=2), Window([3], naive, K=2), 4, 5]
    x = half_steps(lambda x: six.run(x, [1, 2], depth=1), six.run(six.embed(TOKENS), [0]))
    for _ in range(2):
        x = six.run(x, [3], depth=3)
    assert torch.equal(last_two(six, x, 4), six(TOKENS))


def test_the_four_ways_to_write_the_list(six):
    looping = copy.deepcopy(six)
    looping.order = [0, 1, 2, 1, 2, 3]
    grown = untie(looping, looping.order)
    assert torch.equal(grown(TOKENS), looping(TOKENS)) and len(grown.layers) == 6
    core = copy.deepcopy(six)
    core.order, core.adapter = [0, 1, Core([2, 3], r=4), 4, 5], new_adapter(32)
    assert torch.equal(core(TOKENS), surgery(six, '2-2-2')(TOKENS))
    window = copy.deepcopy(six)
    window.order = [0, 1, 2, Window([3, 4], rk, K=3), 5]
    with looped(six, (3, 4), 'rk', 3):
        assert torch.equal(window(TOKENS), six(TOKENS))
    assert str(window.order) == "[0, 1, 2, Window([3, 4], 'rk', K=3), 5]"
    assert window.flops_per_token() - six.flops_per_token() == 4 * (
        six.flops_per_token([0]) - six.flops_per_token([]))


@torch.no_grad()
def test_a_window_in_a_core(six, tmp_path):
    model = surgery(six, '2-2-2', r=3, inject='linear')
    core = core_of(model)
    core.items = [2, Window([3], rk, K=2)]
    e = model.run(model.embed(TOKENS), [0, 1])
    s = core.first_state(e)
    for i in range(3):
        x = model.run(model.adapter(torch.cat((s, e), -1)), [2], depth=2 + 2 * i)
        s = half_steps(lambda x: model.run(x, [3], depth=3 + 2 * i), x)
    assert torch.equal(last_two(model, s, 8), model(TOKENS)) and len(model.unrolled()) == 10
    save(tmp_path, model, [])
    opened, _ = load(tmp_path)
    assert str(opened.order) == str(model.order) == (
        "[0, 1, Core([2, Window([3], 'rk', K=2)], r=3), 4, 5]")
    assert torch.equal(opened(TOKENS), model(TOKENS))


@torch.no_grad()
def test_a_core_in_a_window_and_a_window_in_a_window(six):
    model = surgery(six, '2-2-2', r=2, inject='linear')
    core = core_of(model)
    model.order = [0, Window([1, core], rk, K=2), 4, 5]
    for r in (2, 3):
        x = model.run(model.embed(TOKENS), [0])
        x = half_steps(lambda x: model.run(x, [1, core], depth=1, r=r), x)
        assert torch.equal(last_two(model, x, 2 + 2 * r), model(TOKENS, r=r))
    assert core_of(model) is core and not torch.equal(model(TOKENS), model(TOKENS, r=3))
    model = copy.deepcopy(six)
    model.order = [0, Window([1, Window([2], naive, K=2), 3], rk, K=2), 4, 5]

    def g(x):
        x = model.run(x, [1], depth=1)
        for _ in range(2):
            x = model.run(x, [2], depth=2)
        return model.run(x, [3], depth=3)
    x = half_steps(g, model.run(model.embed(TOKENS), [0]))
    assert torch.equal(last_two(model, x, 4), model(TOKENS))


@torch.no_grad()
@pytest.mark.parametrize('nesting', ['window in core', 'core in window', 'window in window',
                                     'in first'])
def test_an_exact_cache_of_every_nesting_continues_a_text_as_it_is_read(six, nesting):
    model = surgery(six, '2-2-2', r=2, inject='linear')
    core, window = core_of(model), Window([3], rk, K=2, cache='exact')
    if nesting == 'window in core':
        core.items = [2, window]
    elif nesting == 'core in window':
        model.order = [0, Window([1, core], rk, K=2, cache='exact'), 4, 5]
    elif nesting == 'window in window':
        model.order = [0, Window([1, window], naive, K=3, cache='exact'), 4, 5]
    else:                   # K = 1 of 'first' keeps what all keep; each evaluation of K = 2 begins
        model.order = [0, Window([1, window], naive, K=2), 4, 5]        # with what was there before
        in_pieces(model, None)
        model.order[1].K = 1
    torch.testing.assert_close(in_pieces(model, None)[0], model(TOKENS), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_exact_cache_is_of_one_window(six):
    "Its keys and values are of the evaluations of one solver, with its options."
    def filled(solver, **options):
        six.order = [0, Window([1, 2], solver, K=2, cache='exact', **options), 3, 4, 5]
        six.hidden(TOKENS, cache=cache)
    for another in (dict(solver=naive), dict(solver=rk, beta=0.1)):
        cache = {}
        filled(rk)
        with pytest.raises(AssertionError, match='filled with another window'):
            filled(**another)


def test_a_core_grows_with_its_optimizer(six):
    model = surgery(six, '2-2-2', r=3, inject='linear')
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(TOKENS, TOKENS).backward()
    optimizer.step()
    order = [0, 1, Core([2, 3, 2, 3], r=3), 4, 5]
    longer = copy.deepcopy(model)
    longer.order = order
    states = {name: optimizer.state[p]['exp_avg'].clone() for name, p in model.named_parameters()}
    grown = untie(model, order, optimizer)
    with torch.no_grad():
        assert torch.equal(grown(TOKENS), longer(TOKENS))
    assert core_of(grown).items == [2, 3, 4, 5] and len(grown.layers) == 8
    assert order[2].items == [2, 3, 2, 3]           # the Core that was given is as it was
    names = dict(grown.named_parameters())
    for new, old in (('layers.4.attn.q.weight', 'layers.2.attn.q.weight'),
                     ('adapter.weight', 'adapter.weight')):
        assert torch.equal(optimizer.state[names[new]]['exp_avg'], states[old])
    assert {*map(id, optimizer.param_groups[0]['params'])} == {*map(id, names.values())}


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


def test_what_a_core_says_and_is_told(six):
    core = surgery(six, '2-2-2', inject='linear')
    before = core(TOKENS)
    core_of(core).r = 2
    assert not torch.equal(core(TOKENS), before) and torch.equal(core(TOKENS, r=4), before)
    assert parts_of(core) == ([0, 1], [2, 3], [4, 5])
    for wrong in (dict(r=0), dict(backprop_depth=0)):
        with pytest.raises(AssertionError):
            core(TOKENS, **wrong)
    with pytest.raises(Refused, match='r=3 is for a recurrent core'):
        six(TOKENS, r=3)
    with looped(six, (2, 3)), pytest.raises(Refused, match='r=3 is for a recurrent core'):
        six(TOKENS, r=3)


def test_recompute_with_ln_scaling_keeps_every_depth(six):
    model = surgery(six, '2-2-2', inject='linear')
    grads = []
    for core_of(model).recompute in (False, True):
        model.zero_grad()
        model(TOKENS, TOKENS, r=5, backprop_depth=4).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_an_order_is_for_one_call_or_for_good(six):
    own = [0, Window([1, 2], naive, K=2), 3, 4, 5]
    once = six(TOKENS, order=own)
    six.order = own
    assert torch.equal(six(TOKENS), once)
    with running(six, [0, Window([3], naive, K=2)]):
        assert not torch.equal(six(TOKENS), once)
    assert six.order is own and torch.equal(six(TOKENS), once)


def test_effects_with_a_core(six):
    six.order, six.adapter = [0, Core([1, 2], r=2), 3], new_adapter(32)
    assert future_effects(six, TOKENS).shape == (6, 6)
    with pytest.raises(Refused, match='propagate=True'):
        future_effects(six, TOKENS, propagate=False)


def test_an_adapter_stays_with_a_model_whose_order_has_no_core(six, tmp_path):
    plain = six(TOKENS)
    six.order, six.adapter = [0, 1, Core([2, 3], r=2), 4, 5], new_adapter(32, 'linear')
    with_core = six(TOKENS)
    six.order = [*range(6)]
    save(tmp_path, six, [])
    opened, _ = load(tmp_path)
    assert torch.equal(opened(TOKENS), plain)
    opened.order = [0, 1, Core([2, 3], r=2), 4, 5]
    assert torch.equal(opened(TOKENS), with_core)


@torch.no_grad()
def test_a_sweep_takes_a_step_as_one_item(six):
    six.order, six.adapter = [0, 1, Core([2, 3], r=2), 4], new_adapter(32, 'linear')
    core = six.order[2]
    rows = order_sweep(six, lambda model: dict(logits=model(TOKENS)), skip_blocks, [1])
    orders = [six.order, [1, core, 4], [0, core, 4], [0, 1, 4], [0, 1, core]]
    assert [(row['size'], row['start']) for row in rows] == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    for row, order in zip(rows, orders, strict=True):
        assert torch.equal(row['logits'], six(TOKENS, order=order))
