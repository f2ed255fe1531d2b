import re

import pytest
import torch

import nanodepth
from model import LM, ModelConfig
from tools import bench, benchmarks, peers, timing
from train import Config

TINY = dict(vocab_size=257, n_layer=4, n_embd=32, n_head=2, ffn_dim=96, context=16)


def test_every_benchmark_runs_and_prints_a_ratio(monkeypatch, capsys, tmp_path):
    """At a tiny size; compiling, peaks of processes and learning a tokenizer take too long for a
    test."""
    pytest.importorskip('lm_eval')
    against = timing.against
    monkeypatch.setattr(benchmarks, 'against', lambda device, turns=5,
                        **calls: against(device, 1, **calls))
    monkeypatch.setattr(benchmarks, 'SMALL', TINY)
    monkeypatch.setattr(benchmarks, 'GROWN', TINY | dict(n_layer=8))
    monkeypatch.setattr(Config, 'n_layer', 2)
    monkeypatch.setattr(benchmarks, 'OPENED', TINY)
    monkeypatch.setattr(benchmarks, 'WRAPPED', TINY | dict(context=64))
    for name in benchmarks.SHAPES:
        monkeypatch.setitem(benchmarks.SHAPES, name, TINY | dict(context=48))
    names = [name for name in bench.BENCHMARKS if name not in ('recompiling', 'memory',
            'tokenising')]
    nanodepth.main('bench', [*names, '--capped=false', f'--out={tmp_path / "bench.md"}'])
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert list(dict.fromkeys(line.split()[0] for line in lines)) == names
    assert all(float(line.split()[1]) > 0 for line in lines)
    table = (tmp_path / 'bench.md').read_text()
    assert (len(re.findall(r'^\| [^|]+\| \d+\.\d+ +\|', table, flags=re.M)) == len(lines)
            and 'torch ' + torch.__version__ in table)
    # 4, then 8 layers: 28.3% of the steps at half the layers
    assert re.search(r'of the time, 1\d\.\d% of the FLOPs', table)
    assert re.search(r'memory of r = 32 and of r = 8, backprop 8 +\| 1\.000', table)


def test_a_ratio_is_taken_turn_by_turn():
    mine, peer = [1.0, 2.0, 4.0, 1.0, 1.0], [2.0, 4.0, 8.0, 2.0, 10.0]
    assert timing.ratio(peer, mine) == (2.0, 2.0, 2.0)
    assert timing.row('x', dict(ours=mine, them=peer), 'them')[1:4] == (2.0, 2.0, 2.0)


def test_the_same_once_more_with_the_instructions_of_a_laptop(tmp_path, capsys):
    "The cap takes effect in a process of its own: torch names the set it has left."
    if 'AVX' not in torch.backends.cpu.get_cpu_capability():
        pytest.skip('only for x86')
    nanodepth.main('bench', ['multiplying', f'--out={tmp_path / "bench.md"}'])
    table = (tmp_path / 'bench.md').read_text()
    assert '| AVX2: ratio |' in table and 'ONEDNN_MAX_CPU_ISA=AVX2' in table
    cells = [cell.strip() for cell in table.splitlines()[-1].split('|')]
    assert cells[1] == bench.EMULATED and 0 < float(cells[2]) and 0 < float(cells[4]) < 0.5


def test_columns_of_two_machines_stand_beside_each_other():
    rows = [['a', '1.0', '0.9 to 1.1', 'note'], ['b', '2.0', '', 'x']]
    assert bench.merged(rows, [['a', '3.0', '2.9 to 3.1', 'other']]) == [['a', '1.0', '0.9 to 1.1',
            '3.0', '2.9 to 3.1', 'note'],
                                                                         ['b', '2.0', '', '', '',
                                                                                 'x']]


def test_the_peers_are_as_large_as_our_model():
    pytest.importorskip('transformers')
    mine = LM(ModelConfig(**peers.SHAPES['toy']))
    theirs, loss = peers.transformers(peers.SHAPES['toy'])
    assert sum(p.numel() for p in theirs.parameters()) == mine.num_params()
    plain = sum(p.numel() for p in peers.plain(peers.SHAPES['toy'])[0].layers.parameters()
                if p.dim() > 1)
    assert plain == pytest.approx(sum(p.numel() for p in mine.layers.parameters() if p.dim() > 1),
                                  rel=0.03)
    tokens = torch.randint(257, (2, 64))
    for make in (*peers.PEERS.values(), peers.ours):
        model, loss = make(peers.SHAPES['toy'])
        step = peers.training_step(model, loss, tokens)
        before = loss(tokens).item()
        for _ in range(3):
            step()
        assert loss(tokens).item() < before and 4 < before < 8


def test_names_that_are_not_known(capsys):
    for args, message in ((['speed'], "there is no benchmark 'speed': multiplying"),
                          (['--capped=maybe'], "--capped must be bool, not 'maybe'")):
        with pytest.raises(SystemExit) as stop:
            nanodepth.main('bench', args)
        assert stop.value.code == 2 and message in capsys.readouterr().err
