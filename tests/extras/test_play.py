"""The page with models inside, as far as Python goes (in a browser: browser.py beside it): its
weights are the rounded models', its questions those of the commands, and what it cannot show is a
line."""
import base64
import json
import re
import shutil
import struct

import pytest
import torch
from conftest import ROOT, byte_level_bpe, refused, save_run, state_of
from families import tiny as family

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.extras import play
from nanodepth.models.checkpoint import load_model
from nanodepth.grow import double, lidas, untie
from nanodepth.retrofit import surgery
from nanodepth.text.primitives import few_shot
from nanodepth.train import train
from nanodepth.wrapper import Window


def write_growths(run, *orders):
    "The log of a run that grew so."
    lines = [dict(step=step, flops=0, grown=dict(origin=order))
             for step, order in enumerate(orders)]
    (run / 'log.jsonl').write_text('\n'.join(map(json.dumps, lines)))


@pytest.fixture
def run(tiny, tmp_path):
    "A run that grew from 2 to 4 layers and kept the stage before."
    torch.manual_seed(0)
    small = tiny(vocab_size=257, n_layer=2, context=64)
    grown = untie(small, lidas(2, 2))
    for p in grown.parameters():
        p.data += 0.1 * torch.randn_like(p)
    for model, step in ((small, 5), (grown, 9)):
        save_run(tmp_path / 'run', model, config=dict(grow='lidas', grow_block=2),
                 names=('ckpt.pt', f'ckpt-{step}.pt'))
    write_growths(tmp_path / 'run', lidas(2, 2))
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
    models, run = [tiny(vocab_size=257, n_layer=1, context=64)], tmp_path / 'run'
    for layers in (1, 2):
        models.append(untie(models[-1], double(layers, 1)))
    for model in models:
        save_run(run, model, config=dict(grow='an operator of its own', grow_block=1),
                 names=('ckpt.pt', f'ckpt-{len(model.layers)}.pt'))
    ends = lambda: [(path, copies) for path, _, copies in play.stages_of(run)]
    assert ends() == [(run, None)]          # only the log says how it grew
    write_growths(run, double(1, 1), double(2, 1))
    stages = play.stages_of(run)
    assert [(path, len(model.layers), copies) for path, model, copies in stages] == [
        (run / 'ckpt-1.pt', 1, None), (run / 'ckpt-2.pt', 2, double(1, 1)), (run, 4, double(2, 1))]
    (run / 'ckpt-2.pt').unlink()
    assert ends() == [(run, None)]
    save_run(run, models[2], config=dict(grow='double', grow_block=1, grow_from=2))
    save_run(run, models[1], config=dict(grow='double', grow_block=1), names=('ckpt-2.pt',))
    write_growths(run, double(2, 1))
    assert ends() == [(run / 'ckpt-2.pt', None), (run, double(2, 1))]


def inside(text, name):
    return re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script>', text, re.S)[1]


def unpacked(raw, place, row, column):
    "One weight of a page, by GGUF's own description of its blocks of 32."
    at, blocks = place['at'], -(-place['columns'] // 32)
    if place['bits'] == 32:
        return struct.unpack_from('<f', raw, at + 4 * column)[0]
    block, j = row * blocks + column // 32, column % 32
    [scale] = struct.unpack_from('<e', raw, place['scales'] + 2 * block)
    if place['bits'] == 8:
        return scale * struct.unpack_from('<b', raw, at + 32 * block + j)[0]
    [minimum] = struct.unpack_from('<e', raw, place['minima'] + 2 * block)
    byte = raw[at + 16 * block + j % 16]
    return scale * (byte % 16 if j < 16 else byte // 16) + minimum


def assert_holds(raw, places, model, small):
    "Some weights of each tensor are those of the rounded model, and near those of the model."
    plain = {key: t.detach().clone() for key, t in play.tensors_of(model).items()}
    rounded = play.tensors_of(play.round_weights(model, small))
    assert places.keys() == plain.keys()
    for key, place in places.items():
        t, near = (each[key].detach().view(place['rows'], -1) for each in (rounded, plain))
        steps = 255 if place['bits'] == 8 else 15
        most = 0 if place['bits'] == 32 else 0.51 * (near.max() - near.min()).item() / steps
        for row in {0, place['rows'] // 2, place['rows'] - 1}:
            for column in {0, 17 % place['columns'], place['columns'] - 1}:
                found = unpacked(raw, place, row, column)
                assert found == pytest.approx(t[row, column].item(), abs=1e-6), key
                assert abs(found - near[row, column].item()) <= 2 * most + 1e-6, key


def test_kept_checkpoints_stay_and_another_runs_file_is_no_stage_of_this_one(config, tmp_path):
    for name, seed in (('run', 0), ('other', 3)):
        train(config(name, steps=6, warmup_steps=0, decay_steps=1, keep_every=2, seed=seed))
    kept = {path.name: state_of(path)['step'] for path in (tmp_path / 'run').glob('ckpt-*.pt')}
    assert kept == {'ckpt-2.pt': 2, 'ckpt-4.pt': 4, 'ckpt-6.pt': 6}
    shutil.copy(tmp_path / 'other/ckpt-6.pt', tmp_path / 'run/ckpt-9.pt')
    run = tmp_path / 'run'
    assert play.kept_stages(run, state_of(run)) == {2: run / 'ckpt-6.pt'}


def test_the_page_holds_the_rounded_models_and_their_questions(run, tiny, tmp_path):
    "A run with its stages, and a recurrent one with the first states of its positions."
    core = save_run(tmp_path / 'core', surgery(tiny(vocab_size=257, n_layer=4, context=64), '1-2-1',
                                               r=3))
    nanodepth('play', [str(run), core, f'--out={tmp_path / "page.html"}', '--open=false'])
    text = (tmp_path / 'page.html').read_text()
    about = json.loads(inside(text, 'about'))
    assert about['runs'] == [dict(name='run', stages=['run, 2 layers', 'run']),
                             dict(name='core', stages=['core'])]
    deep = about['models']['run']
    assert deep['copies'] == lidas(2, 2) == deep['kin'] and deep['order'] == [0, 1, 2, 3]
    core_about = about['models']['core']
    assert (core_about['r'], core_about['parts']) == (3, [[0], [1, 2], [3]])
    for name, path in {'run': run, 'run, 2 layers': run / 'ckpt-5.pt', 'core': core}.items():
        raw = base64.b64decode(inside(text, f'weights of {name} 0'))
        assert_holds(raw, about['tensors'][name], load_model(path), small=False)
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
    raw = base64.b64decode(inside(text, f'weights of {name} 0'))
    assert len(raw) == about['bytes']
    assert {place['bits'] for place in places.values()} == {4, 8, 32}
    assert_holds(raw, places, load_model(checkpoint), small=True)
    assert about['agreed'][0] <= about['agreed'][1]
    spec = json.loads((checkpoint / 'tokenizer.json').read_text())
    assert [' '.join(pair) for pair in spec['model']['merges']] == about['merges']
    assert all(about['vocab'][i] == token for token, i in spec['model']['vocab'].items())
    assert about['added'] == {'<|endoftext|>': about['start'][0]} and len(about['splits']) == 2


@pytest.mark.parametrize('pattern', [
    r"\p{N}{1,3}|\s+", r"[^\r\n]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?", '[!"*+,\\-.]+'])
def test_a_pattern_is_written_as_javascript_reads_it(pattern):
    "Or it is refused."
    made = play.for_javascript(pattern, 'run')
    assert not re.search(r'\\s|\?\+|\(\?i', made)
    regex, text = pytest.importorskip('regex'), "It's 1234  naïve\r\nWE'LL   go, x"
    assert regex.findall(made, text) == regex.findall(pattern, text)
    for other in ('a?+b', '(?i:x)', '(?>a)', r'\Aa', r'\p{Han}', '[[:alpha:]]', r'[\w-\d]', r'\d+'):
        with pytest.raises(Refused, match='which the page in a browser does not carry'):
            play.for_javascript(other, 'run')


def test_what_a_browser_does_not_carry_is_refused(run, checkpoint, tiny, tmp_path, capsys,
                                                  monkeypatch):
    line = [f'--out={tmp_path / "x.html"}', '--open=false']
    for fields, words in ((dict(ln_scaling=True), 'ln_scaling'),
                          (dict(order=[0, Window([1, 2]), 3]), 'a Window in its order')):
        other = save_run(tmp_path / 'other', tiny(vocab_size=257, **fields))
        assert words in refused(capsys, 'play', other, *line)
    assert "task='copy_words' is not one of" in refused(capsys, 'play', run, '--task=copy_words',
                                                        *line)
    spec = json.loads((checkpoint / 'tokenizer.json').read_text())
    strips = [token | dict(lstrip=True) for token in spec['added_tokens']]
    for change in (dict(normalizer=dict(type='Lowercase')), dict(added_tokens=strips),
                   dict(pre_tokenizer=dict(type='Whitespace'))):
        (checkpoint / 'tokenizer.json').write_text(json.dumps(spec | change))
        assert 'no byte-level BPE' in refused(capsys, 'play', checkpoint, *line)
    monkeypatch.setattr(play, 'LARGEST', 1000)
    assert 'more than 1,000 parameters' in refused(capsys, 'play', run, *line)
    assert not (tmp_path / 'x.html').exists()


def test_what_a_page_holds_cannot_end_its_tags():
    text = play.inside('application/json', 'about', json.dumps('<!--<script></script>'))
    assert text.count('<') == 2 and json.loads(text[text.index('>') + 1:text.rindex('<')]) == (
        '<!--<script></script>')
    assert 'weights of &quot;&gt;&lt;' in play.inside('text/plain', 'weights of "><', 'AA')
