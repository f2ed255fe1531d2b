"""The page of `nanodepth probe`: every probe over several kinds of models.

Promised: one command, one page, with a picture and a table of each probe for each kind of model;
what is noted is not measured again, and counts only for all that was asked.
"""
from types import SimpleNamespace

import pytest
import torch
from conftest import save_run

from nanodepth import probe
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import probe as page
from nanodepth.report.tables import read_rows
from nanodepth.retrofit import surgery
from nanodepth.training.loader import Loader

FEW = ['--count=4', '--length=10', '--n=6', '--batches=1', '--lens_steps=3', '--tasks=toy_assign/1',
       '--device=cpu']


def test_one_command_one_page(tiny, data, tmp_path, capsys, monkeypatch):
    model, out = tiny(vocab_size=257), tmp_path / 'page'
    models = dict(plain=model, loop=tiny(vocab_size=257, n_layer=2, order=[0, 1, 0, 1]),
                  cut=surgery(model, '1-2-1', r=2))
    runs = [save_run(tmp_path / name, model, data) for name, model in models.items()]
    nanodepth('probe', [*runs, f'--out={out}', *FEW])
    html, said = (out / 'index.html').read_text(), capsys.readouterr().out
    for name in page.PROBES:
        assert (out / f'{name}.png').exists() and f'src="{name}.png"' in html
        assert page.TEXTS[name]['title'].replace("'", '&#x27;') in html
        rows = read_rows(out / f'{name}.csv')
        missing = 'cut' if name in ('swap', 'skip', 'reverse') else None
        assert {row['run'] for row in rows} == {'plain', 'loop', 'cut'} - {missing}
    assert 'loop: 4 layers deep, 2 of their own (2x2); looked at with' in html
    assert 'cut is not in swap' in html
    assert 'cut: 6 layers deep' in said
    assert page.Options(models=[]).dtype == 'float32'       # whatever the weights were published in
    score = {row['run']: row['score'] for row in read_rows(out / 'depth_score.csv')}
    tokens = Loader(data, 4, 16, 'val', seed=1).batch(0)[0][:4, :10]
    assert score['plain'] == pytest.approx(probe.depth_score(model, tokens)[0], rel=1e-5)
    # what is noted is not measured again, and another probe beside it is
    monkeypatch.setattr(probe, 'depth_score', None)
    nanodepth('probe', [*runs, f'--out={out}', *FEW, '--only=depth_score,norms'])
    assert {row['run']: row['score'] for row in read_rows(out / 'depth_score.csv')} == score
    with pytest.raises(TypeError):
        nanodepth('probe', [*runs, f'--out={out}', *FEW, '--only=depth_score', '--count=3'])


def test_each_map_is_what_its_title_says(tiny):
    model, tokens = tiny(), torch.arange(12)[None]
    rows = [place | numbers for place, numbers in page.heatmap(
        SimpleNamespace(model=model, tokens=tokens), 'attn')]
    for setting in ('future tokens, propagated', 'future tokens, local', 'all tokens, propagated',
                    'all tokens, local'):
        wanted = probe.future_effects(model, tokens, part='attn', future='future' in setting,
                                      propagate='propagated' in setting)
        here = [row for row in rows if row['setting'] == setting]
        assert len(here) == 6
        assert all(row['change'] == wanted[row['erased'], row['observed']] for row in here)


def test_a_lens_is_trained_on_rows_that_no_probe_looks_at(data, tiny, tmp_path, monkeypatch):
    "12 batches of 4: 40 examples take 10 of them."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=16), data)
    trained = []
    real = page.train_lens
    monkeypatch.setattr(page, 'train_lens', lambda model, rows, *_, batches, **how: (
        trained.extend(rows.batch(step)[0] for step in batches),
        real(model, rows, 1, batches=batches))[1])
    looked = []
    monkeypatch.setattr(page, 'quality', lambda model, lens, tokens: (
        looked.append((lens, tokens)), (torch.zeros(4), torch.zeros(4)))[1])
    line = [run, '--only=early_exit', f'--out={tmp_path / "p"}', '--device=cpu', '--n=2',
            '--batches=1', '--tasks=']
    nanodepth('probe', [*line, '--count=40'])
    rows = {tuple(row.tolist()) for row in torch.cat(trained)}
    (_, tokens), (lens, _) = looked         # without one, and with it
    assert len(rows) == 8 and not rows & {tuple(row.tolist()) for row in tokens}
    assert lens.weight.shape == (3, 32, 32)         # the last depth is the model itself
    nanodepth('probe', [*line, '--count=48'])       # nothing is left, which the page says
