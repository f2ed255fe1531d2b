"retrofit.py: a pretrained model made recurrent, with a prelude, a core and a coda."
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import log_of, refused, same, save_run, state_of

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.model import LM, ModelConfig, Pass
from nanodepth.models.authors import AuthorsCore, authors_surgery, flops_paper, parts_of
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import Core, core_of, parts_of_shape, ramp, sample_recurrence, surgery
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.train import train
from nanodepth.training.plan import generator_for

TINYLLAMA = dict(vocab_size=32000, n_layer=22, n_embd=2048, n_head=32, n_kv_head=4, ffn_dim=5632,
                 context=1024, tie_embeddings=False)
LLAMA = dict(vocab_size=128256, n_layer=16, n_embd=2048, n_head=32, n_kv_head=8, ffn_dim=8192,
             context=1024, tie_embeddings=False)


def at(model, r, backprop_depth=None):
    "The model, whose core runs r times from now on."
    core_of(model).r = r
    core_of(model).backprop_depth = backprop_depth or core_of(model).backprop_depth
    return model


@pytest.fixture
def tokens():
    return torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('fields, shape, parts, share, flops, effective, curriculum', [
    (TINYLLAMA, '4-8-4', (176_177_152, 352_354_304, 176_177_152), 0.727,
     (10_570_629_120, 19_027_132_416, 24_664_801_280, 35_940_139_008),
     (1_761_771_520, 3_171_188_736, 5_990_023_168, 11_627_692_032), 0.915),
    (LLAMA, '4-6-4', (243_286_016, 364_929_024, 243_286_016), 0.875,
     (11_677_728_768, 20_436_025_344, 26_274_889_728, 37_952_618_496),
     (1_946_288_128, 3_406_004_224, 6_325_436_416, 12_164_300_800), 0.917)])
def test_the_papers_cuts(fields, shape, parts, share, flops, effective, curriculum):
    "Their tables: weights by parts, FLOPs for r = 4, 8, 16 and 32, and what a curriculum saves."
    with torch.device('meta'):
        parent = LM(ModelConfig(**fields))
        model = surgery(parent, shape)
    layer = sum(p.numel() for p in model.layers[0].parameters())
    prelude, core, coda = (len(part) * layer for part in parts_of(model))
    assert (prelude, core, coda) == parts and model.adapter.weight.numel() == 8_388_608
    whole = sum(p.numel() for p in parent.layers.parameters())
    assert round(sum(parts) / whole, 3) == share
    head = 2 * model.config.vocab_size * 2048 + 2048
    assert model.num_params() == sum(parts) + 8_388_608 + head
    assert tuple(flops_paper(model, r) for r in (4, 8, 16, 32)) == flops
    assert tuple(prelude + r * core + coda for r in (4, 8, 16, 32)) == effective
    kept = sum(flops_paper(model, ramp(t, 47_684, 32, 0.25))
               for t in range(0, 47_684, 7)) / 6_812 / flops_paper(model, 32)
    assert kept == pytest.approx(curriculum, abs=5e-4)


def test_our_ledger(tiny):
    """The same as LM's for as many layers of their own; recurrences without a trace cost a third;
    the adapter counts."""
    parent = tiny(n_layer=6)
    model = surgery(parent, '2-2-2', inject='add')
    assert at(model, 3).flops_per_token() == parent.flops_per_token([0, 1] + [2, 3] * 3 + [4, 5])
    once = parent.flops_per_token([2, 3]) - parent.flops_per_token([])
    linear = surgery(parent, '2-2-2', r=3)
    assert linear.flops_per_token() - model.flops_per_token() == 3 * 6 * 2 * 32 * 32
    assert at(model, 5, 2).flops_per_token() == parent.flops_per_token([0, 1, 4,
            5]) + 2 * once + 3 * once // 3


@pytest.mark.parametrize('fields', [dict(tie_embeddings=False, n_kv_head=2, qk_norm=True),
                                    dict(ln_scaling=True)])
def test_with_one_recurrence_and_an_identity_start_it_is_its_parent(tiny, tokens, fields):
    parent = tiny(n_layer=6, **fields)
    for r in [1] if parent.config.ln_scaling else [1, 3]:       # LN-scaling sees the depth
        assert torch.equal(surgery(parent, '2-2-2', r=r)(tokens), parent(tokens))
    add = surgery(parent, '2-2-2', inject='add', kind=AuthorsCore, state_std=0, r=1)
    assert torch.equal(add(tokens), parent(tokens))
    assert surgery(parent.bfloat16(), '2-2-2').adapter.weight.dtype == torch.bfloat16


def slowly(model, tokens, r, most):
    "Logits by the paper's equations. Only the last recurrences are learned from."
    prelude, core, coda = parts_of(model)
    run = Pass(model, tokens.shape[1])
    e = run(model.embed(tokens), prelude)
    s = core_of(model).first_state(run, e)
    for k in range(r):
        s = run(model.adapter(s, e), core)
        if k < r - most:        # neither through the state nor through e
            s = s.detach()
    return model.head(model.norm(run(s, coda)))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize('inject', ['linear', 'add'])
@pytest.mark.parametrize('r, most', [(3, 8), (5, 5), (5, 2), (4, 1)])
def test_logits_and_gradients_are_those_of_a_detached_reference(tiny, tokens, inject, r, most):
    model = authors_surgery(tiny(n_layer=6), '2-2-2', inject, Core, r=r, backprop_depth=most)
    logits = slowly(model, tokens, r, most)
    torch.testing.assert_close(model(tokens), logits, rtol=1e-4, atol=1e-5)
    expected = gradients(model, F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
    found = gradients(model, model(tokens, tokens))
    assert found.keys() == expected.keys() == {n for n, _ in model.named_parameters()}
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('half', [False, True])
def test_recurrences_that_are_computed_anew_give_the_same_gradients_from_less_memory(tiny, half):
    model = surgery(tiny(n_layer=6, ln_scaling=half), '2-2-2', r=8, backprop_depth=9)
    tokens, found, memory = torch.arange(24).view(2, 12) % 32, [], []
    for core_of(model).recompute in (False, True):
        kept = {}
        with (torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t),
              torch.autocast('cpu', torch.bfloat16, enabled=half)):
            loss = model(tokens, tokens)
        found.append(gradients(model, loss))
        memory.append(sum(kept.values()))
    assert same(*found) and memory[1] < memory[0] / 3


def test_under_autocast_every_weight_has_its_gradient(tiny, tokens):
    "A weight that was cast in a recurrence without a trace must be cast again."
    model = authors_surgery(tiny(n_layer=6), '2-2-2', 'linear', Core, backprop_depth=1)
    found = []
    for cached in (True, False):
        with torch.autocast('cpu', torch.bfloat16, cache_enabled=cached):
            loss = model(tokens, tokens)
            # the stream keeps its precision, adapter or not
            assert model.hidden(tokens).dtype == torch.float32
        found.append(gradients(model, loss))
    assert same(*found) and all(gradient.any() for gradient in found[0].values())


@pytest.mark.parametrize('kind, std, most', [
    (Core, math.sqrt(2 / (5 * 32)), math.inf), (AuthorsCore, math.sqrt(2 / (5 * 32)), math.inf),
    (lambda items: AuthorsCore(items, start='authors'),     # at any width, of a normal cut at 3
     0.0087039 * 0.9866, 3 * 0.0087039)])
def test_first_state(kind, std, most):
    "By place, and the same in each row; or of each row, whoever computes it."
    core, e = kind([0]), torch.zeros(64, 100, 32)

    def drawn(seeds, e, start=0):
        core.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return core.first_state(SimpleNamespace(start=start), e)
    fixed, of_rows = drawn([], e), drawn(range(64), e)
    for s in (fixed, of_rows):
        assert s.std() == pytest.approx(std, rel=0.05) and s.abs().max() <= most
    assert torch.equal(fixed, fixed[:1].expand(64, 100, 32))
    assert torch.equal(drawn([], e[:2, :5], 80), fixed[:2, 80:85])
    assert torch.equal(drawn([63], e[:1]), of_rows[63:])
    assert not torch.equal(of_rows[0], of_rows[1])


def test_first_state_in_blocks_of_64_places():
    "A gold value, which checkpoints and exports rely on; a text in pieces has the same."
    e, core = torch.zeros(1, 200, 32), Core([0])
    whole = core.first_state(SimpleNamespace(start=0), e)[0]
    block = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)) * math.sqrt(2 / 160)
    assert torch.equal(whole[128:192], block)
    assert whole[128, :3].tolist() == pytest.approx([-0.1164, 0.1025, -0.1458], abs=1e-4)
    for start, T in ((0, 64), (63, 1), (64, 1), (60, 70), (130, 70)):
        piece = core.first_state(SimpleNamespace(start=start), e[:, :T])[0]
        assert torch.equal(piece, whole[start:start + T])


def test_authors_adapter_begins_as_torch_begins_one(tiny):
    torch.manual_seed(3)
    model = authors_surgery(tiny(), '1-2-1')
    assert 0.9 / 8 < model.adapter.weight.abs().max() <= 1 / 8      # 1 / sqrt(2 * 32)


@pytest.mark.parametrize('mean, variance, median', [(4, 8.544, 4), (32, 322.842, 29)])
def test_the_poisson_lognormal(mean, variance, median):
    sample = lambda seed, step: sample_recurrence(mean, generator_for(seed, 'recurrence', step))
    drawn = [sample(3, step) for step in range(4000)]
    assert statistics.mean(drawn) == pytest.approx(mean + 1, abs=4 * math.sqrt(variance / 4000))
    assert abs(statistics.median(drawn) - median) <= 1 + mean // 16 and min(drawn) >= 1
    assert statistics.variance(drawn) == pytest.approx(variance, rel=0.25)
    assert drawn[:50] != [sample(4, step) for step in range(50)]


def test_the_curriculum():
    "3,125 of 6,250 steps to 32: 32 steps of the staircase of 97.66 steps each."
    table = [ramp(t, 6250, 32, 0.5) for t in range(6250)]
    assert table == sorted(table) and {*table} == {*range(1, 33)}
    assert table[3124:] == [32] * (6250 - 3124)
    assert [table.count(k) for k in (1, 2, 3)] == [97, 98, 97]
    slow = [ramp(t, 6250, 32, 0.5, '1-sqrt') for t in range(6250)]
    assert slow == sorted(slow) and all(a <= b for a, b in zip(slow, table))
    assert slow[1500] < 12 and slow[3124] == 32
    assert {ramp(t, 100, 7, 0) for t in range(100)} == {7}
    # a whole number stays that: 4 x 0.25 is one, and not two
    assert [ramp(t, 8, 4, 1.0) for t in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_it_trains_in_the_curriculum_and_every_row_and_step_begins_elsewhere(config, recurrent,
                                                                             monkeypatch):
    states, first = [], Core.first_state
    monkeypatch.setattr(Core, 'first_state', lambda self, *args: states.append(
        first(self, *args)) or states[-1])
    c = config(**recurrent, steps=8, decay_steps=2, eval_every=100, curriculum=0.9, lr=1e-2,
               recurrence=4, backprop_depth=3)
    train(c)
    log = [line for line in log_of(c) if 'r' in line]
    means = [ramp(step, 8, 4, 0.9) for step in range(8)]
    assert [line['r'] for line in log] == [
        sample_recurrence(mean, generator_for(0, 'recurrence', step))
        for step, mean in enumerate(means)]
    assert [line['backprop_depth'] for line in log] == [min(3, mean) for mean in means]
    state, model = state_of(c), load_model(c.out_dir)
    assert core_of(model).settings() == state['order'][2]['settings'] == dict(r=4,
                                                                              backprop_depth=3)
    assert state['flops'] == sum(4 * 16 * at(model, line['r'], line['backprop_depth']
                                             ).flops_per_token() for line in log)
    assert state['inherited_flops'] == 7
    assert log[-1]['loss'] < log[0]['loss'] and len({line['r'] for line in log}) > 2
    # of the steps; evaluation's rows are equal
    flat = torch.cat([s for s in states if s.shape[:2] == (4, 16) and not torch.equal(s[0], s[1])])
    flat = flat.flatten(1)
    assert len(flat) == 8 * 4 and torch.cdist(flat, flat).add(torch.eye(32)).min() > 0.1


def kept(folder, parent):
    "Which of the parent's layers a cut has, in order."
    queries = [layer.attn.q.weight for layer in parent.layers]
    return [next(i for i, q in enumerate(queries) if torch.equal(q, layer.attn.q.weight))
            for layer in load_model(folder).layers]


def test_the_command(tiny, data, tmp_path, capsys):
    base, parent = tmp_path / 'base', tiny(vocab_size=257, n_layer=6, context=16)
    save_run(base, parent, data, flops=7)
    (base / 'LICENSE').write_text('Do as you like.')
    for name, more, layers in (
            ('late', [], [0, 1, 3, 4, 5]), ('lists', ['--layers=0,1/2,3/5'], [0, 1, 2, 3, 5]),
            ('dense', ['--dense', '--layers=0,2/1,3/5'], [0, 2, 1, 3, 5])):
        nanodepth('cut', [str(base), '2-2-1', f'--out={tmp_path / name}', *more])
        assert kept(tmp_path / name, parent) == layers, name
        assert state_of(tmp_path / name)['inherited_flops'] == 7
        assert get_tokenizer(tmp_path / name).n_vocab == 257
        assert (tmp_path / name / 'LICENSE').exists()
    dense, tokens = load_model(tmp_path / 'dense'), torch.arange(9)[None]
    assert torch.equal(dense(tokens), parent(tokens, order=[0, 2, 1, 3, 5]))
    nanodepth('cut', [str(base), '2-2-1', '--authors', f'--out={tmp_path / "theirs"}'])
    theirs = load_model(tmp_path / 'theirs')
    assert theirs.order[2].settings() == dict(r=4, backprop_depth=8, start='authors',
                                              state_std=None)
    assert not theirs.config.tie_embeddings and theirs.head.weight is not theirs.embed.weight
    assert theirs.adapter.weight.abs().max() < 1 / 8        # as torch begins it, and not as (0, 1)
    scaled = tiny(vocab_size=257, n_layer=6, context=16, ln_scaling=True)
    save_run(tmp_path / 'scaled', scaled, data)         # each layer keeps the scale of its depth
    for name, shape, more in (('all', '2-3-1', []), ('some', '1-2-1', ['--dense'])):
        nanodepth('cut', [str(tmp_path / 'scaled'), shape, f'--out={tmp_path / name}', *more])
    with torch.no_grad():
        assert torch.allclose(load_model(tmp_path / 'all')(tokens), scaled(tokens), atol=1e-5)
        x, run = scaled.embed(tokens), Pass(scaled, 9)
        for depth in (0, 3, 4, 5):
            x = run(x, [depth], depth)
        assert torch.allclose(load_model(tmp_path / 'some')(tokens), scaled.head(scaled.norm(x)),
                              atol=1e-5)
    scaled.order = [0, 1, 1, 2, 3, 4, 5]
    looped = save_run(tmp_path / 'looped', scaled, data)
    assert 'runs each of its layers once' in refused(capsys, 'cut', looped, '1-1-1',
                                             f'--out={tmp_path / "no"}')
    (base / 'run.json').unlink()
    assert 'does not say which tokenizer it reads' in refused(capsys, 'cut', base, '2-2-1',
                                                              f'--out={tmp_path / "no"}')
    assert not (tmp_path / 'no/ckpt.pt').exists()


def test_what_no_core_does(tiny, tokens):
    model = tiny()
    core, cache = surgery(model, '1-2-1', r=2), {}
    core(tokens, cache=cache)
    for call, message in (
            (lambda: at(core, 3)(tokens, cache=cache), 'this cache was filled by the order'),
            (lambda: at(core, 0)(tokens), 'r=0, backprop_depth=8: both are at least 1'),
            (lambda: model(tokens, order=[0, Core([1])]), 'a Core needs an adapter'),
            (lambda: surgery(model, ([0], [], [3])), 'has no layers in its core'),
            (lambda: surgery(model, ([0], [9], [3])), 'is not made of the layers 0 to 3'),
            (lambda: surgery(model, '1-2-1', inject='linear'), 'inject=linear: identity or add'),
            (lambda: ramp(0, 9, 4, 0.5, 'steep'), 'curriculum_shape=steep'),
            (lambda: parts_of_shape('4-8', 22), 'is not three numbers of layers'),
            (lambda: parts_of_shape('2-0-2', 22), 'has no layers in its core'),
            (lambda: parts_of_shape('4-9-10', 22), 'more layers than the 22 of the model')):
        with pytest.raises(Refused, match=message):
            call()
