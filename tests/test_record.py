"The record: its rule by hand, and a small run of the command."
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, planned_flops, write_noise

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.study import jobs as study, record
from nanodepth.study.claims import Contrast, one_sided
from nanodepth.study.records import judged, standing, table
from nanodepth.study.results import read_rows


def rows(config, flops, texts, rights):
    return [dict(config=config, seed=seed, flops=flops, minutes=2.0, text=text,
                 **{'depth 3 right': right})
            for seed, (text, right) in enumerate(zip(texts, rights))]


def test_one_sided():
    # mean 1, standard error 1/2 with three degrees: t = 2, both sides 0.1393
    c = Contrast([1 - 3 ** .5 / 2, 1 - 3 ** .5 / 2, 1 + 3 ** .5 / 2, 1 + 3 ** .5 / 2], [0] * 4)
    assert one_sided(c, 1) == pytest.approx(0.0697, abs=1e-4)
    assert one_sided(c, -1) == pytest.approx(1 - 0.0697, abs=1e-4)
    assert one_sided(Contrast([2, 2], [1, 1]), 1) == 0 and one_sided(Contrast([1], [0]), 1) == 0.5


def test_the_fewest_flops_of_those_that_meet_both_hold_it():
    spread = np.linspace(-0.02, 0.02, 8)
    good = 2.15 + spread, 0.98 + spread / 2
    entries = [*rows('dear', 9.0, *good), *rows('cheap', 7.0, *good),
               *rows('text_too_high', 5.0, 2.195 + spread, good[1]),    # below, but not surely
               *rows('too_shallow', 4.0, good[0], 0.94 + spread / 2),
               *rows('few_seeds', 3.0, good[0][:7], good[1][:7])]
    said = judged(entries)
    assert [*said] == ['few_seeds', 'too_shallow', 'text_too_high', 'cheap', 'dear']
    assert [name for name, entry in said.items() if entry.meets] == ['cheap', 'dear']
    assert standing(said) == 'cheap' and standing(judged(entries[:0])) is None
    assert 0.05 < said['text_too_high'].p_text < 0.5 and said['too_shallow'].p_right > 0.5
    lines = table(entries)
    assert sum('**the record**' in line for line in lines) == 1 and '**the record**' in lines[5]
    assert 'open' in lines[2] and 'not good enough' in lines[3]


@pytest.fixture
def small(tmp_path, monkeypatch):
    "Two seeds of tiny models, on text without anything to learn."
    write_noise(tmp_path / 'data', ['text', 'copy'])
    for name, value in dict(TOY=f'{tmp_path}/data', SEEDS=2, QUESTIONS=4).items():
        monkeypatch.setattr(record, name, value)
    monkeypatch.setattr(study, 'BATCHES', 2)
    (tmp_path / 'results').mkdir()
    (tmp_path / 'results/claims.toml').write_text('')
    (tmp_path / 'RECORDS.md').write_text('before\n<!-- table records -->\n<!-- end -->\n')
    (tmp_path / 'mine.py').write_text(f'''data = {f"{tmp_path}/data"!r}
n_layer, n_embd, n_head, head_dim = 2, 16, 2, 8
steps, warmup_steps, decay_steps, batch_size, eval_batches, device = 4, 1, 1, 4, 1, 'cpu'
''')
    seen = []

    def ran(argv, **_):
        seen.append(argv)
        nanodepth('train', argv[4:])
        return subprocess.CompletedProcess(argv, 0)
    monkeypatch.setattr(subprocess, 'run', ran)
    # no threads: a training wants to hear signals
    monkeypatch.setattr(record, 'ThreadPoolExecutor',
                        lambda jobs: nullcontext(SimpleNamespace(map=map)))
    monkeypatch.chdir(ROOT)
    return seen


def test_a_config_in_small(small, tmp_path, capsys):
    argv = [str(tmp_path / 'mine.py'), f'--rows={tmp_path}/results', f'--out={tmp_path}/runs',
            '--jobs=1']
    nanodepth('record', argv)
    said = capsys.readouterr().out
    assert 'it does not meet both thresholds' in said and 'seed 1: loss on text' in said
    mine = read_rows(tmp_path / 'results/records.csv')
    assert [row['seed'] for row in mine] == [0, 1]
    assert mine[0]['flops'] == planned_flops(tmp_path / 'mine.py') * 4 * 64
    assert 2 < mine[0]['text'] < 8 and mine[0]['text'] != mine[1]['text']
    page = (tmp_path / 'RECORDS.md').read_text()
    assert page.startswith('before\n') and 'mine.py' in page and '| open |' in page
    nanodepth('record', argv)          # it goes on where it stopped, and changes nothing
    assert read_rows(tmp_path / 'results/records.csv') == mine and len(small) == 4
    nanodepth('record', [*argv, '--first_seed=2'])     # other seeds: said, not written down
    assert 'does not meet' in capsys.readouterr().out
    assert read_rows(tmp_path / 'results/records.csv') == mine
    # another has the record with fewer FLOPs
    best = rows('config/best.py', 10.0, np.linspace(2.1, 2.11, 8), np.linspace(0.98, 0.99, 8))
    study.write_rows(tmp_path / 'results/records.csv', best)
    nanodepth('record', argv)
    assert 'so the record stays where it is' in capsys.readouterr().out
    assert len(read_rows(tmp_path / 'results/records.csv')) == 10


def test_what_is_said_of_a_config():
    good = judged(rows('a', 5.0, np.linspace(2.1, 2.11, 8), np.linspace(0.98, 0.99, 8)))['a']
    assert record.verdict('a', good, None, 0).endswith('it takes the record')
    assert record.verdict('a', good, 'b', 6.0).endswith('it takes the record from b (6)')
    assert record.verdict('a', good, 'b', 5.0).endswith('but b has the record with 5 FLOPs')


@pytest.mark.parametrize('line', ["data = 'data/toy_deep'", "init_from = 'out/lidas'",
                                  "cooldown_data = 'data/toy'"])
def test_other_data_is_refused(tmp_path, line):
    (tmp_path / 'mine.py').write_text(line + '\n')
    with pytest.raises(Refused, match='must learn from data/toy alone'):
        record.main([str(tmp_path / 'mine.py')])
