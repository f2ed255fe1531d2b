"raven.py: the authors' format in and out, against a slow second form of their model."
import json
import math

import pytest
import torch
import torch.nn.functional as F

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.engine.checkpoint import load_model
from nanodepth.engine.raven import save_raven
from nanodepth.retrofit import surgery

save_file = pytest.importorskip('safetensors.torch').save_file
load_file = pytest.importorskip('safetensors.torch').load_file

SIZES = dict(prelude=1, core_block=2, coda=1)
ABOUT = dict(
    architectures=['RavenForCausalLM'], model_type='huginn_raven', n_embd=32, n_heads=4,
    num_key_value_heads=2, head_dim=8, intermediate_size=48, vocab_size=50, padded_vocab_size=50,
    block_size=4096, max_position_embeddings=64, norm_eps=1e-5, rope_base=50_000.0,
    rope_theta=10_000.0, n_layers_in_prelude=1, n_layers_in_recurrent_block=2, n_layers_in_coda=1,
    n_layers=4, mean_recurrence=3, mean_backprop_depth=8, injection_type='linear', bias=False,
    qk_bias=False, tie_embeddings=False, test_time_noise=0, block_class_name='SandwichBlock',
    init_values=dict(std=0.008703882797784892, embed_scale=1.0), torch_dtype='float32')


@pytest.fixture
def folder(tmp_path):
    "A folder as their conversion writes one: fused matrices, a buffer, Huginn's own leftovers."
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])
    tensors = {'transformer.wte.weight': draw(50, 32), 'transformer.ln_f.weight': 1 + draw(32),
               'transformer.adapter.weight': draw(32, 64), 'lm_head.weight': draw(50, 32),
               'freqs_cis': torch.zeros(1, 64, 1, 4, 2)}
    for part, n in SIZES.items():
        for i in range(n):
            layer = {'norm_1': 1 + draw(32), 'norm_2': 1 + draw(32), 'attn.Wqkv': draw(64, 32),
                     'attn.proj': draw(32, 32), 'mlp.fc': draw(96, 32), 'mlp.proj': draw(32, 48)}
            tensors |= {f'transformer.{part}.{i}.{name}.weight': t for name, t in layer.items()}
    path = tmp_path / 'raven'
    path.mkdir()
    save_file(tensors, path / 'model.safetensors')
    (path / 'config.json').write_text(json.dumps(ABOUT))
    return path


def slowly(path, tokens, state, r):
    "Their forward, written out: pre-norms, Llama's rotation, the adapter on (state, e), one ln_f."
    w = load_file(path / 'model.safetensors')
    c = json.loads((path / 'config.json').read_text())
    T, hd = tokens.shape[1], c['head_dim']
    angles = torch.arange(T)[:, None] / c['rope_theta'] ** (torch.arange(0, hd, 2) / hd)

    def turn(x):                                                    # (B, heads, T, hd)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(),
                          b * angles.cos() + a * angles.sin()), -1)

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + c['norm_eps']).sqrt() * w[f'{name}.weight']

    def block(x, name):
        B, H, Hkv = len(x), c['n_heads'], c['num_key_value_heads']
        qkv = norm(x, f'{name}.norm_1') @ w[f'{name}.attn.Wqkv.weight'].T
        q, k, v = (t.view(B, T, -1, hd).transpose(1, 2)
                   for t in qkv.split([H * hd, Hkv * hd, Hkv * hd], -1))
        k, v = (t.repeat_interleave(H // Hkv, 1) for t in (turn(k), v))
        scores = turn(q) @ k.mT / math.sqrt(hd)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1)
        x = x + y @ w[f'{name}.attn.proj.weight'].T
        gate, up = (norm(x, f'{name}.norm_2') @ w[f'{name}.mlp.fc.weight'].T).chunk(2, -1)
        return x + (F.silu(gate) * up) @ w[f'{name}.mlp.proj.weight'].T

    e = w['transformer.wte.weight'][tokens]
    for i in range(c['n_layers_in_prelude']):
        e = block(e, f'transformer.prelude.{i}')
    for _ in range(r):
        state = torch.cat((state, e), -1) @ w['transformer.adapter.weight'].T
        for i in range(c['n_layers_in_recurrent_block']):
            state = block(state, f'transformer.core_block.{i}')
    for i in range(c['n_layers_in_coda']):
        state = block(state, f'transformer.coda.{i}')
    return norm(state, 'transformer.ln_f') @ w['lm_head.weight'].T


@torch.no_grad()
def test_a_folder_of_theirs_opens_and_computes_what_their_model_does(folder):
    model = load_model(folder)
    assert (model.mean, model.backprop_depth, model.config.context) == (3, 8, 64)
    assert (model.prelude, model.core, model.coda) == ([0], [1, 2], [3])
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    state = model.first_state(torch.zeros(2, 12, 32), 0, None)
    assert state.abs().max() <= 3 * 0.0087039 and state.std() > 0.007
    for r in (1, 2, 5):
        assert torch.allclose(model(tokens, r=r), slowly(folder, tokens, state, r), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize('options, fields', [
    (dict(inject='authors', start='authors', fresh=True), {}),
    (dict(inject='add', start='zero'), dict(tie_embeddings=True)),
    (dict(inject='identity', fresh=True), dict(n_kv_head=2, rope_scaling=dict(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16)))])
def test_ours_in_their_format_come_back(tiny, tmp_path, options, fields):
    model = surgery(tiny(n_layer=6, **fields), '2-2-2', mean=5, backprop_depth=3, **options)
    for p in model.parameters():
        p.add_(torch.randn_like(p) / 50)
    save_raven(model, tmp_path / 'x')
    again = load_model(tmp_path / 'x')
    tokens = torch.randint(50, (2, 12))
    generators = [[torch.Generator().manual_seed(3)] for _ in range(2)]
    e = torch.zeros(1, 12, 32)
    assert again.state_std == (0 if model.start == 'zero' else model.state_std)
    if model.start == 'normal':     # theirs is cut at 3 sigma: the draws differ, not the model
        again.start = 'normal'
    assert torch.allclose(model(tokens[:1], r=4, generator=generators[0]),
                          again(tokens[:1], r=4, generator=generators[1]), atol=1e-5)
    assert (again.mean, again.backprop_depth) == (5, 3) and again.inject == 'authors'
    assert e.shape == (1, 12, 32)


def change(folder, **more):
    about = json.loads((folder / 'config.json').read_text()) | more
    (folder / 'config.json').write_text(json.dumps(about))


@pytest.mark.parametrize('changes, message', [
    (dict(init_values=dict(std=0.0087, embed_scale=5.6)), 'embed_scale=5.6'),
    (dict(test_time_noise=0.1), 'test_time_noise=0.1'),
    (dict(injection_type='add'), "injection_type='add'"),
    (dict(head_dim=16), 'head_dim is 16'),
    (dict(n_layers_in_coda=2), 'transformer.coda.1.norm_1.weight is in none of its files'),
    (dict(rope_scaling=dict(rope_type='yarn')), 'none and llama3 are supported'),
    (dict(intermediate_size=40), 'mlp.fc.weight has the shape')])
def test_what_our_block_does_not_have_is_refused_by_name(folder, changes, message):
    change(folder, **changes)
    with pytest.raises(Refused, match=message):
        load_model(folder)


@pytest.mark.parametrize('name, message', [
    ('norm_3.weight', "Huginn's sandwich norms"), ('attn.q_norm.weight', "OLMo's norms"),
    ('attn.qk_bias', "Huginn's bias")])
def test_other_families_of_the_format_are_refused(folder, name, message):
    tensors = load_file(folder / 'model.safetensors')
    save_file(tensors | {f'transformer.prelude.0.{name}': torch.ones(32)},
              folder / 'model.safetensors')
    with pytest.raises(Refused, match=message):
        load_model(folder)


def test_what_the_format_cannot_hold(tiny, tmp_path):
    model = surgery(tiny(n_layer=4, ln_scaling=True), '1-2-1', fresh=True)
    with pytest.raises(Refused, match="LN-scaling: the authors' format cannot hold that"):
        save_raven(model, tmp_path / 'x')
    assert not (tmp_path / 'x').exists()
    for fields, options, ours in (
            (dict(), dict(fresh=True), []), (dict(qk_norm=True), dict(fresh=True),
                                             ['norms of q and k']),
            (dict(head_dim=16), dict(start='zero'), ['head_dim=16']),
            (dict(), dict(), ['a fixed table of first states (--fresh draws new ones)'])):
        model = surgery(tiny(n_layer=4, **fields), '1-2-1', **options)
        assert save_raven(model, tmp_path / f'{len(list(tmp_path.iterdir()))}') == ours


CUTS = dict(        # a parent, how it is cut
    qwen3=(dict(qk_norm=True, head_dim=24, n_kv_head=2), dict(inject='linear')),
    llama3=(dict(n_kv_head=2, rope_scaling=dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16)), dict(inject='authors', start='authors')),
    added=(dict(tie_embeddings=False), dict(inject='add', start='zero')))


@pytest.mark.parametrize('name', CUTS)
def test_transformers_opens_ours_by_the_code_in_the_folder(tiny, tmp_path, name):
    transformers = pytest.importorskip('transformers')
    fields, how = CUTS[name]
    model = surgery(tiny(n_layer=5, context=128, **fields), '1-2-1', mean=3, **how).eval()
    save_raven(model, tmp_path / 'out')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / 'out', trust_remote_code=True).eval()
    assert not {*theirs.state_dict()} ^ {*load_file(tmp_path / 'out/model.safetensors')}
    tokens = torch.randint(50, (2, 70), generator=torch.Generator().manual_seed(3))
    again = load_model(tmp_path / 'out')
    with torch.no_grad():
        for r in (1, 3, 5):
            want = model(tokens, r=r)
            assert torch.allclose(theirs(tokens, num_steps=r).logits, want, atol=1e-5)
            assert torch.allclose(again(tokens, r=r), want, atol=1e-5)
            said = theirs.generate(tokens, max_new_tokens=8, do_sample=False, num_steps=r,
                                   attention_mask=torch.ones_like(tokens))
            assert torch.equal(said, model.generate(tokens, 8, temperature=0, r=r))
        # padded on the left: the row that is not padded, and the padded one by itself
        mask = torch.ones_like(tokens)
        mask[1, :9] = 0
        said = theirs.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)
        alone = model.generate(tokens[1:, 9:], 4, temperature=0)
        assert torch.equal(said[0, 70:], model.generate(tokens[:1], 4, temperature=0)[0, 70:])
        assert torch.equal(said[1, 70:], alone[0, 61:])
        theirs.save_pretrained(tmp_path / 'saved')          # it can be saved again
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'saved',
                                                                  trust_remote_code=True)
        assert torch.equal(saved(tokens).logits, theirs(tokens).logits)
    loss = theirs(tokens, labels=tokens).loss
    loss.backward()
    assert torch.isfinite(loss) and theirs.transformer.adapter.weight.grad is not None


def test_the_commands_take_it(folder, tmp_path, capsys, data):
    from nanodepth.data.tokenizer import write_tokenizer
    change(folder, vocab_size=257, padded_vocab_size=257)
    tensors = load_file(folder / 'model.safetensors')
    for name in ('transformer.wte.weight', 'lm_head.weight'):
        tensors[name] = torch.randn(257, 32, generator=torch.Generator().manual_seed(2)) / 5
    save_file(tensors, folder / 'model.safetensors')
    write_tokenizer('bytes', folder, 64)
    nanodepth('sample', [str(folder), '--prompt=ab', '--tokens=4', '--r=2', '--device=cpu'])
    assert "'ab' goes on" in capsys.readouterr().out
    nanodepth('evaluate', [str(folder), '--tasks=primitive_toy_copy', '--limit=4', '--r=2',
                                '--device=cpu', f'--out={tmp_path / "e.csv"}'])
    nanodepth('probe', [str(folder), '--only=norms', '--count=2', '--examples=toy_assign/0',
                             '--length=8', '--device=cpu', '--n=2', f'--data={data}',
                             f'--out={tmp_path / "p"}'])
    nanodepth('evaluate', [str(folder), '--r=1,2', f'--data={data}', '--batches=1',
                           '--device=cpu', f'--out={tmp_path / "r.png"}'])
    nanodepth('export', [str(folder), str(tmp_path / 'again'), '--fresh'])
    assert "the authors' format" in capsys.readouterr().out
    assert torch.equal(load_model(tmp_path / 'again').adapter.weight,
                       load_model(folder).adapter.weight)
