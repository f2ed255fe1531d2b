"""Test `nanodepth compare`: arms are trained and scored seed by seed, each in processes of its own,
and a partner with equal FLOPs is added where the FLOPs differ."""
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from helpers import ROOT, state_of, stop_at
from tool_helpers import table_of

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import compare
from nanodepth.commands.train import costs, paid_by, planned
from nanodepth.common.options import read
from nanodepth.report.tables import read_rows, where
from nanodepth.training.plan import Config

pytestmark = pytest.mark.usefixtures('undrawn', 'backward')


SMALL = ('--n_embd=16 --n_head=2 --head_dim=8 --context=96 --batch_size=2 --steps=12 '
         '--eval_every=6 --eval_batches=1')


BASE, GROWN = 'config/baseline.py --n_layer=4', 'config/lidas.py --n_layer=4'


@pytest.fixture
def call(data, tmp_path, monkeypatch, capsys):
    """call(*words) makes a small comparison in tmp_path/c and returns what it printed. What would
    be processes runs in this one, and call.runs lists the runs that were trained."""
    def in_this_process(words, said):
        if words[0] == 'train' and '--dry_run' not in words:
            call.runs.append(words[-1].rpartition('/')[2])
        said.parent.mkdir(parents=True, exist_ok=True)
        with open(said, 'a') as file, contextlib.redirect_stderr(file), \
                contextlib.redirect_stdout(file):
            try:
                nanodepth(None, words)
                return ''
            except SystemExit as end:
                code = end.code
        if code == 128 + signal.SIGTERM:
            raise SystemExit(code)
        return said.read_text().splitlines()[-1]
    monkeypatch.setattr(compare, 'run_command', in_this_process)

    def call(*words, more=SMALL):
        call.runs = []
        capsys.readouterr()
        nanodepth('compare', [*map(str, words), f'--out={tmp_path / "c"}', '--batches=2', '--n=4',
                              '--device=cpu', f'--more={more} --data={data}'])
        call.rows = read_rows(tmp_path / 'c/rows.csv')
        return capsys.readouterr().out
    return call


def file_of(tmp_path, more='', **arms):
    path = tmp_path / 'arms.py'
    path.write_text(f'arms = {arms}\nmeasures = ("loss",)\n{more}\n')
    return path


def runs(tmp_path, seed=0, more='', **arms):
    options = compare.Options(lines=[], arms=arms, out=tmp_path, more=more)
    return compare.runs_of(options, seed)


def test_a_line_may_name_the_arms_above_it(tmp_path):
    of = runs(tmp_path, 3, '--lr=4e-3', plain=BASE,
              late='config/retrofit.py --init_from={plain}/ckpt-6.pt --lr=2e-3',
              even='config/baseline.py --flops=late')
    config = read(Config, of['late'].words)             # a line's own have the last say
    assert (config.lr, config.seed, config.init_from) == (2e-3, 3, f'{tmp_path}/plain-3/ckpt-6.pt')
    assert [run.has_known_cost() for run in of.values()] == [True, False, False]
    assert read(Config, of['plain'].words).lr == 4e-3


@pytest.mark.parametrize('lines, said', [
    (dict(a=BASE, b='aa --lr=1'), 'there is no config aa'),
    (dict(a=BASE, b='c.py --init_from={aa}'), "b: no arm 'aa' is above it; did you mean 'a'?"),
    ({'a b': BASE, 'a_b': BASE}, 'two arms would have the folder '),
    (dict(a='config/baseline.py --n_embd=16 --head_dim=4 --steps=1', b=f'{BASE} --flops=a'),
     'FLOPs pay for less than a step of'),
    (dict(a=BASE, b='config/retrofit.py --init_from={a} --recurence=2'),
     'recurence is not a setting'),
    (dict(a=BASE, b=f'{BASE} --steps=9 --decay_steps=10'), 'are more than steps=9')])
def test_a_mistake_is_refused_before_any_training(lines, said, call, tmp_path, capsys):
    with pytest.raises(SystemExit):
        call(file_of(tmp_path, **lines), more='--steps=20')
    assert said in capsys.readouterr().err and call.runs == []


def test_flops_pay_for_a_number_of_steps(tmp_path):
    "The steps are exact, even if the model grows or a part of the cost is fixed."
    for line, flops in (('config/baseline.py', 2e12), ('config/lidas.py', 2.3e12),
                        (f'{BASE} --cooldown_loop=4x4 --decay_steps=20', 9e12)):
        steps = paid_by(flops, line.split()).steps
        _, own = costs(read(Config, [*line.split(), f'--steps={steps}']))
        assert abs(own - flops) < own / steps
    of = runs(tmp_path, grown='config/lidas.py', less='config/baseline.py --flops=grown')
    config = read(Config, of['less'].all_words())       # what is a share there is one here
    assert (config.steps, config.warmup_steps, config.decay_steps) == (482, 40, 96)


def test_flops_of_the_parent_count(call, data, tmp_path):
    core = 'config/retrofit.py --init_from={plain} --cut=1-2-1 --recurrence=2'
    file = file_of(tmp_path, 'against = dict(core=["even"])', plain=BASE, core=core,
                   even=f'{BASE} --flops=core',
                   late=f'{BASE} --branch_from={{plain}}/ckpt-6.pt --flops=core')
    said = call(file, '--seeds=2', more=SMALL + ' --keep_every=6')
    assert call.runs == [f'{name}-{seed}' for seed in (0, 1) for name in
                         ('plain', 'core', 'even', 'late')]
    spent = {row['run']: row['training_flops'] for row in call.rows}
    for seed in (0, 1):                 # r is drawn, so each seed has other FLOPs
        own = planned(Config(**state_of(tmp_path / f'c/core-{seed}')['config']))
        assert spent[f'core-{seed}'] == own + spent[f'plain-{seed}']
        for name in ('even', 'late'):
            assert spent[f'{name}-{seed}'] == pytest.approx(spent[f'core-{seed}'], rel=0.03)
    assert spent['core-0'] != spent['core-1']
    assert where(table_of(said, 'loss'), model='core')[0]['compared with'] == 'even'


def test_the_comparisons_in_docs_results_can_be_read():
    options = compare.read_options(['docs/results/compare_toy.py', '--seeds=4'])
    runs = compare.runs_of(options, 4)
    equal = ['baseline', 'baseline_isoflops']
    others = 'baseline_isoflops', 'late', 'loop_2x4', 'standard_2', 'loop_1_2x3_1', 'standard_4'
    assert len(runs) == 11 and compare.compared_with(options, runs) == dict(
        dict.fromkeys(others, equal[:1]), midas=equal, lidas=equal, retrofit=['retrofit_dense'],
        retrofit_dense=equal[:1])


def test_the_rows_are_those_of_evaluate(call, tmp_path, capsys):
    words = [BASE, GROWN, '--tasks=toy_copy', '--dtype=float32']
    partner = 'baseline --n_layer=4 --steps=11'
    folders = ['baseline_--n_layer=4', 'lidas_--n_layer=4', 'baseline_--n_layer=4_--steps=11']
    assert 'not resolved (one seed)' in call(*words, '--seeds=1-1')
    assert call.runs == [f'{name}-1' for name in folders]
    rows = call.rows
    said = call(*words, '--seeds=2')        # what is complete is not trained again
    assert call.runs == [f'{name}-0' for name in folders]
    key = lambda row: (row['run'], row['measure'])
    assert sorted(where(call.rows, seed=1), key=key) == sorted(rows, key=key)
    assert [row['compared with'] for row in table_of(said, 'loss')] == [
        '', 'baseline --n_layer=4', partner, '']
    assert 'This table has 4.' in said
    rows = call.rows
    assert call(*words, '--seeds=2') == said and call.runs == [] and call.rows == rows
    # an arm that is the partner is not trained twice; one of equal FLOPs has none
    call(BASE, GROWN, f'{BASE} --steps=11', f'{BASE} --lr=1e-3', *words[2:], '--seeds=1')
    assert call.runs == ['baseline_--n_layer=4_--lr=1e-3-0']

    theirs = table_of(said, 'loss')[1]
    folders = [str(tmp_path / f'c/{name}-{seed}') for name in folders[:2] for seed in (0, 1)]
    nanodepth('evaluate', [*folders, '--against=baseline_--n_layer=4', '--batches=2', '--n=4',
                           '--tasks=toy_copy', '--measures=loss,log_prob', '--device=cpu',
                           f'--out={tmp_path / "e.csv"}'])
    ours = table_of(capsys.readouterr().out, 'loss')[1]
    assert ours['difference'] == theirs['difference'] and ours['p'] == theirs['p']
    evaluated = read_rows(tmp_path / 'e.csv')
    assert len(evaluated) == 4 * len({'loss', 'fifth', 'toy_copy', 'toy_copy log_prob'})
    for row in evaluated:
        [compared] = where(rows, run=row['run'], measure=row['measure'])
        assert row['mean'] == pytest.approx(compared['mean'], rel=1e-12)


def test_a_file_of_arms_may_name_ways_and_a_metric(call, tmp_path):
    "All arms are scored on the same rows, even an arm that was trained in other batches."
    text = '''
ways = dict(plain=['--loop=1-2x2-1', '--window=1-2 --solver=rk --K=2,3', '--window=1-2 --K=3'])
show = ('tokens', 'gate')
def metric(model, loader):
    noise = model.head.weight.sum().item() % 1e-4
    return dict(tokens=(3.5 if model.config.ffn_dim == 32 else 9.0) + noise, gate=noise)
'''
    file = file_of(tmp_path, text, plain=BASE, thin=f'{BASE} --ffn_dim=32 --batch_size=4')
    said = call(file, '--seeds=2')
    thin = where(table_of(said, 'tokens'), model='thin')[0]
    assert thin['compared with'] == 'plain' and thin['verdict'] == 'lower'
    gate = table_of(said, 'gate')
    assert [line['verdict'] for line in gate] == ['', *['equal'] * 4, 'not resolved']
    assert {row['tokens'] for row in call.rows} == {12 * 2 * 96, 12 * 4 * 96}
    assert len({row['way'] for row in call.rows}) == 5
    assert len(where(call.rows, measure='loss')) == 2 * (5 + 1)


def test_an_edit_since_the_training_is_refused(call, data, tmp_path, capsys):
    """train.py refuses an edited function, another setting and other data. Settings that do not
    change the model may differ."""
    (tmp_path / 'mine.py').write_text('n_layer = 4\ndef lr_shape(c, step):\n    return 1.0\n')
    file = file_of(tmp_path, mine=f'{tmp_path}/mine.py --lr=1e-3',
                   cut='config/retrofit.py --init_from={mine} --cut=1-2-1')
    call(file, '--seeds=1')
    for name, old, new, says in (('mine.py', '1.0', '2.0', 'holds a run with lr_shape='),
                                 ('arms.py', 'lr=1e-3', 'lr=2e-3', 'holds a run with lr=0.001'),
                                 ('arms.py', '1-2-1', '0-1-1', "holds a run with cut='1-2-1'")):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(before.replace(old.encode(), new.encode()))
        with pytest.raises(SystemExit, match='1'):
            call(file, '--seeds=1')
        assert says in capsys.readouterr().out
        (tmp_path / name).write_bytes(before)
    call(file, '--seeds=1', more=f'{SMALL} --log_every=3')      # as a resume may
    assert call.runs == []
    shutil.rmtree(tmp_path / 'c/mine-0')        # its arm is trained again; what began from it?
    with pytest.raises(SystemExit, match='1'):
        call(file, '--seeds=1')
    assert 'cut-0 is older than' in capsys.readouterr().out
    shutil.rmtree(tmp_path / 'c/cut-0')
    call(file, '--seeds=1')
    assert call.runs == ['cut-0']


def test_an_arm_that_is_paid_like_another_is_trained_again_with_it(call, tmp_path, capsys):
    "The steps of `even` follow from the FLOPs of `deep`, which is trained again with other steps."
    lines = dict(base=BASE, deep=f'{BASE} --steps=14', even=f'{BASE} --flops=deep')
    call(file_of(tmp_path, **lines), '--seeds=1')
    shutil.rmtree(tmp_path / 'c/deep-0')
    file = file_of(tmp_path, **lines | dict(deep=f'{BASE} --steps=18'))
    with pytest.raises(SystemExit, match='1'):
        call(file, '--seeds=1')
    assert 'even-0 is older than' in capsys.readouterr().out
    shutil.rmtree(tmp_path / 'c/even-0')
    call(file, '--seeds=1')
    assert {row['run']: row['steps'] for row in call.rows} == {
        'base-0': 12, 'deep-0': 18, 'even-0': 18}


def test_wrong_ways_and_measures_are_refused_before_any_training(call, tmp_path, capsys):
    file = file_of(tmp_path, a=BASE, b=f'{BASE} --lr=1e-3')
    for option, words in (('--also=--windwo=mid4', 'did you mean window?'),
                          ('--measures=mine', "measures='mine'")):
        with pytest.raises(SystemExit):
            call(file, option)
        assert words in capsys.readouterr().err and call.runs == []


def test_a_metric_may_be_the_only_measure(call, tmp_path):
    text = 'measures = ("metric",)\ndef metric(model, loader):\n    return dict(layers=4.0)\n'
    call(file_of(tmp_path, text, a=BASE, b=f'{BASE} --lr=1e-3'), '--seeds=1')
    assert {row['measure'] for row in call.rows} == {'layers'}


def test_all_processes_run_your_own_file_first(data, tmp_path):
    (tmp_path / 'mine.py').write_text(
        'from nanodepth.scoring.rows import MEASURES\n'
        "MEASURES['width'] = lambda model, val: dict(width=model.config.n_embd)\n")
    more = shlex.join([*SMALL.split(), '--steps=2', '--warmup_steps=1', '--decay_steps=1',
                       f'--data={data}', '--device=cpu'])
    subprocess.run([sys.executable, '-m', 'nanodepth', f'{tmp_path}/mine.py', 'compare', BASE,
                    f'{BASE} --lr=1e-3', '--seeds=1', '--measures=width', '--batches=1',
                    f'--more={more}', f'--out={tmp_path}/c'],
                   check=True, cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS='1'))
    assert {row['mean'] for row in read_rows(tmp_path / 'c/rows.csv')} == {16}


PATCH = """
from model import MLP
n_layer = 4
real = MLP.forward
MLP.forward = lambda self, x: 2 * real(self, x)
"""


def test_an_arm_that_patches_a_class_changes_no_other_arm(data, tmp_path):
    "Each arm is trained and scored in its own processes."
    (tmp_path / 'patched.py').write_text(PATCH)
    base = [*SMALL.split(), '--steps=6', f'--data={data}', '--device=cpu']
    env = os.environ | dict(OMP_NUM_THREADS='1')
    run = lambda *words: subprocess.run([sys.executable, '-m', 'nanodepth', *words], check=True,
                                        cwd=ROOT, env=env, capture_output=True)
    run('compare', BASE, f'{tmp_path}/patched.py', '--seeds=1', '--batches=2', '--measures=loss',
        f'--more={shlex.join(base)}', f'--out={tmp_path}/c')
    rows = {row['run']: row['mean'] for row in read_rows(tmp_path / 'c/rows.csv')
            if row['measure'] == 'loss'}
    run('evaluate', f'{tmp_path}/c/baseline_--n_layer=4-0', '--batches=2', '--device=cpu',
        f'--out={tmp_path}/e.csv')
    alone = [row['mean'] for row in read_rows(tmp_path / 'e.csv') if row['measure'] == 'loss']
    assert rows['baseline_--n_layer=4-0'] == alone[0] != rows['patched-0']


def test_a_stopped_comparison_continues(call, tmp_path):
    file = file_of(tmp_path, plain=BASE, core='config/retrofit.py --init_from={plain} --cut=1-2-1')
    stop_at(5)
    with pytest.raises(SystemExit, match='143'):
        call(file, '--seeds=1')
    assert 0 < state_of(tmp_path / 'c/plain-0')['step'] < 12 and call.runs == ['plain-0']
    call(file, '--seeds=1')
    assert call.runs == ['plain-0', 'core-0']
    assert {row['steps'] for row in call.rows} == {12}


def test_a_run_that_fails_is_named_and_left_out(call, tmp_path, capsys):
    file = file_of(tmp_path, 'ways = dict(short=["--r=2"])', b=BASE,
                   a=f'{BASE} --lr=1e30 --optimizer=adamw', short=f'{BASE} --steps=20',
                   on=f'{BASE} --init_from={{a}}', less=f'{BASE} --flops=a',
                   bad='config/retrofit.py --init_from={b} --cut=4-4-4')
    with pytest.raises(SystemExit, match='1'):
        call(file, '--seeds=1')
    said = capsys.readouterr().out
    for name, why in (('a', '.*step .* was not taken: loss'),
                      ('on', 'a, which it needs, is missing'),
                      ('less', 'a, which it needs, is missing'), ('bad', '.*4-4-4'),
                      ('short', '.*--r=2: this model has no recurrent core')):
        assert re.search(f'{name}, seed 0, is left out of the means: {why}', said), name
    assert len(table_of(said, 'loss')) == 1


def test_sigterm_reaches_the_training_which_saves_first(data, tmp_path, monkeypatch):
    "A file tqdm.py in the current folder is not imported by the training."
    (tmp_path / 'tqdm.py').write_text('raise SystemExit("a stranger\'s code")')
    (tmp_path / 'config').symlink_to(ROOT / 'config')
    monkeypatch.chdir(tmp_path)
    run, said, ended = tmp_path / 'run', tmp_path / 'run.txt', threading.Event()

    def stop():
        log = run / 'log.jsonl'         # its second line is written after a step
        while not (log.exists() and log.read_text().count('\n') > 1) and not ended.wait(0.05):
            pass
        if not ended.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    threading.Thread(target=stop).start()
    settings = [*BASE.split(), *SMALL.split(), '--steps=9000', f'--data={data}', '--device=cpu']
    try:
        with pytest.raises(SystemExit, match='143'):
            compare.run_command(['train', *settings, f'--out_dir={run}'], said)
    finally:
        ended.set()
    assert 0 < state_of(run)['step'] < 9000
    assert 'the same command continues' in said.read_text()
