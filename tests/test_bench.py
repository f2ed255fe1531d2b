"bench.py at a tiny size, on a CPU: each row says what it names, and one failure is a row."
import math
import re

import pytest
import torch

import nanodepth
from common import progress
from model import LM, ModelConfig
from tools import bench
from train import Config


@pytest.fixture
def here(monkeypatch):
    "Benchmarks in this process, one turn each; compiling and peaks of processes take too long."
    against = bench.against
    monkeypatch.setattr(bench, 'against', lambda device, turns=5, **calls: against(device, 1,
                                                                                   **calls))
    monkeypatch.setattr(bench, 'apart', lambda call, *args, limit=None, **_: call(*args))
    monkeypatch.setattr(bench, 'has_compiler', lambda: False)
    monkeypatch.setattr(Config, 'n_layer', 2)


def test_every_benchmark_runs_and_prints_a_ratio(here, capsys, tmp_path):
    pytest.importorskip('lm_eval')
    names = [name for name in bench.BENCHMARKS if name not in ('memory', 'recompiling')]
    nanodepth.main('bench', [*names, '--tiny', '--capped=false', f'--out={tmp_path / "bench.md"}'])
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert list(dict.fromkeys(line.split()[0] for line in lines)) == names
    # finite: of one turn each, beside other work, a difference of times may come out below zero
    assert all(math.isfinite(float(line.split()[1])) for line in lines)
    table = (tmp_path / 'bench.md').read_text()
    assert table.count('\n| ') == len(lines) + 2 and 'torch ' + torch.__version__ in table
    # 4 layers in growths of one: the FLOPs that are saved follow from the plan
    assert re.search(r'of the time, 1\d\.\d% of the FLOPs', table)


def test_a_ratio_is_taken_turn_by_turn():
    mine, peer = [1.0, 2.0, 4.0, 1.0, 1.0], [2.0, 4.0, 8.0, 2.0, 10.0]
    assert bench.ratio(peer, mine) == (2.0, 2.0, 2.0)


def test_the_wrappers_ratio_is_that_of_the_layers(here):
    "Of counted layers instead of seconds: 4 of 4 layers three times are 12 of 4."
    counted = []

    def against(device, turns=5, **calls):
        seconds = {}
        for name, call in calls.items():
            counted.clear()
            call()
            seconds[name] = [float(len(counted))]
        return seconds
    model, real = LM(ModelConfig(**bench.SHAPES['tiny'])), LM.run
    assert len(model.layers) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, 'against', against)
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_: counted.append(1) if type(module).__name__ == 'MLP' else None)
        try:
            rows = list(bench.wrapping(bench.size_of(torch.device('cpu'), tiny=True)))
        finally:
            hook.remove()
    assert LM.run is real and rows[0][1] == pytest.approx(1.0)
    assert rows[1][1] == pytest.approx(1.0) and rows[2][1] <= 1.0


def test_a_process_of_its_own_has_its_environment_and_a_time_limit():
    assert bench.apart(bench.os.getenv, 'NANODEPTH_X', NANODEPTH_X='7') == '7'
    with pytest.raises(TimeoutError, match='more than 1 seconds'):
        bench.apart(bench.time.sleep, 60, limit=1)
    if 'AVX' in torch.backends.cpu.get_cpu_capability():        # the cap takes effect: x86
        assert bench.apart(torch.backends.cpu.get_cpu_capability, **bench.LAPTOP) == 'AVX2'


def test_a_benchmark_that_fails_takes_no_other_along(here, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench.BENCHMARKS, 'recurring', lambda size: 1 / 0)
    with pytest.raises(SystemExit) as stop:
        nanodepth.main('bench', ['recurring', 'growing', '--tiny', '--capped=false',
                                 f'--out={tmp_path / "bench.md"}'])
    assert stop.value.code == 1
    table = (tmp_path / 'bench.md').read_text()
    assert 'failed: division by zero' in table and 'growing: time saved' in table


def test_columns_of_two_machines_stand_beside_each_other():
    rows = [['a', '1.0', '0.9 to 1.1', 'note'], ['b', '2.0', '', 'x']]
    assert bench.beside(rows, [['a', '3.0', '2.9 to 3.1', 'other']]) == [
        ['a', '1.0', '0.9 to 1.1', '3.0', '2.9 to 3.1', 'note'], ['b', '2.0', '', '', '', 'x']]


def test_the_peers_are_as_large_as_our_model():
    pytest.importorskip('transformers')
    shape = bench.SHAPES['toy']
    mine = LM(ModelConfig(**shape))
    theirs, loss = bench.transformers(shape)
    assert sum(p.numel() for p in theirs.parameters()) == mine.num_params()
    plain = sum(p.numel() for p in bench.plain(shape)[0].layers.parameters() if p.dim() > 1)
    assert plain == pytest.approx(sum(p.numel() for p in mine.layers.parameters() if p.dim() > 1),
                                  rel=0.03)
    tokens = torch.randint(257, (2, 64))
    for make in (*bench.PEERS.values(), bench.ours):
        model, loss = make(shape)
        step = bench.training_step(model, loss, tokens)
        before = loss(tokens).item()
        for _ in range(3):
            step()
        assert loss(tokens).item() < before and 4 < before < 8


def test_what_cannot_be_measured_is_a_line(capsys):
    asked = [('bench', ['speed'], "there is no benchmark 'speed': optimizer"),
             ('bench', ['--capped=maybe'], "--capped must be true or false, not 'maybe'")]
    if not torch.cuda.is_available():
        asked.append(('gpu', [], "device='cuda' cannot be used"))
    for command, args, message in asked:
        with pytest.raises(SystemExit) as stop:
            nanodepth.main(command, args)
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_long_work_says_how_long_and_what_is_shorter(monkeypatch, capsys):
    clock = iter(range(0, 1000, 30))            # half a minute for each piece
    monkeypatch.setattr(progress.time, 'monotonic', lambda: next(clock))
    assert list(progress.timed([1, 2, 3, 4], 'pieces', 'piece', 'a lower --n')) == [1, 2, 3, 4]
    said = capsys.readouterr().err
    assert said.count('pieces: about 2 minutes; a lower --n makes it shorter') == 1
    monkeypatch.undo()
    assert list(progress.timed(range(3), 'pieces', 'piece', '')) == [0, 1, 2]
    assert 'about' not in capsys.readouterr().err
