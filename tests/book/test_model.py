"Test model.py: one Transformer that runs its layers in any order, and Spans in an order."
import copy
import gc
import math
import textwrap
import weakref

import numpy as np
import pytest
import torch
from helpers import ROOT, Times
from own_spans import GatedLoop, names, two_heads
from slow_forms import PIECES, anchored, close, in_pieces, reading, slowly, text
from torch import nn

from grow import untie
from loop import in_order
from model import LM, ModelConfig, Refused, Span, seen, spans_in, unrolled
from probe import depth_score
from retrofit import Core, core_of
from training.measure import losses_of
from wrapper import Window, wrapped


def test_the_usage_in_the_docstring_runs():
    doc = (ROOT / 'model.py').read_text().split('"""')[1].split('Usage:\n')[1]
    tokens = targets = torch.randint(257, (2, 8))
    scope = dict(LM=LM, ModelConfig=ModelConfig, tokens=tokens, targets=targets)
    exec(textwrap.dedent(doc), scope)
    assert scope['model'].order == [0, 1, 2, 3, 2, 3] and scope['loss'].isfinite()


def tokens_of(model, B=2, T=10, seed=0):
    "Return B rows of T drawn tokens."
    return torch.randint(model.config.vocab_size, (B, T),
                         generator=torch.Generator().manual_seed(seed))


def slow_forward(model, tokens):
    """Return the logits (T, V) of one text (T,). Tokens and heads are computed one after the other,
    and the rotation with complex numbers."""
    c, sd = model.config, {k: v.double() for k, v in model.state_dict().items()}
    hd, group = c.head_dim, c.n_head // c.n_kv_head

    def norm(x, w):
        return torch.stack([row / torch.sqrt((row * row).mean() + c.norm_eps) * w for row in x])

    def turn(row, position):            # one head's query or key
        z = torch.complex(row[:hd // 2], row[hd // 2:])
        angles = torch.tensor([position * c.rope_theta ** (-2 * i / hd) for i in range(hd // 2)],
                              dtype=torch.float64)
        z = z * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((z.real, z.imag))

    x = sd['embed.weight'][tokens]
    for d, i in enumerate(model.order, 1):
        w = {k.removeprefix(f'layers.{i}.'): v for k, v in sd.items()
             if k.startswith(f'layers.{i}.')}
        scale = 1 / math.sqrt(d) if c.ln_scaling else 1.0
        h = norm(x, w['attn_norm.weight']) * scale
        heads = []
        for head in range(c.n_head):
            kv = head // group
            q, k, v = (h @ w[f'attn.{name}.weight'][i * hd:(i + 1) * hd].T
                       for name, i in (('q', head), ('k', kv), ('v', kv)))
            if c.qk_norm:
                q, k = norm(q, w['attn.q_norm.weight']), norm(k, w['attn.k_norm.weight'])
            q, k = (torch.stack([turn(row, t) for t, row in enumerate(m)]) for m in (q, k))
            out = []
            for t in range(len(tokens)):
                weights = torch.softmax(k[:t + 1] @ q[t] / math.sqrt(hd), 0)
                out.append(weights @ v[:t + 1])
            heads.append(torch.stack(out))
        x = x + torch.cat(heads, 1) @ w['attn.o.weight'].T
        h = norm(x, w['mlp_norm.weight']) * scale
        gate = h @ w['mlp.gate.weight'].T
        gated = gate / (1 + torch.exp(-gate)) * (h @ w['mlp.up.weight'].T)
        x = x + gated @ w['mlp.down.weight'].T
    return norm(x, sd['norm.weight']) @ sd['head.weight'].T


@pytest.mark.parametrize('fields', [{}, dict(n_kv_head=2), dict(n_kv_head=1, tie_embeddings=False),
                                    dict(ln_scaling=True),
                                    dict(ln_scaling=True, order=[0, 1, 2, 1, 2, 3]),
                                    dict(qk_norm=True, head_dim=12)],
                         ids=str)
def test_logits_are_those_of_the_slow_form(tiny, fields):
    model = tiny(**fields).double()
    tokens = tokens_of(model, B=1)
    torch.testing.assert_close(model(tokens)[0], slow_forward(model, tokens[0]), rtol=1e-6,
                               atol=1e-6)


@pytest.mark.parametrize('order', [None, [2], [3, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize('fields', [{}, dict(ln_scaling=True)], ids=str)
def test_logits_with_a_cache_are_those_without(tiny, order, fields):
    "So is generated text, even after more tokens than the context, when the oldest are dropped."
    model = tiny(n_kv_head=2, context=12, **fields)
    tokens, order = tokens_of(model), order or model.order
    whole, cache, steps = model(tokens, order=order), {}, []
    for piece in tokens.split([3, 1, 4, 1, 1], dim=1):
        steps.append(model(piece, order=order, cache=cache))
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
    assert seen(cache) == 10
    assert all(t.shape == (2, 2, 10, 8) for place in enumerate(order) for t in cache[place])
    with pytest.raises(Refused, match='13 tokens are more than the context of 12'):
        model(tokens[:, :3], order=order, cache=cache)
    hidden = type('Hidden', (Times,), dict(unrolled=lambda self: self.items))
    with pytest.raises(Refused, match='Hidden.* runs more layers than its unrolled'):
        model(tokens, order=[0, hidden([1]), 2], cache={})

    for length in (10, 20):             # past the context the last tokens are read
        slow = prompt = tokens_of(model, T=length)
        for _ in range(6):
            slow = torch.cat((slow, model(slow[:, -12:], order=order)[:, -1:].argmax(-1)), 1)
        assert torch.equal(model.generate(prompt, 6, order=order, temperature=0), slow)


def test_order_takes_numbers_of_numpy_and_refuses_what_is_not_a_layer(tiny):
    model = tiny()
    tokens = tokens_of(model)
    assert torch.equal(model(tokens, order=np.array([3, 0, 0])), model(tokens, order=[3, 0, 0]))
    for order in ([0, -1], [0, 4], [], torch.tensor([0, 1]), ['0']):
        with pytest.raises(Refused, match='is not made of the layers 0 to 3'):
            model(tokens, order=order)


def test_generate_draws_from_the_top_k_tokens(tiny):
    model = tiny()
    tokens = tokens_of(model, B=1)
    likeliest = model(tokens)[0, -1].topk(2).indices.tolist()
    drawn = {model.generate(tokens, 1, temperature=50.0, top_k=2,
                            generator=torch.Generator().manual_seed(i))[0, -1].item()
             for i in range(60)}
    assert drawn == {*likeliest}
    assert model.generate(tokens, 1, temperature=0.01)[0, -1] == likeliest[0]


def test_loss_is_the_mean_over_targets(tiny):
    model = tiny()
    tokens, targets = tokens_of(model), tokens_of(model, seed=1)
    targets[0, :7] = -1
    logits = model(tokens)
    by_hand = [-math.log(logits.detach()[b, t].double().softmax(0)[targets[b, t]])
               for b in range(2) for t in range(10) if targets[b, t] != -1]
    assert model(tokens, targets).item() == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_parameters_and_flops_are_those_counted_by_hand(tiny):
    tied, untied = tiny(n_kv_head=2), tiny(n_kv_head=2, tie_embeddings=False)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * tied.config.ffn_dim
    assert tied.num_params() == 50 * 32 + 4 * (layer + 64) + 32
    assert untied.num_params() == tied.num_params() + 50 * 32
    for order in ([0, 1, 2, 3], [0, 1, 0, 1, 0, 1], [2]):
        want = 6 * (50 * 32 + len(order) * layer) + 12 * len(order) * 32 * 32
        assert tied.flops_per_token(order) == untied.flops_per_token(order) == want
    # 8/3 of the width, rounded up to a multiple of 32
    assert [ModelConfig(n_embd=n).ffn_dim for n in (64, 96, 128, 512)] == [192, 256, 352, 1376]
    for tied, std in ((True, 0.02), (False, 1.0)):      # an untied embedding starts large
        model = LM(ModelConfig(tie_embeddings=tied))
        assert model.embed.weight.std().item() == pytest.approx(std, rel=0.05)
        assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize('ln_scaling', [False, True])
def test_a_block_is_compiled_once_for_all_orders_and_depths(tiny, ln_scaling):
    "There are two graphs: one with gradients, and one without for measuring."
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    tokens = torch.randint(50, (2, 10))

    def compiles(n_layer, orders):
        "Return how many graphs there are after these orders were trained and measured."
        model = tiny(n_layer=n_layer, ln_scaling=ln_scaling)
        plain = copy.deepcopy(model)
        for block in model.layers:
            block.compile(backend='aot_eager')
        for order in orders:
            loss = model(tokens, tokens, order=order)
            loss.backward()
            torch.testing.assert_close(loss, plain(tokens, tokens, order=order))
        with torch.no_grad():
            losses_of(model, tokens, tokens)
        return counters['stats']['unique_graphs']
    assert compiles(3, [[0, 1, 2], [2, 1, 0], [0], [0, 1, 2] * 8]) == 2
    assert compiles(6, [[0, 1, 2, 3, 4, 5]]) == 2
    torch._dynamo.reset()


TEXTS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


class DropsOut(Span):
    def make_weights(self, model):
        self.drop = nn.Dropout(0.5)

    def forward(self, run, x):
        return self.drop(run(x, self.items))


def test_an_order_registers_the_spans_that_have_weights(tiny):
    "A Window that is in the order for a while registers nothing and renames nothing."
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
    model(TEXTS, order=[0, GatedLoop([1]), 2])
    assert len(names(model)) == len(plain) + 3


def test_a_span_is_in_training_mode_if_the_model_is(tiny):
    "This holds even for a Span without weights, and for the order of a single call."
    model, order = tiny(), [0, DropsOut([1]), 2]
    for how in (dict(order=order), {}):
        assert torch.equal(model(TEXTS, **how), model(TEXTS, **how))
        model.train()
        assert not torch.equal(model(TEXTS, **how), model(TEXTS, **how))
        model.eval()
        model.order = order


def test_weights_of_a_span_have_the_dtype_and_device_of_the_model(tiny):
    model = tiny().bfloat16()
    model.order = [0, GatedLoop([1]), 2]
    assert model.spans[0].vectors.dtype == torch.bfloat16
    assert model.float().spans[0].gate.weight.dtype == torch.float32
    with torch.device('meta'):
        model = LM(ModelConfig(n_layer=3, n_embd=32, n_head=2))
        model.order = [0, GatedLoop([1]), 2]
    assert all(p.is_meta for p in model.parameters())


def test_an_order_refuses_to_hold_a_span_twice(tiny):
    model, span = tiny(), GatedLoop([1])
    with pytest.raises(Refused, match='holds one Span twice: use copy.deepcopy'):
        model.order = [0, span, span]
    assert model.order == [0, 1, 2, 3]
    model.order = [0, span, copy.deepcopy(span)]
    assert len(model.spans) == 2


def test_settings_of_a_span_are_its_arguments():
    "An argument that the Span keeps under another name has no known value."
    class Forgets(Span):
        def __init__(self, items, rank=4):
            super().__init__(items)
            self.thin = rank
    assert GatedLoop([1], strength=0.25).settings() == dict(times=2, strength=0.25)
    assert Span([1]).settings() == {} and Span([1], 3).settings() == dict(times=3)
    with pytest.raises(AttributeError, match='rank'):
        Forgets([1]).settings()


def test_a_core_runs_r_times():
    core = Core([1, 2], r=3)
    assert core.times == 3 and core.unrolled() == [1, 2] * 3
    core.r = 5
    assert core.times == 5 and len(core.unrolled()) == 10


@pytest.mark.parametrize('recompute', [False, True])
def test_gradients_of_notes_are_equal_in_a_recomputed_core(tiny, recompute):
    model = tiny(order=[0, Core([GatedLoop([1]), 2], r=3), 3])
    core_of(model).recompute = recompute
    notes = {}
    x = model.hidden(TEXTS, notes=notes)
    (model.mean_loss(x, TEXTS) + notes['last'].square().mean()).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert found['spans.1.vectors'].abs().sum() > 0
    core_of(model).recompute = False
    model.zero_grad()
    notes = {}
    x = model.hidden(TEXTS, notes=notes)
    (model.mean_loss(x, TEXTS) + notes['last'].square().mean()).backward()
    assert all(torch.equal(found[name], p.grad) for name, p in model.named_parameters())


def test_notes_of_a_loss_are_freed_after_it(tiny):
    model, notes = tiny(order=[0, GatedLoop([1]), 2]), {}
    model.hidden(TEXTS, notes=notes)
    last = weakref.ref(notes['last'])
    del notes
    gc.collect()
    assert last() is None
    copy.deepcopy(model)


def test_a_loss_of_your_own_is_the_same_in_pieces(tiny):
    model, targets = tiny(), TEXTS.clone()
    targets[0, :9] = -1
    n = (targets != -1).sum()
    whole = model(TEXTS, targets, loss=two_heads)
    pieces = sum(model(x, y, loss=two_heads) * (y != -1).sum() / n
                 for x, y in zip(TEXTS.chunk(2), targets.chunk(2)))
    assert torch.allclose(whole, pieces)
    assert torch.equal(model(TEXTS, targets, loss=lambda model, x, y: model(x, y)),
                       model(TEXTS, targets))


@pytest.mark.parametrize('order, depth', [
    ([0, 1, Core([2, 3], r=3), 4, 5], 10),
    ([0, 1, Core([2, anchored([3])], r=3), 4, 5], 10),
    ([0, anchored([1, Core([2, 3], r=2)]), 4, 5], 8),
    ([0, anchored([1, anchored([2]), 3], 'last'), 4, 5], 6),
    ([0, 1, 2, 1, anchored([2, 3]), 4, 5], 8),
    ([0, Span([1, Span([anchored([2, 1])])]), 3, Span([]), 5], 6)], ids=str)
def test_spans_inside_spans_compute_what_the_slow_form_does(plain_or_scaled, order, depth):
    model, tokens = plain_or_scaled, text(11)
    readings = [reading(model, tokens[:, :end]) for end in (5, 6, 11)]
    model.order = order
    for span in spans_in(order):
        if isinstance(span, Core):      # a new adapter takes nothing from the state of the core
            torch.nn.init.normal_(span.adapter.weight, std=0.1)
    in_parts, whole = slowly(readings, order), slowly(readings[-1:], order)
    assert close(model(tokens), whole) and len(unrolled(model.order)) == depth
    assert close(in_pieces(model, tokens, PIECES)[0], in_parts)


@pytest.mark.parametrize('order, plain, untied', [
    ([0, Span([1, Span([2, 1])]), 3, Span([]), 5], [0, 1, 2, 1, 3, 5], [0, 1, 2, 3, 4, 5]),
    ([0, Times([1, Times([2]), 3]), 2, 5], [0, 1, 2, 2, 3, 1, 2, 2, 3, 2, 5],
     [0, 1, 2, 2, 3, 1, 2, 2, 3, 4, 5])], ids=str)
def test_a_span_computes_what_its_unrolled_order_does(plain_or_scaled, order, plain, untied):
    """Logits, FLOPs, depth scores and the cache are equal to the last bit. When the order is
    untied, each item gets its own layer, once."""
    model, tokens, runs = plain_or_scaled, text(), []
    assert unrolled(order) == plain
    assert model.flops_per_token(order) == model.flops_per_token(plain)
    for either in (order, plain):
        with in_order(model, either):
            logits, cache = in_pieces(model, tokens, [5, 1, 6])
            runs.append([logits, model(tokens), depth_score(model, tokens)[1],
                         *(part for place in enumerate(plain) for part in cache[place])])
    assert all(map(torch.equal, *runs))
    grown = untie(model, order)
    assert unrolled(grown.order) == untied and len(grown.layers) == max(untied) + 1
    assert torch.equal(grown(tokens), runs[0][1])


def test_layers_after_a_span_that_exits_early_keep_their_depths(plain_or_scaled):
    "So they keep their positions in a cache."
    class Exit(Span):
        def __call__(self, run, x):
            return run(x, self.items[:1])
    cache = {}
    plain_or_scaled(text(), order=[0, Exit([1, 2, 3]), 4], cache=cache)
    assert [*cache] == [(0, 0), (1, 1), (4, 4), 'order']


@pytest.mark.parametrize('before, after', [
    ([0, 1, 2, 3], [0, Window([1, 2], K=3, beta=0), 3]),
    ([0, Window([1, 2], beta=0.5), 3], [0, Window([1, 2], beta=0.6), 3]),
    ([0, Core([1, 2, 3], r=4)], [0, Core([1, 2, 3], r=2)])], ids=str)
def test_a_cache_is_refused_for_another_order(plain_or_scaled, before, after):
    "This includes an order of the same depth, and one with another beta or r."
    cache = {}
    plain_or_scaled(text(), order=before, cache=cache)
    with pytest.raises(Refused, match='this cache was filled in the order'):
        plain_or_scaled(text(1), order=after, cache=cache)
