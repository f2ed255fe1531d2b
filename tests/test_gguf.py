"""A GGUF file as a checkpoint: ours is transformers' model of the same file, its tokens are those
of the original tokenizer, and every other command says what to do with such a file."""
import json

import numpy as np
import pytest
import torch
from conftest import refused
from nanodepth.__main__ import main as nanodepth
from nanodepth.models.checkpoint import load_model
from nanodepth.models.gguf import open_gguf
from nanodepth.text.tokenizer import get_tokenizer

gguf = pytest.importorskip('gguf')
tokenizers = pytest.importorskip('tokenizers')

LAYERS, WIDTH, HEADS, KV, FFN = 2, 32, 4, 2, 48
TEXTS = ['in  1984,   12 x  7²', 'def f(x):\n    return  x[10:20]\t# 3', '  9', 'naïve ½ 東 12']


@pytest.fixture(scope='module')
def original():
    "A byte-level tokenizer that splits digits off, as SmolLM's does, with some merges."
    pre = tokenizers.pre_tokenizers
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True),
                                       pre.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False,
        special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'])
    made.train_from_iterator(['    return x  in  the  def f(x) 1 2 3 naïve'] * 9, trainer)
    return made


@pytest.fixture(params=['smollm'])
def path(request, original, tmp_path):
    "A tiny Llama as a GGUF file, its first matrices in 4 bits, q and k permuted as llama.cpp does."
    model = json.loads(original.to_str())['model']
    tokens = sorted(model['vocab'], key=model['vocab'].get)
    rng = np.random.default_rng(0)
    head = WIDTH // HEADS
    path = tmp_path / 'tiny.gguf'
    w = gguf.GGUFWriter(path, 'llama')
    w.add_block_count(LAYERS)
    w.add_context_length(64)
    w.add_embedding_length(WIDTH)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV)
    w.add_rope_freq_base(10_000.0)
    w.add_rope_dimension_count(head)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(len(tokens))
    w.add_tokenizer_model('gpt2')
    w.add_tokenizer_pre(request.param)
    w.add_token_list(tokens)
    w.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    w.add_token_merges([merge if isinstance(merge, str) else ' '.join(merge)
                        for merge in model['merges']])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_add_bos_token(False)

    def add(name, *shape, ones=False):
        t = rng.normal(0, 0.3, shape).astype(np.float32) + ones
        if name.endswith('ffn_gate.weight'):
            kind = gguf.GGMLQuantizationType.Q4_1
            return w.add_tensor(name, gguf.quants.quantize(t, kind), raw_dtype=kind)
        w.add_tensor(name, t)
    add('token_embd.weight', len(tokens), WIDTH)
    add('output_norm.weight', WIDTH, ones=True)
    for i in range(LAYERS):
        for name, rows in dict(attn_q=WIDTH, attn_k=KV * head, attn_v=KV * head,
                               attn_output=WIDTH, ffn_gate=FFN, ffn_up=FFN).items():
            add(f'blk.{i}.{name}.weight', rows, WIDTH)
        add(f'blk.{i}.ffn_down.weight', WIDTH, FFN)
        for name in ('attn_norm', 'ffn_norm'):
            add(f'blk.{i}.{name}.weight', WIDTH, ones=True)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def test_a_gguf_file_becomes_a_folder(path, original, tmp_path, capsys):
    theirs, _ = open_gguf(path)
    folder = tmp_path / 'out'
    nanodepth('export', [str(path), str(folder)])
    assert 'every command opens it' in capsys.readouterr().out
    ours = load_model(folder)
    tokens = torch.randint(len(original.get_vocab()), (2, 20))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)
    # by hand: q's rows as llama.cpp has them are halves of each head, one row of each in turn
    reader = gguf.GGUFReader(path)
    stored = {t.name: t for t in reader.tensors}['blk.1.attn_q.weight'].data
    unmixed = stored.reshape(HEADS, WIDTH // HEADS // 2, 2, WIDTH).swapaxes(1, 2)
    assert np.array_equal(ours.layers[1].attn.q.weight.detach().numpy(),
                          unmixed.reshape(WIDTH, WIDTH))
    made = get_tokenizer(folder)
    for text in TEXTS:
        assert made.encode(text) == original.encode(text).ids and made.decode(
            made.encode(text)) == text
    nanodepth('export', [str(path), str(tmp_path / 'half'), '--dtype=bfloat16'])
    half = load_model(tmp_path / 'half')
    assert half.embed.weight.dtype == torch.bfloat16
    assert torch.equal(half.embed.weight, ours.embed.weight.bfloat16())


@pytest.mark.parametrize('path', ['a-new-kind'], indirect=True)
def test_a_tokenizer_of_an_unknown_kind_is_refused(path, tmp_path, capsys):
    assert "kind 'a-new-kind', which nothing here knows" in refused(
        capsys, 'export', path, tmp_path / 'out')
    assert not (tmp_path / 'out/config.json').exists()


def test_other_commands_name_the_command(tmp_path, capsys):
    file = tmp_path / 'x.gguf'
    file.write_bytes(b'GGUF')
    for argv in (['evaluate', file], ['sample', file], ['cut', file, '1-1-1'], ['export', file],
                 ['sweep', file], ['probe', file]):
        assert f'nanodepth export {file} FOLDER' in refused(capsys, *argv)
