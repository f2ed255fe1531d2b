"""What is shown of runs: text, pictures, tables over seeds, and the tests of changes.

Promised: sampling is seeded and loops; a run and several have a picture; the table by hand, with
errors over the seeds; paired tests against every sign tried one by one.
"""
import json
import shutil
from collections import Counter

import pytest
import torch
from conftest import refused, save_run
from matplotlib.figure import Figure

from nanodepth.__main__ import main as nanodepth
from nanodepth.models.checkpoint import load_model
from nanodepth.report import logs as report_runs, plot, tables
from nanodepth.report.logs import log_of
from nanodepth.report.tables import change_in_words, of_one_kind, p_value
from nanodepth.train import train
from nanodepth.training.picture import draw


def test_sample_goes_on_is_seeded_and_loops(tmp_path, tiny, capsys):
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, n_layer=1))

    def sample(*words):
        nanodepth('sample', [run, *words, '--device=cpu'])
        return capsys.readouterr().out
    said = [sample('--prompt=a,\\nb', '--tokens=20', more)
            for more in ('--seed=0', '--seed=0', '--seed=1', '--loop=1x3')]
    assert said[0] == said[1] != said[2] and '3 layers deep' in said[3]
    assert "--- 'a,\\nb' goes on:\na,\nb|" in said[0]
    assert '(the prompt' not in sample(f'--prompt={"a" * 31}', '--tokens=1')
    # a text begins with a token of its own
    assert 'has 33 tokens: the model sees the last 32 of them' in sample(
        f'--prompt={"a" * 32}', '--tokens=1')


def test_one_picture_of_one_run_and_one_of_two(config, tmp_path, capsys, pictures):
    train(config(steps=3, warmup_steps=0, decay_steps=1))
    run, other = tmp_path / 'run', tmp_path / 'other'
    assert (run / 'loss.png').read_bytes()[:4] == b'\x89PNG'
    other.mkdir()
    lines = (run / 'log.jsonl').read_text()
    (other / 'log.jsonl').write_text(lines + '{"step": 4, "lo')  # cut off while it is being written
    nanodepth('plot', [str(run), str(other)])
    assert (run / 'curves.png').stat().st_size > 10_000
    assert f'there is no {tmp_path}/log.jsonl' in refused(capsys, 'plot', tmp_path)
    own = log_of(run)[-1]['flops']              # what a run began with counts, too
    save_run(run, load_model(run), inherited_flops=7)
    assert log_of(run)[-1]['flops'] == own + 7


def test_a_picture_has_a_row_for_each_run_and_a_curve_for_each_kind_where_it_was_measured(
        tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, 'savefig',
                        lambda self, path, **_: drawn.append(self) or path.write_bytes(b'PNG'))
    log = [dict(step=step, loss=2.0, val_loss=3.0, depth=4,
                kinds={kind: dict(accuracy=share, loss=1.0) for kind, share in kinds.items()})
           for step, kinds in ((0, dict(gone=0.1)), (10, dict(gone=0.2, late=0.5, text=0.0)),
                               (20, dict(late=1.0, text=0.0)))]
    other = [dict(step=0, val_loss=3.0, kinds={}, depth=2),
             dict(step=8, loss=2.5, grown={}, depth=4)]
    draw(dict(one=log, two=other), tmp_path / 'loss.png')
    left, right, other_left, other_right = drawn[0].axes
    curves = [[list(curve.get_xdata()) for curve in axes.get_lines()] for axes in drawn[0].axes]
    assert curves == [[[0, 10, 20], [0, 10, 20], [10, 20], [0, 0]], [[0, 10], [10, 20], [0, 0]],
                      [[8], [0], [0, 0], [8, 8]], [[0, 0], [8, 8]]]     # a place has two ends
    assert [axes.get_title() for axes in drawn[0].axes] == ['one', '', 'two', '']
    assert not left.title.get_parse_math()          # a run may be called $x$
    assert [text.get_text() for text in right.texts] == ['gone ', 'late ', ' 4 layers']


def line(step, layers, accuracy, loss=1.0):
    return dict(step=step, flops=10 * step, seconds=60 * step, n_layer=layers, val_loss=loss,
                kinds=dict(text=dict(loss=2.0), look=dict(accuracy=accuracy)))


def seeded(folder, seed, order=(0, 1), **config):
    folder.mkdir(parents=True)
    torch.save(dict(config=dict(seed=seed, **config), order=list(order)), folder / 'ckpt.pt')
    return folder


def test_a_suffix_is_a_seed_only_where_the_run_says_so(tmp_path):
    "Two cuts of one run, base_1-2-1 and base_1-2-2, are two models."
    seeds = {'a-0': 0, 'a-1': 1, 'b': 0, 'c-4': 4, 'lr1e-3': 0, 'lr1e-4': 0, 'd': 0, 'd-0': 0,
             'd-1': 1, 'base_1-2-1': 1, 'base_1-2-2': 1, 'e-1': 1, 'e-01': 1}
    runs = {name: seeded(tmp_path / name, seed) for name, seed in seeds.items()}
    for seed in (0, 1):                     # of other data
        runs[f'f-{seed}'] = seeded(tmp_path / f'f-{seed}', seed, data=f'data/{seed}')
    for seed in (0, 1):                     # of other cores, as two cuts have them
        runs[f'g-{seed}'] = seeded(tmp_path / f'g-{seed}', seed, order=[0, seed])
    for seed in (0, 1, 2):                  # of one of them the settings are others
        runs[f'h-{seed}'] = seeded(tmp_path / f'h-{seed}', seed, lr=1 + (seed > 0))
    for seed in (0, 1):
        runs[f'j-{seed}'] = seeded(tmp_path / f'j-{seed}', seed, init_from=f'out/p-{seed}')
    for name in ('hf-1', 'hf-2'):           # others' checkpoints say nothing
        runs[name] = tmp_path / name
    assert tables.groups_of(runs)['g-0'] == 'g'         # a picture of training needs no more
    assert Counter(tables.groups_of(runs, tables.MADE).values()) == {
        'a': 2, 'b': 1, 'c-4': 1, 'lr1e-3': 1, 'lr1e-4': 1, 'd': 1, 'd-*': 2, 'base_1-2-1': 1,
        'base_1-2-2': 1, 'e-1': 1, 'e-01': 1, 'f-0': 1, 'f-1': 1, 'g-0': 1,
        'g-1': 1, 'h-0': 1, 'h-1': 1, 'h-2': 1, 'j': 2, 'hf-1': 1, 'hf-2': 1}
    there = [seeded(tmp_path / place / f'i-{seed}', seed) for place in 'xy' for seed in (0, 1)]
    assert [*Counter(tables.groups_of(tables.run_names(there)).values()).values()] == [2, 2]
    kept = tables.run_names([runs[name] / 'ckpt-9.pt' for name in ('a-0', 'a-1', 'b')])
    for path in kept.values():
        shutil.copy(path.with_name('ckpt.pt'), path)
    assert [*tables.groups_of(kept).values()] == ['a ckpt-9.pt'] * 2 + [
        str(runs['b'] / 'ckpt-9.pt')]
    of_a = [*kept.values()][:2]
    for path in of_a:                   # each step of one run has its name
        torch.save(torch.load(path) | dict(step=9), path)
    both = tables.run_names([*of_a, runs['a-0'], runs['a-1']])
    assert [*tables.groups_of(both, tables.MADE).values()] == ['a ckpt-9.pt'] * 2 + ['a'] * 2


def test_runs_side_by_side_by_hand(tmp_path, capsys):
    groups = dict(base=[[line(0, 2, 0.1), line(5, 2, 0.5), line(9, 2, 0.6, loss)]
                        for loss in (1.0, 3.0)],
                grown=[[line(0, 1, 0), line(4, 2, 0.8), line(9, 2, 1.0, 6.0)],
                       [line(0, 1, 0), line(4, 2, 0.7), line(9, 2, 0.7, 8.0)]])
    assert [entry['step'] for entry in report_runs.growths(groups['grown'][0])] == [4]
    assert not report_runs.growths(groups['base'][0])
    assert [(row['flops'], row['loss']) for row in report_runs.measured(
        [groups['base'][0], groups['grown'][0]])] == [(0, 1), (0, 1), (90, 1), (90, 6)]
    for name, group in groups.items():
        for seed, log in enumerate(group):
            (seeded(tmp_path / f'{name}-{seed + 3}', seed + 3) / 'log.jsonl').write_text(
                '\n'.join(map(json.dumps, log)))
    runs, csv = sorted(tmp_path.iterdir()), tmp_path / 'toys.csv'
    nanodepth('plot', [*map(str, runs), f'--out={tmp_path / "toys.png"}'])
    rows = csv.read_text()
    for run in runs:                    # logs that were copied without their checkpoints
        config = torch.load(run / 'ckpt.pt')['config'] | dict(init_from='parent')
        (run / 'run.json').write_text(json.dumps(dict(config=config)))
        (run / 'ckpt.pt').unlink()
    nanodepth('plot', [*map(str, runs), f'--out={tmp_path / "toys.png"}'])
    assert csv.read_text() == rows and 'what its parent cost' in capsys.readouterr().err
    both, one = (plot.draw_runs(groups, kinds) for kinds in (['loss', 'look'], ['look']))
    assert one.axes[0].get_ylabel() == both.axes[2].get_ylabel() == 'look: % right'
    last = [row.split(',') for row in rows.splitlines()[-2:]]
    assert [(row[0], row[1], row[-1]) for row in last] == [('grown', '3', '1.0'),
                                                           ('grown', '4', '0.7')]


def test_what_training_costs_is_a_mean_over_seeds_and_a_partner_is_dashed():
    groups = {run: [[dict(step=step, flops=10 * step + seed, depth=1, val_loss=5.0 - step,
                          kinds=dict(x=dict(accuracy=0.5))) for step in range(1, 6 - seed)]
                    for seed in range(seeds)] for run, seeds in (('a', 2), ('less', 1))}
    fig = plot.draw_runs(groups, ['loss', 'x'], ['flops'], dict(a='a', less='a'))
    mean, partner = fig.axes[0].lines           # step 5 is not of both seeds
    assert mean.get_xdata().tolist() == [10.5, 20.5, 30.5, 40.5] and mean.get_linestyle() == '-'
    assert partner.get_linestyle() == '--' and partner.get_color() == mean.get_color()
    assert fig.axes[1].lines[0].get_ydata().tolist() == [50.0] * 4
    groups['a'][0][2]['val_loss'] = float('nan')        # of a run that was stopped there
    assert plot.draw_runs(groups, ['loss']).axes[0].get_ylim()[1] < 5


def test_a_panel_has_the_curve_of_its_size_and_the_level_of_the_model_as_it_is():
    rows = [dict(run='a', x=x, size=size, loss=x + size) for size in (1, 2) for x in (0, 1)]
    rows.append(dict(run='a', x=None, size=0, loss=7))
    fig = plot.draw_curves(rows, 'x', 'size', ['loss'], {}, '', 'depth')
    drawn = [[line.get_ydata() for line in ax.lines] for ax in fig.axes]
    assert [[*map(list, lines)] for lines in drawn] == [[[1, 2], [7, 7]], [[2, 3], [7, 7]]]


def test_a_metric_has_one_kind_in_all_rows():
    "A count of a weak model lies from 0 to 1, as a share would."
    of = lambda *kinds: [dict(measure='count', kind=kind) for kind in kinds]
    kinds = [row['kind'] for row in of_one_kind(of('share', 'score') + [dict(measure='acc',
                                                                            kind='share')])]
    assert kinds == ['score', 'score', 'share']


def test_a_number_that_a_seed_lacks_has_no_mean():
    "One seed's answers were no numbers: it has no error, and no interval."
    rows = [dict(run=f'a-{seed}', group='a', mean=1.0 + seed) for seed in (0, 1)]
    rows[0] |= dict(error=0.5, low=0.25)
    rows[1] |= dict(error=None)
    for its in (rows, rows[::-1]):
        [row] = tables.over_seeds(its, [], ['mean'])
        assert (row['mean'], row['error'], row['low'], row['seeds']) == (1.5, None, None, 2)


def test_the_paired_tests_by_hand():
    "Of right and wrong, every way to set the signs; of scores with grades, their ranks."
    assert p_value([1, 1, 1, 1, 1, 0, 0]) == pytest.approx(2 / 32) and p_value([0, 0]) == 1.0
    assert p_value([1, -1, 1, -1]) == 1.0 and p_value([]) is None
    assert p_value([1] * 9 + [-1]) == pytest.approx(2 * 11 / 1024)
    assert p_value([0.1, 0.2, 0.3, 0.4, 0.0]) == pytest.approx(2 / 16)
    assert p_value([0.5, -0.1, 0.4, 0.3]) == pytest.approx(4 / 16)      # by signs 10 / 16
    assert p_value([2, -1, 2, 1]) == p_value([4, -2, 4, 2]) != p_value([1, -1, 1, 1])
    assert change_in_words(0.0171, 0.0171, 0.25, 'share') == '+1.7 (1.7), p 0.250'
    assert change_in_words(-0.5, None, None, 'nats') == '-0.500'
