import json

import pytest

from nanodepth.__main__ import main as nanodepth
from nanodepth.report import plot, runs as report_runs, tables
from nanodepth.train import Config, train


@pytest.fixture
def run(data, tmp_path):
    out = tmp_path / 'run'
    train(Config(n_layer=1, n_embd=32, n_head=2, head_dim=None, context=16, batch_size=2,
                       steps=3, warmup_steps=0, decay_steps=1,
                       eval_batches=1, log_every=1, data=str(data), out_dir=str(out),
                       device='cpu'))
    return out


def test_sample_goes_on_and_is_seeded(run, capsys):
    said = []
    for seed in (0, 0, 1):
        nanodepth('sample', [str(run), '--prompt=a,\\nb', '--tokens=20', f'--seed={seed}',
                                  '--device=cpu'])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    assert "--- 'a,\\nb' goes on:\na,\nb|" in said[0]
    nanodepth('sample', [str(run), '--prompt=' + 'x' * 40, '--tokens=2', '--device=cpu',
                              '--temperature=0'])
    assert 'has 41 tokens: the model sees the last 16' in capsys.readouterr().out


def test_sample_loops(run, capsys):
    nanodepth('sample', [str(run), '--prompt=a', '--tokens=20', '--device=cpu', '--loop=1x3'])
    assert '3 layers deep' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        nanodepth('sample', [str(run), '--device=cpu', '--loop=2x3'])
    assert ("sample: the loop '2x3' has 2 unique layers, but the model "
            "has 1" in capsys.readouterr().err)


def test_one_picture_of_one_run_and_one_of_two(run, tmp_path, capsys):
    assert (run / 'loss.png').read_bytes()[:4] == b'\x89PNG'
    other = tmp_path / 'other'
    other.mkdir()
    lines = (run / 'log.jsonl').read_text()
    (other / 'log.jsonl').write_text(lines + '{"step": 4, "lo')  # cut off while it is being written
    nanodepth('plot', [str(run), str(other)])
    assert (run / 'compare.png').stat().st_size > 10_000
    assert f'picture: {run}/compare.png' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        nanodepth('plot', [str(tmp_path)])
    assert (f'plot: there is no {tmp_path}/log.jsonl: is {tmp_path} the folder of a '
            'run?' in capsys.readouterr().err)


def test_a_log_without_marks_has_a_picture_too(tmp_path):
    (tmp_path / 'log.jsonl').write_text(
        ''.join(json.dumps(dict(step=i, flops=i, loss=3 - i, val_loss=3 - i, kinds={})) + '\n'
                for i in range(3)))
    nanodepth('plot', [str(tmp_path)])
    assert (tmp_path / 'loss.png').exists()


def test_without_matplotlib_the_numbers_remain(tmp_path, monkeypatch, capsys):
    (tmp_path / 'log.jsonl').write_text('{"step": 0, "flops": 0, "val_loss": 1.0}')

    def missing(*_, **__):
        raise ImportError
    monkeypatch.setattr(plot, 'figure', missing)
    nanodepth('plot', [str(tmp_path)])
    assert 'matplotlib is not installed' in capsys.readouterr().out


def line(step, layers, accuracy, loss=1.0):
    return dict(step=step, flops=10 * step, seconds=60 * step, n_layer=layers, val_loss=loss,
                kinds=dict(text=dict(loss=2.0), look=dict(accuracy=accuracy)))


def test_seeds_are_one_group_and_other_numbers_are_names():
    runs = {name: [] for name in ('a-0', 'a-1', 'b', 'c-4', 'lr1e-3', 'lr1e-4', 'd', 'd-0', 'd-1')}
    assert {k: len(v) for k, v in tables.by_seed(runs).items()} == {'a': 2, 'b': 1, 'c-4': 1,
            'lr1e-3': 1, 'lr1e-4': 1, 'd': 1, 'd-*': 2}


def test_the_table_by_hand(tmp_path, capsys):
    groups = dict(base=[[line(0, 2, 0.1), line(5, 2, 0.5), line(9, 2, 0.6, loss)]
                        for loss in (1.0, 3.0)],
                grown=[[line(0, 1, 0), line(4, 2, 0.8), line(9, 2, 1.0, 6.0)],
                       [line(0, 1, 0), line(4, 2, 0.7), line(9, 2, 0.7, 8.0)]])
    base, grown = report_runs.table(groups)
    assert (base['loss'], base['loss se'], base['look'], base['look reached'],
            base['minutes']) == (2.0, 1.0, 0.6, 0, 9.0)
    assert (grown['loss'], grown['loss se'], grown['look reached'], grown['look step'],
            grown['look flops']) == (7.0, 1.0, 1, 4, 40)
    assert ([entry['step'] for entry in report_runs.growths(groups['grown'][0])] == [4]
            and not report_runs.growths(groups['base'][0]))
    assert [(row['flops'], row['loss']) for row in report_runs.measured(
        [groups['base'][0], groups['grown'][0]])] == [(0, 1), (0, 1), (90, 1), (90, 6)]
    report_runs.print_table([base, grown])
    out = capsys.readouterr().out
    # 5 / sqrt(1 + 1)
    assert '7.000 ± 1.000 (+3.5)' in out and '4, 4.00e+01 (1 of 2 seeds)' in out and 'never' in out
    for name, group in groups.items():
        for seed, log in enumerate(group):
            (tmp_path / f'{name}-{seed}').mkdir()
            (tmp_path / f'{name}-{seed}' / 'log.jsonl').write_text('\n'.join(map(json.dumps, log)))
    nanodepth('plot',
                   [*map(str, sorted(tmp_path.iterdir())), f'--out={tmp_path / "toys.png"}'])
    both, one = (plot.draw_runs(groups, only) for only in (None, ['look']))
    assert len(both.axes) == 4 and len(one.axes) == 2
    assert one.axes[0].get_ylabel() == both.axes[2].get_ylabel() == 'look: answers right (%)'
    with pytest.raises(SystemExit):
        nanodepth('plot', [f'{tmp_path}/base-0', f'{tmp_path}/base-1', '--show=text'])
    assert "--show='text' is not one of loss, look" in capsys.readouterr().err
    assert (tmp_path / 'toys.csv').read_text().splitlines()[2].startswith(
        'grown,2,9.0,2.0,90.0,9.0,7.0,')
