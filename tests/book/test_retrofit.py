"Test retrofit.py: a pretrained model becomes recurrent, with a prelude, a core and a coda."
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import log_of, refused, same, save_run, state_of

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.model import LM, ModelConfig, Pass
from nanodepth.models.authors import AuthorsCore, flops_paper, parts_of
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import Core, core_of, ramp, sample_recurrence, surgery
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
def test_surgery_has_the_papers_tables(fields, shape, parts, share, flops, effective, curriculum):
    "The weights of their Table 7 and, by section 3's rule, FLOPs for r = 4, 8, 16 and 32."
    with torch.device('meta'):
        parent = LM(ModelConfig(**fields))
        model = surgery(parent, shape)
    layer = sum(p.numel() for p in model.layers[0].parameters())
    prelude, core, coda = (len(part) * layer for part in parts_of(model))
    assert (prelude, core, coda) == parts and core_of(model).adapter.weight.numel() == 8_388_608
    whole = sum(p.numel() for p in parent.layers.parameters())
    assert round(sum(parts) / whole, 3) == share
    head = 2 * model.config.vocab_size * 2048 + 2048
    assert model.num_params() == sum(parts) + 8_388_608 + head
    assert tuple(flops_paper(model, r) for r in (4, 8, 16, 32)) == flops
    assert tuple(prelude + r * core + coda for r in (4, 8, 16, 32)) == effective
    kept = sum(flops_paper(model, ramp(t, 47_684, 32, 0.25))
               for t in range(0, 47_684, 7)) / 6_812 / flops_paper(model, 32)
    assert kept == pytest.approx(curriculum, abs=5e-4)


def test_flops_of_a_core(tiny):
    """The same as LM's for as many layers of their own; recurrences without a trace cost a third;
    the adapter counts."""
    parent = tiny(n_layer=6)
    model = surgery(parent, '2-2-2', AuthorsCore, inject='add')
    assert at(model, 3).flops_per_token() == parent.flops_per_token([0, 1] + [2, 3] * 3 + [4, 5])
    once = parent.flops_per_token([2, 3]) - parent.flops_per_token([])
    linear = surgery(parent, '2-2-2', r=3)
    assert linear.flops_per_token() - model.flops_per_token() == 3 * 6 * 2 * 32 * 32
    outside = parent.flops_per_token([0, 1, 4, 5])
    assert at(model, 5, 2).flops_per_token() == outside + 2 * once + 3 * once // 3


@pytest.mark.parametrize('fields', [dict(tie_embeddings=False, n_kv_head=2, qk_norm=True),
                                    dict(ln_scaling=True)])
def test_surgery_without_training_is_its_parent(tiny, tokens, fields):
    parent = tiny(n_layer=6, **fields)
    for r in [1] if parent.config.ln_scaling else [1, 3]:       # LN-scaling sees the depth
        assert torch.equal(surgery(parent, '2-2-2', r=r)(tokens), parent(tokens))
    add = surgery(parent, '2-2-2', AuthorsCore, inject='add', state_std=0, r=1)
    assert torch.equal(add(tokens), parent(tokens))
    half = surgery(parent.bfloat16(), '2-2-2')
    assert core_of(half).adapter.weight.dtype == torch.bfloat16


def slowly(model, tokens, r, most):
    "Logits by the paper's equations. Only the last recurrences are learned from."
    prelude, core, coda = parts_of(model)
    run = Pass(model, tokens.shape[1])
    e = run(model.embed(tokens), prelude)
    s = core_of(model).first_state(run, e)
    for k in range(r):
        s = run(core_of(model).mix(s, e), core)
        if k < r - most:        # neither through the state nor through e
            s = s.detach()
    return model.head(model.norm(run(s, coda)))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize('inject', ['random', 'add'])
@pytest.mark.parametrize('r, most', [(3, 8), (5, 5), (5, 2), (4, 1)])
def test_core_is_the_papers_equations(tiny, tokens, inject, r, most):
    model = surgery(tiny(n_layer=6), '2-2-2', AuthorsCore, r=r, backprop_depth=most, inject=inject)
    logits = slowly(model, tokens, r, most)
    torch.testing.assert_close(model(tokens), logits, rtol=1e-4, atol=1e-5)
    expected = gradients(model, F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
    found = gradients(model, model(tokens, tokens))
    assert found.keys() == expected.keys() == {n for n, _ in model.named_parameters()}
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('half', [False, True])
def test_recompute_has_equal_gradients_from_less_memory(tiny, half):
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


def test_gradients_under_autocast_are_whole(tiny, tokens):
    "A weight that was cast in a recurrence without a trace must be cast again."
    model = surgery(tiny(n_layer=6), '2-2-2', AuthorsCore, backprop_depth=1)
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


@pytest.mark.parametrize('mean, variance, median', [(4, 8.544, 4), (32, 322.842, 29)])
def test_recurrences_are_poisson_lognormal(mean, variance, median):
    sample = lambda seed, step: sample_recurrence(mean, generator_for(seed, 'recurrence', step))
    drawn = [sample(3, step) for step in range(4000)]
    assert statistics.mean(drawn) == pytest.approx(mean + 1, abs=4 * math.sqrt(variance / 4000))
    assert abs(statistics.median(drawn) - median) <= 1 + mean // 16 and min(drawn) >= 1
    assert statistics.variance(drawn) == pytest.approx(variance, rel=0.25)
    assert drawn[:50] != [sample(4, step) for step in range(50)]


def test_curriculum_is_a_staircase():
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


@pytest.mark.parametrize('scaled', [False, True])
@pytest.mark.parametrize('options, layers', [
    ('2-2-1', [0, 1, 3, 4, 5]), ('2-2-1 --layers=0,1/2,3/5', [0, 1, 2, 3, 5]),
    ('2-2-1 --dense --layers=0,2/1,3/5', [0, 2, 1, 3, 5]), ('2-3-1', [*range(6)])])
def test_cut_keeps_the_layers_it_says(options, layers, scaled, tiny, data, tmp_path):
    "With LN-scaling each keeps the scale of its depth. Tokenizer, FLOPs and licence go with them."
    parent = tiny(vocab_size=257, n_layer=6, context=16, ln_scaling=scaled)
    base, out = tmp_path / 'base', tmp_path / 'out'
    save_run(base, parent, data, flops=7)
    (base / 'LICENSE').write_text('Do as you like.')
    nanodepth('cut', [str(base), *options.split(), f'--out={out}'])
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        x, run = parent.embed(tokens), Pass(parent, 9)
        for depth in layers:
            x = run(x, [depth], depth)
        assert torch.allclose(load_model(out)(tokens), parent.head(parent.norm(x)), atol=1e-5)
    assert state_of(out)['inherited_flops'] == 7 and get_tokenizer(out).n_vocab == 257
    assert (out / 'LICENSE').exists()


def test_cut_as_the_authors_do(tiny, tmp_path, capsys):
    base = save_run(tmp_path / 'base', tiny(vocab_size=257))
    nanodepth('cut', [base, '1-2-1', '--authors', f'--out={tmp_path / "theirs"}'])
    assert '| core    | 1 2 ' in capsys.readouterr().out
    theirs = load_model(tmp_path / 'theirs')
    assert theirs.order[1].settings() == dict(r=4, backprop_depth=8, inject='random',
                                              start='authors', state_std=None)
    assert not theirs.config.tie_embeddings and theirs.head.weight is not theirs.embed.weight
    largest = core_of(theirs).adapter.weight.abs().max()
    assert 0.9 / 8 < largest <= 1 / 8           # as torch begins it: width 32
    nanodepth('cut', [base, '1-2-1', '--authors', '--inject=add', f'--out={tmp_path / "sum"}'])
    added = load_model(tmp_path / 'sum')
    assert added.order[1].settings()['inject'] == 'add' and added.order[1].start == 'authors'


def test_core_refuses_what_it_cannot_do(tiny, tokens):
    model = tiny()
    core = surgery(model, '1-2-1', r=2)
    for call, message in (
            (lambda: at(core, 0)(tokens), 'r=0, backprop_depth=8: both must be at least 1'),
            (lambda: surgery(model, ([0], [], [3])), 'has no layers in its core'),
            (lambda: surgery(model, ([0], [9], [3])), 'must name layers from 0 to 3'),
            (lambda: surgery(model, ([0, 1], [1], [3])), 'none of them twice'),
            (lambda: surgery(model, '1-2'), 'is not three numbers of layers'),
            (lambda: surgery(model, '1-3-1'), 'than the model, which has 4'),
            (lambda: surgery(model, '1-2-1', AuthorsCore, inject='linear'), 'inject=linear must')):
        with pytest.raises(Refused, match=message):
            call()
