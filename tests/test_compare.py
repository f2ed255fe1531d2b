"""A comparison: what its lines mean, what partners cost, and that it goes on where it was stopped.

Promised: the partner at equal FLOPs has the steps that they pay for; the best rate is found with
seed 0 and kept; a row says what evaluate says, whole or not at all; what has a row is not run
again; a diverged run is in no mean; intervals and words by hand; a mistake is a line before all.
"""
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, refused, state_of
from scipy import stats

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import compare
from nanodepth.commands.arms import Arms
from nanodepth.commands.cost import planned
from nanodepth.common.errors import Refused
from nanodepth.models import checkpoint
from nanodepth.report.contrasts import Contrast, in_words, p_beyond, t_around
from nanodepth.report.logs import read_log
from nanodepth.report.tables import read_rows, where
from nanodepth.scoring.scores import Asked, Subject
from nanodepth.scoring.way import Way
from nanodepth.train import Config, read

SMALL = ('--n_embd=16 --n_head=2 --head_dim=8 --context=96 --batch_size=2 --steps=24 '
         '--eval_every=12 --eval_batches=1')
BASE, GROWN = 'config/baseline.py --n_layer=4', 'config/lidas.py --n_layer=4'


@pytest.fixture
def call(data, tmp_path, monkeypatch):
    """call(*words) is a small comparison in tmp_path/c. Its commands run in this process, and are
    noted in call.runs; call.before may break one of them."""
    def start(words, said, threads, tell):
        call.runs.append(re.search(r'--out(?:_dir)?=\S*/(\S+)', ' '.join(words))[1])
        try:
            call.before(call.runs[-1])
            nanodepth(words[0], words[1:])
        except SystemExit as end:
            raise Refused(f'status {end.code}: {call.why}') from None
        tell()

    def call(*words):
        call.runs = []
        nanodepth('compare', [*map(str, words), f'--out={tmp_path / "c"}', '--batches=2', '--n=4',
                              '--device=cpu', f'--more={SMALL} --data={data}'])
        return read_rows(tmp_path / 'c/rows.csv')
    call.before, call.why = (lambda run: None), ''
    monkeypatch.setattr(compare, 'start', start)
    return call


# ---------------------------------------------------------------------------------------- the arms

def test_a_line_is_a_config_a_variant_or_another_command(data, tmp_path):
    arms = Arms({'twice': 'plain --lr=2e-3', 'plain': f'config/baseline.py --data={data}',
                 'late': 'config/retrofit.py --init_from={cut}', 'cut': 'cut {plain} 2-2-2'},
                tmp_path, [f'--data={data}'])
    assert [*arms] == ['plain', 'twice', 'cut', 'late']     # what is needed comes first
    assert arms['twice'].root == 'plain' and arms.trained() == ['plain', 'twice', 'late']
    assert arms.argv('cut', 3) == [f'{tmp_path}/plain-3', '2-2-2', f'--out={tmp_path}/cut-3']
    arms.factors['plain'] = 0.5
    assert arms.argv('cut', 3)[0] == f'{tmp_path}/plain_rate0.5-3'
    assert '--lr=0.001' in arms.argv('twice', 0) and '--seed=0' in arms.argv('twice', 0)


@pytest.mark.parametrize('grown', ['lidas', 'midas'])
def test_a_partner_has_the_flops_and_a_cool_down_in_proportion(grown, tmp_path):
    arms = Arms(dict(plain='config/baseline.py', grown=f'config/lidas.py --grow={grown}',
                     kept='plain --flops=grown --decay_steps=120', less='grown --flops=half',
                     half='config/baseline.py --n_layer=4'), tmp_path, partners=True)
    partner = 'plain, FLOPs of grown'
    for name, decay in (('kept', 120), (partner, 96)):
        assert arms.argv(name, 0)[-3:] == ['--steps=482', '--warmup_steps=50',
                                           f'--decay_steps={decay}']
    for name, other in ((partner, 'grown'), ('kept', 'grown'), ('less', 'half')):   # less grows
        assert arms.total(name, 0) == pytest.approx(arms.total(other, 0), rel=0.003)
    assert 'plain, FLOPs of half' in arms and len(arms) == 7
    short = Arms(dict(a='config/baseline.py', b='a --n_layer=1 --loop=1 --steps=70'), tmp_path,
                 partners=True)         # its warm-up of 50 would not fit into so few steps
    config = read(Config, short.argv('a, FLOPs of b', 0))
    assert (config.steps, config.warmup_steps, config.decay_steps) == (10, 0, 2)
    both = Arms(dict(a='config/baseline.py --steps=150', b='a --grow=lidas'), tmp_path,
                partners=True)          # the warm-up of the config would fit, that of the arm is 12
    config = read(Config, both.argv('a, FLOPs of b', 0))
    assert (config.steps, config.warmup_steps, config.decay_steps) == (120, 12, 24)


def test_what_a_model_begins_from_counts(data, tmp_path):
    lines = dict(plain=BASE, cut='cut {plain} 1-2-1',
                 core='config/retrofit.py --init_from={cut} --recurrence=2',
                 same='plain --init_from={plain} --flops=core')
    arms = Arms(lines, tmp_path, [*SMALL.split(), f'--data={data}', '--device=cpu'], partners=True)
    for name in ('plain', 'cut'):
        nanodepth(arms[name].command, arms.argv(name, 0))
    own = planned(read(Config, arms.argv('core', 0)))
    before = checkpoint.cost_of(state_of(tmp_path / 'plain-0'))
    assert arms.total('core', 0) == own + before
    assert arms.total('plain, FLOPs of core', 0) == pytest.approx(own + before, rel=0.03)
    assert planned(read(Config, arms.argv('same', 0))) == pytest.approx(own, rel=0.05)


@pytest.mark.parametrize('lines, said', [
    (dict(a=BASE, b='a --n_layers=4'), '--n_layers is no setting; did you mean n_layer?'),
    (dict(a=BASE, b='aa --lr=1'), "b: 'aa' is no config, arm or command; did you mean 'a'?"),
    (dict(a=BASE, b='cut {plain} 1-1-1'), 'b: there is no arm plain'),
    (dict(a=BASE, b='c --lr=1', c='b --lr=2'), 'is a variant of itself'),
    (dict(a=BASE, b='a --flops=c', c='a --flops=b'), 'b, c: each needs another one of these'),
    (dict(a=BASE, b='a --data=nowhere'), 'b: there is no dataset at nowhere'),
    (dict(a=BASE, b='a --n_layer=8 --n_embd=2048 --head_dim=128 --flops=c',
          c='a --n_embd=16 --head_dim=4 --steps=1'), 'b: the FLOPs of c pay for less than a step')])
def test_what_cannot_be_compared_is_refused_before_a_run(lines, said, tmp_path):
    with pytest.raises(Refused, match=re.escape(said)):
        Arms(lines, tmp_path, partners=True)


def test_the_rows_of_the_repo_are_those_of_its_file(monkeypatch):
    "No seed that is published is run again, and a trial writes beside its runs."
    monkeypatch.setattr(Arms, 'refuse', lambda self, name: None)    # data/toy_deep may not be here
    comparison = compare.Comparison(compare.read_options(['config/compare_toy.py', '--seeds=4']))
    assert len(comparison.arms) == 11 and comparison.left() == []
    costs = dict(baseline=(100, 100), lidas=(100, 80), baseline_isoflops=(80, 80),
                 retrofit=(25, 135), retrofit_dense=(25, 136))      # (tokens, FLOPs)
    beside = {name: comparison.beside(name, 'as it is', costs) for name in costs}
    assert beside == dict(
        baseline=[], baseline_isoflops=[], retrofit_dense=[],
        lidas=[('baseline, equal tokens', 'baseline'),
               ('baseline_isoflops, equal FLOPs', 'baseline_isoflops')],
        # the tokens of what these begin from are not counted
        retrofit=[('retrofit_dense, equal FLOPs', 'retrofit_dense')])
    trial = compare.read_options(['config/compare_toy.py', '--more=--steps=9'])
    assert trial.rows == Path('out/compare_toy/rows.csv')


# ---------------------------------------------------------------------------------------- the runs

def test_two_arms_and_a_partner_stopped_and_gone_on(call, tmp_path, capsys):
    call.before = lambda run: sys.exit(137) if run == 'grown-1' else None
    words = [tmp_path / 'two.py', '--seeds=2', '--tasks=toy_copy']
    (tmp_path / 'two.py').write_text(
        f'arms = dict(plain={BASE!r}, grown={GROWN!r})\n'
        'ways = dict(grown=["--loop=1-2x2-1", "--window=1-2 --method=rk --K=2,3"])\n'
        'def metric(model, loader): return dict(deep=len(model.order))\n')
    with pytest.raises(SystemExit, match='2'):
        call(*words)
    assert call.runs == ['plain-0', 'grown-0', 'plain_FLOPs_of_grown-0', 'plain-1', 'grown-1']
    call.before = lambda run: None
    rows = call(*words)
    assert call.runs == ['grown-1', 'plain_FLOPs_of_grown-1']
    assert len(rows) == 2 * (1 + 4 + 1)
    assert all(row['deep'] == 4 for row in where(rows, way='as it is'))
    said = capsys.readouterr().out
    assert 'plain, equal tokens' in said and 'plain, FLOPs of grown, equal FLOPs' in said
    assert 'Comparisons made here: 10.' in said

    # what evaluate says of one of them
    found = Subject(tmp_path / 'c/grown-1', Asked(
        tasks='toy_copy', n=4, batches=2, measures=('loss', 'log_prob'), device='cpu')).scores(
            Way(window='1-2', method='rk', K=3))
    [row] = where(rows, run='grown', seed=1, way='--window=1-2 --method=rk --K=3')
    for name, value in (('loss', found['loss']), ('fifth right', found['fifth']),
                        ('toy_copy right', found['toy_copy']),
                        ('toy_copy log_prob', found['toy_copy log_prob'])):
        assert row[name] == pytest.approx(value.mean, rel=1e-5)
    log = read_log(tmp_path / 'c/grown-1')
    curves = where(read_rows(tmp_path / 'c/rows_curves.csv'), run='grown', seed=1)
    assert row['val_loss'] == pytest.approx(log[-1]['val_loss'], rel=1e-5)
    assert [line['step'] for line in curves] == [
        line['step'] for line in log if {'val_loss', 'grown'} & line.keys()]

    # asked something else, its models are asked again; another line under a name is refused
    again = call(*words, '--tasks=toy_copy,toy_assign/0')
    assert len(again) == len(rows) and 'toy_assign/0 right' in again[0]
    (tmp_path / 'two.py').write_text(f'arms = dict(plain={BASE!r}, grown="plain --lr=1e-3")')
    assert 'has rows of plain by' in refused(capsys, 'compare', tmp_path / 'two.py',
                                             f'--out={tmp_path / "c"}')


def test_the_best_rate_of_seed_0_is_kept_and_a_diverged_run_is_in_no_mean(call, tmp_path, capsys,
                                                                          monkeypatch):
    words = [BASE, f'{GROWN} --lr=1e-2', '--rates=0.5,1,2', '--measures=loss']
    loss_of = compare.read_log

    def as_if(folder):          # plain: half its rate is best; grown: twice
        log = loss_of(folder)
        best = 'rate0.5' if 'baseline' in folder.name else 'rate2'
        log[-1]['val_loss'] = 1.0 if best in folder.name else 2.0
        return log
    monkeypatch.setattr(compare, 'read_log', as_if)
    call.why = 'the loss is nan, so it was not taken'
    call.before = lambda run: sys.exit(2) if run == 'lidas_--n_layer=4_--lr=1e-2-0' else None
    with pytest.raises(SystemExit):
        call(*words, '--seeds=1-1')
    assert 'tried with seed 0' in capsys.readouterr().err
    rows = call(*words, '--seeds=2')
    rates = {name: {row['lr'] for row in where(rows, run=name, seed=1)}
             for name in dict.fromkeys(row['run'] for row in rows)}
    assert [*rates.values()] == [{0.002}, {0.02}, {0.002}]      # and the partner's: plain's
    assert len(where(rows, seed=0)) == 7 and len(where(rows, seed=1)) == 3
    assert [row['val_loss'] for row in rows if row['lr'] == 0.01] == [math.inf]
    said = capsys.readouterr().out
    assert '0.5 times its own rate was best, an end of what was tried' in said
    assert call(*words, '--seeds=2') == rows and call.runs == []
    call.before = lambda run: sys.exit(2) if run.startswith('two') else None
    (tmp_path / 'd.py').write_text(f'arms = dict(one={BASE!r}, two="one --lr=9")')
    call(tmp_path / 'd.py', '--seeds=1', f'--rows={tmp_path / "d.csv"}')
    assert 'two, seed 0, has diverged, and is in no mean' in capsys.readouterr().out


def test_sigterm_ends_the_run_in_hand_at_its_step_and_the_next_call_goes_on(data, tmp_path):
    words = [sys.executable, '-m', 'nanodepth', 'compare', BASE, f'{BASE} --lr=1e-3', '--seeds=1',
             f'--out={tmp_path / "c"}', '--batches=2', '--threads=1', '--device=cpu',
             f'--more={SMALL} --data={data} --steps=4000 --log_every=1']
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    log = tmp_path / 'c/baseline_--n_layer=4-0/log.jsonl'
    while not log.exists() or log.read_bytes().count(b'\n') < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130 and not (tmp_path / 'c/rows.csv').exists()
    step = state_of(log.parent)['step']
    assert 4 <= step < 4000 and 'stopped after step' in (tmp_path / f'c/{log.parent.name}.txt'
                                                      ).read_text()


@pytest.mark.parametrize('text, seeds', [('3', [0, 1, 2]), ('4-6', [4, 5, 6]), ('2-2', [2])])
def test_seeds_in_words(text, seeds):
    assert [*compare.seeds_of(text)] == seeds
    for wrong in ('0', '3-1', 'x', '1,2'):
        with pytest.raises(Refused, match='must be how many'):
            compare.seeds_of(wrong)


# ---------------------------------------------------------------------------------- the statistics

def test_students_t_is_scipys():
    for degrees in (1, 2, 7, 30):
        for t in (0.0, 0.5, 2.0, 12.0):
            assert p_beyond(t, degrees) == pytest.approx(2 * stats.t.sf(t, degrees), rel=1e-5)
        assert t_around(0.95, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-5)


def test_a_difference_by_hand():
    rows = [dict(seed=seed, loss=loss, **{'x right': share}) for seed, loss, share in (
        (0, 1.0, 0.5), (1, 1.3, 0.75), (2, 1.6, 0.5))]
    others = [dict(seed=seed, loss=loss) for seed, loss in ((2, 1.5), (0, 1.0), (1, 1.25), (5, 9))]
    # 0, 0.05, 0.1: mean 0.05, sd 0.05, t of 2 degrees 4.303
    assert compare.difference(rows, others, 'loss') == (
        '+0.050 ± 0.124', '0.23', 'not resolved (0.15 would have shown)')
    assert compare.spread(rows, 'x right') == '58.3 ± 35.9'
    assert compare.difference(rows[:1], others, 'loss') == ('+0.000', '', 'not resolved (1 seed)')


@pytest.mark.parametrize('changes, said', [
    ([1.0, 1.1, 0.9, 1.0], 'higher'), ([-1.0, -1.1, -0.9], 'lower'),
    ([0.001, -0.002, 0.001, 0.0], 'no difference'), ([1.0, -1.0, 2.0, 0.0], 'not resolved')])
def test_what_the_seeds_say(changes, said):
    assert in_words(Contrast(changes, [0.0] * len(changes)), 0.02).startswith(said)
