"""A GGUF file as a checkpoint: ours is transformers' model of the same file, its tokens are those
of the original tokenizer, and every other command says what to do with such a file."""
import json

import numpy as np
import pytest
import torch
from conftest import byte_level_bpe, refused, save_run
from families import LLAMA3

from nanodepth.__main__ import main as nanodepth
from nanodepth.scoring.way import Way
from nanodepth.common.errors import Refused
from nanodepth.model import LM, ModelConfig
from nanodepth.models import hf
from nanodepth.models.checkpoint import load_model
from nanodepth.extras.gguf import read_loop, shared_stack, splits_as, write_gguf
from nanodepth.models.gguf import open_gguf
from nanodepth.models.hf import their_config
from nanodepth.text.tokenizer import get_tokenizer

gguf = pytest.importorskip('gguf')

TEXTS = ['in  1984,   12 x  7²', 'def f(x):\n    return  x[10:20]\t# 3', '  9', 'naïve ½ 東 12']


@pytest.fixture(scope='module')
def original():
    return byte_level_bpe(['    return x  in  the  def f(x) 1 2 3 naïve'] * 9, 300,
                          ['<|endoftext|>', '<|im_start|>', '<|im_end|>'])


def folder_of(original, path, **shape):
    "A tiny model of ours as a Hugging Face folder with the tokenizer of these tests."
    torch.manual_seed(0)
    config = dict(vocab_size=320, n_embd=64, n_head=4, n_kv_head=2, n_layer=3, context=64)
    model = LM(ModelConfig(**config | shape))
    for name, p in model.named_parameters():
        if name.endswith('bias'):
            torch.nn.init.normal_(p)        # they begin as zeros
    hf.save_hf(model, path)
    original.save(str(path / 'tokenizer.json'))
    (path / 'tokenizer_config.json').write_text(json.dumps(dict(
        tokenizer_class='PreTrainedTokenizerFast', bos_token='<|im_start|>',
        eos_token='<|im_end|>')))
    (path / 'chat_template.jinja').write_text('{{ messages }}')
    return path


@pytest.fixture
def path(original, tmp_path):
    "A tiny Llama as a file in eight bits, as export writes one (by hand further below)."
    file = tmp_path / 'tiny.gguf'
    write_gguf(load_model(folder_of(original, tmp_path / 'in')), file, 'q8_0', str(tmp_path / 'in'))
    return file


def test_a_gguf_file_becomes_a_folder(path, original, tmp_path):
    theirs, _ = open_gguf(path)
    folder = tmp_path / 'out'
    with pytest.raises(Refused, match=f'nanodepth export {path} FOLDER'):
        load_model(path)
    nanodepth('export', [str(path), str(folder)])
    ours = load_model(folder)
    tokens = torch.randint(320, (2, 20))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)
    made = get_tokenizer(folder)
    for text in TEXTS:
        assert made.encode(text) == original.encode(text).ids and made.decode(
            made.encode(text)) == text
    nanodepth('export', [str(path), str(tmp_path / 'half'), '--dtype=bfloat16'])
    half = load_model(tmp_path / 'half')
    assert half.embed.weight.dtype == torch.bfloat16
    assert torch.equal(half.embed.weight, ours.embed.weight.bfloat16())


@pytest.mark.parametrize('kind, scaling, message', [
    ('a-new-kind', 'NONE', "kind 'a-new-kind', which nothing here knows"),
    ('smollm', 'LINEAR', 'its rotary positions are scaled')])
def test_what_would_be_read_wrongly_is_refused(original, tmp_path, capsys, monkeypatch, kind,
                                               scaling, message):
    def as_others_write(writer, _):
        writer.add_string('tokenizer.ggml.pre', kind)
        writer.add_rope_scaling_type(gguf.RopeScalingType[scaling])
    monkeypatch.setattr(gguf.GGUFWriter, 'add_tokenizer_pre', as_others_write)
    model = load_model(folder_of(original, tmp_path / 'in'))
    write_gguf(model, tmp_path / 'x.gguf', 'float32', str(tmp_path / 'in'))
    assert message in refused(capsys, 'export', tmp_path / 'x.gguf', tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('shape', [
    {}, dict(qk_norm=True, head_dim=128), dict(qkv_bias=True),
    dict(rope_scaling=LLAMA3, head_dim=8), dict(tie_embeddings=True)], ids=str)
def test_a_model_becomes_a_gguf_file(original, tmp_path, shape):
    folder, path = folder_of(original, tmp_path / 'in', **shape), tmp_path / 'out.gguf'
    nanodepth('export', [str(folder), str(path), '--loop=1-1x2-1', '--damp'])
    model, tokens = load_model(folder), torch.randint(320, (2, 30))
    theirs, words = open_gguf(path, their_config(model).rope_parameters)
    with torch.no_grad(), Way(loop='1-1x2-1', damp=True).apply(model):
        assert torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-5)
    for text in TEXTS:
        assert words.encode(text) == original.encode(text).ids
    reader = gguf.GGUFReader(path)
    said = {name: field.contents() for name, field in reader.fields.items()}
    stored = {t.name: t.data for t in reader.tensors}
    if model.config.rope_scaling:           # the file has what they do to each frequency
        plain = 1 / 10_000 ** (np.arange(0, 8, 2) / 8)
        assert stored['rope_freqs.weight'] == pytest.approx(
            plain / theirs.model.rotary_emb.inv_freq.numpy(), rel=1e-5)
    assert (said['tokenizer.ggml.pre'], said['tokenizer.ggml.bos_token_id'],
            said['tokenizer.chat_template']) == ('smollm', 1, '{{ messages }}')
    assert [*said['tokenizer.ggml.token_type'][:4], said['tokenizer.ggml.tokens'][-1]] == [
        3, 3, 3, 1, '[PAD319]']
    q = model.layers[2].attn.q.weight.detach().numpy()      # the last of the order 0, 1, 1, 2
    half = model.config.head_dim // 2                       # rows 0 and hd/2 are a pair to turn
    turned = not (model.config.qk_norm or model.config.qkv_bias)      # Llama's alone
    assert np.array_equal(stored['blk.3.attn_q.weight'][1], q[half if turned else 1])
    assert np.array_equal(stored['blk.3.attn_norm.weight'],
                          model.layers[2].attn_norm.weight.detach().numpy())
    assert ('output.weight' in stored) is not model.config.tie_embeddings


def test_a_stack_that_runs_several_times_is_written_once(original, tmp_path, capsys, tiny):
    folder, path = folder_of(original, tmp_path / 'in'), tmp_path / 'out.gguf'
    nanodepth('export', [str(folder), str(path), '--loop=3x2'])
    assert '3 layers that run 2 times with shared weights' in capsys.readouterr().out
    reader = gguf.GGUFReader(path)
    said = {name: field.contents() for name, field in reader.fields.items()}
    # llama.cpp's family nanbeige, without the norm that it would put between the passes
    assert (said['general.architecture'], said['nanbeige.block_count'], said['nanbeige.num_loops'],
            said['nanbeige.skip_loop_final_norm']) == ('nanbeige', 3, 2, True)
    stored = {t.name: t.data for t in reader.tensors}
    nanodepth('export', [str(folder), str(tmp_path / 'once.gguf')])     # as transformers reads it
    once = {t.name: t.data for t in gguf.GGUFReader(tmp_path / 'once.gguf').tensors}
    assert once.keys() == stored.keys()
    assert all(np.array_equal(once[name], stored[name]) for name in once)
    model, tokens = load_model(folder), torch.randint(320, (1, 9))
    with torch.no_grad(), Way(loop='3x2').apply(model):
        wanted = model(tokens)
        for p in model.parameters():        # what is read comes from the file
            p.zero_()
        assert torch.equal(read_loop(path, model)(tokens), wanted)
    assert shared_stack(tiny(order=[0, 0])) == ([0], 2)
    for feature in (dict(rope_scaling=LLAMA3), dict(qk_norm=True), dict(ln_scaling=True)):
        assert shared_stack(tiny(order=[0, 0], **feature)) == ([0, 0], 1)
    biased = folder_of(original, tmp_path / 'biased', qkv_bias=True)
    for other, loop in ((folder, '1-1x2-1'), (biased, '3x2')):
        nanodepth('export', [str(other), str(tmp_path / f'{loop}.gguf'), f'--loop={loop}'])
        assert 'layers that run again are written again' in capsys.readouterr().out


def test_eight_bits_and_what_no_file_can_be(original, tmp_path, capsys, tiny, data):
    folder, path = folder_of(original, tmp_path / 'in'), tmp_path / 'small.gguf'
    nanodepth('export', [str(folder), str(path), '--dtype=q8_0'])
    reader = gguf.GGUFReader(path)
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert (kinds['blk.0.ffn_up.weight'], kinds['blk.0.ffn_norm.weight']) == ('Q8_0', 'F32')
    up = load_model(folder).layers[0].mlp.up.weight.detach().numpy()
    read = gguf.quants.dequantize({t.name: t.data for t in reader.tensors}['blk.0.ffn_up.weight'],
                                  gguf.GGMLQuantizationType.Q8_0)
    # the largest of 32 numbers is 127 steps, each is rounded to a step, and
    # the step itself to 16 bits
    step = np.abs(up.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    assert (np.abs((read - up).reshape(-1, 32)) <= 0.6 * step).all()
    hf.save_hf(load_model(folder).half(), tmp_path / 'half', tokenizer=str(folder))
    nanodepth('export', [str(tmp_path / 'half'), str(tmp_path / 'half.gguf')])
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / 'half.gguf').tensors}
    assert np.array_equal(stored['blk.0.ffn_up.weight'].data, up.astype(np.float16))
    assert 'is there already' in refused(capsys, 'export', folder, path)
    assert 'ends in .gguf' in refused(capsys, 'export', folder, tmp_path / 'x', '--dtype=q8_0')
    odd = folder_of(original, tmp_path / 'odd', qk_norm=True)
    assert 'heads of 16 channels' in refused(capsys, 'export', odd, tmp_path / 'odd.gguf')
    save_run(tmp_path / 'run', tiny(vocab_size=257), data)
    assert 'no merges' in refused(capsys, 'export', tmp_path / 'run', tmp_path / 'run.gguf')
    assert not (tmp_path / 'run.gguf').exists()


@pytest.mark.parametrize('kind, digits', [('llama-bpe', '{1,3}'), ('qwen2', '')])
def test_how_a_tokenizer_splits_has_a_name(kind, digits):
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits
               + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = dict(type='Split', pattern=dict(Regex=pattern))
    level = dict(type='ByteLevel', use_regex=False)
    assert splits_as('', dict(type='Sequence', pretokenizers=[split, level])) == kind
    assert splits_as('', dict(level, use_regex=True)) == 'gpt-2'
    with pytest.raises(Refused, match='no name here'):
        splits_as('', level)
