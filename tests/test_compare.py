"""A comparison: what its lines mean, what partners cost, and that a row is of what stands in it.

Promised: the partner at equal FLOPs has the steps that they pay for; whatever is edited is another
run in another folder; what is whole is not trained again; a row says what evaluate says; a diverged
run is named and in no mean; intervals and words by hand; a mistake is a line before all.
"""
import contextlib
import importlib
import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import ROOT, asked_of, refused, save_run, state_of, stop_at
from scipy import stats

from docs.results.check import read_rows
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import compare, cut
from nanodepth.commands.compare import Arms, planned
from nanodepth.common.errors import Refused
from nanodepth.model import unrolled
from nanodepth.models import checkpoint
from nanodepth.report.contrasts import Contrast, difference, p_beyond, spelled, t_around
from nanodepth.report.printed import print_differences
from nanodepth.models.hf import save_hf
from nanodepth.report.tables import where
from nanodepth.scoring.rows import MEASURES, Asked, Subject, measures_of
from nanodepth.scoring.way import Way
from nanodepth.training.plan import Config


SMALL = ('--n_embd=16 --n_head=2 --head_dim=8 --context=96 --batch_size=2 --steps=24 '
         '--eval_every=12 --eval_batches=1')
BASE, GROWN = 'config/baseline.py --n_layer=4', 'config/lidas.py --n_layer=4'


@pytest.fixture
def call(data, tmp_path, monkeypatch, capsys):
    """call(*words) is a small comparison in tmp_path/c: what it printed. Its runs are trained in
    this process, and those that the call has trained stand in call.runs, without the letters."""
    def ended(argv, stdout, **_):
        "A process that has ended before it returns: a command of ours, in this one."
        call.runs.append(re.sub('-[0-9a-f]{8}-', '-', argv[-1].rpartition('/')[2]))
        said, code = io.StringIO(), 0
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                nanodepth(argv[3], argv[4:])
            except SystemExit as end:
                code = end.code
        stdout.write(said.getvalue().encode())
        return SimpleNamespace(returncode=code, wait=lambda: code)
    monkeypatch.setattr(compare, 'subprocess', SimpleNamespace(Popen=ended))

    def call(*words, more=SMALL):
        call.runs = []
        capsys.readouterr()
        nanodepth('compare', [*map(str, words), f'--out={tmp_path / "c"}', '--batches=2', '--n=4',
                              '--device=cpu', f'--more={more} --data={data}'])
        call.rows = read_rows(tmp_path / 'c/rows.csv')
        return capsys.readouterr().out
    return call


def write(path, text):
    path.write_text(text)
    return path


def table_of(said, measure):
    "The cells of a table's lines, by its heads."
    table = next(table for table in re.findall(r'(?:^\|.*\n)+', said, flags=re.M)
                 if f' {measure} ' in table.partition('\n')[0])
    heads, _, *lines = [[cell.strip() for cell in line.strip('|').split('|')]
                        for line in table.splitlines()]
    return [dict(zip(heads, line)) for line in lines]


def test_a_line_is_a_config_a_variant_or_a_cut(data, tmp_path):
    arms = Arms({'twice': 'plain --lr=2e-3', 'plain': f'config/baseline.py --data={data}',
                 'late': 'config/retrofit.py --cut=none --init_from={cut}',
                 'cut': 'cut {plain} 2-2-2',
                 'long' * 99: 'twice'}, tmp_path, [f'--data={data}', '--lr=4e-3'])
    order = [*arms]                     # what is needed comes first
    assert order.index('plain') < order.index('cut') < order.index('late')
    assert {*arms.trained()} == {'plain', 'twice', 'late', 'long' * 99}
    assert arms.config('cut', 3)[1] == [str(arms.folder('plain', 3)), '2-2-2']
    assert re.fullmatch(f'{tmp_path}/plain-[0-9a-f]{{8}}-3', str(arms.folder('plain', 3)))
    assert len(arms.folder('long' * 99, 3).name) < 50
    config, words = arms.argv('twice', 1)
    assert (config.lr, config.seed) == (2e-3, 1) and words[-1] == '--seed=1'    # its own last
    assert arms.config('plain')[0].lr == 4e-3


AGAIN = '''from model import Span
class Again(Span):
    def flops(self, model, context):
        return {} * super().flops(model, context)
n_layer, order = 4, [0, Again([1, 2]), 3]
'''


def total(arms, name):
    "The FLOPs of an arm, with those of what it begins from."
    config, _ = arms.argv(name, 0)
    return planned(config) + compare.inherited(config)


def schedule(arms, name):
    config, _ = arms.argv(name, 0)
    return config.steps, config.warmup_steps, config.decay_steps


def test_a_partner_has_the_flops_and_a_cool_down_in_proportion(tmp_path):
    arms = Arms(dict(plain='config/baseline.py', grown='config/lidas.py',
                     less='grown --flops=half',
                     half='config/baseline.py --n_layer=4'), tmp_path, partners=True)
    partner = 'plain with the FLOPs of grown'
    assert partner in arms.added and 'less' not in arms.added       # which fails if it must
    assert schedule(arms, partner) == (482, 50, 96)
    for name, other in ((partner, 'grown'), ('less', 'half')):      # less grows
        assert total(arms, name) == pytest.approx(total(arms, other), rel=0.003)
    assert arms.family('plain')[1:3] == [partner, 'plain with the FLOPs of half']
    kept = Arms(dict(plain='config/baseline.py', grown='config/lidas.py',
                     kept='plain --flops grown --decay_steps 120'), tmp_path, partners=True)
    assert schedule(kept, 'kept') == (482, 50, 120) and kept.family('plain')[1] == 'kept'
    short = Arms(dict(a='config/baseline.py', b='a --n_layer=1 --loop=1 --steps=70'), tmp_path,
                 partners=True)         # its warm-up of 50 would not fit into so few steps
    assert schedule(short, 'a with the FLOPs of b') == (10, 0, 2)
    both = Arms(dict(a='config/baseline.py --steps=150', b='a --grow=lidas',
                     more='a --n_layer=16 --decay_steps=0.4',       # a share stays one
                     less='more --flops=a'), tmp_path, partners=True)
    assert schedule(both, 'a with the FLOPs of b') == (120, 12, 24)
    late = Arms(dict(a='config/baseline.py --decay_steps=90', b='a --n_layer=16',
                     less='b --decay_steps=0.4 --flops=a'), tmp_path)     # the last word counts
    for arms in (both, late):
        steps, _, decay = schedule(arms, 'less')
        assert steps < 350 and decay == round(0.4 * steps)
    aside = Arms(dict(a='config/baseline.py', b='a --grow=lidas', c='a --steps=300'), tmp_path,
                 partners=True, against=dict(c='b'))
    assert aside.family('a')[1:] == ['a with the FLOPs of b']


def test_an_arms_steps_are_the_nearest_and_its_own(tmp_path):
    "Where a part of the cost is fixed, and where two classes have one name."
    loop = 'config/baseline.py --n_layer=4 --cooldown_loop=4x4'
    arms = Arms(dict(a=f'{loop} --steps=40', b='config/baseline.py --n_layer=4 --steps=30',
                     less='a --flops=b'), tmp_path)
    wanted, (own, _) = total(arms, 'b'), arms.config('a')
    steps, _, _ = schedule(arms, 'less')
    missed = {n: abs(planned(replace(own, steps=n, decay_steps=round(own.decay_steps * n / 40),
                                     warmup_steps=0)) - wanted) for n in range(10, 30)}
    assert steps == min(missed, key=missed.get) == 18
    for n in (2, 4):
        write(tmp_path / f's{n}.py', AGAIN.format(n))
    spans = Arms(dict(a='config/baseline.py --n_layer=4', x=f'{tmp_path}/s2.py --flops=a',
                      y=f'{tmp_path}/s4.py --flops=a'), tmp_path)
    assert schedule(spans, 'x')[0] > 1.4 * schedule(spans, 'y')[0]


def test_which_arms_have_a_partner(tmp_path):
    arms = Arms({'a': 'config/baseline.py --n_layer=4 --steps=400', 'b': 'a --n_layer=2',
                 'c': 'b --steps=800', 'd': 'a --flops=c --lr=1', 'e': 'b --steps=990',
                 'a with the FLOPs of e': 'a --flops=e --lr=2'}, tmp_path, partners=True,
                against=dict(b='a', c='b'))
    # d has c's, for which no partner was added; what was written stays
    assert arms.family('a')[1:][:2] == ['a with the FLOPs of b', 'a with the FLOPs of d']
    assert '--lr=2' in arms.argv('a with the FLOPs of e', 0)[1]
    of_another = Arms(dict(a='config/baseline.py', b='a --n_layer=6', c='a --n_layer=12',
                           more='b --flops=c'), tmp_path, partners=True, against=dict(c='more'))
    partner = 'a with the FLOPs of more'
    assert partner in of_another and of_another.paid_for(partner) == 'c'
    variant = Arms(dict(a='config/baseline.py', b='a --n_layer=6', c='a --n_layer=12',
                        less='a --flops=b', least='less --flops=c'), tmp_path, partners=True)
    mine = write(tmp_path / 'mine.py', 'n_layer = 4\n')
    assert not Arms({'a': BASE, f'{mine}': f'{mine} --flops=a'}, tmp_path)[f'{mine}'].partner_of
    assert variant.family('a')[1:3] == ['less', 'least']


def test_a_partner_that_whole_steps_miss_is_none(data, tmp_path):
    arms = Arms(dict(a=f'{BASE} --steps=2', b='a --n_layer=3 --loop=3', less='a --flops=b'),
                tmp_path, [f'--data={data}'], partners=True)        # and so does less
    assert 1.5 < total(arms, 'b') / (total(arms, 'a') / 2) < 1.9
    with pytest.raises(compare.NoPartner, match='whole steps miss these FLOPs by more than 2%'):
        arms.judge('a with the FLOPs of b', 0)


def test_a_partner_is_trained_if_no_other_run_has_the_arms_flops(data, tmp_path):
    "By the costs that a table's words go by, and for all seeds or none."
    arms = Arms(dict(a=f'{BASE} --steps=60', near='a --ffn_dim=334', same='a --ffn_dim=337',
                     less='a --lr=1e-3 --steps=30', twin='less --lr=2e-3', long='a --steps=90',
                     **{'a b': "'a' --decay_steps 6", 'c': "'a b' --flops same"}),
                tmp_path, [f'--data={data}', '--warmup_steps=3', '--decay_steps=6'], partners=True)
    whole = total(arms, 'a')
    assert 0.97 < total(arms, 'near') / whole < 0.98 < total(arms, 'same') / whole < 0.99
    assert total(arms, 'a with the FLOPs of near') > 0.98 * whole       # in whole steps
    for name, is_trained in dict(near=True, same=False, less=True, twin=False, long=True).items():
        partner = f'a with the FLOPs of {name}'
        with contextlib.nullcontext() if is_trained else pytest.raises(compare.NoPartner):
            arms.judge(partner, 0)
        assert arms.verdicts[partner] == (None if is_trained else '')
    assert compare.bases(SimpleNamespace(against=dict(near='less')), arms)['near'] == ['less']


def test_what_a_model_begins_from_counts(data, tmp_path):
    lines = dict(plain=BASE, cut='cut {plain} 1-2-1',
                 core='config/retrofit.py --cut=none --init_from={cut} --recurrence=2',
                 same='plain --init_from={plain} --flops=core')
    arms = Arms(lines, tmp_path, [*SMALL.split(), f'--data={data}', '--device=cpu'], partners=True)
    for name, command, out in (('plain', 'train', 'out_dir'), ('cut', 'cut', 'out')):
        nanodepth(command, [*arms.argv(name, 0)[1], f'--{out}={arms.folder(name, 0)}'])
    own = planned(arms.argv('core', 0)[0])
    before = checkpoint.cost_of(state_of(arms.folder('plain', 0)))
    assert total(arms, 'core') == own + before
    assert total(arms, 'plain with the FLOPs of core') == pytest.approx(own + before, rel=0.03)
    assert planned(arms.argv('same', 0)[0]) == pytest.approx(own, rel=0.05)
    assert 'add an arm "plain --flops=core"' in arms.verdict('plain with the FLOPs of core', 0)
    assert [arms.is_drawn(name, 0) for name in lines] == [False, False, True, True]
    cores = Arms({'core': lines['core'].replace('{cut}', str(arms.folder('cut', 0))),
                  'again': 'core --lr=1e-3'}, tmp_path, arms.more, partners=True)
    assert cores.verdict('core with the FLOPs of again', 0) == ''       # in any seed
    lines['less'] = 'plain --flops=core'        # which is that partner
    assert Arms(lines, tmp_path, [f'--data={data}'], True).family('plain')[1] == 'less'
    steps = schedule(Arms(lines, tmp_path, arms.more), 'less')[0]
    lines['big'] = f'plain --lr=1e-3 --steps={steps}'       # as dear as less, but in one seed
    assert Arms(lines, tmp_path, arms.more, True).verdict('plain with the FLOPs of big', 0) is None
    dear = dict(a=f'plain --init_from={arms.folder("plain", 0)}', plain=f'{BASE} --steps=5')
    more = [*SMALL.split(), f'--data={data}', '--decay_steps=1', '--warmup_steps=1']
    assert [*Arms(dear, tmp_path, more, True)] == ['a', 'plain']    # what a begins from cost more


def test_what_begins_from_a_published_model_is_compared_by_its_own_flops(call, tiny, tmp_path):
    save_hf(tiny(vocab_size=257, context=96), tmp_path / 'published', tokenizer='bytes')
    line = f'config/baseline.py --init_from={tmp_path}/published'
    said = call(line, f'{line} --lr=1e-3 --steps=30', '--measures=loss', '--seeds=1')
    assert 'with the FLOPs of' in said and 'equal training FLOPs' in said
    nanodepth('cut', [f'{tmp_path}/published', '1-2-1', '--scratch', f'--out={tmp_path}/new'])
    for path, is_published in ('published', True), ('new', False):      # of which no weight is left
        config = SimpleNamespace(init_from=str(tmp_path / path))
        assert compare.is_published(config) == is_published
    arms = dict(first=line, longer=f'{line} --lr=1e-3 --steps=30', new=BASE)
    said = call(write(tmp_path / 'three.py', f'arms, measures = {arms}, ("loss",)'), '--seeds=1')
    assert [row['compared with'] for row in table_of(said, 'loss')] == [
        '', 'first', 'first with the FLOPs of longer, equal training FLOPs', 'first', '']
    assert len(call.runs) == 4          # and no partner, as what that has cost is unknown


@pytest.mark.parametrize('lines, said', [
    (dict(a=BASE, b='aa --lr=1'), "b: 'aa' is no config, no other arm and not `cut`; did you mean"),
    (dict(a=BASE, b='cut {plain} 1-1-1'), "b: the arm='plain' is not one of a, b"),
    (dict(a=BASE, b='c --lr=1', c='b --lr=2'), "'b' is no config, no other arm"),
    (dict(a=BASE, b='a --flops=c', c='a --flops=b'), 'each needs another one first'),
    (dict(a=BASE, b='a --data=nowhere'), 'there is no data in nowhere'),
    (dict(a=BASE, b='a --n_layer=8 --n_embd=2048 --head_dim=128 --flops=c',
          c='a --n_embd=16 --head_dim=4 --steps=1'), 'b: the FLOPs of c pay for less than a step'),
    (dict(a=f'{BASE} --seed 5'), 'which seeds are trained is --seeds')])
def test_what_cannot_be_compared_is_refused_before_a_run(lines, said, tmp_path):
    with pytest.raises(Refused, match=re.escape(said)):
        Arms(lines, tmp_path, partners=True)
    with pytest.raises(Refused, match='and not `cut`$'):        # it is not near itself
        Arms(dict(base='base'), tmp_path)


def test_two_arms_and_a_partner_and_what_evaluate_says_of_them(call, tmp_path, capsys):
    words = [write(tmp_path / 'two.py', f'arms = dict(plain={BASE!r}, grown={GROWN!r})\n'
                   'ways = dict(grown=["--loop=1-2x2-1", "--window=1-2 --solver=rk --K=2,3"])\n'
                   'def metric(model, loader): return dict(deep=len(model.order))\n'),
             '--seeds=2', '--tasks=toy_copy', '--dtype=float32']
    said = call(*words)
    partner = 'plain_with_the_FLOPs_of_grown'
    assert call.runs == [f'{name}-{seed}' for seed in (0, 1)
                         for name in ('plain', 'grown', partner)]
    rows = call.rows
    assert len(where(rows, measure='loss')) == 2 * (1 + 4 + 1)
    assert [row['mean'] for row in where(rows, measure='deep')] == [4] * 6
    assert [row['compared with'] for row in table_of(said, 'loss')] == [
        '', 'plain, equal tokens', 'plain with the FLOPs of grown, equal training FLOPs',
        *['as it is'] * 3, '']
    assert 'Comparisons made here: 10.' in said
    [folder] = tmp_path.glob('c/grown-*-1')
    config, *own = GROWN.split()
    line = (folder / 'train.txt').read_text().splitlines()[0]
    assert line.startswith(f'train {config} ') and '--dtype=float32' in line
    assert f' {" ".join(own)} --seed=1' in line
    way = Way(window='1-2', solver='rk', K=3)
    asked = Asked(tasks='toy_copy', n=4, batches=2, device='cpu', measures=('loss', 'log_prob'))
    scores = asked_of(Subject(folder, asked), way)
    for name in ('loss', 'fifth', 'toy_copy', 'toy_copy log_prob'):
        [row] = where(rows, run='grown-1', way=str(way), measure=name)
        assert row['mean'] == pytest.approx(scores[name].mean, rel=1e-12)

    # again: nothing is trained; another seed is; asked something else, all are asked again
    assert call(*words) == said and call.runs == [] and call.rows == rows
    said = call(*words, '--seeds=3-3')
    assert [run[-2:] for run in call.runs] == ['-3'] * 3
    assert len(where(call.rows, measure='loss')) == 6
    assert 'One seed decides nothing' in said and '4 answers or rows decide nothing' in said
    call(*words, '--tasks=toy_copy,toy_assign/0')
    assert call.runs == [] and where(call.rows, measure='toy_assign/0')

    # the same by the other command
    theirs = table_of(call(*words), 'loss')[1]
    folders = [str(each) for each in tmp_path.glob('c/*-*-[01]')]
    grown, base = (next(tmp_path.glob(f'c/{arm}-*-1')).name[:-2] for arm in ('grown', 'plain'))
    nanodepth('evaluate', [*folders, f'--against={base}', '--batches=2', '--device=cpu',
                           f'--out={tmp_path / "e.csv"}'])
    [ours] = where(table_of(capsys.readouterr().out.split('\n\n', 1)[1], 'loss'), model=grown)
    assert ours['difference'] == theirs['difference'] and ours['p'] == theirs['p']
    assert '--against' in refused(capsys, 'evaluate', *folders, '--against=plain')


MADE = {        # what the arms of the next test are made of
    'c.py': 'from made import make\nfrom parts.helper import SHARE as _share\n'
            'from distant import X as _x\nfrom ops import scale as _scale\n'
            'init = make(0.5)\ngrow = "lidas"\nn_layer = 4\n',
    '../far/distant.py': 'X = 1\n',
    'made.py': 'def make(share):\n    def init(new, old):\n        new.mul_(1.0)\n'
               '    return init\n',
    'parts/__init__.py': '', 'parts/helper.py': 'SHARE = 1\n',
    'ops/scale.py': 'SCALE = 1\n', 'plan.py': 'ALPHA = 1\n'}


def test_a_folder_is_named_by_all_that_decides_what_will_stand_in_it(data, tmp_path,
                                                                     monkeypatch):
    "By settings and texts: the book's, a config's, those of what it brought in, and the data's."
    own = tmp_path / 'own'
    for name, text in MADE.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        write(own / name, text)
    monkeypatch.syspath_prepend(tmp_path / 'far')
    importlib.import_module('distant')          # by a script of yours, before compare reads it
    of_book = compare.nanodepth.file_of
    monkeypatch.setattr(compare.nanodepth, 'file_of', lambda name: (
        own / 'plan.py' if name == 'training.plan' else of_book(name)))

    def folders(line='--lr=1e-3', shape='1-2-1'):
        arms = Arms(dict(own=f'{own}/c.py {line}', cut=f'cut {{own}} {shape}',
                         core='config/retrofit.py --cut=none --init_from={cut}',
                         partner='other --flops=own', other='config/baseline.py --context=32'),
                    tmp_path, [f'--data={data}'])
        return {name: arms.folder(name, 0) for name in arms}

    def changed(before, now):
        return {name for name in before if before[name] != now[name]}
    first, children = folders(), {'own', 'cut', 'core'}
    assert len({*first.values()}) == 5 and first == folders()
    for words, its in ((dict(shape='0-1-1'), {'cut', 'core'}),
                       (dict(shape='1-2-1 --seed=5'), {'cut', 'core'}),
                       (dict(line='--lr=2e-3'), children),      # the partner's FLOPs stay
                       # what another arm may begin from
                       (dict(line='--lr=1e-3 --keep_every=2'), children),
                       (dict(line='--lr=1e-3 --n_embd=64'), children | {'partner'})):
        assert changed(first, folders(**words)) == its, words
    for name, old, new, its in (
            ('c.py', '0.5', '0.6', children), ('made.py', '1.0', '2.0', children),
            ('parts/helper.py', '1', '2', children), ('ops/scale.py', '1', '2', children),
            ('../far/distant.py', '1', '2', children),
            ('plan.py', '1', '2', {*first}), (data / 'val.json', '"bytes"', ' "bytes"', {*first})):
        write(own / name, (own / name).read_text().replace(old, new))
        before, first = first, folders()
        assert changed(before, first) == its, name
    helpers = own / 'ops/scale.py', own / 'parts/helper.py'     # that change places
    for texts in (('SCALE = 1', 'SHARE = 2'), ('SHARE = 2', 'SCALE = 1')):
        for path, text in zip(helpers, texts):
            write(path, f'SCALE = SHARE = 1\n{text}\n')
        before, first = first, folders()
        assert changed(before, first) == children
    del sys.modules['distant']


def test_datasets_that_change_places_are_others(data, tmp_path):
    def folder():
        lines = dict(a=f'config/baseline.py --data={tmp_path}/one --cooldown_data={tmp_path}/two')
        return Arms(lines, tmp_path).folder('a', 0)
    for name in ('one', 'two'):
        shutil.copytree(data, tmp_path / name)
    same = folder()
    write(tmp_path / 'one/val.json', (data / 'val.json').read_text() + ' ')
    before = folder()
    for old, new in (('one', 'was'), ('two', 'one'), ('was', 'two')):
        (tmp_path / old).rename(tmp_path / new)
    assert len({same, before, folder()}) == 3


def test_a_run_that_is_killed_is_no_run_that_failed(tmp_path, monkeypatch):
    killed = lambda *_, **how: SimpleNamespace(returncode=-9, wait=lambda: None)
    monkeypatch.setattr(compare, 'subprocess', SimpleNamespace(Popen=killed))
    with pytest.raises(compare.Left, match='it was killed by SIGKILL'):
        compare.train([], tmp_path / 'run')


def test_of_a_parent_for_each_seed_that_one_counts(tiny, data, tmp_path):
    for seed in (0, 1):
        save_run(tmp_path / f'p-{seed}', tiny(seed, vocab_size=257, context=96), data)
    arms = Arms(dict(first=f'config/baseline.py --init_from={tmp_path}/p-0',
                     on=f'config/baseline.py --init_from={tmp_path}/p-{{seed}}',
                     cut='cut {on} 1-2-1 --seed={seed}', same='cut {new} 1-2-1 --seed={seed}',
                     core='config/retrofit.py --cut=none --init_from={cut}',
                     new='config/baseline.py'),
                tmp_path, [f'--data={data}'], partners=True)

    def folders():
        "Of each arm, as far as they are the same for all seeds: the name without its seed."
        return {(name, seed): arms.folder(name, seed).name[:-2] for seed in (0, 1) for name in arms}
    before, partner = folders(), 'first with the FLOPs of core'
    (tmp_path / 'late').mkdir()             # no call asks for the parent of a seed that it has not
    shutil.copytree(tmp_path / 'p-1', tmp_path / 'late/p-1')
    late = f'config/baseline.py --data={data} --init_from={tmp_path}/late/p-{{seed}}'
    assert [*Arms(dict(late=late), tmp_path, seed=1)] == ['late']
    assert before['same', 0] == before['same', 1]
    for path, changed in (('p-1', {(name, 1) for name in ('on', 'cut', 'core', partner)}),
                          ('p-0', {(name, seed) for seed in (0, 1) for name in (
                              'first', partner)} | {(name, 0) for name in ('on', 'cut', 'core')})):
        save_run(tmp_path / path, tiny(2, vocab_size=257, context=96), data)
        now = folders()
        of_others = [name for name in arms if name.startswith('first with') and name != partner]
        assert {each for each in now if now[each] != before[each]
                and each[0] not in of_others} == changed, path
        before = now


def test_a_way_that_is_named_twice_is_asked_once():
    options = compare.Options(lines=[], window=('1-2',), K=(3,),
                              ways=dict(a=['--window=1-2 --K=3,4', '--window=1-2 --K=4'],
                                        b='--window=1-2 --K=4'))
    for name in 'ab':
        assert [str(way) for way in compare.ways_of(options, name)] == [
            'as it is', '--window=1-2 --K=3', '--window=1-2 --K=4']


def test_what_was_stopped_goes_on(call, tmp_path, monkeypatch):
    "In a run, and then in a cut."
    file = write(tmp_path / 'arms.py', f"partners, measures = False, ('loss',)\n"
                 f"arms = dict(plain='{BASE}', cut='cut {{plain}} 1-2-1 --seed={{seed}}',\n"
                 "core='config/retrofit.py --cut=none --init_from={cut}',\n"
                 "on='plain --init_from={plain}')\n")

    def stop(*_, **how):
        raise KeyboardInterrupt
    stop_at(10)
    with pytest.raises(SystemExit):
        call(file, '--seeds=1')
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(cut, 'save', stop)
        call(file, '--seeds=1')
    assert len(call.runs) == 1
    call(file, '--seeds=1')
    assert call.runs == ['on-0', 'core-0']
    assert {row['steps'] for row in call.rows} == {24}
    assert len([*tmp_path.glob('c/cut-*-0')]) == 1


@pytest.mark.parametrize('read_late', [False, True])
def test_a_config_that_is_edited_while_it_is_trained(read_late, call, tmp_path, capsys,
                                                     monkeypatch):
    "The command ends, and the run stays: it is the old text's, unless it has read the new one."
    mine, train = tmp_path / 'mine.py', compare.train

    def edit(words, folder):
        if read_late:
            write(mine, 'n_layer = 4\nlr = 1e-3\n')
        train(words, folder)
        write(mine, 'n_layer = 4\nlr = 1e-3\n')

    def compared(*lines):
        write(mine, 'n_layer = 4\n')
        call(*lines, '--seeds=1', '--partners=false')
    for lines, left in (([BASE, mine], 0), ([mine, BASE], 1)):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(compare, 'train', edit)
            compared(*lines)
        assert 'was edited after this command had begun' in capsys.readouterr().err
        assert len([*tmp_path.glob('c/mine-*/ckpt.pt')]) == left
    call.runs.clear()
    with pytest.raises(SystemExit) if read_late else contextlib.nullcontext():
        compared(BASE, mine)
    assert call.runs == [] and ('holds a run with lr=0.001' in capsys.readouterr().err) == read_late


def test_a_diverged_arm_is_named_and_the_tables_stand(call, tmp_path, capsys):
    file = write(tmp_path / 'f.py', f'arms = dict(a="{BASE} --lr=1e30 --optimizer=adamw", '
                 f'b={BASE!r}, on="b --init_from={{a}}", short="b --context=64")\n'
                 'partners, ways = False, dict(short="--r=2")')
    with pytest.raises(SystemExit, match='1'):
        call(file, '--seeds=1')
    said = capsys.readouterr().out
    assert re.search('a, seed 0, is in no mean: .*step .* was not taken: loss', said)
    assert 'on, seed 0, is in no mean: a, which it needs, is not there' in said
    assert 'short, seed 0, is in no mean: r=2 is for models with a recurrent core' in said
    assert [(row['model'], row['compared with']) for row in table_of(said, 'loss')] == [('b', '')]
    file.write_text(file.read_text().replace('dict(short', 'dict(b'))
    with pytest.raises(SystemExit, match='2'):          # not even the first can be asked
        call(file, '--seeds=1')
    file.write_text(f'arms = dict(b={BASE!r}, short="b --context=64", wide="b --batch_size=4")\n'
                    'partners = False')
    said = call(file, '--seeds=1')
    assert [row['compared with'] for row in table_of(said, 'loss')] == [
        '', 'no seed in common on equal data', 'b']         # (the rows of one are shorter)
    assert 'a curve in the picture is of the rows that its arm was validated on' in said


def test_what_cannot_be_made_is_left_out_and_two_arms_of_equal_flops_have_one_partner(
        call, tmp_path, capsys):
    base = f'{BASE} --keep_every=12'
    file = write(tmp_path / 'f.py', f'arms = dict(a={base!r}, cut="cut {{a}} 1-1-1",\n'
                 'c1="config/retrofit.py --cut=none --init_from={cut}", c2="c1 --lr=1e-3",\n'
                 'half="a --init_from={a}/ckpt-12.pt --steps=12 --warmup_steps=0",\n'
                 'like_c1="a --flops=c1",\n'
                 'bad="cut {a} 4-4-4", d="config/retrofit.py --cut=none --init_from={bad}")\n')
    with pytest.raises(SystemExit, match='1'):
        call(file, '--seeds=1', '--measures=loss')
    said = capsys.readouterr().out
    assert sorted(call.runs) == ['a-0', 'c1-0', 'c2-0', 'half-0', 'like_c1-0']
    for name, why in (('bad', 'the shape 4-4-4 has more layers than'),
                      ('d', 'bad, which it needs, is not there'),
                      ('a with the FLOPs of d', 'd, which it needs, is not there')):
        assert f'{name}, seed 0, is in no mean: {why}' in said
    assert 'FLOPs of half' not in said          # which a has
    assert [row['compared with'] for row in table_of(said, 'loss') if row['compared with']] == [
        'a, equal training FLOPs', *['a', 'like_c1, equal training FLOPs'] * 2, 'a']
    assert 'the FLOPs of c' not in said         # somebody has written it


def test_a_first_arm_that_is_a_partner_is_not_trained_once_more(call, tmp_path, capsys):
    file = write(tmp_path / 'f.py', f'arms = dict(long="short --flops=big", short={BASE!r},\n'
                 'big="short --n_layer=8")\n')
    call(file, '--seeds=1', '--measures=loss')
    assert sorted(call.runs) == ['big-0', 'long-0', 'short-0']


METRIC = """
arms = dict(plain={!r}, thin='plain --ffn_dim=32')
partners, measures, margins = False, ('loss', 'deep'), dict(gate=0.1)
show = 'loss', 'tokens', 'gate', 'deep, half 1'
def metric(model, loader):
    thin = model.config.ffn_dim == 32
    noise = model.head.weight.sum().item() % 1e-4
    return dict(tokens=(3.5 if thin else 9.0) + noise, gate=0.0014 + noise)
"""


def test_a_metric_and_a_measure_of_ones_own_have_tables(call, tmp_path, monkeypatch, capsys):
    "A metric has any name, and a margin if it is given one; a margin of nothing is a line."
    alone = Asked(measures=(), metric=print, device='cpu')
    assert 'metric' in measures_of(alone)
    monkeypatch.setitem(MEASURES, 'deep', lambda subject: [
        (dict(half=half), dict(deep=len(unrolled(subject.model.order)) / 2)) for half in (0, 1)])
    file = write(tmp_path / 'f.py', METRIC.format(BASE))
    said = call(file, '--seeds=2')
    [first, thin] = table_of(said, 'tokens')
    assert 'equal tokens' in thin['compared with'] and thin['so many seeds say'] == 'lower'
    assert {row['tokens'] for row in call.rows} == {24 * 2 * 96}
    assert Subject(next((tmp_path / 'c').glob('plain-*')), alone).val       # it is given data
    assert table_of(said, 'gate')[1]['so many seeds say'] == 'no difference'
    assert [row['deep, half 1'] for row in table_of(said, 'deep, half 1')] == ['2', '2']
    with pytest.raises(SystemExit):
        call(write(file, file.read_text().replace('(gate=', '(gat=')), '--seeds=2')
    assert "did you mean 'gate'" in capsys.readouterr().err


def test_the_picture_counts_what_an_arm_began_with(call, data, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(compare, 'show', lambda path, draw, *what: drawn.extend(what))
    arms = f'arms = dict(plain={BASE!r}, on="plain --init_from={{plain}}")\n'
    said = call(write(tmp_path / 'f.py', arms), '--seeds=1')
    assert 'a curve in the picture' not in said
    groups, kinds, costs, _ = drawn
    end = {name: log[-1]['flops'] for name, [log] in groups.items()}
    assert end['on'] == pytest.approx(2 * end['plain'])
    assert 'plain with the FLOPs of on, equal training FLOPs' in said
    assert costs == ['flops']           # of what it began from, tokens are not known
    assert kinds == ['loss', 'fifth']
    folder = next((tmp_path / 'c').glob('on-*'))
    config = Config(**state_of(folder)['config'])
    assert compare.is_whole(folder, replace(config, init_from='where/it/was'))      # it is moved
    drawn.clear()
    asked = f'arms = dict(plain={BASE!r}, short="plain --context=64")\npartners = False\n'
    with pytest.raises(SystemExit, match='1'):
        call(write(tmp_path / 'f.py', asked + f'data = {str(data)!r}'), '--seeds=1')
    assert [*drawn[0]] == ['plain']     # the other one reads too little, and is in no table


def test_the_ends_of_whole_runs_are_one_point(monkeypatch, tmp_path, capsys):
    "A core's r is drawn, so its partners have other steps in each seed."
    drawn = []
    monkeypatch.setattr(compare, 'show', lambda path, draw, groups, *_: drawn.append(groups))
    monkeypatch.setattr(compare, 'log_of', lambda seed: [
        dict(step=step, flops=1, val_loss=1.0) for step in (0, 10, 20 + seed)])
    run = dict(context=9, batch_size=2, eval_batches=1)
    data = dict(val=[dict(fingerprint='f')])        # by whichever path
    monkeypatch.setattr(compare, 'read_run', lambda _: dict(config=run, data=data))
    arms = Arms(dict(a=BASE), tmp_path)
    compare.draw(SimpleNamespace(out=tmp_path), arms, {('a', seed): seed for seed in (0, 1)}, [])
    assert [[line['step'] for line in log] for log in drawn[0]['a']] == [[0, 10, 20]] * 2
    assert not capsys.readouterr().out
    runs = iter([run, run | dict(eval_batches=2)])      # the setting was edited meanwhile
    monkeypatch.setattr(compare, 'read_run', lambda _: dict(config=next(runs), data=data))
    compare.draw(SimpleNamespace(out=tmp_path), arms, {('a', seed): seed for seed in (0, 1)}, [])
    assert 'the rows that its arm was validated on' in capsys.readouterr().out


def test_sigterm_ends_the_run_in_hand_and_another_call_takes_what_is_free(call, data, tmp_path,
                                                                          capsys):
    "A process of its own: a call beside it leaves out what it trains, and says so."
    arms, more = [f'{BASE} --steps=9000', f'{BASE} --steps=5'], SMALL.replace('--steps=24', '')
    words = [*arms, '--seeds=1', '--partners=false']
    # somebody else's, in the current folder: it is not what a run imports
    (tmp_path / 'tqdm.py').write_text('raise SystemExit("a stranger\'s code")')
    (tmp_path / 'config').symlink_to(ROOT / 'config')
    (tmp_path / 'bin').mkdir()
    script = tmp_path / 'bin/nanodepth'         # as pip makes one
    script.write_text('from nanodepth.__main__ import main\nmain()\n')
    process = subprocess.Popen([sys.executable, script, 'compare', *words, '--device=cpu',
                                f'--out={tmp_path / "c"}', f'--more={more} --data={data}'],
                               env=os.environ | dict(PYTHONPATH=str(ROOT)), cwd=tmp_path,
                               stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while not (logs := [*tmp_path.glob('c/*/log.jsonl')]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    with pytest.raises(SystemExit, match='1'):
        call(*words, more=more)
    assert 'another run is at work in' in capsys.readouterr().out
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    folder = logs[0].parent
    assert 0 < state_of(folder)['step'] < 9000
    assert 'the same command goes on' in (folder / 'train.txt').read_text()


@pytest.mark.parametrize('text, seeds', [('3', [0, 1, 2]), ('4-6', [4, 5, 6]), ('2-2', [2])])
def test_seeds_in_words(text, seeds):
    assert [*compare.seeds_of(text)] == seeds


def test_the_file_of_the_toys_has_the_arms_that_its_table_needs(monkeypatch):
    monkeypatch.setattr(compare, 'open_data', lambda config: None)      # it may not be here
    options = compare.read_options(['docs/results/compare_toy.py', '--seeds=4'])
    arms = Arms(options.arms, options.out, (), options.partners)
    equal = ['baseline', 'baseline_isoflops']       # whose cool-down is the baseline's own
    assert len(arms) == 11 and compare.bases(options, arms) == dict(
        baseline_isoflops=equal[:1], midas=equal, lidas=equal, loop_2x4=equal, standard_2=equal,
        loop_1_2x3_1=equal, standard_4=equal, retrofit=['retrofit_dense'], retrofit_dense=equal)


def test_students_t_is_scipys():
    for degrees in (1, 2, 7, 30):
        for t in (0.0, 0.5, 2.0, 12.0):
            assert p_beyond(t, degrees) == pytest.approx(2 * stats.t.sf(t, degrees), rel=1e-5)
        assert t_around(0.95, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-5)


GATE = (0.0012, 0.0016, 0.0014), (0.0041, 0.0102, 0.0073)
LARGE = [[1000 * value for value in values] for values in GATE]


@pytest.mark.parametrize('ours, base, kind, margin, found', [
    # 0, 0.05, 0.1: mean 0.05, sd 0.05, t of 2 degrees 4.303
    ((1.0, 1.3, 1.6), (1.0, 1.25, 1.5), 'nats', None,
     ['+0.050 ± 0.124', '0.23', 'not resolved (0.15 would have shown)']),
    ((1.0, 1.3, 1.6), (1.0, 1.25, 1.5), 'nats', 1.0, ['+0.050 ± 0.124', '0.23', 'no difference']),
    ((1.0, 1.1, 0.9), (0, 0, 0), 'nats', None, ['+1.000 ± 0.248', '0.0033', 'higher']),
    ((1.0,), (1.0, 1.25), 'nats', None, ['+0.000', '', 'not resolved (1 seed)']),
    ((1.0,), (), 'nats', None, ['', '', '']),
    # two models alike at 98% of 200 questions: two seeds often differ by as many of them
    ((0.985, 0.975), (0.98, 0.97), 'share', None,
     ['+0.5', '', 'not resolved (the same in all 2 seeds)']),
    # a measure of no unit has the margin that it is given
    (*GATE, 'score', None,
     ['-0.0058 ± 0.00708', '0.072', 'not resolved (0.0088 would have shown)']),
    (*GATE, 'score', 0.02, ['-0.0058 ± 0.00708', '0.072', 'no difference']),
    (*LARGE, 'score', 20, ['-5.8 ± 7.08', '0.072', 'no difference'])])
def test_a_difference_by_hand(ours, base, kind, margin, found):
    rows, others = ([dict(seed=seed, mean=mean, kind=kind, measure='gate')
                     for seed, mean in enumerate(values)] for values in (ours, base))
    others = others[::-1] + [rows[0] | dict(seed=5)]
    assert difference(rows, others, dict(gate=margin)) == found
    rows[0]['mean'] = float('nan')
    assert difference(rows, others) == ['', '', '']


def test_a_mean_of_seeds_by_hand_and_equal_differences_have_no_p():
    assert spelled([0.5, 0.75, 0.5], 'share') == '58.3 ± 35.9'
    assert spelled(GATE[0], 'score') == '0.0014 ± 0.000497'
    assert Contrast([1.0, 2.0], [1.0, 2.0]).p == 1 == Contrast([1.0, 2.0], [0.9, 1.9]).p


def test_costs_are_means_over_seeds_and_what_no_seed_shares_is_no_comparison(capsys):
    def group(name, seeds, *costs):
        return [dict(run=name, group=name, way='as it is', seed=seed, measure='loss', kind='nats',
                     mean=1.0, data='', tokens=5.0, training_flops=cost, n=9)
                for seed, cost in zip(seeds, costs)]
    rows = [*group('a', (0, 1), 100.0, 100.0), *group('b', (0, 1), 70.0, 90.0),
            *group('c', (2, 3), 1.0, 1.0), *group('free', (0,), 0.0)]
    print_differences(rows, dict(b=['a', 'free'], c=['a']))     # free is not as dear as b
    said = capsys.readouterr().out
    assert 'Comparisons made here: 1.' in said
    assert [row['FLOPs'] for row in table_of(said, 'loss')] == ['100%', '80%', '1%', '0%']
    equal = group('e', (0, 1), 81.0, 81.0) + group('f', (0, 1), 79.0, 79.0)
    print_differences(rows + equal, dict(b=['e', 'f', 'a']))     # with each that is as dear
    assert 'Comparisons made here: 2.' in capsys.readouterr().out
    others = [row | dict(data='b' if row['seed'] else 'a') for row in rows]
    at_first = [row | dict(data='a') for row in rows]
    for mixed in (others[:2] + at_first[2:4], others[:4]):
        print_differences(mixed, dict(b=['a']))         # one seed, or both, on equal data
        assert ('seeds in common: 1' in capsys.readouterr().out) == (mixed != others[:4])
    in_a_way = [row | dict(way='--K=2') for row in rows[2:4]]       # (b as it is has no such rows)
    print_differences(rows[:2] + in_a_way, dict(b=['a']))
    assert 'no seed in common' not in capsys.readouterr().out
    # p and q began from published models: what counts between the two is the training since
    unknown = [row | dict(flops=80.0) for row in group('p', (0, 1), *[float('nan')] * 2)
               + group('q', (0, 1), *[float('nan')] * 2)]
    print_differences(rows[:4] + unknown, dict(p=['a', 'q'], b=['a', 'q']))
    said = capsys.readouterr().out
    assert [row['compared with'] for row in table_of(said, 'loss')] == [
        '', 'a, equal tokens', 'a, equal tokens', 'q, equal tokens and equal training FLOPs', '']
    print_differences(rows, dict(a=['free']))          # new weights cost nothing
    said = capsys.readouterr().out
    assert {row['FLOPs'] for row in table_of(said, 'loss')} == {''} and 'seeds in common: 1' in said


