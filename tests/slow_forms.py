"""Slow second forms, for the tests of the book and of the package: an order with windows and cores,
in models of ours and of other families, the steps of a solver, and the equations of a core."""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from model import Pass, unrolled
from retrofit import Core
from wrapper import SOLVERS, Window

PIECES = 5, 1, 5        # a text of eleven tokens is read in these pieces
ONE = torch.tensor([[[1.0]]], dtype=torch.float64)


def anchored(items, cache='first', decode='full'):
    "Return the window that these tests use."
    return Window(items, 'anchored', 3, cache, decode, beta=0.3)


def text(n=12, batch=2, seed=0):
    "Return rows of n drawn tokens."
    return torch.randint(2, 50, (batch, n), generator=torch.Generator().manual_seed(seed))


def in_pieces(model, tokens, pieces):
    "Return the logits of a text that is read piece by piece with a cache, and the cache."
    cache, out, start = {}, [], 0
    for n in pieces:
        out.append(model(tokens[:, start:start + n], cache=cache))
        start += n
    return torch.cat(out, dim=1), cache


def by_stages(g, x, K, beta):
    'Take K anchored steps, by Equations 13 to 15 of "Training-Free Looped Transformers".'
    result, slopes = x, []
    for weight in [beta + (1 - beta) / K] + [(1 - beta) / K] * (K - 1):
        y = x + sum(slopes, torch.zeros_like(x)) / K
        slopes.append(g(y) - y)
        result = result + weight * slopes[-1]
    return result


def reading(model, tokens):
    """Return the stream before the first layer, layer(x, i, depth), which runs a layer, and
    logits(x), which runs what comes after the last layer."""
    def layer(x, i, depth):
        return Pass(model, x.shape[1])(x, [i], depth)

    def logits(x):
        return model.head(model.norm(x))
    return model.embed(tokens), layer, logits


def slowly(readings, order):
    """Return the logits of a text that is read in pieces. `readings` are reading(...) of the text
    up to the end of each piece. A cache holds keys. This form keeps the streams from which the keys
    were computed, by depth, and a layer reads these streams again before the new ones."""
    pieces, past, n_before = [], {}, 0

    def run(x, items, depth, kept):
        for item in items:
            if isinstance(item, int):
                kept[depth] = x
                whole = torch.cat((past.get(depth, x[:, :0]), x), 1)
                x = layer(whole, item, depth)[:, -n:]
            elif isinstance(item, Window):
                x = window(x, item, depth, kept)
            elif isinstance(item, Core):
                e = x
                x = item.first_state(SimpleNamespace(start=n_before), e)
                for i in range(item.r):
                    s = item.mix(x, e)
                    x = run(s, item.items, depth + i * len(unrolled(item.items)), kept)
            else:
                x = run(x, item.items, depth, kept)
            depth += len(unrolled([item]))
        return x

    def window(x, item, depth, kept):
        if item.decode == 'bypass' and n == 1 and n_before:
            return run(x, item.items, depth, kept)
        streams = []            # for each evaluation, the streams that its layers read

        def g(y):
            streams.append({})
            return run(y, item.items, depth, streams[-1])
        x = by_stages(g, x, item.K, item.options['beta'])
        if item.cache == 'last':
            streams.insert(0, {})
            run(x, item.items, depth, streams[0])
        kept |= streams[0]
        return x

    for stream, layer, logits in readings:
        n, kept = stream.shape[1] - n_before, {}
        pieces.append(logits(run(stream[:, -n:], order, 0, kept)))
        past = {depth: torch.cat((past[depth], x), 1) if depth in past else x
                for depth, x in kept.items()}
        n_before += n
    return torch.cat(pieces, 1)


def close(a, b):
    "Return whether logits are equal but for rounding."
    return torch.allclose(a, b, rtol=1e-4, atol=2e-4)


# ------------------------------------------------------------------------------------- solvers

def half(x):
    "A window that halves its stream, so each step can be computed by hand."
    return x - 0.5 * x


def moved_by_tanh():
    "Return a stream whose tokens have norms from small to large, and a window that is not linear."
    torch.manual_seed(0)
    A = torch.randn(5, 5, dtype=torch.float64)
    x = torch.randn(2, 6, 5, dtype=torch.float64) * torch.logspace(-1, 1.5, 6)[None, :, None]
    return x, lambda y: y + torch.tanh(y @ A)


def slow_steps(g, x, K, alphas=None, T=1, tol=0):
    "Take Euler steps, token by token. The first step that moves a token too little is its last."
    tokens = []
    for token in x.flatten(0, -2):
        for alpha in alphas or [T / K] * K:
            before, token = token, token + alpha * (g(token) - token)
            if (token - before).norm() <= tol * before.norm():
                break
        tokens.append(token)
    return torch.stack(tokens).view_as(x)


def check_solver(name, settings_for=lambda K: {}):
    """Check what a Window relies on. A solver evaluates the window as often as the Window counts,
    and first with the stream itself, which it does not change. It keeps the dtype, even under
    autocast, and no token depends on another one."""
    solver = SOLVERS[name]
    for K in (2, 4):
        seen, x = [], torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
        before, settings = x.clone(), settings_for(K)
        solver(lambda y: seen.append(y) or y * 0.9 + 0.1, x, K, **settings)
        assert len(seen) == Window([], name, K, **settings).evaluations()
        assert torch.equal(seen[0], x) and torch.equal(x, before)

    def run(x):
        return solver(lambda y: y * 0.9 + 0.1, x, K=2, **settings_for(2))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert run(torch.randn(2, 3, 4).to(dtype)).dtype == dtype
    x = torch.randn(2, 3, 4)
    clean = run(x)
    x[1, 0] = math.nan
    broken = run(x)
    assert torch.allclose(broken[0], clean[0]) and broken[1, 0].isnan().all()
    assert torch.allclose(broken[1, 1:], clean[1, 1:])
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.allclose(run(x[:1]), clean[:1], atol=1e-6)


# ---------------------------------------------------------------------------------------- a core

def core_slowly(model, tokens):
    "Return the logits by the paper's equations. Only the last recurrences get gradients."
    [i] = [i for i, item in enumerate(model.order) if isinstance(item, Core)]
    run, core = Pass(model, tokens.shape[1]), model.order[i]
    e = run(model.embed(tokens), model.order[:i])
    s = core.first_state(run, e)
    for k in range(core.r):
        s = run(core.mix(s, e), core.items)
        if k < core.r - core.backprop_depth:        # neither through the state nor through e
            s = s.detach()
    return model.head(model.norm(run(s, model.order[i + 1:])))


def gradients(model, loss):
    "Return {name: gradient} of a loss."
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_core(model, tokens):
    "Check that the logits and all gradients of a recurrent model are those of the slow form."
    slow = core_slowly(model, tokens)
    torch.testing.assert_close(model(tokens), slow, rtol=1e-4, atol=1e-5)
    expected = gradients(model, F.cross_entropy(slow.flatten(0, 1), tokens.flatten()))
    found = gradients(model, model(tokens, tokens))
    assert found.keys() == expected.keys() == {n for n, _ in model.named_parameters()}
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def check_first_state(core, std, most=math.inf):
    """Check the noise of a core's first state. Without generators all rows have the same noise.
    With a generator for each row, a row has its noise in any batch."""
    e = torch.zeros(64, 100, 32)

    def drawn(seeds, e):
        core.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return core.first_state(SimpleNamespace(start=0), e)
    by_position, by_row = drawn([], e), drawn(range(64), e)
    for s in (by_position, by_row):
        assert s.std() == pytest.approx(std, rel=0.05) and s.abs().max() <= most
    assert torch.equal(by_position, by_position[:1].expand(64, 100, 32))
    assert torch.equal(drawn([63], e[:1]), by_row[63:])
    assert not torch.equal(by_row[0], by_row[1])
