import re

import pytest

import bench


def test_every_benchmark_runs_and_prints_a_ratio(monkeypatch, capsys):
    "At a tiny size; compiling takes too long for a test."
    tiny = dict(vocab_size=257, n_layer=4, n_embd=32, n_head=2, context=16)
    monkeypatch.setattr(bench, 'shape', lambda device: (dict(tiny), 2, 2))
    monkeypatch.setattr(bench, 'OPENED', tiny)
    monkeypatch.setattr(bench, 'WRAPPED', tiny | dict(context=64))
    names = [name for name in bench.BENCHMARKS if name != 'recompiling']
    bench.main([*names, '--device=cpu'])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == names
    for line in lines:
        ratio, mine, theirs = map(float, re.findall(r'(?<=\s)\d+\.\d+(?= (?:=|s\b))', line)[:3])
        assert mine > 0 and theirs > 0 and ratio == pytest.approx(mine / theirs, rel=0.05)
    assert 'of the FLOPs: 0.876' in lines[names.index('growing')]


def test_names_that_are_not_known(capsys):
    for args, message in ((['speed'], "there is no benchmark 'speed': growing"), (['--device=cudaa'], "device='cudaa' cannot be used")):
        with pytest.raises(SystemExit) as stop:
            bench.main(args)
        assert stop.value.code == 2 and message in capsys.readouterr().err
