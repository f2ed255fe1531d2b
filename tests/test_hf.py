"""Hugging Face checkpoints: the same logits as transformers, the same bits back, and one line for
each broken one."""
import dataclasses
import json
import os
import random
import sys

import pytest
import torch
from conftest import ROOT

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.data import primitives
from nanodepth.data.tokenizer import as_tokenizers, get_tokenizer, start_of_document
from nanodepth.engine import checkpoint, hf
from nanodepth.engine.checkpoint import load_model
from nanodepth.engine.hf import load_hf, save_hf
from nanodepth.grow import lidas, untie

transformers = pytest.importorskip('transformers')
safetensors_torch = pytest.importorskip('safetensors.torch')
transformers.utils.logging.disable_progress_bar()


def theirs(folder, family='Llama', dtype=torch.float32, shard='1GB', seed=0, **fields):
    """A tiny random checkpoint made by transformers, with weights large enough that every part
    matters."""
    fields = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=67,
                  max_position_embeddings=64) | fields
    config = getattr(transformers, f'{family}Config')(**fields)
    torch.manual_seed(seed)
    model = getattr(transformers, f'{family}ForCausalLM')(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.dim() == 2 else torch.nn.init.uniform_(p, 0.5, 1.5)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def close(a, b):
    return (a - b).abs().max() <= 1e-5 * b.abs().max()


def logits(model, tokens):
    with torch.no_grad():
        out = model(tokens)
    return getattr(out, 'logits', out)


def automodel(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='auto').eval()


LLAMA3 = dict(rope_type='llama3', rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize('seed', range(12))
def test_logits_are_those_of_transformers(tmp_path, seed):
    rng = random.Random(seed)
    family, kv, ratio = ('Llama', 'Qwen3')[seed % 2], rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    fields = dict(num_attention_heads=kv * ratio, num_key_value_heads=kv,
                  hidden_size=kv * ratio * rng.choice([4, 6, 16]),
                  intermediate_size=rng.choice([24, 50, 96]),
                  num_hidden_layers=rng.choice([1, 2, 5]), vocab_size=rng.choice([31, 67, 257]),
                  tie_word_embeddings=rng.random() < 0.5,
                  rms_norm_eps=rng.choice([1e-6, 1e-5, 1e-2]))
    if rng.random() < 0.5 or family == 'Qwen3':
        fields['head_dim'] = rng.choice([8, 10, 32])
    if seed % 3 == 0:
        fields['rope_parameters'] = LLAMA3
    reference = theirs(tmp_path / 'x', family, seed=seed, **fields)
    tokens = torch.randint(fields['vocab_size'], (2, 64))
    model = load_hf(tmp_path / 'x')
    assert close(logits(model, tokens), logits(reference, tokens))
    assert torch.equal(model.generate(tokens[:, :9], 8, temperature=0),
                       reference.generate(tokens[:, :9], max_new_tokens=8, min_new_tokens=8,
                                          do_sample=False, pad_token_id=0))


@pytest.mark.parametrize('family, dtype', [('Llama', torch.float32), ('Llama', torch.bfloat16),
                                           ('Qwen3', torch.bfloat16)])
def test_in_and_out_keeps_every_bit(tmp_path, family, dtype):
    theirs(tmp_path / 'x', family, dtype, head_dim=8, tie_word_embeddings=family == 'Qwen3')
    model = load_hf(tmp_path / 'x')
    assert model.norm.weight.dtype == dtype
    save_hf(model, tmp_path / 'y')
    a, b = (safetensors_torch.load_file(tmp_path / d / 'model.safetensors') for d in 'xy')
    a.pop('lm_head.weight' if family == 'Qwen3' else '', None)
    assert (a.keys() == b.keys()
            and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a))


def test_shards(tmp_path):
    reference = theirs(tmp_path / 'x', shard='20KB')
    assert len(list((tmp_path / 'x').glob('model-*.safetensors'))) > 2
    tokens = torch.randint(67, (2, 20))
    assert close(logits(load_hf(tmp_path / 'x'), tokens), logits(reference, tokens))
    (tmp_path / 'x' / 'model-00002-of-00003.safetensors').unlink(missing_ok=True)
    gone = sorted((tmp_path / 'x').glob('model-*.safetensors'))[-1]
    gone.unlink()
    with pytest.raises(Refused, match=r'model-0000\d-of-0000\d.safetensors is missing'):
        load_hf(tmp_path / 'x')


def test_the_index_decides_where_a_tensor_stands_in_two_files(tmp_path):
    reference = theirs(tmp_path / 'x', shard='20KB')
    index = json.loads((tmp_path / 'x/model.safetensors.index.json').read_text())['weight_map']
    for path in (tmp_path / 'x').glob('model-*.safetensors'):
        others = {name: torch.zeros_like(t) for name, t in reference.state_dict().items()
                  if index[name] != path.name}
        rewrite(path, lambda tensors, others=others: tensors.update(others))
    tokens = torch.randint(67, (2, 20))
    assert close(logits(load_hf(tmp_path / 'x'), tokens), logits(reference, tokens))


MODELS = {
    'ordinary': dict(),
    'grown': dict(grow=True),
    'looped': dict(order=[0, 1, 2, 1, 2, 3]),
    'LN-scaling': dict(ln_scaling=True),
    'other numbers': dict(rope_theta=5e5, norm_eps=1e-2, ffn_dim=50),
    'looped LN-scaling': dict(ln_scaling=True, order=[0, 1, 0, 1, 2, 3]),
    'qk-norm, own head_dim, GQA, tied': dict(qk_norm=True, head_dim=12, n_kv_head=2,
                                             tie_embeddings=True),
    'untied, rope scaling': dict(tie_embeddings=False,
                                 rope_scaling={k: v for k, v in LLAMA3.items()
                                               if k not in ('rope_type', 'rope_theta')}),
}


@pytest.mark.parametrize('name', MODELS)
def test_what_we_write_transformers_reads(tmp_path, tiny, name):
    fields = dict(MODELS[name])
    grows = fields.pop('grow', False)
    model = tiny(vocab_size=257, **fields)
    if grows:
        model = untie(model, lidas(4, 2))
    save_hf(model, tmp_path / 'x', tokenizer='bytes')
    tokens = torch.randint(257, (2, 32))
    assert close(logits(automodel(tmp_path / 'x'), tokens), logits(model, tokens))
    again = load_model(tmp_path / 'x')
    assert (close(logits(again, tokens), logits(model, tokens)) and again.order
            == list(range(len(model.order))))
    with pytest.raises(Refused, match='holds a checkpoint already: choose another folder'):
        save_hf(model, tmp_path / 'x')


# ------------------------------------------------------------------ tokenizers

def test_bytes_as_a_tokenizer_json(tmp_path, tiny):
    model, enc = tiny(vocab_size=257), get_tokenizer('bytes')
    save_hf(model, tmp_path / 'x', tokenizer='bytes')
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / 'x')
    for text in ('w7j6?w', 'def f(x):\n\treturn  "ä東🙂"\r\n', ' ' * 7, ''):
        assert reference.encode(text, add_special_tokens=False) == enc.encode(text)
        # documents begin as in training
        assert reference.encode(text) == start_of_document(enc) + enc.encode(text)
        assert reference.decode(enc.encode(text)) == text
    again = get_tokenizer(tmp_path / 'x')
    assert (again.encode('depth') == enc.encode('depth') and again.n_vocab == 257
            and start_of_document(again) == [256])


def test_an_encoding_with_merges_as_a_tokenizer_json():
    "The same tokens through both; one with a hole before its special token is refused."
    import tiktoken
    from test_tokens import TEXTS, random_texts
    ranks = {bytes([i]): i for i in range(256)}
    for i, pair in enumerate((' a', 'an', ' an', '  ', 'be', ' be', 'th', 'the')):
        ranks[pair.encode()] = 256 + i
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    for special, fits in ((264, True), (300, False)):
        enc = tiktoken.Encoding('t', pat_str=words, mergeable_ranks=ranks,
                                special_tokens={'<|endoftext|>': special})
        if not fits:
            with pytest.raises(Refused, match='it would give other tokens'):
                as_tokenizers(enc, 't')
            continue
        reference = as_tokenizers(enc, 't')
        for text in [*TEXTS, *random_texts()]:
            if '<|' not in text:
                ids = reference.encode(text, add_special_tokens=False).ids
                assert ids == enc.encode(text), repr(text)


def test_a_tokenizer_that_tiktoken_cannot_represent(tmp_path, monkeypatch):
    """TinyLlama's kind: pieces with a lower line for a space, bytes as a last resort, and a start
    that its template puts first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
    reference = Tokenizer(models.BPE(unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    reference.normalizer = normalizers.Sequence([normalizers.Prepend('▁'),
                                                 normalizers.Replace(' ', '▁')])
    reference.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    special = ['<unk>', '<s>', '</s>', *(f'<0x{i:02X}>' for i in range(256))]
    reference.train_from_iterator(['the depth of a model is a list of layers'] * 3,
                                  trainers.BpeTrainer(vocab_size=300, special_tokens=special[:3]))
    reference.post_processor = processors.TemplateProcessing(single='<s> $A',
            special_tokens=[('<s>', 1)])
    reference.save(str(tmp_path / 'tokenizer.json'))
    enc = get_tokenizer(tmp_path)
    whole = reference.encode('a list of', add_special_tokens=False).ids
    assert enc.encode('a list') + primitives.continuation(enc, 'a list', ' of') == whole
    # on its own it begins with a space
    assert primitives.continuation(enc, 'a zz',
                                   'of') != enc.encode('of') == enc.encode('a list of')[
                                       -len(enc.encode('of')):]
    text = 'a list of models'
    assert (enc.encode(text) == reference.encode(text, add_special_tokens=False).ids
            and enc.decode(enc.encode(text)) == text)
    assert (enc.n_vocab == reference.get_vocab_size() and start_of_document(enc) == [1]
            and len(enc.encode(text)) < len(text))
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    with pytest.raises(Refused, match=r'tokenizer.json is read by the tokenizers package .pip'):
        get_tokenizer(tmp_path)


# -------------------------------------------------------------- what is refused, and what is broken

def broken(folder, **changes):
    "Its config.json with some changes; None takes a field away."
    path = folder / 'config.json'
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize('changes, message', [
    (dict(model_type='gpt2'), "the family 'gpt2' .known: llama, qwen3., which"),
    (dict(model_type='qwen3_moe'), "the family 'qwen3_moe'"),
    (dict(attention_bias=True), 'linear layers with a bias, which is not supported'),
    (dict(use_sliding_window=True), 'attention over a sliding window'),
    (dict(layer_types=['full_attention', 'sliding_attention', 'full_attention']),
     'attention over a sliding window'),
    (dict(hidden_act='gelu'), "the activation 'gelu'"),
    (dict(quantization_config=dict(bits=4)), 'quantized weights'),
    (dict(rope_parameters=dict(rope_type='yarn')), "rope scaling of the kind 'yarn'"),
    (dict(rope_parameters=dict(rope_type='default'), rope_scaling=dict(type='yarn', factor=4)),
     "rope scaling of the kind 'yarn'"),
    (dict(rope_parameters=dict(rope_type='default'), rope_scaling=dict(rope_type='yarn')),
     "rope scaling of the kind 'yarn'"),
    (dict(rope_parameters=None, rope_scaling=dict(type='linear', factor=2)),
     "rope scaling of the kind 'linear'"),
    (dict(num_hidden_layers=4), 'layers.3.input_layernorm.weight is in none of its files, '
     'though config.json'),
    (dict(vocab_size=68), r'weight has the shape \(67, 32\), but by config.json it is \(68'),
    (dict(intermediate_size=64),
     r'mlp.gate_proj.weight has the shape \(48, 32\), but by config.json it is \(64, 32\)'),
    (dict(head_dim=16),
     r'self_attn.q_proj.weight has the shape \(32, 32\), but by config.json it is \(64, 32\)'),
])
def test_a_config_that_cannot_be_used_is_one_line(tmp_path, changes, message):
    theirs(tmp_path / 'x')
    broken(tmp_path / 'x', **changes)
    with pytest.raises(Refused, match=message) as caught:
        load_model(tmp_path / 'x')
    assert '\n' not in str(caught.value) and 'config.json' in str(caught.value)


def rewrite(path, change):
    tensors = safetensors_torch.load_file(path)
    change(tensors)
    safetensors_torch.save_file(tensors, path)


def test_broken_files_are_named(tmp_path):
    theirs(tmp_path / 'x')
    path = tmp_path / 'x' / 'model.safetensors'
    good = path.read_bytes()
    length = int.from_bytes(good[:8], 'little')
    damaged = 'model.safetensors is damaged, or not what it should be'
    for raw, message in ((good[:-100], damaged), (good[:5], damaged), (b'', damaged),
                         ((2 ** 60).to_bytes(8, 'little') + good[8:], damaged),
                         (good[:8] + b'x' * length + good[8 + length:], damaged),
                         (good[:8] + b'[' + b' ' * (length - 2) + b']' + good[8 + length:],
                          damaged),
                         (good.replace(b'"F32"', b'"I32"'), 'must be of one type, float32'),
                         (good.replace(b'[67,32]', b'[67,31]', 1), damaged),
                         (good + b'more', damaged)):
        path.write_bytes(raw)
        with pytest.raises(Refused, match=message) as caught:
            load_hf(tmp_path / 'x')
        assert '\n' not in str(caught.value)
    path.write_bytes(good)
    for change, message in ((lambda t: t.pop('model.norm.weight'),
                             'x: model.norm.weight is in none of its files'),
                            (
                                lambda t: t.update(
                                    {'model.layers.1.self_attn.q_proj.bias': torch.ones(32)}),
                             'x: model.layers.1.self_attn.q_proj.bias has no place in this '
                             'model'),
                            (
                                lambda t: t.update(
                                    {'model.layers.1.mlp.up_proj.weight': torch.ones(48,
                                    32).half()}),
                             'of one type, .* not float16 and float32')):
        rewrite(path, change)
        with pytest.raises(Refused, match=message):
            load_hf(tmp_path / 'x')
        path.write_bytes(good)
    path.rename(tmp_path / 'x' / 'pytorch_model.bin')
    with pytest.raises(Refused, match='x has no model.safetensors, but pytorch_model.bin: only '
                       'safetensors is read'):
        load_hf(tmp_path / 'x')
    (tmp_path / 'x' / 'model.safetensors.index.json').write_text(
        json.dumps(dict(weight_map=dict(a='two.safetensors'))))
    with pytest.raises(Refused, match='two.safetensors is missing: model.safetensors.index.json'):
        load_hf(tmp_path / 'x')


def test_a_name_on_the_hub_without_a_network(monkeypatch):
    with pytest.raises(Refused, match=r'no HuggingFaceTB/SmolLM-135M here; .* did not give it'):
        load_model('HuggingFaceTB/SmolLM-135M')         # HF_HUB_OFFLINE is set in conftest.py
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(Refused, match=r'huggingface_hub is not installed'):
        load_model('HuggingFaceTB/SmolLM-135M')
    with pytest.raises(Refused, match=r"no config/sft2 here; did you mean 'config/sft.py'\?; the "
                       'Hugging Face hub'):
        load_model('config/sft2')       # a folder of that name hides no owner on the hub


def test_without_safetensors(tmp_path, monkeypatch):
    theirs(tmp_path / 'x')
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    with pytest.raises(Refused, match=r'pip install safetensors'):
        load_hf(tmp_path / 'x')


# ------------------------------------------------------------------ memory, and the other scripts

@pytest.mark.skipif(not os.path.exists('/proc/self/status'),
                    reason='Linux says how much memory is mapped')
def test_loading_copies_nothing(tmp_path):
    theirs(tmp_path / 'x', hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    size = (tmp_path / 'x' / 'model.safetensors').stat().st_size

    def private():
        return 1024 * int(next(line.split()[1] for line in open('/proc/self/status')
                               if line.startswith('RssAnon')))
    load_hf(tmp_path / 'x')         # imports are done
    before = private()
    model = load_hf(tmp_path / 'x')
    logits(model, torch.zeros(1, 2, dtype=torch.long))
    assert size > 20_000_000 and private() - before < size / 4
    kept = (tmp_path / 'x' / 'model.safetensors').read_bytes()
    with torch.no_grad():
        model.embed.weight.zero_()          # a change stays in memory
    assert (tmp_path / 'x' / 'model.safetensors').read_bytes() == kept
    # deepcopy takes a tensor, not the file
    assert max(t.untyped_storage().nbytes() for t in model.state_dict().values()) < size / 4


@pytest.fixture
def exported(tmp_path, tiny):
    "A run of ours, and the same as a Hugging Face folder."
    model = tiny(vocab_size=257, context=64, n_layer=2)
    ours = tmp_path / 'ours'
    checkpoint.save(ours, kind='lm', model=model.state_dict(),
                    model_config=dataclasses.asdict(model.config), config={}, flops=0)
    (ours / 'run.json').write_text(json.dumps(dict(tokenizer='bytes')))
    nanodepth('export', [str(ours), str(tmp_path / 'hf')])
    return ours, tmp_path / 'hf'


def test_the_scripts_take_such_a_folder(exported, tmp_path, capsys):
    said = {}
    for path in exported:
        nanodepth('sample', [str(path), '--prompt=w7j6?w', '--tokens=8', '--device=cpu'])
        out = tmp_path / f'{path.name}.csv'
        nanodepth('evaluate', [str(path), '--tasks=toy_assign/0-1', '--n=20', '--loop=1x2-1',
                               '--device=cpu', f'--out={out}'])
        numbers = out.read_text().replace(path.name, 'RUN').replace('nan', '0')
        said[path.name] = capsys.readouterr().out.split('--- ')[1].split('\n')[1], numbers
    assert said['ours'] == said['hf']
    with pytest.raises(SystemExit):
        nanodepth('evaluate', [str(exported[1]), '--device=cpu'])
    assert 'hf does not say what it was trained on: give --data' in capsys.readouterr().err


def test_training_goes_on_from_such_a_folder(data, tmp_path, tiny):
    from nanodepth.train import Config, train
    reference = theirs(tmp_path / 'x', dtype=torch.bfloat16, vocab_size=257)
    save_hf(tiny(vocab_size=257), tmp_path / 'tok', tokenizer='bytes')
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        (tmp_path / 'x' / name).write_text((tmp_path / 'tok' / name).read_text())
    config = dict(init_from=str(tmp_path / 'x'), data=str(data), context=16, batch_size=2, steps=2,
                  warmup_steps=0, decay_steps=1, lr=0.0,
                  eval_batches=1, log_every=1, out_dir=str(tmp_path / 'out'), device='cpu',
                  weight_decay=0.0)
    train(Config(**config))
    after = load_model(tmp_path / 'out')
    assert after.norm.weight.dtype == torch.float32 and len(after.layers) == 3
    assert torch.equal(after.embed.weight, reference.model.embed_tokens.weight.float())


def test_chat_templates_and_ends_go_along(tmp_path, tiny):
    save_hf(tiny(vocab_size=257), tmp_path / 'x', tokenizer='bytes')
    (tmp_path / 'x' / 'chat_template.jinja').write_text('{{ messages[0].content }}')
    save_hf(load_hf(tmp_path / 'x'), tmp_path / 'y', tokenizer=str(tmp_path / 'x'))
    assert (transformers.AutoTokenizer.from_pretrained(tmp_path / 'y').chat_template
            == '{{ messages[0].content }}')
    assert json.loads((tmp_path / 'y' / 'config.json').read_text())['eos_token_id'] == 256
    (tmp_path / 'x' / 'config.json').unlink()
    with pytest.raises(Refused, match='has no config.json'):
        load_hf(tmp_path / 'x')
