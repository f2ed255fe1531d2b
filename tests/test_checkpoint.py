"Checkpoints: what is saved comes back, a bad file is refused, and none is half written."
import dataclasses
import math
import os
import pickle
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import BEGUN, save_run

from nanodepth.__main__ import main as nanodepth
from nanodepth.common import files
from nanodepth.common.errors import Refused
from nanodepth.common.files import claim, fresh, replace
from nanodepth.models import checkpoint
from nanodepth.models.checkpoint import describe, load, load_model, save
from nanodepth.retrofit import surgery
from nanodepth.train import train


def test_what_is_saved_comes_back(tmp_path):
    state = dict(step=3, weights={'a': torch.randn(4, 5), 'b': torch.arange(3)},
                 config=dict(lr=1e-3, order=[0, 1], name=None))
    save(tmp_path / 'run', **state)
    for path in (tmp_path / 'run', tmp_path / 'run' / checkpoint.FILE):
        back = load(path)
        assert back['step'] == 3 and back['config'] == state['config']
        assert all(torch.equal(back['weights'][k], v) for k, v in state['weights'].items())
    save(tmp_path / 'run', step=4)
    assert load(tmp_path / 'run') == dict(step=4)
    assert sorted(p.name for p in (tmp_path / 'run').iterdir()) == [checkpoint.FILE]


def test_the_last_checkpoint_of_a_depth_is_that_of_the_highest_step(tmp_path, tiny):
    save(tmp_path, **describe(tiny()))
    for step in (8, 16):
        checkpoint.keep(tmp_path, step)
    assert checkpoint.stages_of(tmp_path) == {4: tmp_path / 'ckpt-16.pt'}


def test_load_model(tmp_path, tiny):
    model = tiny(n_kv_head=2, ln_scaling=True, order=[0, 1, 2, 1, 3])
    save(tmp_path, kind='lm', model=model.state_dict(), model_config=asdict(model.config))
    back = load_model(tmp_path)
    tokens = torch.randint(50, (2, 9))
    assert torch.equal(back(tokens), model(tokens)) and not back.training
    assert back.head.weight is back.embed.weight
    core = surgery(tiny(n_layer=6), ([0, 2], [3], [5, 4]), inject='add', start='zero', recurrence=3)
    save(tmp_path / 'core', **describe(core))
    assert torch.equal(load_model(tmp_path / 'core')(tokens), core(tokens))


def test_broken_checkpoints_are_refused(tmp_path):
    save(tmp_path, weights=torch.randn(1000), step=1)
    path = tmp_path / checkpoint.FILE
    good = path.read_bytes()
    at = good.index(load(tmp_path)['weights'].numpy().tobytes()) + 50
    flipped = good[:at] + bytes([good[at] ^ 1]) + good[at + 1:]
    for raw, message in ((b'', 'is damaged'), (good[:-1], 'is damaged'),
                         (flipped, 'the checksum of .* is wrong')):
        path.write_bytes(raw)
        with pytest.raises(Refused, match=message):
            load(tmp_path)
    with pytest.raises(Refused, match='there is no checkpoint at .*nowhere'):
        load(tmp_path / 'nowhere')


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'it ran'),)

    torch.save(dict(model=Code()), tmp_path / checkpoint.FILE)
    with pytest.raises(Refused, match='more than tensors and plain values'):
        load(tmp_path)
    (tmp_path / checkpoint.FILE).write_bytes(pickle.dumps(Code()))
    with pytest.raises(Refused, match='is damaged, or not what it should be'):
        load_model(tmp_path)
    assert not (tmp_path / 'it ran').exists()


def write_without_a_pause(folder, pipe):
    for step in range(10 ** 6):
        save(folder, step=step, weights=torch.full((1_000_000,), float(step)))
        os.write(pipe.fileno(), b'%d ' % step)


def test_kill_while_writing_leaves_the_last_good_one(tmp_path):
    "Killed with kill -9 five times, each at another point of a write."
    for fraction in (0.1, 0.3, 0.5, 0.7, 0.9):
        ours, theirs = BEGUN.Pipe(duplex=False)
        child = BEGUN.Process(target=write_without_a_pause, args=(tmp_path, theirs))
        child.start()
        theirs.close()
        os.read(ours.fileno(), 99)
        began = time.perf_counter()
        said = os.read(ours.fileno(), 99)
        time.sleep((time.perf_counter() - began) * fraction)        # so far into the next write
        child.kill()
        child.join()
        said = int((said + os.read(ours.fileno(), 1 << 16)).split()[-1])     # all that is left
        state = load(tmp_path)
        assert state['step'] in (said, said + 1)
        assert (state['weights'] == state['step']).all()


def test_a_failed_write_keeps_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, step=1)

    def full(state, file):
        file.write(b'half a check')
        raise OSError('no space left on device')
    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(OSError, match='no space left'):
        save(tmp_path, step=2)
    assert load(tmp_path) == dict(step=1)


def test_a_file_of_an_older_form_is_refused(tiny, tmp_path):
    state = describe(surgery(tiny(), '1-2-1', recurrence=3))
    state['recurrent']['mean'] = state['recurrent'].pop('recurrence')
    save(tmp_path, **state)
    with pytest.raises(Refused, match='of an older form'):
        load_model(tmp_path)


def test_a_model_that_is_not_finite_is_opened_by_nobody(tiny, tmp_path):
    model = tiny(vocab_size=257, n_layer=2)
    model.layers[1].mlp.up.weight.data[3, 2] = math.inf
    path = save_run(tmp_path / 'run', model)
    with pytest.raises(Refused, match='up.weight holds numbers that are not finite'):
        load_model(path)


def test_a_run_that_was_moved_aside_leaves_its_lock(tmp_path, monkeypatch):
    (tmp_path / 'run.1').touch()
    with claim(tmp_path / 'run'):
        (tmp_path / 'run/notes.txt').touch()
        checkpoint.move_aside(tmp_path / 'run')
        monkeypatch.setattr(files, 'held', {})          # the second run is another process
        with pytest.raises(Refused, match='another run is at work'), claim(tmp_path / 'run'):
            pass
        monkeypatch.undo()
    assert [path.name for path in (tmp_path / 'run.2').iterdir()] == ['notes.txt']


def test_two_writers_of_one_file_leave_one_of_two_whole_files(tmp_path):
    path = tmp_path / 'table.csv'
    with fresh(path) as slow:
        slow.write(b'b' * 1000)
        slow.flush()
        pid, os.getpid = os.getpid, lambda: 1
        try:
            replace(path, b'a' * 500)               # another process, from beginning to end
        finally:
            os.getpid = pid
        slow.write(b'b' * 1000)
    assert path.read_bytes() == b'b' * 2000


def test_a_claimed_folder_keeps_what_its_owner_calls_tmp(tmp_path):
    for name in ('thesis.12.tmp', 'ckpt.pt.123.nanodepth.tmp'):
        (tmp_path / name).touch()
    (tmp_path / 'old.12.nanodepth.tmp').mkdir()
    with claim(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {
            'thesis.12.tmp', 'old.12.nanodepth.tmp', 'lock'}
    with pytest.raises(Refused, match='write its name'), claim(Path('')):
        pass
    with pytest.raises(SystemExit):
        nanodepth('evaluate', ['x', '--out='])


def test_one_process_checks_a_checkpoint_and_loading_maps_it(config, monkeypatch, tmp_path):
    c = config(steps=4, decay_steps=1)
    train(c)
    checked, how = [], []
    monkeypatch.setattr(checkpoint, 'check', lambda folder: checked.append(folder))
    real = torch.load
    monkeypatch.setattr(torch, 'load', lambda *a, **k: (how.append(k), real(*a, **k))[1])
    train(dataclasses.replace(c, steps=6))
    assert len(checked) == 1 and how[0]['mmap']
    checkpoint.load(c.out_dir, checked=True)
    assert len(checked) == 1
