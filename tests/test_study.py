"A seed of the study in small, and the tables that its rows make."
import csv
import subprocess

import numpy as np
import pytest
import torch
from conftest import ROOT

import nanodepth
import train
from common.errors import Refused
from data.tokens import write_dataset
from engine.checkpoint import load_model
from tools import results, study

CLAIM = '''
[[claim]]
section = 'growing'
claim = 'a is above b'
paper = 'x'
table = 'depth'
measure = 'depth 4'
beside = 'depth 4 right'
unit = 'answers'
a = {run = 'lidas', way = 'ordinary'}
b = {run = 'baseline', way = 'ordinary'}
direction = 1
primary = true

[[numbers]]
name = 'models'
table = 'depth'
where = {way = 'ordinary'}
rows = ['run']
columns = ['text', 'depth 4 right']
'''
FRAME = '''Before
<!-- table growing -->
stale
<!-- end -->
between
<!-- table models --><!-- end -->
'''


@pytest.fixture
def folder(tmp_path):
    rows = [dict(seed=seed, run=run, way=way, added=0, text=2.0 + seed / 100,
                 **{'depth 4': value + seed * 0.1 + (way == 'looped'), 'depth 4 right': 0.5})
            for seed in range(5) for run, value in (('lidas', -0.5), ('baseline', -1.0 - seed / 50))
            for way in ('ordinary', 'looped')]
    study.write_rows(tmp_path / 'depth.csv', rows)
    (tmp_path / 'claims.toml').write_text(CLAIM)
    (tmp_path / 'R.md').write_text(FRAME)
    return tmp_path


def tables(folder, *more):
    nanodepth.main('results', [f'--file={folder}/R.md', f'--rows={folder}', *more])
    return (folder / 'R.md').read_text()


def test_tables_by_hand(folder, monkeypatch):
    monkeypatch.setattr(results, 'show', lambda *_: None)
    text = tables(folder)
    # lidas minus baseline: 0.5 + seed / 50, mean 0.54, sd sqrt(.001), t of 4 degrees 2.776
    assert '**+0.540** ± 0.039 (right: 50% against 50%) | 5 |' in text
    assert '| 0.0625 | holds |' in text.replace('0.062 |', '0.0625 |')
    assert '| lidas | 5 | 2.020 ± 0.020 | 50.0 ± 0.0 |' in text
    assert text.startswith('Before\n<!-- table growing -->') and 'stale' not in text
    assert tables(folder, '--check') == text            # made again, it is the same
    (folder / 'R.md').write_text(text.replace('+0.540', '+0.640'))
    with pytest.raises(SystemExit):
        tables(folder, '--check')


def test_a_difference_of_differences(folder):
    rows = results.read_rows(folder / 'depth.csv')
    claim = dict(measure='depth 4', unit='answers', a=dict(run='lidas', way='looped'),
                 less_a=dict(run='lidas', way='ordinary'), b=dict(run='baseline', way='looped'),
                 less_b=dict(run='baseline', way='ordinary'))
    found = results.contrast(claim, rows)
    assert found.n == 5 and found.mean == pytest.approx(0, abs=1e-6)
    assert found.a == pytest.approx([1] * 5)


@pytest.mark.parametrize('change, message', [
    (("unit = 'answers'", "unit = 'answer'"), "did you mean 'answers'"),
    (("paper = 'x'\n", ''), "has no paper"),
    (("'x'", "'x'y"), "claims.toml: Expected newline"),
    (("way = 'ordinary'}\nb", "seed = 1}\nb"), 'several'),
    (('[[numbers]]', CLAIM.split('[[numbers]]')[0] * 5 + '[[numbers]]'), 'six|6 primary claims')])
def test_claims_that_cannot_be_judged_are_one_line(folder, change, message):
    (folder / 'claims.toml').write_text(CLAIM.replace(*change))
    if message == 'several':
        rows = results.read_rows(folder / 'depth.csv')
        with pytest.raises(Refused, match='several rows of one seed'):
            results.values_of(rows, dict(run='lidas'), 'depth 4')
        return
    with pytest.raises(Refused, match=message):
        results.read_claims(folder / 'claims.toml')


def test_the_papers_of_this_repo_say_what_its_rows_say():
    "docs/RESULTS.md is what the command makes of docs/results."
    if not (ROOT / 'docs/results/depth.csv').exists():
        pytest.skip('no seed has been measured')
    nanodepth.main('results', ['--check'])


def test_a_seed_in_small(tmp_path, monkeypatch):
    "Each run trains, each way is measured, a second call has nothing to do, a seed is replaced."
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        tokens, n = rng.integers(97, 123, 8000), np.arange(8000)
        write_dataset(tmp_path / 'data', split, 'bytes', tokens, kinds=['text', 'copy'],
                      marks=np.where(n % 5 == 0, 130, 129))
    small = ['--steps=16', '--n_embd=16', '--n_head=2', '--head_dim=8', '--warmup_steps=1',
             '--batch_size=4', '--eval_batches=1', '--eval_every=100', f'--data={tmp_path}/data',
             '--device=cpu']
    monkeypatch.setattr(study, 'DATA', str(tmp_path / 'data'))
    for name, value in dict(DEPTHS=(0, 1), DEEPEST=(1,), QUESTIONS=4, BATCHES=1).items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study.subprocess, 'run', lambda argv, **_: ran(argv))
    seen = []

    def ran(argv):
        name, *argv = argv[2:]
        seen.append(name)
        if name == 'train':
            shape = [] if any('init_from' in a for a in argv) else ['--steps=16']
            argv = [a for a in argv if not a.startswith(('--steps', '--decay', '--warm'))]
            nanodepth.main('train', [*argv, *small, '--decay_steps=0' if shape else
                                     '--decay_steps=2'])
        else:
            nanodepth.main(name, argv)
        return subprocess.CompletedProcess(argv, 0)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train, 'show', lambda *_: None)
    monkeypatch.setattr(study, 'MODELS', dict(lidas=study.MODELS['lidas']))
    one = study.Seed('lidas', 0, tmp_path / 'study')
    one.train()
    before = len(seen)
    one.train()
    assert len(seen) == before == 6
    rows = one.measured()
    study.write_rows(one.root.with_suffix('.csv'), rows)
    assert {row['way'] for row in rows} == {'ordinary', 'more FLOPs', 'repeated', 'window, T = 1',
                                            'window, T = 2', 'looped', 'recurrent'}
    assert len({(row['way'], row['added']) for row in rows}) == len(rows) == 19
    trunk, plain = (load_model(one.root / name) for name in ('trunk', 'cut'))
    tokens = torch.arange(97, 120)[None]
    plain.mean = 1          # the recurrent cool-down begins as its trunk
    assert torch.allclose(trunk(tokens), plain(tokens), atol=1e-6)
    exits = {(row['by'], row['at']): row for row in one.exits()}
    assert exits['fixed r', 3]['layers'] == 3 + 3 * 4 + 3
    assert 0 < exits['latent', 0.4]['recurrences'] <= exits['latent', 0.02]['recurrences'] <= 8
    sure = exits['sure', 0.3]
    assert sure['layers'] == pytest.approx(3 + 7 * sure['recurrences'])
    for _ in range(2):
        study.collect(0, tmp_path / 'study', tmp_path)
    with open(tmp_path / 'depth.csv', newline='') as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_a_dry_run_says_what_it_would_cost(capsys):
    nanodepth.main('study', ['3', '--dry_run'])
    said = capsys.readouterr().out
    assert '--seed=3' in said and 'two cores' in said
