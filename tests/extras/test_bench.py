"""How fast the code is beside its peers: every benchmark prints a finite ratio, taken turn by turn,
against peers of the same size."""

import torch

from nanodepth.__main__ import main as nanodepth
from nanodepth.extras import bench
from nanodepth.model import LM, ModelConfig


def test_the_benchmark_runs_against_a_peer_of_the_same_size(capsys, tmp_path):
    nanodepth('bench', ['--tiny', '--device=cpu', f'--out={tmp_path / "bench.md"}'])
    table = (tmp_path / 'bench.md').read_text()
    rows = [line.split('|')[1:-1] for line in table.splitlines() if line.startswith('| tiny')]
    assert [row[0].strip() for row in rows] == ['tiny: a training step', 'tiny: 32 new tokens',
                                                  'tiny: 64 questions']
    assert all(float(row[1]) > 0 for row in rows) and table in capsys.readouterr().out
    mine, theirs = bench.both(bench.SHAPES['toy'], 'cpu').values()
    assert sum(p.numel() for p in theirs.parameters()) == mine.num_params()


def test_the_first_turn_does_not_count_and_the_median_does(monkeypatch):
    monkeypatch.setattr(bench.time, 'perf_counter', iter([0, 9, 0, 9, 0, 1, 0, 4, 0, 2, 0, 4, 0, 9,
                                                          0, 5]).__next__)
    row = bench.race('x', torch.device('cpu'), 3, 10, dict(ours=int, transformers=int))
    assert row[:5] == ['x', '2.000', '2', '4', '5']


def test_a_head_that_is_the_embedding_is_read_for_each_token(monkeypatch):
    read = []
    monkeypatch.setattr(bench, 'race', lambda *_, read: read_.append(read))
    read_ = read
    for tied in (True, False):
        shape = dict(vocab_size=500, n_layer=2, n_embd=32, n_head=2, context=64)
        ours = LM(ModelConfig(**shape, tie_embeddings=tied))
        monkeypatch.setattr(bench, 'readers', lambda *_: (ours, None))
        [*bench.generating('tiny', torch.device('cpu'), n=1)]
        by_hand = sum(m.weight.nbytes for m in ours.modules()
                      if isinstance(m, (torch.nn.Linear, torch.nn.RMSNorm)))
        assert read[-1] == by_hand
