"""A comparison: what its lines mean, what partners cost, and that a row is of what stands in it.

Promised: the partner at equal FLOPs has the steps that they pay for; whatever is edited is another
run in another folder; what is whole is not trained again; a row says what evaluate says; a diverged
run is named and in no mean; intervals and words by hand; a mistake is a line before all.
"""
import contextlib
import io
import math
import re
import runpy
import signal
import subprocess
import sys
import time
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, refused, state_of
from scipy import stats

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import arms as arms_file, compare, cut, evaluate
from nanodepth.commands.arms import Arms, planned
from nanodepth.common.errors import Refused
from nanodepth.models import checkpoint
from nanodepth.probe import depth_score
from nanodepth.report.contrasts import (Contrast, beside, difference, in_words, p_beyond, spelled,
                                        t_around)
from nanodepth.report.tables import read_rows, where
from nanodepth.scoring.rows import MEASURES, Asked, Subject, sources_of
from nanodepth.scoring.way import Way
from nanodepth.text.tokens import write_dataset
from nanodepth.train import Config, Loader, train

SMALL = ('--n_embd=16 --n_head=2 --head_dim=8 --context=96 --batch_size=2 --steps=24 '
         '--eval_every=12 --eval_batches=1')
BASE, GROWN = 'config/baseline.py --n_layer=4', 'config/lidas.py --n_layer=4'


class InHere:
    "A process that has ended before it returns: a command of ours, in this one."
    runs = []

    def __init__(self, argv, stdout, **_):
        self.runs.append(argv[-1].rpartition('/')[2])
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                nanodepth(argv[3], argv[4:])
                self.returncode = 0
            except SystemExit as end:
                self.returncode = end.code
        stdout.write(said.getvalue().encode())

    def wait(self):
        return self.returncode

    def poll(self):
        return self.returncode


@pytest.fixture
def call(data, tmp_path, monkeypatch, capsys):
    """call(*words) is a small comparison in tmp_path/c: what it printed. Its runs are trained in
    this process, and those that the call has trained stand in call.runs, without the letters."""
    monkeypatch.setattr(compare, 'subprocess', SimpleNamespace(
        Popen=InHere))

    def call(*words, more=SMALL):
        InHere.runs = []
        capsys.readouterr()
        nanodepth('compare', [*map(str, words), f'--out={tmp_path / "c"}', '--batches=2', '--n=4',
                              '--device=cpu', f'--more={more} --data={data}'])
        call.runs = [re.sub('-[0-9a-f]{8}-', '-', run) for run in InHere.runs]
        call.rows = read_rows(tmp_path / 'c/rows.csv')
        return capsys.readouterr().out
    return call


@pytest.fixture
def write(tmp_path):
    "write(name, text) -> the path of a config or of a file of arms."
    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path
    return write


def table_of(said, measure):
    "The cells of a table's lines, by its heads."
    lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in said.splitlines()
             if line.startswith('|')]
    first = next(i for i, line in enumerate(lines) if measure in line)
    rows = []
    for line in lines[first + 2:]:
        if 'model' in line:
            break
        rows.append(dict(zip(lines[first], line)))
    return rows


# ---------------------------------------------------------------------------------------- the arms

def test_a_line_is_a_config_a_variant_or_a_cut(data, tmp_path):
    arms = Arms({'twice': 'plain --lr=2e-3', 'plain': f'config/baseline.py --data={data}',
                 'late': 'config/retrofit.py --init_from={cut}', 'cut': 'cut {plain} 2-2-2'},
                tmp_path, [f'--data={data}'])
    assert [*arms] == ['plain', 'twice', 'cut', 'late']     # what is needed comes first
    assert arms.trained() == ['plain', 'twice', 'late']
    assert arms.config('cut', 3)[1] == [str(arms.folder('plain', 3)), '2-2-2']
    assert re.fullmatch(f'{tmp_path}/plain-[0-9a-f]{{8}}-3', str(arms.folder('plain', 3)))
    config, words = arms.argv('twice', 1)
    assert (config.lr, config.seed) == (2e-3, 1) and words[-1] == '--seed=1'


@pytest.mark.parametrize('grown', ['lidas', 'midas'])
def test_a_partner_has_the_flops_and_a_cool_down_in_proportion(grown, tmp_path):
    arms = Arms(dict(plain='config/baseline.py', grown=f'config/lidas.py --grow={grown}',
                     kept='plain --flops=grown --decay_steps=120', less='grown --flops=half',
                     half='config/baseline.py --n_layer=4'), tmp_path, partners=True)
    partner = 'plain with the FLOPs of grown'

    def schedule(arms, name):
        config, _ = arms.argv(name, 0)
        return config.steps, config.warmup_steps, config.decay_steps
    assert schedule(arms, 'kept') == (482, 50, 120) and schedule(arms, partner) == (482, 50, 96)
    for name, other in ((partner, 'grown'), ('kept', 'grown'), ('less', 'half')):   # less grows
        assert arms.total(name, 0) == pytest.approx(arms.total(other, 0), rel=0.003)
    assert len(arms) == 7 and arms.partners_of('plain') == [
        'kept', partner, 'plain with the FLOPs of half']
    short = Arms(dict(a='config/baseline.py', b='a --n_layer=1 --loop=1 --steps=70'), tmp_path,
                 partners=True)         # its warm-up of 50 would not fit into so few steps
    assert schedule(short, 'a with the FLOPs of b') == (10, 0, 2)
    both = Arms(dict(a='config/baseline.py --steps=150', b='a --grow=lidas'), tmp_path,
                partners=True)
    assert schedule(both, 'a with the FLOPs of b') == (120, 12, 24)


def test_what_a_model_begins_from_counts(data, tmp_path):
    lines = dict(plain=BASE, cut='cut {plain} 1-2-1',
                 core='config/retrofit.py --init_from={cut} --recurrence=2',
                 same='plain --init_from={plain} --flops=core')
    arms = Arms(lines, tmp_path, [*SMALL.split(), f'--data={data}', '--device=cpu'], partners=True)
    for name, command, out in (('plain', 'train', 'out_dir'), ('cut', 'cut', 'out')):
        nanodepth(command, [*arms.argv(name, 0)[1], f'--{out}={arms.folder(name, 0)}'])
    own = planned(arms.argv('core', 0)[0])
    before = checkpoint.cost_of(state_of(arms.folder('plain', 0)))
    assert arms.total('core', 0) == own + before
    assert arms.total('plain with the FLOPs of core', 0) == pytest.approx(own + before, rel=0.03)
    assert planned(arms.argv('same', 0)[0]) == pytest.approx(own, rel=0.05)


def test_the_flops_of_a_recurrent_arm_are_those_of_each_seeds_draws(data, tmp_path):
    words = [*SMALL.split(), f'--data={data}', '--device=cpu', '--n_layer=6', '--steps=60']
    nanodepth('train', ['config/baseline.py', *words, '--steps=5', f'--out_dir={tmp_path}/parent'])
    nanodepth('cut', [f'{tmp_path}/parent', '1-2-1', f'--out={tmp_path}/cut'])
    arms = Arms(dict(core=f'config/baseline.py --init_from={tmp_path}/cut --recurrence=4',
                     dense=f'config/baseline.py --init_from={tmp_path}/parent --flops=core'),
                tmp_path, words)
    costs = [[planned(arms.argv(name, seed)[0]) for name in arms] for seed in range(4)]
    assert len({core for core, _ in costs}) == 4
    assert all(dense == pytest.approx(core, rel=0.01) for core, dense in costs)


@pytest.mark.parametrize('lines, said', [
    (dict(a=BASE, b='a --n_layers=0'), "b: --n_layers is no setting; did you mean 'n_layer'?"),
    (dict(a=BASE, b='aa --lr=1'), "b: 'aa' is no config, no other arm and not `cut`; did you mean"),
    (dict(a=BASE, b='cut {plain} 1-1-1'), 'b: there is no arm plain'),
    (dict(a=BASE, b='c --lr=1', c='b --lr=2'), 'is a variant of itself'),
    (dict(a=BASE, b='a --flops=c', c='a --flops=b'), 'b, c: each needs another one of these'),
    (dict(a=BASE, b='a --data=nowhere'), 'b: there is no dataset at nowhere'),
    (dict(a=BASE, b='a --n_layer=8 --n_embd=2048 --head_dim=128 --flops=c',
          c='a --n_embd=16 --head_dim=4 --steps=1'), 'b: the FLOPs of c pay for less than a step'),
    (dict(a=BASE, b='a --warmup_steps=900'), 'b: too few steps for warm-up and decay')])
def test_what_cannot_be_compared_is_refused_before_a_run(lines, said, tmp_path):
    with pytest.raises(Refused, match=re.escape(said)):
        Arms(lines, tmp_path, partners=True)


def test_what_is_asked_and_shown_is_refused_before_a_run(data, tmp_path, capsys):
    for words, said in (
            (['--show=txt'], "--show='txt' is not one of"), (['--seed=3'], 'is --seeds'),
            (['--seeds=0'], 'must be how many'), (['--window=9-12'], '9-12'),
            (['--rates=0.5,1'], '--rates is no setting'), (['--minutes=9'], '--minutes is no'),
            (['--tasks=toy_assign/x'], 'the depth must be a whole number'),
            (['--tasks=f1_triviaq'], "did you mean 'f1_triviaqa'?"),
            (['--measures=log_prob'], 'nothing is asked')):
        line = refused(capsys, 'compare', BASE, GROWN, f'--more={SMALL} --data={data}',
                       f'--out={tmp_path / "c"}', *words)
        assert said in line, line
    assert not [*tmp_path.glob('c/*')]
    assert 'is named twice' in refused(capsys, 'compare', BASE, BASE)


# ---------------------------------------------------------------------------------------- the runs

def test_two_arms_and_a_partner_and_what_evaluate_says_of_them(call, write, tmp_path, capsys):
    words = [write('two.py', f'arms = dict(plain={BASE!r}, grown={GROWN!r})\n'
                   'ways = dict(grown=["--loop=1-2x2-1", "--window=1-2 --method=rk --K=2,3"])\n'
                   'def metric(model, loader): return dict(deep=len(model.order))\n'),
             '--seeds=2', '--tasks=toy_copy']
    said = call(*words)
    partner = 'plain_with_the_FLOPs_of_grown'
    assert call.runs == [f'{name}-{seed}' for seed in (0, 1)
                         for name in ('plain', 'grown', partner)]
    rows = call.rows
    assert len(rows) == 2 * (1 + 4 + 1)
    assert all(row['deep'] == 4 for row in where(rows, way='as it is'))
    compared = [row['compared with'] for row in table_of(said, 'loss')]
    assert compared == ['', 'plain, equal tokens', 'plain with the FLOPs of grown, equal training '
                        'FLOPs', 'as it is', 'as it is', 'as it is', '']
    assert 'Comparisons made here: 10.' in said
    [folder] = tmp_path.glob('c/grown-*-1')
    config, *own = GROWN.split()
    line = (folder / 'line.txt').read_text()
    assert line.startswith(f'train {config} ') and f' {" ".join(own)} --seed=1' in line
    found = Subject(folder, Asked(tasks='toy_copy', n=4, batches=2, device='cpu',
                                  measures=('loss', 'log_prob'))).scores(
                                      Way(window='1-2', method='rk', K=3))
    [row] = where(rows, run='grown', seed=1, way='--window=1-2 --method=rk --K=3')
    for name, value in (('loss', found['loss']), ('fifth right', found['fifth']),
                        ('toy_copy right', found['toy_copy']),
                        ('toy_copy log_prob', found['toy_copy log_prob'])):
        assert row[name] == pytest.approx(value.mean, rel=1e-12)

    # again: nothing is trained; another seed is; asked something else, all are asked again
    assert call(*words) == said and call.runs == [] and call.rows == rows
    said = call(*words, '--seeds=3-3')
    assert [run[-2:] for run in call.runs] == ['-3'] * 3 and len(call.rows) == 6
    assert 'One seed decides nothing' in said and '4 answers or rows decide nothing' in said
    call(*words, '--tasks=toy_copy,toy_assign/0')
    assert call.runs == [] and 'toy_assign/0 right' in call.rows[0]

    # the same by the other command
    capsys.readouterr()
    folders = [str(each) for each in tmp_path.glob('c/*-*-[01]')]
    first, base = (next(name for name in folders if f'/{arm}-' in name).rpartition('/')[2][:-2]
                   for arm in ('grown', 'plain'))
    nanodepth('evaluate', [*folders, f'--against={base}', '--batches=2', '--device=cpu',
                           f'--out={tmp_path / "e.csv"}'])
    [ours] = [row for row in table_of(capsys.readouterr().out.split('\n\n', 1)[1], 'loss')
              if row['model'] == first]
    [theirs] = [row for row in table_of(call(*words), 'loss')
                if row['compared with'] == 'plain, equal tokens']
    assert ours['difference'] == theirs['difference'] and ours['p'] == theirs['p']
    assert '--against' in refused(capsys, 'evaluate', *folders, '--against=plain')


def test_a_comparison_that_was_stopped_goes_on(call, monkeypatch):
    keep = compare.make

    def stopped(arms, name, seed, *more):
        if seed == 1:
            raise KeyboardInterrupt
        keep(arms, name, seed, *more)
    monkeypatch.setattr(compare, 'make', stopped)
    with pytest.raises(SystemExit):
        call(BASE, f'{BASE} --lr=1e-3', '--seeds=2')
    monkeypatch.setattr(compare, 'make', keep)
    call(BASE, f'{BASE} --lr=1e-3', '--seeds=2')
    assert [run[-2:] for run in call.runs] == ['-1', '-1'] and len(call.rows) == 4


def test_what_is_edited_is_another_run(call, write, tmp_path):
    "A config's setting, what its function calls, a Step, a cut's line, the data, a parent's rate."
    def folders(name):
        return {path.name.rpartition('-')[0] for path in tmp_path.glob(f'c/{name}-*')}
    mine = write('mine.py', 'n_layer = 4\nweight_decay = 0.5\n')
    call(BASE, mine, '--seeds=1', '--partners=false')
    call(BASE, mine, '--seeds=2', '--partners=false')
    assert call.runs == ['baseline_--n_layer=4-1', 'mine-1']
    write('mine.py', 'n_layer = 4\nweight_decay = 0.0\nadamw_lr = 4e-5\n')
    call(BASE, mine, '--seeds=2', '--partners=false')
    assert call.runs == ['mine-0', 'mine-1'] and len(folders('mine')) == 2
    decays = {state_of(path)['config']['weight_decay'] for path in tmp_path.glob('c/mine-*-1')}
    assert decays == {0.5, 0.0}

    helped = ('def scale(new):\n    new.mlp.down.weight.mul_({})\n'
              'def init(new, old):\n    scale(new)\n'
              'n_layer = 4\ngrow = "lidas"\ngrow_block = 2\n')
    own = write('own.py', helped.format('0.5'))
    call(own, f'{own} --lr=1e-3', '--seeds=1', '--partners=false')
    write('own.py', helped.format('0.5') + '# a remark\n')
    call(own, f'{own} --lr=1e-3', '--seeds=1', '--partners=false')
    assert call.runs == []
    write('own.py', helped.format('0.25'))
    call(own, f'{own} --lr=1e-3', '--seeds=1', '--partners=false')
    assert len(call.runs) == 2

    step = ('from model import Step\nclass Again(Step):\n    def unrolled(self, r=None):\n'
            '        return 2 * self.items\n    def __call__(self, model, x, depth, **how):\n'
            '        for i in (0, 1):\n'
            '            x = {} * model.run(x, self.items, depth + i, **how)\n        return x\n')
    write('again.py', step.format(1.0))
    looped = write('looped.py', 'from again import Again\nn_layer = 3\n'
                   'order = [0, Again([1]), 2]\n')
    words = [BASE, looped, '--seeds=1', '--partners=false', f'--classes={tmp_path / "again.py"}']
    call(*words)
    write('again.py', step.format(0.9))
    call(*words)
    assert call.runs == ['looped-0']


def arms_of_three(write, shape='1-2-1', lr='4e-3'):
    return write('arms.py', f"""
partners = False
measures = 'loss',
arms = dict(plain='{BASE} --lr={lr}', cut='cut {{plain}} {shape} --seed={{seed}}',
            core='config/retrofit.py --init_from={{cut}}', on='plain --init_from={{plain}}')
""")


def test_another_cut_and_a_parent_of_another_rate_make_other_children(call, write, tmp_path):
    call(arms_of_three(write), '--seeds=1')
    assert call.runs == ['plain-0', 'core-0', 'on-0'] and len([*tmp_path.glob('c/cut-*')]) == 1
    call(arms_of_three(write, '0-1-1'), '--seeds=2')
    assert call.runs == ['core-0', 'plain-1', 'core-1', 'on-1']
    layers = {row['seed']: row['layers'] for row in where(call.rows, run='core')}
    assert layers == {0: 2, 1: 2}
    call(arms_of_three(write, lr='1e-3'), '--seeds=1')
    assert call.runs == ['plain-0', 'core-0', 'on-0'] and len([*tmp_path.glob('c/cut-*-0')]) == 3


def test_the_data_and_a_fixed_parent_are_known_again(call, data, tmp_path):
    parent = tmp_path / 'parent'
    words = [*SMALL.split(), f'--data={data}', '--device=cpu', '--n_layer=2']
    nanodepth('train', ['config/baseline.py', *words, f'--out_dir={parent}'])
    lines = [f'{BASE} --init_from={parent}', f'{BASE} --init_from={parent} --lr=1e-3']
    call(*lines, '--seeds=1', '--partners=false')
    call(*lines, '--seeds=1', '--partners=false')
    assert call.runs == []
    nanodepth('train', ['config/baseline.py', *words, f'--out_dir={parent}', '--resume=false',
                        '--lr=1e-3'])
    call(*lines, '--seeds=1', '--partners=false')
    assert len(call.runs) == 2
    about = (data / 'train.json').read_text()
    (data / 'train.json').write_text(about.replace('"origin": {}', '"origin": {"of": "today"}'))
    call(*lines, '--seeds=1', '--partners=false')
    assert len(call.runs) == 2


def test_a_config_that_is_edited_while_it_is_trained_starts_nothing_more(call, write, tmp_path,
                                                                        capsys, monkeypatch):
    mine = write('mine.py', 'n_layer = 4\n')
    train = compare.train

    def edit(words, folder, refuse_edited, clock):
        train(words, folder, refuse_edited, clock)
        write('mine.py', 'n_layer = 4\nlr = 1e-3\n')
    monkeypatch.setattr(compare, 'train', edit)
    with pytest.raises(SystemExit):
        call(BASE, mine, '--seeds=1')
    assert 'was edited after this command had begun' in capsys.readouterr().err
    assert not [*tmp_path.glob('c/mine-*')]


def test_a_run_is_of_the_code_of_training(tmp_path, monkeypatch):
    "Of all files that train.py imports, without their remarks."
    names = {name for name, _ in sources_of([train])}
    assert names == {f'{name}.py' for name in ('train', 'model', 'loop', 'grow', 'retrofit',
                                               'wrapper')}
    assert 'probe.py' in dict(sources_of([depth_score]))        # which has a decorator
    (tmp_path / 'train.py').write_text('import model\ndef train(): pass\n')
    monkeypatch.setattr(arms_file, 'train', runpy.run_path(str(tmp_path / 'train.py'))['train'])
    marks = []
    for text in ('x = 1\n', 'x = 1     # one\n', 'x = 2\n'):
        (tmp_path / 'model.py').write_text(text)
        marks.append(Arms(dict(a='config/baseline.py'), tmp_path).mark('a'))
    assert marks[0] == marks[1] != marks[2]


def test_an_edit_behind_a_config_makes_another_run(tmp_path):
    "A factory's argument, a file of a package, what a class of a Step's has by itself."
    files = {'made.py': 'def make(share):\n    def init(new, old):\n        pass\n'
                        '    return init\n',
             'parts/__init__.py': '', 'parts/helper.py': 'SHARE = 1\n',
             'c.py': 'from made import make\nfrom parts.helper import SHARE as _share\n'
                     'init = make(0.5)\ngrow = "lidas"\nn_layer = 4\n'}
    (tmp_path / 'parts').mkdir()
    marks = []
    for edit in ({}, {'c.py': ('0.5', '0.6')}, {'parts/helper.py': ('1', '2')}):
        for name, text in files.items():
            (tmp_path / name).write_text(text.replace(*edit.get(name, ('', ''))))
        marks.append(Arms(dict(a=str(tmp_path / 'c.py')), tmp_path).mark('a'))
    assert len({*marks}) == 3


def test_a_lines_own_settings_have_the_last_say(tmp_path):
    arms = Arms(dict(a=f'{BASE} --lr=1e-3', b=BASE), tmp_path, ['--lr=4e-3'])
    assert [arms.config(name)[0].lr for name in 'ab'] == [1e-3, 4e-3]
    with pytest.raises(Refused, match='which seeds are trained is --seeds'):
        Arms(dict(a=f'{BASE} --seed=5'), tmp_path)


def test_a_cut_that_was_stopped_is_made_again(call, write, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr(cut, 'save', stop)
    with pytest.raises(SystemExit):
        call(arms_of_three(write), '--seeds=1')
    monkeypatch.undo()
    monkeypatch.setattr(compare, 'subprocess', SimpleNamespace(Popen=InHere))
    call(arms_of_three(write), '--seeds=1')
    assert call.runs == ['core-0', 'on-0']
    [folder] = tmp_path.glob('c/cut-*-0')
    assert (folder / 'line.txt').read_text().startswith('cut ') and checkpoint.exists(folder)


def test_lines_of_any_length_and_names_of_any_kind(call, write):
    "A line of 300 letters, a config called 12.py, an arm that is a number."
    long = f'{BASE} ' + ' '.join(f'--lr={i}e-3' for i in range(1, 40))
    number = write('12.py', 'n_layer = 4\nffn_dim = 64\n')
    said = call(long, number, '--seeds=1', '--partners=false')
    assert [row['model'] for row in table_of(said, 'loss')] == [
        long.replace('config/', '').replace('.py', ''), '12']
    call(long, number, '--seeds=1', '--partners=false')
    assert call.runs == []
    call(write('f.py', f'arms = {{"8": {BASE!r}, "9": "8 --lr=1e-3"}}\npartners = False'),
         '--seeds=1')
    assert call.runs == ['8-0', '9-0'] and [row['run'] for row in call.rows] == [8, 9]


def test_a_line_with_its_own_decay_is_compared_at_equal_flops(call):
    said = call(f'{BASE} --decay_steps=8', GROWN, '--seeds=1', '--batches=1')
    assert any('equal training FLOPs' in row['compared with'] for row in table_of(said, 'loss'))


def test_a_diverged_arm_is_named_and_the_tables_stand(call, write):
    for first in (0, 1):
        lines = [f'{BASE} --lr=1e30 --optimizer=adamw', BASE]
        said = call(*lines[::1 if first else -1], '--seeds=1', '--partners=false')
        name = 'baseline --n_layer=4 --lr=1e30 --optimizer=adamw'
        assert f'{name}, seed 0, is in no mean: it has diverged' in said
        assert [row['model'] for row in table_of(said, 'loss')] == ['baseline --n_layer=4']
    said = call(write('f.py', f'arms = dict(a="{BASE} --lr=1e30 --optimizer=adamw", b={BASE!r}, '
                'on="b --init_from={a}")\npartners = False'), '--seeds=1')
    assert 'on, seed 0, is in no mean: a, from which it begins, is not there' in said


def test_a_way_that_is_asked_no_more_is_in_no_table(call):
    lines = [BASE, f'{BASE} --ffn_dim=64', '--seeds=2', '--partners=false', '--measures=loss']
    assert '--window=1-2' in call(*lines, '--window=1-2')
    assert '--window' not in call(*lines, '--batches=5')


def test_a_metric_has_any_name_and_a_margin_if_it_gives_one(call, write, capsys):
    text = """
arms = dict(plain={!r}, thin='plain --ffn_dim=32')
partners, measures = False, ('loss',)
show = 'loss', 'tokens', 'gate'
def metric(model, loader):
    thin = model.config.ffn_dim == 32
    noise = model.head.weight.sum().item() % 1e-4
    return dict(tokens=(3.5 if thin else 9.0) + noise, {}=0.0014 + noise)
"""
    said = call(write('f.py', text.format(BASE, 'gate')), '--seeds=2')
    [first, thin] = table_of(said, 'tokens')
    assert 'equal tokens' in thin['compared with'] and thin['so many seeds say'] == 'lower'
    assert 'metric tokens' in call.rows[0] and call.rows[0]['tokens'] == 24 * 2 * 96
    small = table_of(said, 'gate')[1]['so many seeds say']
    assert small.startswith('not resolved')
    said = call(write('f.py', text.format(BASE, 'gate') + 'margins = dict(gate=0.1)\n'),
                '--seeds=2')
    assert table_of(said, 'gate')[1]['so many seeds say'] == 'no difference' and call.runs == []
    with pytest.raises(SystemExit):
        call(write('f.py', text.format(BASE, 'loss')), '--seeds=2')
    assert "gives 'loss', which is measured already" in capsys.readouterr().err
    said = call(write('f.py', text.format(BASE, 'text').replace("'gate'", "'text'")), '--seeds=2')
    assert table_of(said, 'text') and call.runs == []       # the text's own loss is not asked here


def test_a_measure_of_ones_own_has_a_table(call, write, monkeypatch):
    monkeypatch.setitem(MEASURES, 'deep', lambda subject: [
        (dict(half=half), dict(deep=len(subject.model.unrolled()) / 2)) for half in (0, 1)])
    said = call(write('f.py', f"arms = dict(a='{BASE}', b='{GROWN}')\nmeasures = 'loss', 'deep'\n"
                      "partners, show = False, ('deep, half 1',)\n"), '--seeds=1', '--loop=1-2x2-1')
    assert [row['deep, half 1'] for row in table_of(said, 'deep, half 1')] == list('2323')
    assert call.rows[1]['deep, half 0'] == 3


def test_a_metric_with_a_slip_is_told_before_a_run(call, write):
    text = """
arms = dict(plain={!r}, core='plain --n_layer=3 --loop=1-1x2-1')
def metric(model, loader): return dict(deep=len(model.unrolled()), rows=loader.batchsize)
"""
    with pytest.raises(AttributeError, match='batchsize'):
        call(write('f.py', text.format(BASE)), '--seeds=1')
    assert InHere.runs == []


def test_the_picture_counts_what_an_arm_began_with(call, write, monkeypatch):
    drawn = []
    monkeypatch.setattr(compare, 'show', lambda path, draw, *what: drawn.extend(what))
    said = call(write('f.py', f'arms = dict(plain={BASE!r}, on="plain --init_from={{plain}}")\n'),
                '--seeds=1')
    groups, costs, _ = drawn
    end = {name: log[-1]['flops'] for name, [log] in groups.items()}
    assert end['on'] == pytest.approx(2 * end['plain'])
    assert end['plain with the FLOPs of on'] == pytest.approx(end['on'], rel=0.05)
    assert [row['compared with'] for row in table_of(said, 'loss')][1:] == [
        'plain', 'plain with the FLOPs of on, equal training FLOPs', '']
    assert costs == ['flops']           # of what it began from, tokens are not known
    assert {'val_loss' in line for line in groups['plain'][0] if line['step'] < 2} == {False}


def test_files_of_a_users_stay(call, tmp_path):
    (tmp_path / 'c').mkdir()
    theirs = {tmp_path / 'c' / name: name for name in (
        'rows_curves.csv', 'mine.csv', 'baseline-0.txt', 'baseline-0.jsonl')}
    for path, text in theirs.items():
        path.write_text(text)
    call(BASE, f'{BASE} --lr=1e-3', '--seeds=1')
    assert all(path.read_text() == text for path, text in theirs.items())


def test_sigterm_ends_the_run_in_hand_and_another_call_takes_what_is_free(data, tmp_path):
    "With real processes: the second call leaves out what the first one trains, and says so."
    more = SMALL.replace('--steps=24', f'--data={data} --log_every=1')
    words = [sys.executable, '-m', 'nanodepth', 'compare', f'{BASE} --steps=9000',
             f'{BASE} --steps=5', '--seeds=1', f'--out={tmp_path / "c"}', '--batches=2',
             '--device=cpu', '--partners=false', f'--more={more}']
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    log = []
    while not log or log[0].read_bytes().count(b'\n') < 25:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
        log = [*tmp_path.glob('c/*/log.jsonl')]
    second = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 0 and 'another call is training it' in second.stdout, second
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130 and b'may take' in process.stderr.read()
    assert 25 <= state_of(log[0].parent)['step'] < 9000
    assert 'the same command goes on' in (log[0].parent / 'said.txt').read_text()


@pytest.mark.parametrize('text, seeds', [('3', [0, 1, 2]), ('4-6', [4, 5, 6]), ('2-2', [2])])
def test_seeds_in_words(text, seeds):
    assert [*compare.seeds_of(text)] == seeds
    for wrong in ('0', '3-1', 'x', '1,2'):
        with pytest.raises(Refused, match='must be how many'):
            compare.seeds_of(wrong)


def test_the_files_of_the_repo_have_the_arms_that_their_tables_need(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Arms, 'refuse', lambda self, name: None)    # their data may not be here
    options = compare.read_options(['docs/results/compare_toy.py', '--seeds=4'])
    monkeypatch.setattr(Arms, 'mark', lambda self, name, seed: 'x' * 8)
    arms = Arms(options.arms, options.out, (), options.partners)
    equal = ['baseline', 'baseline_isoflops']       # whose cool-down is the baseline's own
    assert len(arms) == 11 and compare.bases(options, arms) == dict(
        midas=equal, lidas=equal, loop_2x4=equal, standard_2=equal, loop_1_2x3_1=equal,
        standard_4=equal, retrofit=['retrofit_dense'], retrofit_dense=equal)
    options = compare.read_options(['docs/results/compare_gpu.py'])
    assert [*compare.seeds_of(options.seeds)][0] == 2
    kinds = ['text', 'copy', *(f'depth {k}' for k in range(6))]
    marks = np.where(np.arange(4000) % 3 == 0, 128, 0) + np.arange(4000) // 3 % 8 + 1
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'gpu', split, 'bytes', np.arange(4000) % 97, marks=marks,
                      kinds=kinds)
    loader = Loader(Config(context=64, batch_size=8), str(tmp_path / 'gpu'), 'val')
    columns = {'text'}
    for n_layer in (4, 8):
        model = tiny(n_layer=n_layer, vocab_size=257, context=64)
        numbers = options.metric(model, loader)
        columns |= numbers.keys()
        assert all(math.isfinite(float(number)) for number in numbers.values())
    claims = tomllib.loads((ROOT / 'docs/results/claims.toml').read_text())['claim']
    claims = [claim for claim in claims if claim['table'] == 'gpu_depth']
    assert len(claims) == 7
    for claim in claims:
        assert claim['measure'] in columns
        assert {claim['a']['run'], claim['b']['run']} <= {*options.arms}
        assert numbers.items() >= {key: 1.0 for key in claim['a'] if key != 'run'}.items()


# ---------------------------------------------------------------------------------- the statistics

def test_students_t_is_scipys():
    for degrees in (1, 2, 7, 30):
        for t in (0.0, 0.5, 2.0, 12.0):
            assert p_beyond(t, degrees) == pytest.approx(2 * stats.t.sf(t, degrees), rel=1e-5)
        assert t_around(0.95, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-5)


def rows(*values, kind='nats', measure='loss', **more):
    return [dict(seed=seed, mean=mean, kind=kind, measure=measure) | more
            for seed, mean in enumerate(values)]


def test_a_difference_by_hand():
    others = rows(1.0, 1.25, 1.5)[::-1] + [rows(9)[0] | dict(seed=5)]
    # 0, 0.05, 0.1: mean 0.05, sd 0.05, t of 2 degrees 4.303
    assert difference(rows(1.0, 1.3, 1.6), others) == [
        '+0.050 ± 0.124', '0.23', 'not resolved (0.15 would have shown)']
    assert spelled([0.5, 0.75, 0.5], 'share') == '58.3 ± 35.9'
    assert difference(rows(1.0), others) == ['+0.000', '', 'not resolved (1 seed)']
    assert difference(rows(1.0), []) == ['', '', '']


def test_equal_differences_have_no_p_and_no_verdict():
    "Two models alike at 98% of 200 questions: two seeds often differ by as many of them."
    found = difference(rows(0.985, 0.975, kind='share'), rows(0.98, 0.97, kind='share'))
    assert found == ['+0.5', '', 'not resolved (the same in all 2 seeds)']
    assert Contrast([1.0, 2.0], [1.0, 2.0]).p == 1 == Contrast([1.0, 2.0], [0.9, 1.9]).p


def test_a_measure_of_no_unit_has_the_margin_that_it_is_given():
    ours, base = ((0.0012, 0.0016, 0.0014), (0.0041, 0.0102, 0.0073))
    for factor in (1, 1000):
        a, b = (rows(*(factor * v for v in each), kind='score', measure='gate')
                for each in (ours, base))
        assert difference(a, b)[2].startswith('not resolved')
        assert difference(a, b, dict(gate=0.02 * factor))[2] == 'no difference'
    assert spelled(ours, 'score') == '0.0014 ± 0.000497'


def test_costs_are_means_over_seeds_and_what_no_seed_shares_is_no_comparison(capsys):
    def group(name, seeds, *costs):
        return [dict(run=name, group=name, way='as it is', seed=seed, measure='loss', kind='nats',
                     mean=1.0, data='', tokens=5.0, training_flops=cost, n=9)
                for seed, cost in zip(seeds, costs)]
    rows = [*group('a', (0, 1), 100.0, 100.0), *group('b', (0, 1), 70.0, 90.0),
            *group('c', (2, 3), 1.0, 1.0), *group('free', (0,), 0.0)]
    evaluate.print_differences(rows, dict(b=['a'], c=['a']))
    said = capsys.readouterr().out
    assert 'Comparisons made here: 1.' in said
    assert [row['FLOPs'] for row in table_of(said, 'loss')] == ['100%', '80%', '1%', '0%']
    evaluate.print_differences(rows, dict(a=['free']))          # new weights cost nothing
    assert {row['FLOPs'] for row in table_of(capsys.readouterr().out, 'loss')} == {''}


def test_equal_flops_are_those_of_training():
    ours = rows(1.0, tokens=100.0, training_flops=80.0)
    first, less = (rows(1.0, tokens=tokens, training_flops=float(tokens)) for tokens in (100, 80))
    assert [words for words, _ in beside(ours, dict(first=first, less=less))] == [
        'first, equal tokens', 'less, equal training FLOPs']
    assert [words for words, _ in beside(first, dict(first=first, less=first))] == [
        'first, equal tokens and equal training FLOPs']


@pytest.mark.parametrize('changes, said', [
    ([1.0, 1.1, 0.9, 1.0], 'higher'), ([-1.0, -1.1, -0.9], 'lower'),
    ([0.001, -0.002, 0.001, 0.0], 'no difference'), ([1.0, -1.0, 2.0, 0.0], 'not resolved')])
def test_what_the_seeds_say(changes, said):
    assert in_words(Contrast(changes, [0.0] * len(changes)), 0.02).startswith(said)
