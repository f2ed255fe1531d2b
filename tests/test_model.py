"model.py: one Transformer that runs its layers in any order."
import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import write_noise

from nanodepth.common import losses, losses as losses_file
from nanodepth.grow import untie
from nanodepth.model import KVCache, LM, ModelConfig, pick_token
from nanodepth.text.loader import Loader
from nanodepth.training import measure as measure_file
from nanodepth.training.measure import losses_of


def tokens_of(model, B=2, T=10, seed=0):
    return torch.randint(model.config.vocab_size, (B, T),
                         generator=torch.Generator().manual_seed(seed))


def slow_forward(model, tokens):
    """One sequence, one token at a time, one head at a time, with complex numbers for the
    rotation: (T,) -> (T, V)."""
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
            rows, kv = slice(head * hd, (head + 1) * hd), slice(head // group * hd,
                    (head // group + 1) * hd)
            q, k, v = h @ w['attn.q.weight'][rows].T, h @ w['attn.k.weight'][kv].T, h @ w[
                'attn.v.weight'][kv].T
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
        x = x + (gate / (1 + torch.exp(-gate)) * (h @ w['mlp.up.weight'].T)) @ w[
            'mlp.down.weight'].T
    return norm(x, sd['norm.weight']) @ sd['head.weight'].T


@pytest.mark.parametrize('fields', [{}, dict(n_kv_head=2), dict(n_kv_head=1, tie_embeddings=False),
                                    dict(ln_scaling=True),
                                    dict(order=[0, 1, 2, 1, 2, 3], ln_scaling=True),
                                    dict(qk_norm=True, head_dim=12)],
                         ids=str)
def test_forward_equals_the_slow_form(tiny, fields):
    model = tiny(**fields).double()
    tokens = tokens_of(model, B=1)
    torch.testing.assert_close(model(tokens)[0], slow_forward(model, tokens[0]), rtol=1e-6,
                               atol=1e-6)


def test_identity_order_is_the_plain_model(tiny):
    model = tiny()
    tokens = tokens_of(model)
    assert torch.equal(model(tokens), model(tokens, order=[0, 1, 2, 3]))
    looped = tiny(order=[0, 1, 1, 3])           # in the config: it runs by default
    assert torch.equal(looped(tokens), model(tokens, order=[0, 1, 1, 3]))
    assert not torch.allclose(model(tokens), model(tokens, order=[0, 1, 2, 3, 0, 1, 2, 3]))


@pytest.mark.parametrize('ln_scaling', [False, True])
def test_two_segments_are_one(tiny, ln_scaling):
    model = tiny(ln_scaling=ln_scaling)
    x, order = model.embed(tokens_of(model)), [0, 1, 2, 1, 3, 0]
    whole = model.run(x, order)
    for cut in range(len(order) + 1):
        first = model.run(x, order[:cut])
        assert torch.equal(model.run(first, order[cut:], position=cut), whole)
    if ln_scaling:
        assert not torch.allclose(model.run(model.run(x, order[:3]), order[3:]), whole)


@pytest.mark.parametrize('order, message', [
    ([], 'order is empty'), ([0, 4], 'names layer 4, but the layers are 0 to 3'),
    ([-1], 'names layer -1')])
def test_bad_orders(tiny, order, message):
    model = tiny()
    with pytest.raises(ValueError, match=message):
        model(tokens_of(model), order=order)
    with pytest.raises(ValueError, match=message):
        ModelConfig(n_layer=4, order=order)


@pytest.mark.parametrize('order', [None, [0, 1, 2, 3, 1, 2, 3], [2], [3, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize('fields', [{}, dict(ln_scaling=True)], ids=str)
def test_cached_logits_and_generation_equal_uncached(tiny, order, fields):
    model = tiny(n_kv_head=2, **fields)
    tokens = tokens_of(model)
    depth = len(order or model.order)
    whole, cache, steps = model(tokens, order=order), KVCache(depth), []
    for piece in tokens.split([3, 1, 4, 1, 1], dim=1):
        steps.append(model(piece, order=order, cache=cache))
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
    assert cache.seen == 10 and len(cache.layers) == depth
    assert all(slot.keys.shape == (2, 2, 10, 8) for slot in cache.layers)

    slow = tokens
    for _ in range(12):
        slow = torch.cat((slow, model(slow, order=order)[:, -1:].argmax(-1)), 1)
    assert torch.equal(model.generate(tokens, 12, order=order, temperature=0), slow)


def test_generation_past_the_context_sees_the_last_tokens(tiny):
    model = tiny(context=12)
    for length, new in ((20, 9), (5, 15)):
        slow = prompt = tokens_of(model, T=length)
        for _ in range(new):
            slow = torch.cat((slow, model(slow[:, -12:])[:, -1:].argmax(-1)), 1)
        assert torch.equal(model.generate(prompt, new, temperature=0), slow)


def test_sampling_is_seeded_and_top_k_limits_it(tiny):
    model = tiny()
    tokens = tokens_of(model)

    def sample(seed, **kw):
        return model.generate(tokens, 20, generator=torch.Generator().manual_seed(seed), **kw)

    assert torch.equal(sample(1), sample(1)) and not torch.equal(sample(1), sample(2))
    assert torch.equal(sample(1, top_k=1), model.generate(tokens, 20, temperature=0))
    assert torch.equal(model.generate(tokens, 0), tokens)


def test_loss_is_the_mean_over_the_targets_that_count(tiny):
    model = tiny()
    tokens, targets = tokens_of(model), tokens_of(model, seed=1)
    targets[0, :7] = -1
    logits = model(tokens)
    by_hand = [-math.log(logits.detach()[b, t].double().softmax(0)[targets[b, t]])
               for b in range(2) for t in range(10) if targets[b, t] != -1]
    assert model(tokens, targets).item() == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)
    others = torch.where(targets == -1, -100, targets)
    assert model(tokens, others, ignore_index=-100) == model(tokens, targets)
    assert model(tokens, torch.full_like(tokens, -1)).item() == 0.0


def test_counts_by_hand(tiny):
    tied, untied = tiny(n_kv_head=2), tiny(n_kv_head=2, tie_embeddings=False)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * tied.config.ffn_dim
    assert tied.num_params() == 50 * 32 + 4 * (layer + 64) + 32
    assert untied.num_params() == tied.num_params() + 50 * 32
    for order in ([0, 1, 2, 3], [0, 1, 0, 1, 0, 1], [2]):
        want = 6 * (50 * 32 + len(order) * layer) + 12 * len(order) * 32 * 32
        assert tied.flops_per_token(order) == untied.flops_per_token(order) == want


@pytest.fixture
def count_compiles(monkeypatch):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield lambda: counters['stats']['unique_graphs']
    torch._dynamo.reset()


@pytest.mark.parametrize('ln_scaling', [False, True])
def test_neither_the_order_nor_growth_compiles_a_block_again(tiny, count_compiles, ln_scaling):
    model = tiny(n_layer=3, ln_scaling=ln_scaling).train()
    plain = copy.deepcopy(model)
    for block in model.layers:
        block.compile(backend='aot_eager')
    tokens = tokens_of(model)

    def step(order, T=10):
        loss = model(tokens[:, :T], tokens[:, :T], order=order)
        loss.backward()
        torch.testing.assert_close(loss, plain(tokens[:, :T], tokens[:, :T], order=order))

    step([0, 1, 2])
    once = count_compiles()
    assert once == 1                # three Blocks, one graph
    for order in ([2, 1, 0], [0, 1, 2, 0, 1, 2], [0], [0, 1, 2] * 8):
        step(order)
    deeper = tiny(n_layer=6, ln_scaling=ln_scaling).train()
    for block in deeper.layers:
        block.compile(backend='aot_eager')
    deeper(tokens, tokens).backward()
    assert count_compiles() == once
    for T in (7, 8, 9, 5, 6):
        step([0, 1], T)
    # the second length makes the length a variable; no later one does
    assert count_compiles() <= once + 1


def test_measuring_compiles_a_block_once_more_and_then_no_other(tiny, count_compiles):
    "train.py measures by the compiled Blocks: one graph without gradients, whatever grows."
    model = tiny(n_layer=3).train()
    tokens = tokens_of(model)
    plain = losses_of(model, tokens, tokens)
    graphs = []
    for _ in range(2):
        for block in model.layers:
            block.compile(backend='aot_eager')
        model(tokens, tokens).backward()
        with torch.no_grad():
            found = losses_of(model.eval(), tokens, tokens)
        graphs.append(count_compiles())
        torch.testing.assert_close(found[0], plain[0])
        model = untie(model, [0, 1, 2, 1, 2]).train()
        plain = losses_of(copy.deepcopy(model).requires_grad_(False), tokens, tokens)
    assert graphs[0] == graphs[1] == 2


def test_only_an_untied_embedding_starts_large():
    for tied, std in ((True, 0.02), (False, 1.0)):
        model = LM(ModelConfig(tie_embeddings=tied))
        assert model.embed.weight.std().item() == pytest.approx(std, rel=0.05)
        assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.05)


def gradients(function, *inputs):
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).sin())
    return [y.detach(), *(t.grad for t in inputs)]


def alike(found, wanted, most=1e-6):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a.double() - b).abs().max() <= most * b.abs().max()


@pytest.mark.parametrize('piece', [3, 512])
def test_the_loss_in_pieces_is_the_whole_one(monkeypatch, piece):
    if not hasattr(torch.nn, 'LinearCrossEntropyOptions'):
        pytest.skip('torch computes the loss in pieces from 2.12 on')
    torch.manual_seed(0)
    x, w, y = torch.randn(2, 5, 8), torch.randn(40, 8), torch.randint(40, (2, 5))
    y[0, 1:4] = -1
    plain = gradients(lambda x, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), y.flatten(),
                                                   ignore_index=-1), x.double(), w.double())
    alike(gradients(lambda x, w: losses.mean_loss(x, w, y), x, w), plain)
    calls, real = [], F.linear_cross_entropy
    monkeypatch.setattr(F, 'linear_cross_entropy', lambda *a, **k: calls.append(k) or real(*a, **k))
    monkeypatch.setattr(losses, 'LARGE_VOCABULARY', 40)
    monkeypatch.setattr(losses, 'PIECE_ON_CPU', piece)
    alike(gradients(lambda x, w: losses.mean_loss(x, w, y), x, w), plain)
    assert calls[0]['options'].batch_chunk_size == piece and calls[0]['reduction'] == 'sum'
    found = losses.mean_loss(x.bfloat16(), w.bfloat16(), y)      # summed in float32, token by token
    assert calls[1]['reduction'] == 'none' and abs(found - plain[0]) < 0.03


@pytest.mark.parametrize('piece', [3, 7, 512])
def test_the_losses_of_a_gpu_are_the_whole_ones(monkeypatch, piece):
    "In pieces that keep their logits, or that the backward pass computes again; and one by one."
    torch.manual_seed(0)
    x, w, y = torch.randn(14, 8), torch.randn(40, 8), torch.randint(40, (14,))
    y[2:5] = -1
    plain = gradients(lambda x, w: F.cross_entropy(F.linear(x, w), y, ignore_index=-1,
                                                   reduction='sum'), x.double(), w.double())
    for name in ('PIECE', 'PIECE_KEPT'):
        monkeypatch.setattr(losses, name, piece)
    calls = []
    monkeypatch.setitem(losses.compiled, 'cpu', {losses.loss_of_a_piece: lambda *args: (
        calls.append(len(args[0])), losses.loss_of_a_piece(*args))[1]})
    for keep, times in ((True, 1), (False, 2)):
        calls.clear()
        alike(gradients(lambda x, w: losses.loss_in_pieces(x, w, y, -1, keep), x, w), plain, 2e-6)
        assert max(calls) <= piece and sum(calls) == times * 14     # forward, and once more
    monkeypatch.setattr(losses, 'LOGITS_AT_ONCE', piece * 40)
    each, likeliest = losses.each_loss(x.view(2, 7, 8), w, y.view(2, 7))
    assert each.sum().item() == pytest.approx(plain[0].item()) and (each.view(14)[2:5] == 0).all()
    assert torch.equal(likeliest.flatten(), (x @ w.T).argmax(-1))


def test_logits_are_kept_where_a_tenth_of_the_gpu_holds_them(monkeypatch):
    "And only compiled: as written, a piece would keep them three times in float32."
    x, w = torch.empty(100, 8), torch.empty(50, 8)      # 10,000 bytes of logits
    monkeypatch.setattr(torch.cuda, 'get_device_properties',
                        lambda device: SimpleNamespace(total_memory=memory))
    for memory, is_compiled, kept in ((100_000, True, True), (99_990, True, False),
                                      (100_000, False, False)):
        monkeypatch.setattr(losses, 'compiled', {'cpu': {}} if is_compiled else {})
        assert losses.has_room(x, w) == kept


def test_defaults_by_hand():
    "8/3 of the width, rounded up to a multiple of 32; a draw among the likeliest so many."
    assert [ModelConfig(n_embd=n).ffn_dim for n in (64, 96, 128, 512)] == [192, 256, 352, 1376]
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    drawn = {pick_token(logits, 5.0, 2, torch.Generator().manual_seed(i)).item()
             for i in range(60)}
    assert drawn == {0, 2} and pick_token(logits, 0, None, None).item() == 0


def test_our_layers_read_all_rows_together_and_only_the_head_is_cut(tiny, tmp_path, monkeypatch):
    write_noise(tmp_path / 'noise', [])
    val = Loader(tmp_path / 'noise', 4, 32, split='val')
    model = tiny(vocab_size=257)
    with torch.no_grad():
        tokens, targets = val.batch(0)
        plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction='none')
    heads, layers = [], []
    monkeypatch.setattr(losses_file, 'LOGITS_AT_ONCE', 40 * 257)
    linear = F.linear
    monkeypatch.setattr(F, 'linear', lambda x, w, *b: (heads.append(len(x)) if len(w) == 257 else 0,
                                                      linear(x, w, *b))[1])
    model.layers[0].register_forward_hook(lambda layer, args, out: layers.append(len(out)))
    found, best = losses_of(model, tokens, targets)
    torch.testing.assert_close(found.flatten(), plain)
    assert heads == [40, 40, 40, 8] and layers == [4]
    monkeypatch.setattr(measure_file, 'LAYERS_AT_ONCE', 64)
    assert torch.equal(losses_of(model, tokens, targets)[1], best) and layers == [4, 2, 2]


def test_a_large_vocabulary_is_summed_exactly():
    torch.manual_seed(0)
    logits = 30 + 0.01 * torch.randn(1, 4, 200_000)
    targets = torch.arange(4)[None]
    losses, _ = losses_of(lambda tokens: logits, targets, targets)
    exact = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=2e-6)
