"bench.py at a tiny size, on a CPU: each row says what it names, and one failure is a row."
import math
import os

import pytest
import torch

from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import bench
from nanodepth.model import LM, ModelConfig
from nanodepth.train import Config


@pytest.fixture
def here(monkeypatch):
    "Benchmarks in this process, one turn each; compiling and peaks of processes take too long."
    against = bench.against
    monkeypatch.setattr(bench, 'against', lambda device, turns=5, **calls: against(device, 1,
                                                                                   **calls))
    monkeypatch.setattr(bench, 'apart', lambda call, *args: call(*args))
    monkeypatch.setattr(Config, 'n_layer', 2)


def test_every_benchmark_runs_and_prints_a_ratio(here, capsys, tmp_path):
    names = [name for name in bench.BENCHMARKS if name != 'memory']
    nanodepth('bench', [*names, '--tiny', '--device=cpu', f'--out={tmp_path / "bench.md"}'])
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert list(dict.fromkeys(line.split()[0] for line in lines)) == names
    # finite: of one turn each, beside other work, a difference of times may come out below zero
    assert all(math.isfinite(float(line.split()[1])) for line in lines)
    table = (tmp_path / 'bench.md').read_text()
    assert table.count('\n| ') == len(lines) + 2 and 'torch ' + torch.__version__ in table


def test_a_ratio_is_taken_turn_by_turn():
    mine, peer = [1.0, 2.0, 4.0, 1.0, 1.0], [2.0, 4.0, 8.0, 2.0, 10.0]
    assert bench.ratio(peer, mine) == (2.0, 2.0, 2.0)


def test_a_process_of_its_own():
    assert bench.apart(os.getpid) != os.getpid()


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
