"""The page with a model inside, as far as Python goes (in a browser: tests/browser.py): its weights
are the rounded model's, its questions those of the commands, and what it cannot show is a line."""
import base64
import json
import re
import shutil

import pytest
import torch
from conftest import ROOT, refused, save_run

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import play
from nanodepth.data.primitives import few_shot
from nanodepth.engine.checkpoint import load_model
from nanodepth.grow import double, lidas, untie
from nanodepth.retrofit import surgery


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


def test_the_page_holds_the_rounded_models_and_their_questions(run, tmp_path, capsys):
    out = tmp_path / 'page.html'
    nanodepth('play', [str(run), f'--out={out}', '--task=toy_assign/2', '--open=false'])
    text = out.read_text()
    about = json.loads(inside(text, 'about'))
    raw = base64.b64decode(inside(text, 'weights'))
    assert about['stages'] == ['2 layers', '4 layers'] and about['task'] == 'toy_assign/2'
    deep = about['models']['4 layers']
    assert deep['copies'] == lidas(2, 2) == deep['kin'] and deep['order'] == [0, 1, 2, 3]
    assert deep['config']['head_dim'] == load_model(run).config.head_dim
    for name, path in {'4 layers': run, '2 layers': run / 'stage_2'}.items():
        plain, model = load_model(path).state_dict(), play.round_weights(load_model(path))
        assert about['tensors'][name].keys() == plain.keys()
        for key, place in about['tensors'][name].items():
            n = place['rows'] * place['columns']
            numbers = torch.frombuffer(bytearray(raw), dtype=torch.int8, count=n,
                                       offset=place['at']).view(place['rows'], -1)
            scale = torch.frombuffer(bytearray(raw), dtype=torch.float32, count=place['rows'],
                                     offset=place['scales'])[:, None]
            assert torch.equal((numbers * scale).view_as(plain[key]), model.state_dict()[key])
            assert torch.allclose(model.state_dict()[key], plain[key], atol=scale.max().item() / 2
                                  + 1e-7)
    for q, example in zip(about['questions']['toy_assign/3'],
                          few_shot('toy_assign', 100, shots=0, depth=3), strict=True):
        assert q == vars(example)
    assert text.index('id="weights"') < text.index('window.inside =') < text.index('const post')


def test_the_page_in_docs_has_todays_code():
    page = (ROOT / 'docs/demo.html').read_text(encoding='utf-8')
    html = (play.FOLDER / 'play.html').read_text(encoding='utf-8')
    worker = (play.FOLDER / 'play.js').read_text(encoding='utf-8')
    for part in (*html.split('<script>\n', 1), play.START_WORKERS,
                 play.inside('text/plain', 'worker', worker)):
        assert part in page


def test_what_the_browsers_model_does_not_have_is_refused(run, tiny, tmp_path, capsys):
    lm = tiny(vocab_size=257, n_layer=4)
    for name, model in dict(deep=surgery(lm, '1-2-1'), scaled=tiny(vocab_size=257, ln_scaling=True)
                            ).items():
        save_run(tmp_path / name, model)
    export = f'--out={tmp_path / "x.html"}'
    assert 'a recurrent core' in refused(capsys, 'play', tmp_path / 'deep', export)
    assert 'ln_scaling' in refused(capsys, 'play', tmp_path / 'scaled', export)
    unknown = refused(capsys, 'play', run, export, '--task=copy_words')
    assert "task='copy_words' is not one of" in unknown
    assert not (tmp_path / 'x.html').exists()
