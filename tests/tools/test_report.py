"Test nanodepth/report: the log of a run, tables, tests of differences, and pictures."
import json
import math
import sys

import pytest
from helpers import SMALL, save_run
from tool_helpers import refused, row_of, table_of

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.models.checkpoint import load_model
from nanodepth.report import contrasts, logs, plot, tables
from nanodepth.report.contrasts import interval, p_of, p_value, verdict
from nanodepth.report.logs import log_of
from nanodepth.report.tables import read_rows
from nanodepth.train import train
from nanodepth.training.plan import Config


def test_pictures_of_one_run_and_of_two(data, tmp_path, capsys):
    train(Config(**SMALL | dict(steps=3, warmup_steps=0, decay_steps=1, data=str(data),
                                out_dir=str(tmp_path / 'run'))))
    run, other = tmp_path / 'run', tmp_path / 'other'
    assert (run / 'loss.png').read_bytes()[:4] == b'\x89PNG'
    other.mkdir()
    lines = (run / 'log.jsonl').read_text()
    (other / 'log.jsonl').write_text(lines + '{"step": 4, "lo')  # a line that is half written
    nanodepth('plot', [str(run), str(other)])
    assert (run / 'curves.png').stat().st_size > 10_000
    assert f'there is no {tmp_path}/log.jsonl' in refused(capsys, 'plot', tmp_path)
    own = log_of(run)[-1]['flops']              # FLOPs of the parent count
    save_run(run, load_model(run), inherited_flops=7)
    assert log_of(run)[-1]['flops'] == own + 7


@pytest.mark.parametrize('run, group, seed', [
    ('lidas-1', 'lidas', 1), ('lidas', 'lidas', None), ('lr1e-4', 'lr1e', 4), ('e-01', 'e', 1),
    ('base_10-2-10', 'base_10-2-10', None), ('base_1-2-1-3', 'base_1-2-1', 3),
    ('out/a-0/ckpt-9.pt', 'out/a/ckpt-9.pt', 0)])
def test_the_name_of_a_run_has_its_seed(run, group, seed):
    "base_1-2-1 and base_1-2-2 are two cuts, and not two seeds of one cut."
    wanted = dict(run=run, group=group, seed=seed)
    assert tables.names_of(run) == {
        key: value for key, value in wanted.items() if value is not None}


def line(step, layers, accuracy, loss=1.0):
    return dict(step=step, flops=10 * step, n_layer=layers, val_loss=loss,
                kinds=dict(text=dict(loss=2.0), look=dict(accuracy=accuracy)))


def test_plot_of_runs_by_hand(tmp_path):
    groups = dict(base=[[line(0, 2, 0.1), line(5, 2, 0.5), line(9, 2, 0.6, loss)]
                        for loss in (1.0, 3.0)],
                  grown=[[line(0, 1, 0), line(4, 2, 0.8), line(9, 2, 1.0, 6.0)],
                         [line(0, 1, 0), line(4, 2, 0.7), line(9, 2, 0.7, 8.0)]])
    assert [entry['step'] for entry in logs.growths(groups['grown'][0])] == [4]
    assert not logs.growths(groups['base'][0])
    measured = logs.measured([groups['base'][0], groups['grown'][0]])
    assert [(row['flops'], row['loss']) for row in measured] == [(0, 1), (0, 1), (90, 1), (90, 6)]
    runs = [tmp_path / f'{name}-{seed}' for name in groups for seed in (3, 4)]
    for run, log in zip(runs, sum(groups.values(), [])):    # folders without a checkpoint
        run.mkdir()
        (run / 'log.jsonl').write_text('\n'.join(map(json.dumps, log)))
        config = dict(seed=int(run.name[-1]), init_from='parent')
        (run / 'run.json').write_text(json.dumps(dict(config=config)))
    nanodepth('plot', [*map(str, runs), f'--out={tmp_path / "toys.png"}'])
    rows = read_rows(tmp_path / 'toys.csv')
    assert [(row['run'], row['seed'], row['look']) for row in rows[-2:]] == [
        ('grown', 3, 1.0), ('grown', 4, 0.7)]


def test_curves_are_means_over_seeds():
    "A step that not all seeds have reached is left out."
    groups = {run: [[dict(step=step, flops=10 * step + seed, depth=1, val_loss=5.0 - step,
                          kinds=dict(x=dict(accuracy=0.5))) for step in range(1, 6 - seed)]
                    for seed in range(seeds)] for run, seeds in (('a', 2), ('less', 1))}
    fig = plot.draw_runs(groups, ['loss', 'x'], ['flops'])
    mean, _ = fig.axes[0].lines
    assert mean.get_xdata().tolist() == [10.5, 20.5, 30.5, 40.5]
    assert fig.axes[1].lines[0].get_ydata().tolist() == [50.0] * 4
    groups['a'][0][2]['val_loss'] = float('nan')
    assert plot.draw_runs(groups, ['loss']).axes[0].get_ylim()[1] < 5


def test_a_csv_of_other_rows_is_not_written_over(tmp_path):
    path = tmp_path / 'e.csv'
    path.write_bytes(b'name,grade\nAda \xff,1\n')
    with pytest.raises(Refused, match='not hold rows of nanodepth: choose'):
        tables.write_csv([dict(run='a', mean=1.0)], path)
    assert path.read_bytes() == b'name,grade\nAda \xff,1\n'


def test_one_seed_has_a_standard_error_and_several_an_interval(capsys):
    "Columns with equal cells are left out."
    tables.print_table([row_of(run=f'{group}-{seed}', group=group, seed=seed, mean=mean,
                               kind='share', error=0.1, n=9, chance=0.25, measure='x')
                        for group, seed, mean in (('a', 0, 0.5), ('b', 0, 0.25), ('b', 1, 0.75))])
    head = dict(measure='x, % of 9 (chance 25%)')
    assert table_of(capsys.readouterr().out, 'x') == [
        head | dict(model='a', seeds='1', score='50.0 (10.0)'),
        head | dict(model='b', seeds='2', score='50.0 ± 317.7')]      # 12.706 x 0.25


def test_scores_that_are_no_numbers_are_left_out_and_named(capsys):
    rows = [row_of(run=f'{group}-{seed}', group=group, seed=seed, mean=mean)
            for group, seed, mean in (
                ('a', 0, 1.0), ('a', 1, 2.0), ('b', 0, math.nan), ('b', 1, 2.0))]
    tables.print_table(rows, dict(b=['a']))
    said = capsys.readouterr().out
    [a, b] = table_of(said, 'loss')
    assert (a['seeds'], b['seeds'], b['verdict']) == ('2', '1', 'equal')
    assert 'left out: loss of b.' in said and 'nan' not in said


def test_paired_tests_by_hand():
    "Answers that are right or wrong get the exact sign test, and other scores Student's t."
    stats = pytest.importorskip('scipy.stats')
    assert p_value([1, 1, 1, 1, 1, 0, 0]) == pytest.approx(2 / 32) and p_value([0, 0]) == 1.0
    assert p_value([1, -1, 1, -1]) == 1.0 and p_value([]) is None and p_value([0.5]) is None
    assert p_value([1] * 9 + [-1]) == pytest.approx(2 * 11 / 1024)
    for changes in ([0.1, 0.2, 0.3, 0.4, 0.0], [0.5, -0.1, 0.4, 0.3]):
        assert p_value(changes) == pytest.approx(stats.ttest_1samp(changes, 0).pvalue, rel=1e-6)
        low, high = stats.t.interval(0.95, len(changes) - 1, 0, stats.sem(changes))
        assert interval(changes) == pytest.approx(high, rel=1e-6)
    assert (interval([0.1, 0.1]), p_of([0.1, 0.1])) == (None, None)     # no spread
    for change, p, word in ((-0.1, 0.049, 'lower'), (0.1, 0.049, 'higher'),
                            (0.1, 0.05, 'not resolved'), (1, None, 'not resolved')):
        assert verdict(change, p) == word


def test_without_scipy_there_is_no_p_and_a_line_says_so(monkeypatch, capsys):
    contrasts.students_t.cache_clear()
    monkeypatch.setitem(sys.modules, 'scipy.stats', None)
    assert (interval([0.1, 0.2]), p_of([0.1, 0.2])) == (None, None)
    assert p_value([1, 1, -1]) == 1.0                   # the sign test needs no scipy
    assert 'pip install scipy' in capsys.readouterr().err
    contrasts.students_t.cache_clear()
