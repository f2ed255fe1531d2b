"gpu.py: its parts on a tiny model without a GPU, so that they work the first time they meet one."
import json

import pytest
import torch

import nanodepth
from model import LM, ModelConfig
from tools import gpu


@pytest.mark.parametrize('part', ['training', 'growing', 'recurring', 'generating', 'wrapping'])
def test_a_part_measures_something(part, monkeypatch):
    pytest.importorskip('transformers')
    torch._dynamo.reset()
    monkeypatch.setattr(gpu, 'compile_model', lambda who,
                        model: [m.compile(backend='eager')
                                for m in (model.layers if who == 'ours' else [model])])
    rows = gpu.measure(gpu.PARTS[part], gpu.TINY, torch.device('cpu'))
    assert rows and all(float(value) >= 0 for _, value, _ in rows)
    found = dict((what, float(value)) for what, value, _ in rows)
    if part == 'training':
        assert 'MFU unknown' in rows[0][2] and found['a step, transformers over ours, eager'] > 0
    if part == 'growing':
        assert found['graphs that a growth compiles'] == 0
    if part == 'generating':
        assert found['tokens in common'] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize('order', [None, [0, 1, 2, 1, 2, 3]])
def test_text_from_rooms_of_fixed_length_is_the_models_own(tiny, order):
    model, prompt = tiny(order=order, n_kv_head=2), torch.randint(50, (1, 5))
    assert torch.equal(gpu.generate_captured(model, prompt, 12),
                       model.generate(prompt, 12, temperature=0))


def test_a_part_that_fails_takes_no_other_along(monkeypatch, tmp_path, capsys):
    """Both in processes of their own: one is unknown to the sister process, and ends in a
    traceback whose last line the table has."""
    monkeypatch.setitem(gpu.PARTS, 'broken', None)
    with pytest.raises(SystemExit) as stop:
        nanodepth.main('gpu', ['broken', 'recurring', '--tiny', '--device=cpu',
                               f'--out={tmp_path / "gpu.md"}'])
    assert stop.value.code == 1 and 'failed: broken' in capsys.readouterr().err
    table = (tmp_path / 'gpu.md').read_text()
    assert ("there is no part 'broken'" in table
            and '| random r over r = 5, time over FLOPs |' in table)


def test_a_part_that_takes_too_long_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, 'LIMIT', 0.2)
    args = type('args', (), dict(device='cpu', tiny=True))
    assert gpu.in_a_process('recurring', args,
                            tmp_path) == [['recurring', 'failed', 'took more than 0.2 seconds']]


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip('there is one')
    with pytest.raises(SystemExit) as stop:
        nanodepth.main('gpu', [])
    assert stop.value.code == 2 and "device='cuda' cannot be used" in capsys.readouterr().err


def test_a_run_that_is_killed_and_resumed_is_compared(monkeypatch):
    """As in the table, with runs that a function makes instead of processes: what counts is what
    is compared with what."""
    from engine import checkpoint
    starts = []

    class Child:
        def __init__(self, line, **_):
            self.out = next(a for a in line if a.startswith('--out_dir=')).partition('=')[2]
            save(self.out, 4)

        def poll(self):
            return 0

        def send_signal(self, number):
            starts.append('killed')

        def wait(self):
            pass

    def save(out, step):
        torch.manual_seed(len(starts) // 3)
        model = LM(ModelConfig(n_layer=1, n_embd=32, n_head=2))
        checkpoint.save(out, **checkpoint.describe(model), optimizers=[], step=step)

    def finished(line):
        starts.append('whole')
        save(next(a for a in line if a.startswith('--out_dir=')).partition('=')[2], 12)
    monkeypatch.setattr(gpu.subprocess, 'Popen', Child)
    monkeypatch.setattr(gpu, 'finished', finished)
    rows = gpu.measure(gpu.resuming, gpu.TINY, torch.device('cpu'))
    assert starts == ['whole', 'whole', 'killed', 'whole']
    assert float(rows[0][1]) > 0 and 'from step 4 of 12' in rows[0][2] and float(rows[1][1]) == 0
    json.dumps(rows)
