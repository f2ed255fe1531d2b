"""The evidence: verdicts by hand, the tables, and the record in small.

Promised: Student's t, Holm's correction and each verdict as in any textbook; tables that are made
from rows and from nothing else; the record's rule, one-sided and on eight seeds; and that the pages
are what docs/results says.
"""
import math
import re
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, planned_flops, write_noise

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.report.tables import as_csv, read_rows, where
from nanodepth.study import record, results
from nanodepth.study.claims import Contrast, holm, one_sided, t_quantile, verdict, verdicts
from nanodepth.study.record import judged, standing, table


@pytest.mark.parametrize('share, df, t', [      # the tables in any textbook
    (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 4, 2.776), (0.95, 7, 2.365), (0.99, 3, 5.841),
    (0.9, 7, 1.895), (0.95, 30, 2.042)])
def test_students_t_is_the_tables(share, df, t):
    assert t_quantile(share, df) == pytest.approx(t, abs=6e-4)


def test_a_contrast_by_hand():
    contrast = Contrast([3.0, 5.0, 7.0, 5.0], [1.0, 4.0, 4.0, 3.0])        # 2, 1, 3, 2
    assert contrast.mean == 2 and contrast.error == pytest.approx(math.sqrt(2 / 3 / 4))
    assert contrast.interval(0.95) == pytest.approx((2 - 3.182 * 0.40825, 2 + 3.182 * 0.40825),
                                                 abs=1e-3)
    assert contrast.p_signs == 2 / 16              # only all signs up, or all down
    assert contrast.p == pytest.approx(0.0163, abs=2e-4)
    assert Contrast([1.0, 2.0], [1.0, 2.0]).p == 1


def test_holm_by_hand():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize('changes, direction, said', [
    ([1.0, 1.1, 0.9, 1.0], 1, 'holds'), ([1.0, 1.1, 0.9, 1.0], -1, 'does not hold'),
    ([0.001, -0.002, 0.001, 0.0], 1, 'no difference'),
    ([0.001, -0.002, 0.001, 0.0], 0, 'holds'), ([1.0, 1.1, 0.9, 1.0], 0, 'does not hold'),
    ([1.0, -1.0, 2.0, 0.0], 1, 'not resolved'), ([0.3], 1, r'not resolved \(1 seed\)'),
    ([], 1, r'not resolved \(0 seeds\)')])
def test_every_verdict(changes, direction, said):
    contrast = Contrast(changes, [0.0] * len(changes))
    [(text, _)] = verdicts([contrast], [0.05], [direction])
    assert re.match(said, text)


def test_a_verdict_is_corrected_for_its_section():
    weak = Contrast([1.0, 2.0, 3.0, 1.0, 2.5], [0.0] * 5)       # p = .009 alone
    noise = [Contrast([1.0, -1.0, 0.5 * k, -0.4, 0.1], [0.0] * 5) for k in range(6)]
    assert verdict(weak, weak.p, 0.05, 1) == 'holds'
    several = verdicts([weak, *noise[:3]], [0.05] * 4, [1] * 4)
    assert several[0][1] == pytest.approx(4 * weak.p) and several[0][0] == 'holds'
    several = verdicts([weak, *noise, *noise], [0.05] * 13, [1] * 13)
    assert several[0][0].startswith('not resolved')


CLAIM = '''
[[claim]]
section = 'growing'
name = 'above'
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

[[written]]
name = 'words'
table = 'depth'
head = ['idea', 'seen']
lines = [['growing', "by {claim = 'above'} nats: {verdict = 'above'}"],
    ['looping', "{run = 'lidas', way = 'looped', measure = 'depth 4 right'}%"],
    ['cells', """{run = 'lidas', way = 'ordinary', measure = 'depth 4 right', round = true}, \\
      {run = 'lidas', way = 'looped', measure = 'depth 4', less = {way = 'ordinary'}}, \\
      {run = 'lidas', way = 'ordinary', measure = 'text', share_of = {run = 'baseline'}}"""]]
'''
FRAME = '''Before
<!-- table growing -->
stale
<!-- end -->
between
<!-- table words --><!-- end -->
| [`train.py`](train.py) | 0 | the loop |
'''


@pytest.fixture
def folder(tmp_path):
    rows = [dict(seed=seed, run=run, way=way, added=0,
                 text=(2.0 + seed / 100) * (2 if run == 'baseline' else 1),
                 **{'depth 4': value + seed * 0.1 + (way == 'looped'), 'depth 4 right': 0.5})
            for seed in range(5) for run, value in (('lidas', -0.5), ('baseline', -1.0 - seed / 50))
            for way in ('ordinary', 'looped')]
    rows.append(rows[0] | dict(seed=5))         # of a sixth seed there is no other row
    (tmp_path / 'depth.csv').write_bytes(as_csv(rows))
    (tmp_path / 'claims.toml').write_text(CLAIM)
    (tmp_path / 'R.md').write_text(FRAME)
    return tmp_path


def tables(folder, *more):
    nanodepth('results', [f'{folder}/R.md', f'--rows={folder}', *more])
    return (folder / 'R.md').read_text()


def test_tables_by_hand(folder):
    text = tables(folder)
    # lidas minus baseline: 0.5 + seed / 50, mean 0.54, sd sqrt(.001), t of 4 degrees 2.776
    assert '**+0.540** ± 0.039 (right: 50% against 50%) | 5 |' in text
    assert '| 0.0625 | holds |' in text.replace('0.062 |', '0.0625 |')
    assert '| growing | by +0.540 ± 0.039 nats: holds |\n| looping | 50.0 ± 0.0% |' in text
    lines = len((ROOT / 'train.py').read_text().splitlines())
    assert f'| [`train.py`](train.py) | {lines} | the loop |' in text
    assert '| cells | 50, +1.000 ± 0.000, 50% |' in text
    assert text.startswith('Before\n<!-- table growing -->') and 'stale' not in text
    assert tables(folder, '--check') == text            # made again, it is the same
    (folder / 'R.md').write_text(text.replace('+0.540', '+0.640'))
    with pytest.raises(SystemExit):
        tables(folder, '--check')


def test_a_difference_of_differences(folder):
    rows = read_rows(folder / 'depth.csv')
    claim = dict(measure='depth 4', unit='answers', a=dict(run='lidas', way='looped'),
                 less_a=dict(run='lidas', way='ordinary'), b=dict(run='baseline', way='looped'),
                 less_b=dict(run='baseline', way='ordinary'))
    found = results.contrast(claim, rows)
    assert found.n == 5 and found.mean == pytest.approx(0, abs=1e-6)
    assert found.a == pytest.approx([1] * 5)


def test_rows_that_cannot_be_judged_are_refused(folder):
    rows = read_rows(folder / 'depth.csv')
    with pytest.raises(Refused, match='several rows of one seed'):
        results.values_of(rows, dict(run='lidas'), 'depth 4')
    primary = CLAIM.split('[[written]]')[0]
    (folder / 'claims.toml').write_text(primary * 6)
    with pytest.raises(Refused, match='six|6 primary claims'):
        results.all_tables(results.read_claims(folder / 'claims.toml'), folder)


def test_the_papers_of_this_repo_say_what_its_rows_say():
    "docs/RESULTS.md is what the command makes of docs/results."
    nanodepth('results', ['--check'])


def test_the_readmes_losses_are_those_that_training_printed():
    page, curves = (read_rows(ROOT / f'docs/results/{name}.csv')
                    for name in ('page', 'curves'))
    ends = {(row['seed'], row['run']): row['loss'] for row in curves if row['loss'] != ''}
    assert len(ends) == 2 * len({row['seed'] for row in page}) > 0
    for (seed, run), loss in ends.items():      # the last ones
        [row] = where(page, seed=seed, run=run, way='as trained')
        assert row['loss'] == pytest.approx(loss, rel=1e-5)


def entries(config, flops, texts, rights):
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
    found = [*entries('dear', 9.0, *good), *entries('cheap', 7.0, *good),
               *entries('text_too_high', 5.0, 2.195 + spread, good[1]),    # below, but not surely
               *entries('too_shallow', 4.0, good[0], 0.94 + spread / 2),
               *entries('few_seeds', 3.0, good[0][:7], good[1][:7])]
    said = judged(found)
    assert [*said] == ['few_seeds', 'too_shallow', 'text_too_high', 'cheap', 'dear']
    assert [name for name, entry in said.items() if entry.meets] == ['cheap', 'dear']
    assert standing(said) == 'cheap' and standing(judged([])) is None
    assert 0.05 < said['text_too_high'].p_text < 0.5 and said['too_shallow'].p_right > 0.5
    lines = table(found)
    # the dearest stands first
    assert sum('**the record**' in line for line in lines) == 1 and '**the record**' in lines[3]
    assert '| 22% |' in lines[3] and 'open' in lines[6] and 'not good enough' in lines[5]
    again = [row | dict(seed=row['seed'] + 8, text=2.0) for row in found]
    assert judged(found + again)['dear'].p_text == said['dear'].p_text
    assert '| 2.000 |' in table(found + again)[2]
    refuted = table(found + [row | {'depth 3 right': 0.5} for row in again])
    assert 'not confirmed' in refuted[3] and not any('the record' in line for line in refuted)
    meets = [entry.meets for entry in judged(found + again).values()]
    assert meets == [False, False, False, True, True]


@pytest.fixture
def record_in_small(tmp_path, monkeypatch):
    "Two seeds of tiny models, on text without anything to learn."
    write_noise(tmp_path / 'data', ['text', 'copy'])
    for name, value in dict(TOY=f'{tmp_path}/data', SEEDS=2, QUESTIONS=4, BATCHES=2).items():
        monkeypatch.setattr(record, name, value)
    (tmp_path / 'results').mkdir()
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


def test_a_config_in_small(record_in_small, tmp_path, capsys):
    argv = [str(tmp_path / 'mine.py'), f'--rows={tmp_path}/results', f'--out={tmp_path}/runs',
            '--jobs=1']
    nanodepth('record', argv)
    said = capsys.readouterr().out
    assert 'the record: None' in said and 'seed 1: loss on text' in said
    mine = read_rows(tmp_path / 'results/records.csv')
    assert [row['seed'] for row in mine] == [0, 1]
    assert mine[0]['flops'] == planned_flops(tmp_path / 'mine.py') * 4 * 64
    assert 2 < mine[0]['text'] < 8 and mine[0]['text'] != mine[1]['text']
    assert 'mine.py' in record.table(mine)[2] and 'not good enough' in record.table(mine)[2]
    nanodepth('record', argv)          # it goes on where it stopped, and changes nothing
    assert read_rows(tmp_path / 'results/records.csv') == mine and len(record_in_small) == 4
    nanodepth('record', [*argv, '--first_seed=2'])     # others stand beside them
    both = read_rows(tmp_path / 'results/records.csv')
    assert both[:2] == mine and [row['seed'] for row in both[2:]] == [2, 3]
    # another has the record with fewer FLOPs
    best = entries('config/best.py', 10.0, np.linspace(2.1, 2.11, 8), np.linspace(0.98, 0.99, 8))
    (tmp_path / 'results/records.csv').write_bytes(as_csv(best))
    nanodepth('record', argv)
    assert 'so the record stays where it is' in capsys.readouterr().out
    assert len(read_rows(tmp_path / 'results/records.csv')) == 10


def test_other_data_is_refused(tmp_path):
    (tmp_path / 'mine.py').write_text("init_from = 'out/lidas'\n")
    with pytest.raises(Refused, match='must learn from data/toy alone'):
        record.main([str(tmp_path / 'mine.py')])
