"""The page with models inside, as far as Python goes (in a browser: tests/browser.py): its weights
are the rounded models', its questions those of the commands, and what it cannot show is a line."""
import base64
import json
import re
import shutil

import pytest
import torch
from conftest import ROOT, byte_level_bpe, refused, save_run
from families import tiny as family

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import play
from nanodepth.models.checkpoint import load_model
from nanodepth.grow import double, lidas, untie
from nanodepth.retrofit import surgery
from nanodepth.text.primitives import few_shot


@pytest.fixture
def run(tiny, tmp_path):
    "A run that grew from 2 to 4 layers and kept the stage before."
    torch.manual_seed(0)
    small = tiny(vocab_size=257, n_layer=2, context=64)
    grown = untie(small, lidas(2, 2))
    for p in grown.parameters():
        p.data += 0.1 * torch.randn_like(p)
    about = dict(config=dict(grow='lidas', grow_block=2))
    for name, model in {'run': grown, 'run/stage_2': small}.items():
        save_run(tmp_path / name, model, **about)
    return tmp_path / 'run'


@pytest.fixture
def checkpoint(tmp_path):
    "A small Qwen 3 with a tokenizer that was trained on a few words."
    tokenizer = byte_level_bpe(['the depth of the deep'] * 9, 280, ['<|endoftext|>'])
    family('qwen3', vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=3,
           tie_word_embeddings=True).save_pretrained(tmp_path / 'checkpoint')
    tokenizer.save(str(tmp_path / 'checkpoint/tokenizer.json'))
    return tmp_path / 'checkpoint'


def test_stages_that_double_and_a_stage_that_is_missing(tiny, tmp_path):
    models = [tiny(vocab_size=257, n_layer=1, context=64)]
    models += [untie(models[0], double(1, 1))]
    models += [untie(models[1], double(2, 1))]
    folders = [tmp_path / 'run/stage_1', tmp_path / 'run/stage_2', tmp_path / 'run']
    for model, folder in zip(models, folders):
        save_run(folder, model, config=dict(grow='double', grow_block=1))
    stages = play.stages_of(tmp_path / 'run')
    assert [(name, len(model.layers), copies) for name, model, copies in stages] == [
        ('1 layers', 1, None), ('2 layers', 2, double(1, 1)), ('4 layers', 4, double(2, 1))]
    shutil.rmtree(folders[1])
    [(name, _, copies)] = play.stages_of(tmp_path / 'run')
    assert name == '4 layers' and copies is None


def inside(text, name):
    return re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script>', text, re.S)[1]


def test_the_page_holds_the_rounded_models_and_their_questions(run, tiny, tmp_path):
    "A run with its stages, and a recurrent one with the first states of its positions."
    core = save_run(tmp_path / 'core', surgery(tiny(vocab_size=257, n_layer=4, context=64), '1-2-1',
                                               mean=3, inject='linear'))
    nanodepth('play', [str(run), core, f'--out={tmp_path / "page.html"}', '--open=false'])
    text = (tmp_path / 'page.html').read_text()
    about = json.loads(inside(text, 'about'))
    assert about['runs'] == [dict(name='run', stages=['run, 2 layers', 'run']),
                             dict(name='core', stages=['core'])]
    deep = about['models']['run']
    assert deep['copies'] == lidas(2, 2) == deep['kin'] and deep['order'] == [0, 1, 2, 3]
    assert (about['models']['core']['r'], about['models']['core']['parts']) == (
        3, [[0], [1, 2], [3]])
    for name, path in {'run': run, 'run, 2 layers': run / 'stage_2', 'core': core}.items():
        raw = bytearray(base64.b64decode(inside(text, f'weights of {name} 0')))
        plain = play.tensors_of(load_model(path))
        rounded = play.tensors_of(play.round_weights(load_model(path)))
        assert about['tensors'][name].keys() == plain.keys()
        for key, place in about['tensors'][name].items():
            width = -(-place['columns'] // 16) * 16         # rows are filled up
            numbers = torch.frombuffer(raw, dtype=torch.int8, count=place['rows'] * width,
                                       offset=place['at']).view(-1, width)[:, :place['columns']]
            scale = torch.frombuffer(raw, dtype=torch.float32, count=place['rows'],
                                     offset=place['scales'])[:, None]
            found = (numbers * scale).view_as(plain[key])
            assert torch.allclose(found, rounded[key], atol=1e-7), key
            assert torch.allclose(found, plain[key], atol=scale.max().item() / 2 + 1e-7)
    for q, example in zip(about['questions']['toy_assign/3'],
                          few_shot('toy_assign', 100, shots=0, depth=3), strict=True):
        assert q == vars(example)


def test_the_page_in_docs_has_todays_code():
    page = (ROOT / 'docs/demo.html').read_text(encoding='utf-8')
    html, style, board, worker = ((play.FOLDER / name).read_text(encoding='utf-8') for name in
                                  ('play.html', 'play.css', 'board.js', 'play.js'))
    head, script = html.split('<script>\n', 1)
    for part in (*head.split('</style>'), style, board, script,
                 play.inside('text/plain', 'worker', worker)):
        assert part in page


def test_the_page_of_a_checkpoint(checkpoint, tmp_path, capsys):
    "All that play.js needs: weights in parts, one for a tied head; the tokenizer; no questions."
    out = tmp_path / 'page.html'
    nanodepth('play', [str(checkpoint), f'--out={out}', '--open=false'])
    text = out.read_text()
    about = json.loads(inside(text, 'about'))
    [(name, places)] = about['tensors'].items()
    assert name == checkpoint.name and places['head.weight'] == places['embed.weight']
    assert 'layers.0.attn.q_norm.weight' in places and about['models'][name]['config']['qk_norm']
    assert len(base64.b64decode(inside(text, f'weights of {name} 0'))) == about['bytes']
    spec = json.loads((checkpoint / 'tokenizer.json').read_text())
    assert [' '.join(pair) for pair in spec['model']['merges']] == about['merges']
    assert all(about['vocab'][i] == token for token, i in spec['model']['vocab'].items())
    assert about['added'] == {'<|endoftext|>': about['start'][0]} and len(about['splits']) == 2


def test_a_tokenizer_that_the_page_does_not_have_is_refused(checkpoint, tmp_path, capsys):
    file = checkpoint / 'tokenizer.json'
    spec = json.loads(file.read_text())
    for change in (dict(normalizer=dict(type='Lowercase')),
                   dict(pre_tokenizer=dict(type='Whitespace'))):
        file.write_text(json.dumps(spec | change))
        assert 'no byte-level BPE' in refused(capsys, 'play', checkpoint,
                                              f'--out={tmp_path / "x.html"}')


def test_what_a_browser_does_not_carry_is_refused(run, tiny, tmp_path, capsys, monkeypatch):
    scaled = save_run(tmp_path / 'scaled', tiny(vocab_size=257, ln_scaling=True))
    line = [f'--out={tmp_path / "x.html"}', '--open=false']
    assert 'ln_scaling' in refused(capsys, 'play', scaled, *line)
    assert "task='copy_words' is not one of" in refused(capsys, 'play', run, '--task=copy_words',
                                                        *line)
    monkeypatch.setattr(play, 'LARGEST', 1000)
    said = refused(capsys, 'play', run, *line)
    assert 'more than 1,000 parameters' in said and 'evaluate or sweep' in said
    assert not (tmp_path / 'x.html').exists()
