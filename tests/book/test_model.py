"Test model.py: one Transformer that runs its layers in any order."
import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Times

from nanodepth.model import LM, ModelConfig, Refused, seen
from nanodepth.scoring import likelihoods
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
def test_model_as_the_slow_form(tiny, fields):
    model = tiny(**fields).double()
    tokens = tokens_of(model, B=1)
    torch.testing.assert_close(model(tokens)[0], slow_forward(model, tokens[0]), rtol=1e-6,
                               atol=1e-6)


@pytest.mark.parametrize('order', [None, [2], [3, 0, 0, 0, 1]], ids=str)
@pytest.mark.parametrize('fields', [{}, dict(ln_scaling=True)], ids=str)
def test_model_cached_as_uncached(tiny, order, fields):
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


def test_model_order_of_numpy_numbers(tiny):
    "numpy's are numbers, too. Whatever names no layer is a line."
    model = tiny()
    tokens = tokens_of(model)
    assert torch.equal(model(tokens, order=np.array([3, 0, 0])), model(tokens, order=[3, 0, 0]))
    for order in ([0, -1], [0, 4], [], torch.tensor([0, 1]), ['0']):
        with pytest.raises(Refused, match='is not made of the layers 0 to 3'):
            model(tokens, order=order)


def test_generate_top_k(tiny):
    model = tiny()
    tokens = tokens_of(model, B=1)
    likeliest = model(tokens)[0, -1].topk(2).indices.tolist()
    drawn = {model.generate(tokens, 1, temperature=50.0, top_k=2,
                            generator=torch.Generator().manual_seed(i))[0, -1].item()
             for i in range(60)}
    assert drawn == {*likeliest}
    assert model.generate(tokens, 1, temperature=0.01)[0, -1] == likeliest[0]


def test_model_loss_by_hand(tiny):
    model = tiny()
    tokens, targets = tokens_of(model), tokens_of(model, seed=1)
    targets[0, :7] = -1
    logits = model(tokens)
    by_hand = [-math.log(logits.detach()[b, t].double().softmax(0)[targets[b, t]])
               for b in range(2) for t in range(10) if targets[b, t] != -1]
    assert model(tokens, targets).item() == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_model_counts_by_hand(tiny):
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
def test_block_is_compiled_once(tiny, ln_scaling):
    "train.py measures by the compiled Blocks, too: one graph without gradients, whatever grows."
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    tokens = torch.randint(50, (2, 10))

    def compiles(n_layer, orders):
        "How many graphs there are after these orders were trained and measured."
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


@torch.no_grad()
def test_losses_of_in_pieces():
    "Of 2^26 logits at most, which are 4,096 tokens of this vocabulary."
    torch.manual_seed(0)
    model = LM(ModelConfig(vocab_size=16_384, n_layer=1, n_embd=8, n_head=1, context=2050))
    (tokens, targets), sizes = torch.randint(16_384, (2, 2, 2050)), []
    targets[0, 1:40] = -1
    logits = model(tokens)
    wanted = F.cross_entropy(logits.mT, targets, ignore_index=-1, reduction='none')
    model.head.register_forward_hook(lambda head, args, out: sizes.append(len(out)))
    losses, wrong = losses_of(model, tokens, targets)
    torch.testing.assert_close(losses.float(), wanted, rtol=1e-5, atol=5e-5)
    assert torch.equal(wrong, logits.argmax(-1) != targets) and sizes == [4096, 4]


def test_losses_of_a_large_vocabulary():
    torch.manual_seed(0)
    logits = 30 + 0.01 * torch.randn(1, 4, 200_000)
    targets = torch.arange(4)[None]
    losses, _ = likelihoods.losses_of(lambda tokens: logits, targets, targets)
    exact = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=2e-6)
