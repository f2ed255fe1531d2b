"""The page of `nanodepth probe`: every probe over several kinds of models.

Promised: one command, one page, with a picture and a table of each probe for each kind of model;
a lens is kept and never used for another model or another way; moved layers keep their scales.
"""
import pytest
import torch
from conftest import save_run

from nanodepth import probe
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import probe as page
from nanodepth.models import checkpoint
from nanodepth.models.hf import fold_scales, save_hf
from nanodepth.asking.scoring import open_data
from nanodepth.report.tables import read_csv
from nanodepth.retrofit import surgery
from nanodepth.text.loader import Loader

FEW = ['--count=4', '--length=10', '--n=6', '--batches=1', '--lens_steps=3', '--tasks=toy_assign/1',
       '--device=cpu']


@pytest.fixture
def runs(tmp_path, tiny, data):
    "An ordinary model, a looped one, a retrofitted one, a Hugging Face folder."
    model = tiny(vocab_size=257, n_layer=4, context=64)
    save_run(tmp_path / 'plain', model, data)
    save_run(tmp_path / 'loop', tiny(vocab_size=257, n_layer=2, context=64, order=[0, 1, 0, 1]),
              data)
    save_run(tmp_path / 'cut', surgery(model, '1-2-1', mean=2), data)
    save_hf(model, tmp_path / 'hf', tokenizer='bytes')
    return {name: str(tmp_path / name) for name in ('plain', 'loop', 'cut', 'hf')}


def test_one_command_one_page(runs, data, tmp_path, capsys):
    out = tmp_path / 'page'
    nanodepth('probe', [runs['plain'], runs['loop'], runs['cut'], f'--out={out}', *FEW])
    said = capsys.readouterr().out
    html = (out / 'index.html').read_text()
    for name in page.PROBES:
        assert ((out / f'{name}.png').exists() and f'src="{name}.png"' in html
                and page.TEXTS[name]['title'].replace("'", '&#x27;') in html)
        rows = read_csv(out / f'{name}.csv')
        assert {row['run'] for row in rows} == ({'plain', 'loop'} if name in ('swap', 'skip',
                'reverse') else {'plain', 'loop', 'cut'})
    assert (
        'loop: 4 layers deep, 2 of their own (2x2); looked at with' in html
        and 'cut is not in swap' in html)
    assert 'cut: 6 layers deep' in said and '| plain | ' in said and 'every position' in html
    score = {row['run']: float(row['score']) for row in read_csv(out / 'depth_score.csv')}
    model = checkpoint.load_model(runs['plain'])
    val = Loader(str(data), 4, 16, split='val', seed=1)
    assert score['plain'] == pytest.approx(probe.depth_score(model, val.batch(0)[0][:4, :10])[0],
                                           rel=1e-5)


def test_a_model_of_16_bits_is_probed_in_float32(runs, data, tmp_path):
    "Else the largest change would be one of rounding."
    folder = tmp_path / 'half'
    save_hf(checkpoint.load_model(runs['hf']).bfloat16(), folder, tokenizer=runs['hf'])
    nanodepth('probe', [str(folder), f'--data={data}', '--only=depth_score', f'--out={tmp_path}/h',
                        *FEW])
    model = checkpoint.load_model(folder).float()
    tokens = open_data(folder, {}, model, str(data), seed=1).batch(0)[0][:4, :10]
    _, weights = probe.depth_score(model, tokens)
    found = [float(row['change']) for row in read_csv(tmp_path / 'h/depth_score.csv')]
    assert found == pytest.approx(weights.tolist(), rel=1e-5)


def test_moved_layers_keep_their_scales_if_asked(tiny):
    "Folded into the norms, the scale goes where the layer goes; unmoved, nothing changes."
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    model = tiny(ln_scaling=True)
    folded = fold_scales(model)
    assert not folded.config.ln_scaling and model.config.ln_scaling
    assert torch.allclose(folded(tokens), model(tokens), atol=1e-5)
    swapped = probe.swap_blocks(model.order, 0, 1)
    x = folded.embed(tokens)
    for i in swapped:           # by hand: layer i with the scale that it was trained with
        x = model.run(x, [i], depth=i)
    assert torch.allclose(folded(tokens, order=swapped), model.head(model.norm(x)), atol=1e-5)
    assert not torch.allclose(folded(tokens, order=swapped), model(tokens, order=swapped))
