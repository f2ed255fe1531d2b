"""The page of `nanodepth probe`: every probe over several kinds of models.

Promised: one command, one page, with a picture and a table of each probe for each kind of model;
a lens is kept and never used for another model or another way.
"""
from types import SimpleNamespace

import pytest
import torch
from conftest import save_run

from nanodepth import probe
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import probe as page
from nanodepth.models import checkpoint
from nanodepth.models.hf import save_hf
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
    save_run(tmp_path / 'cut', surgery(model, '1-2-1', recurrence=2), data)
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
    assert page.Options(models=[]).dtype == 'float32'       # whatever the weights were published in
    score = {row['run']: float(row['score']) for row in read_csv(out / 'depth_score.csv')}
    model = checkpoint.load_model(runs['plain'])
    val = Loader(str(data), 4, 16, split='val', seed=1)
    assert score['plain'] == pytest.approx(probe.depth_score(model, val.batch(0)[0][:4, :10])[0],
                                           rel=1e-5)


def test_each_map_is_what_its_title_says(tiny):
    model = tiny()
    c = SimpleNamespace(model=model, tokens=torch.arange(12)[None])
    rows = page.heatmap(c, 'attn')
    for future in (True, False):
        for propagate in (True, False):
            setting = (f'{"future" if future else "all"} tokens, '
                       f'{"propagated" if propagate else "local"}')
            wanted = probe.future_effects(model, c.tokens, part='attn', future=future,
                                    propagate=propagate)
            here = [row for row in rows if row['setting'] == setting]
            assert len(here) == 6 and all(
                row['change'] == wanted[row['erased'], row['observed']] for row in here)
