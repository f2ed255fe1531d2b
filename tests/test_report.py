"""What is shown of runs: text, pictures, tables over seeds, and the tests of changes.

Promised: sampling is seeded and loops; a run and several have a picture; the table by hand, with
errors over the seeds; paired tests against every sign tried one by one.
"""
import json

import pytest
from helpers import SMALL, refused, save_run
from docs.results.tables import read_rows
from matplotlib.figure import Figure

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.models.checkpoint import load_model
from nanodepth.report import logs as report_runs, plot, tables
from nanodepth.report.logs import log_of
from nanodepth.report.contrasts import interval, p_of, p_value, verdict
from nanodepth.train import train
from nanodepth.training.picture import draw
from nanodepth.training.plan import Config


def test_sample_goes_on_is_seeded_and_loops(tmp_path, tiny, capsys):
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, n_layer=1))

    def sample(*words):
        nanodepth('sample', [run, *words, '--device=cpu'])
        return capsys.readouterr().out
    said = [sample('--prompt=a,\\nb', '--tokens=20', more)
            for more in ('--seed=0', '--seed=0', '--seed=1', '--loop=1x3')]
    assert said[0] == said[1] != said[2] and '3 layers deep' in said[3]
    assert "--- 'a,\\nb' goes on:\na,\nb|" in said[0]
    assert '|' in sample(f'--prompt={"a" * 32}', '--tokens=1')          # the context slides


def test_picture_of_one_run_and_of_two(data, tmp_path, capsys):
    train(Config(**SMALL | dict(steps=3, warmup_steps=0, decay_steps=1, data=str(data),
                                out_dir=str(tmp_path / 'run'))))
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


def test_picture_has_a_row_for_each_run(tmp_path, monkeypatch):
    "And a curve for each kind, where it was measured."
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


@pytest.mark.parametrize('run, group, seed', [
    ('lidas-1', 'lidas', 1), ('lidas', 'lidas', None), ('lr1e-4', 'lr1e', 4), ('e-01', 'e', 1),
    ('base_10-2-10', 'base_10-2-10', None), ('base_1-2-1-3', 'base_1-2-1', 3),
    ('out/a-0/ckpt-9.pt', 'out/a/ckpt-9.pt', 0)])
def test_names_of_seeds(run, group, seed):
    "Two cuts of one run, base_1-2-1 and base_1-2-2, are two models."
    wanted = dict(run=run, group=group, seed=seed)
    assert tables.names_of(run) == {
        key: value for key, value in wanted.items() if value is not None}


def test_rows_of_others_are_not_written_over(tmp_path):
    path = tmp_path / 'e.csv'
    path.write_text('name,grade\nAda,1\n')
    for write in (lambda: tables.write_csv([dict(run='a', mean=1.0)], path),
                  lambda: tables.add_to_csv(path, [dict(run='a', mean=1.0)])):
        with pytest.raises(Refused, match='no rows of ours: choose another --out'):
            write()
    assert path.read_text() == 'name,grade\nAda,1\n'


def test_plot_of_runs_by_hand(tmp_path):
    groups = dict(base=[[line(0, 2, 0.1), line(5, 2, 0.5), line(9, 2, 0.6, loss)]
                        for loss in (1.0, 3.0)],
                  grown=[[line(0, 1, 0), line(4, 2, 0.8), line(9, 2, 1.0, 6.0)],
                         [line(0, 1, 0), line(4, 2, 0.7), line(9, 2, 0.7, 8.0)]])
    assert [entry['step'] for entry in report_runs.growths(groups['grown'][0])] == [4]
    assert not report_runs.growths(groups['base'][0])
    assert [(row['flops'], row['loss']) for row in report_runs.measured(
        [groups['base'][0], groups['grown'][0]])] == [(0, 1), (0, 1), (90, 1), (90, 6)]
    runs = [tmp_path / f'{name}-{seed}' for name in groups for seed in (3, 4)]
    for run, log in zip(runs, sum(groups.values(), [])):    # logs copied without checkpoints
        run.mkdir()
        (run / 'log.jsonl').write_text('\n'.join(map(json.dumps, log)))
        config = dict(seed=int(run.name[-1]), init_from='parent')
        (run / 'run.json').write_text(json.dumps(dict(config=config)))
    nanodepth('plot', [*map(str, runs), f'--out={tmp_path / "toys.png"}'])
    rows = read_rows(tmp_path / 'toys.csv')
    assert [(row['run'], row['seed'], row['look']) for row in rows[-2:]] == [
        ('grown', 3, 1.0), ('grown', 4, 0.7)]
    both, one = (plot.draw_runs(groups, kinds) for kinds in (['loss', 'look'], ['look']))
    assert one.axes[0].get_ylabel() == both.axes[2].get_ylabel() == 'look: % right'


def test_cost_of_training_is_a_mean_over_seeds():
    groups = {run: [[dict(step=step, flops=10 * step + seed, depth=1, val_loss=5.0 - step,
                          kinds=dict(x=dict(accuracy=0.5))) for step in range(1, 6 - seed)]
                    for seed in range(seeds)] for run, seeds in (('a', 2), ('less', 1))}
    fig = plot.draw_runs(groups, ['loss', 'x'], ['flops'])
    mean, _ = fig.axes[0].lines                 # step 5 is not of both seeds
    assert mean.get_xdata().tolist() == [10.5, 20.5, 30.5, 40.5]
    assert fig.axes[1].lines[0].get_ydata().tolist() == [50.0] * 4
    groups['a'][0][2]['val_loss'] = float('nan')        # of a run that was stopped there
    assert plot.draw_runs(groups, ['loss']).axes[0].get_ylim()[1] < 5


def test_panel_has_its_size_and_the_model_as_it_is():
    rows = [dict(run='a', x=x, size=size, loss=x + size) for size in (1, 2) for x in (0, 1)]
    rows.append(dict(run='a', x=None, size=0, loss=7))
    fig = plot.draw_curves(rows, 'x', 'size', ['loss'], '', 'depth')
    drawn = [[line.get_ydata() for line in ax.lines] for ax in fig.axes]
    assert [[*map(list, lines)] for lines in drawn] == [[[1, 2], [7, 7]], [[2, 3], [7, 7]]]


def test_number_that_a_seed_lacks_has_no_mean():
    "One seed's answers were no numbers: it has no error, and no interval."
    rows = [dict(run=f'a-{seed}', group='a', mean=1.0 + seed) for seed in (0, 1)]
    rows[0] |= dict(error=0.5, low=0.25)
    rows[1] |= dict(error=None)
    for its in (rows, rows[::-1]):
        [row] = tables.over_seeds(its, [], ['mean'])
        assert (row['mean'], row['error'], row['seeds']) == (1.5, its[0]['error'], 2)


def test_paired_tests_by_hand():
    "Of right and wrong, every way to set the signs; of other changes, Student's t, as of scipy."
    stats = pytest.importorskip('scipy.stats')
    assert p_value([1, 1, 1, 1, 1, 0, 0]) == pytest.approx(2 / 32) and p_value([0, 0]) == 1.0
    assert p_value([1, -1, 1, -1]) == 1.0 and p_value([]) is None and p_value([0.5]) is None
    assert p_value([1] * 9 + [-1]) == pytest.approx(2 * 11 / 1024)
    for changes in ([0.1, 0.2, 0.3, 0.4, 0.0], [0.5, -0.1, 0.4, 0.3]):
        assert p_value(changes) == pytest.approx(stats.ttest_1samp(changes, 0).pvalue, rel=1e-6)
        low, high = stats.t.interval(0.95, len(changes) - 1, 0, stats.sem(changes))
        assert interval(changes) == pytest.approx(high, rel=1e-6)
    assert (interval([0.1, 0.1]), p_of([0.1, 0.1])) == (None, None)     # equal: nothing is known
    assert verdict([-0.1, -0.11, -0.12]) == 'lower' and verdict([0.1]) == 'not resolved (1 seed)'
