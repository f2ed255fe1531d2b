"Shared layers with a difference for each position: zero, merged, cut from a model, and trained."
import dataclasses

import pytest
import torch
from conftest import planned_flops, ranks
from test_train import command, config, log_of, same, weights_of  # noqa: F401

from common.errors import Refused
from engine import checkpoint
from engine.checkpoint import load_model
from engine.cost import memory
from loop import parse_loop, running
from model import LM, ModelConfig
from tools.loop import facts
from train import Config, train
from variants.relaxed import MATRICES, merge, relax

TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture
def relaxed(tiny):
    "A loop with differences that are no longer zero."
    model = relax(tiny(n_layer=2, order=[0, 1, 0, 1, 0, 1]), 4)
    for name, p in model.named_parameters():
        if 'differences' in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


def test_at_first_it_computes_what_the_loop_did(tiny):
    loop = tiny(n_layer=3, order=[0, 1, 1, 1, 2])
    assert relax(loop, 0) is loop and torch.equal(relax(loop, 4)(TOKENS), loop(TOKENS))


@torch.no_grad()
def test_by_a_slow_form(relaxed):
    "Each position a layer of its own, to whose weights the differences are added one number each."
    slow = LM(ModelConfig(**vars(relaxed.config) | dict(n_layer=6, order=None)))
    loop = LM(relaxed.config)
    for model in (slow, loop):
        model.embed, model.norm, model.head = relaxed.embed, relaxed.norm, relaxed.head
    for i, shared in enumerate(relaxed.layers):
        loop.layers[i] = shared.layer
    for d, (i, layer) in enumerate(zip(relaxed.order, slow.layers)):
        layer.load_state_dict(relaxed.layers[i].layer.state_dict())
        difference = relaxed.layers[i].differences[str(d)]
        for k, name in enumerate(MATRICES):
            up, down = difference.up[k], difference.down[k]
            layer.get_submodule(name).weight += torch.einsum('or,ri->oi', up, down)
    assert torch.allclose(slow(TOKENS), relaxed(TOKENS), atol=1e-5)
    assert not torch.allclose(loop(TOKENS), relaxed(TOKENS), atol=1e-2)


def test_merged_it_is_an_ordinary_model_with_the_same_logits(relaxed, tmp_path):
    plain = merge(relaxed)
    assert type(plain) is LM and plain.order == [*range(6)] and not plain.rank
    assert torch.equal(plain(TOKENS), relaxed(TOKENS))
    answer = relaxed.generate(TOKENS[:, :4], 6, temperature=0)
    assert torch.equal(answer, plain.generate(TOKENS[:, :4], 6, temperature=0))
    checkpoint.save(tmp_path, **checkpoint.describe(relaxed))
    opened = load_model(tmp_path)           # for whoever does not train it, it is merged
    assert type(opened) is LM and torch.equal(opened(TOKENS), relaxed(TOKENS))
    again = checkpoint.build_model(checkpoint.load(tmp_path), tmp_path, merged=False)
    assert again.rank == 4 and same(again.state_dict(), relaxed.state_dict())


@torch.no_grad()
def test_in_mixed_precision_it_is_merged_to_the_last_bit_too(relaxed):
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(merge(relaxed)(TOKENS), relaxed(TOKENS))


def test_the_ledger_counts_the_differences_that_run(relaxed):
    tied = LM(relaxed.config).flops_per_token()
    added = sum(p.numel() for name, p in relaxed.named_parameters() if 'differences' in name)
    assert relaxed.flops_per_token() == tied + 6 * added
    assert relaxed.flops_per_token(range(2)) == LM(relaxed.config).flops_per_token(range(2))
    amounts = [memory(model, 100, depth=6) for model in (relaxed, LM(relaxed.config))]
    layer = sum(p.numel() for p in relaxed.layers[0].layer.parameters() if p.dim() == 2)
    assert amounts[0]['sums'] == 4 * 6 * layer and 'sums' not in amounts[1]


def test_a_tied_head_stays_tied(tiny):
    plain = merge(relax(tiny(n_layer=2, order=[0, 1, 0, 1], tie_embeddings=True), 2))
    assert plain.head.weight is plain.embed.weight


def test_the_differences_belong_to_their_positions(relaxed):
    with running(relaxed, [0, 1, 1]), pytest.raises(Refused, match="'5'. cannot run at 2"):
        relaxed(TOKENS)
    x = torch.randn(1, 3, 32)
    whole = relaxed.run(x, relaxed.order)
    parts = relaxed.run(relaxed.run(x, [0, 1, 0]), [1, 0, 1], depth=3)
    assert torch.equal(whole, parts)
    with pytest.raises(Refused, match='without differences'):
        relax(relaxed, 2)


@torch.no_grad()
def test_an_ordinary_model_as_a_loop(tiny):
    model, loop = tiny(n_layer=6), parse_loop('2x3')
    wanted = model(TOKENS)
    away = [sum((a.mlp.down.weight - b.mlp.down.weight).norm().item() for a, b in zip(
        merge(relax(model, rank, loop, 'svd')).layers, model.layers)) for rank in (1, 2, 8, 32)]
    assert away[0] > away[1] > away[2] > away[3] and away[3] < 1e-4 * away[0]
    whole = relax(model, 96, loop, 'svd')               # more than any matrix has
    assert torch.allclose(whole(TOKENS), wanted, atol=1e-4) and len(whole.layers) == 2
    assert torch.allclose(merge(whole)(TOKENS), wanted, atol=1e-4)
    # the mean, by hand; and a difference of rank 1 is the largest singular value's
    mean = relax(model, 0, loop)
    up = [layer.mlp.down.weight for layer in model.layers]
    assert torch.allclose(mean.layers[1].mlp.down.weight, (up[1] + up[3] + up[5]) / 3)
    one = relax(model, 1, loop, 'svd').layers[1].differences['3']
    u, s, v = torch.linalg.svd(up[3] - (up[1] + up[3] + up[5]) / 3)
    assert torch.allclose(one.up[6] @ one.down[6], s[0] * u[:, :1] @ v[:1], atol=1e-5)
    with pytest.raises(Refused, match='of 6 positions is made of 6 layers'):
        relax(tiny(n_layer=4), 2, loop, 'svd')
    with pytest.raises(Refused, match='layers are 0 to 1'):
        relax(model, 2, [0, 2, 0, 2, 0, 2], 'svd')
    half = relax(tiny(n_layer=6).bfloat16(), 2, loop, 'svd')
    assert half(TOKENS).dtype == torch.bfloat16
    with pytest.raises(Refused, match='norms of queries and keys'):
        relax(tiny(n_layer=6, qk_norm=True), 2, loop, 'svd')


LOOP = dict(n_layer=2, loop='2x2')


def test_rank_0_is_the_loop(config):      # noqa: F811
    plain, zero = config('plain', **LOOP), config('zero', **LOOP, relax_rank=0)
    train(plain)
    train(zero)
    assert same(weights_of(plain), weights_of(zero))


def test_a_loop_is_relaxed_from_its_first_step_on(config, tmp_path):      # noqa: F811
    c = config('relaxed', **LOOP, relax_rank=4)
    train(c)
    first, *_, last = log_of(c)
    model = checkpoint.build_model(checkpoint.load(c.out_dir), c.out_dir, merged=False)
    assert model.rank == 4 and first['val_loss'] == log_of(c)[1]['looped']['after']
    assert all(p.abs().sum() > 0 for name, p in model.named_parameters() if 'up.' in name)
    assert last['flops'] == 12 * 64 * model.flops_per_token(context=16)
    assert last['flops'] == 64 * planned_flops(*command(c)[2:])
    layer = model.layers[0].layer
    added = sum(4 * sum(layer.get_submodule(name).weight.shape) for name in MATRICES)
    assert model.num_params() == LM(ModelConfig(**vars(model.config))).num_params() + 4 * added
    more = config('more', init_from=c.out_dir, lr=1e-3, steps=2, warmup_steps=0, decay_steps=0,
                  **{name: getattr(Config, name) for name in ('n_layer', 'n_embd', 'n_head',
                                                              'head_dim')})
    train(more)                         # it goes on as what it is
    assert checkpoint.load(more.out_dir)['kind'] == 'relaxed'
    assert log_of(more)[-1]['flops'] == 64 * planned_flops(*command(more)[2:])
    for settings in (dict(cooldown_loop='2x4'), dict(loop='2x4'), dict(relax_rank=8)):
        with pytest.raises(Refused, match='has differences of rank 4 that belong to its order'):
            train(dataclasses.replace(more, out_dir=f'{more.out_dir}_other', decay_steps=1,
                                      **settings))
    row = facts('relaxed', checkpoint.load(c.out_dir) | dict(folder=c.out_dir), None)
    assert (row['loop'], row['unique'], row['params']) == ('2x2', 2, model.num_params())
    train(config('relaxed', **LOOP, relax_rank=4))          # finished: nothing to do
    with pytest.raises(Refused, match='relax_rank=4, but this config has 8'):
        train(config('relaxed', **LOOP, relax_rank=8))


def test_in_the_cool_down_it_is_the_tied_run_until_then(config):      # noqa: F811
    fields = dict(n_layer=2, cooldown_loop='2x2', steps=9, decay_steps=1)
    tied, c = config('tied', **fields), config('relaxed', **fields, relax_rank=4)
    train(tied)
    train(c)
    a, b = (log_of(one) for one in (tied, c))
    # the last one too, before which they became relaxed: the differences begin at zero
    assert [line['loss'] for line in a[1:]] == [line['loss'] for line in b[1:]]
    assert b[-1]['looped']['after'] == a[-1]['looped']['after']
    # what the optimizers held was kept, so the step of the shared weights is the same
    model = weights_of(c)
    assert same({k.replace('.layer.', '.'): v for k, v in model.items() if 'differences' not in k},
                weights_of(tied))
    assert all(v.abs().sum() > 0 for k, v in model.items() if 'differences' in k)
    assert b[-1]['flops'] > a[-1]['flops'] and b[-2]['flops'] == a[-2]['flops']
    assert b[-1]['flops'] == 64 * planned_flops(*command(c)[2:])


def test_two_processes_are_one(config):      # noqa: F811
    one, two = config('one', **LOOP, relax_rank=2), config('two', **LOOP, relax_rank=2)
    train(one)
    run = ranks(command(two)[2:])
    assert run.returncode == 0, run.stderr
    a, b = weights_of(one), weights_of(two)
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)


def test_a_rank_without_a_loop_is_refused(config):      # noqa: F811
    with pytest.raises(Refused, match='relax_rank=4 is for a loop'):
        config(relax_rank=4)
