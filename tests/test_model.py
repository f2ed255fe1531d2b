"model.py: one Transformer that runs its layers in any order."
import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from nanodepth.model import LM, ModelConfig, Refused, loss_of_piece, seen, sum_of_losses
from nanodepth.scoring import measure
from nanodepth.train import losses_of


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


def test_more_tokens_than_the_context_are_refused(tiny):
    model, cache = tiny(context=12), {}
    with pytest.raises(Refused, match='13 tokens are more than the context of 12'):
        model(tokens_of(model, T=13))
    model(tokens_of(model, T=12), cache=cache)
    with pytest.raises(Refused, match='13 tokens are more than the context of 12'):
        model(tokens_of(model, T=1), cache=cache)


@pytest.mark.parametrize('order', [None, [0, 1, 2, 3, 1, 2, 3], [2], [3, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize('fields', [{}, dict(ln_scaling=True)], ids=str)
def test_cached_logits_and_generation_equal_uncached(tiny, order, fields):
    model = tiny(n_kv_head=2, **fields)
    tokens = tokens_of(model)
    depth = len(order or model.order)
    whole, cache, steps = model(tokens, order=order), {}, []
    for piece in tokens.split([3, 1, 4, 1, 1], dim=1):
        steps.append(model(piece, order=order, cache=cache))
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
    assert [*cache] == ['layers', *range(depth)] and seen(cache) == 10
    assert all(t.shape == (2, 2, 10, 8) for d in range(depth) for t in cache[d])
    with pytest.raises(Refused, match='keys of another order'):        # also of one as deep
        model(tokens[:, :1], order=[0] * depth, cache=cache)

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
    "train.py measures by the compiled Blocks, too: one graph without gradients, whatever grows."
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
    for each in (model, deeper):
        with torch.no_grad():
            losses_of(each.eval(), tokens, tokens)
        each.train()
        assert count_compiles() == once + 1
    for T in (7, 8, 9, 5, 6):
        step([0, 1], T)
    # the second length makes the length a variable; no later one does
    assert count_compiles() <= once + 2


def test_only_an_untied_embedding_starts_large():
    for tied, std in ((True, 0.02), (False, 1.0)):
        model = LM(ModelConfig(tie_embeddings=tied))
        assert model.embed.weight.std().item() == pytest.approx(std, rel=0.05)
        assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.05)


def slow_loss(x, weight, targets):
    "The mean loss, and its gradients by hand: what a softmax gives too much, token by token."
    x, weight = x.detach().double(), weight.detach().double()
    counts = (targets != -1).nonzero()[:, 0].tolist()
    loss, of_x, of_weight = 0.0, torch.zeros_like(x), torch.zeros_like(weight)
    for some in torch.tensor(counts).split(512):
        p = (x[some] @ weight.T).softmax(-1)
        rows = torch.arange(len(some))
        loss -= p[rows, targets[some]].log().sum().item()
        p[rows, targets[some]] -= 1
        of_x[some] = p @ weight
        of_weight += p.T @ x[some]
    return loss / len(counts), of_x / len(counts), of_weight / len(counts)


@pytest.fixture(scope='module')
def large():
    """(a model of 16,384 words, the normed stream of 4,100 tokens, their targets, the slow loss).
    All but 40 words are next to impossible: a float32 sum of many likely ones is less exact."""
    torch.manual_seed(0)
    model = LM(ModelConfig(vocab_size=16_384, n_layer=1, n_embd=8, n_head=1))
    torch.nn.init.normal_(model.head.weight)
    model.head.weight.data[40:, 0] = -30
    x, targets = torch.randn(2, 2050, 8), torch.randint(40, (2, 2050))
    x[..., 0] = 1
    targets[0, 1:40], targets[1, :9] = -1, 12_345
    return model, x, targets, slow_loss(x.flatten(0, 1), model.head.weight, targets.flatten())


def mean_loss(model, x, targets):
    return sum_of_losses(x.flatten(0, 1), model.head.weight, targets.flatten(),
                         model.compiled_loss) / (targets != -1).sum()


def loss_and_gradients(model, x, targets):
    model.zero_grad()
    x = x.clone().requires_grad_()
    loss = mean_loss(model, x, targets)
    loss.backward()
    return loss, x.grad.flatten(0, 1), model.head.weight.grad


def alike(found, wanted, most=3e-6):
    for a, b in zip(found, wanted, strict=True):
        b = torch.as_tensor(b)
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a.double() - b).abs().max() <= most * b.abs().max()


def test_the_loss_of_torchs_own_pieces_is_the_whole_one(large, monkeypatch):
    if not hasattr(torch.nn, 'LinearCrossEntropyOptions'):
        pytest.skip('torch computes the loss in pieces from 2.12 on')
    model, x, targets, slow = large
    calls, real = [], F.linear_cross_entropy
    monkeypatch.setattr(F, 'linear_cross_entropy', lambda *a, **k: calls.append(k) or real(*a, **k))
    alike(loss_and_gradients(model, x, targets), slow)
    assert [each['options'].batch_chunk_size for each in calls] == [512]
    # in bfloat16 torch would also sum in it: these are our pieces
    with torch.autocast('cpu', torch.bfloat16):
        assert abs(mean_loss(model, x, targets).item() - slow[0]) < 0.03
    assert len(calls) == 1


def test_the_loss_in_our_pieces_is_the_whole_one(large, monkeypatch):
    """Not kept, they are computed again in the backward pass. A compiled piece is kept if all
    logits, in bfloat16, fit into a tenth of the GPU."""
    model, x, targets, slow = large
    monkeypatch.delattr(torch.nn, 'LinearCrossEntropyOptions', raising=False)
    monkeypatch.setattr(torch.cuda, 'get_device_properties',
                        lambda device: SimpleNamespace(total_memory=memory))
    pieces, real = [], F.cross_entropy
    monkeypatch.setattr(F, 'cross_entropy',
                        lambda *a, **k: pieces.append(len(a[0])) or real(*a, **k))
    room = 20 * 4100 * 16_384
    for memory, is_compiled, sizes in ((room, False, [4096, 4] * 2), (room, True, [4100]),
                                       (room - 10, True, [4096, 4] * 2)):
        pieces.clear()
        if is_compiled:
            monkeypatch.setattr(model, 'compiled_loss', lambda *args: loss_of_piece(*args))
        alike(loss_and_gradients(model, x, targets), slow)
        assert sorted(pieces) == sorted(sizes)
    monkeypatch.setattr(model, 'hidden', lambda tokens: x[:, :3])
    assert model(targets[:, :3], torch.full((2, 3), -1)) == 0


@torch.no_grad()
def test_each_loss_in_pieces(large, monkeypatch):
    model, x, targets, _ = large
    logits, sizes = model.head(model.norm(x)), []
    wanted = F.cross_entropy(logits.mT, targets, ignore_index=-1, reduction='none')
    monkeypatch.setattr(model, 'hidden', lambda tokens: x)
    hook = model.head.register_forward_hook(lambda head, args, out: sizes.append(len(out)))
    losses, wrong = losses_of(model, targets, targets)
    hook.remove()
    torch.testing.assert_close(losses.float(), wanted, rtol=1e-5, atol=5e-5)
    assert torch.equal(wrong, logits.argmax(-1) != targets) and not losses[targets == -1].any()
    assert sizes == [4096, 4]


@torch.no_grad()
def test_our_layers_read_many_rows_together(tiny):
    model, sizes = tiny(vocab_size=50, n_layer=1), []
    tokens = tokens_of(model, B=4100, T=16)
    model.layers[0].register_forward_hook(lambda layer, args, out: sizes.append(len(out)))
    losses, _ = losses_of(model, tokens, tokens)
    assert sizes == [4096, 4] and len(losses) == 4100


def test_defaults_by_hand(tiny):
    "8/3 of the width, rounded up to a multiple of 32; a draw among the likeliest so many."
    assert [ModelConfig(n_embd=n).ffn_dim for n in (64, 96, 128, 512)] == [192, 256, 352, 1376]
    model = tiny()
    tokens = tokens_of(model, B=1)
    likeliest = model(tokens)[0, -1].topk(2).indices.tolist()
    drawn = {model.generate(tokens, 1, temperature=50.0, top_k=2,
                            generator=torch.Generator().manual_seed(i))[0, -1].item()
             for i in range(60)}
    assert drawn == {*likeliest}
    assert model.generate(tokens, 1, temperature=0)[0, -1] == likeliest[0]


def test_a_large_vocabulary_is_summed_exactly():
    torch.manual_seed(0)
    logits = 30 + 0.01 * torch.randn(1, 4, 200_000)
    targets = torch.arange(4)[None]
    losses, _ = measure.losses_of(lambda tokens: logits, targets, targets)
    exact = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=2e-6)
