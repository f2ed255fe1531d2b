"Checkpoints: what is saved comes back, a bad file is refused, and none is half written."
import math
import os
import pickle
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import BEGUN, Times, logits, refused, same, save_run, state_of

from nanodepth import patch, save_hf, wrapper
from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.common.files import claim, fresh, replace
from nanodepth.model import LM, ModelConfig, Step, steps_in
from nanodepth.models import checkpoint
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import Core, core_of, new_adapter
from nanodepth.train import load, save, written
from nanodepth.wrapper import Window


def test_what_is_saved_comes_back(tmp_path, tiny):
    model, config = tiny(), dict(lr=1e-3, order=[0, 1], name=None)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)[None], torch.arange(4)[None]).backward()
    optimizer.step()
    save(tmp_path, model, [optimizer], names=('ckpt.pt', 'ckpt-3.pt'), step=3, config=config)
    for path in (tmp_path, tmp_path / 'ckpt.pt', tmp_path / 'ckpt-3.pt'):
        back, saved = load(path)
        assert saved['step'] == 3 and saved['config'] == config
        assert same(back.state_dict(), model.state_dict())
        assert same(saved['optimizers'][0]['state'][0], optimizer.state_dict()['state'][0])
    save(tmp_path, model, [], step=4)
    assert load(tmp_path)[1]['step'] == 4 and load(tmp_path / 'ckpt-3.pt')[1]['step'] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ['ckpt-3.pt', 'ckpt.pt']


class Again(Core):
    "A core whose first state is the stream as it comes in."

    def first_state(self, e, first=0, generator=None):
        return e


ORDERS = {      # (an order, which classes of it a checkpoint does not know)
    'core': ([0, Core([1, 2], 3, 2, start='authors', state_std=0.3), 3], []),
    'window': ([0, Window([1, 2], wrapper.euler, K=2, cache='exact', T=1.5), 3], []),
    'window in a core': ([0, Core([1, Window([2], K=3, beta=0.3)], r=2), 3], []),
    'window beside a core': ([Window([0], K=2), Core([1, 2], r=2), 3], []),
    'own': ([0, Times([1, Window([2], K=2)], times=3), 3], ['Times']),
    'own core': ([0, Again([1, 2], r=3), 3], ['Again'])}


@pytest.fixture
def ordered(tiny):
    "ordered(name) -> a model of this order."
    def make(name):
        model = tiny(vocab_size=257)
        model.order = ORDERS[name][0]
        if core_of(model):
            model.adapter = new_adapter(32, 'linear')
        return model
    return make


@pytest.mark.parametrize('name', ORDERS)
def test_what_is_written_is_the_same_step_or_a_line(name, ordered, tmp_path):
    model = ordered(name)
    save(tmp_path, model, [])
    for kind in ORDERS[name][1]:
        with pytest.raises(Refused, match=f'has a Step {kind}: --classes=FILE.py, where its class'):
            load_model(tmp_path)
    back, tokens = load_model(tmp_path, classes=(Times, Again)), torch.arange(24).view(2, 12)
    assert torch.equal(logits(back, tokens), logits(model, tokens))
    assert torch.equal(back.generate(tokens, 4, 0), model.generate(tokens, 4, 0))
    assert written(back.order) == written(model.order)
    assert list(map(type, steps_in(back.order))) == list(map(type, steps_in(model.order)))
    assert back.flops_per_token() == model.flops_per_token()
    assert back.head.weight is back.embed.weight and not back.training


def test_what_no_checkpoint_can_say_is_not_written(ordered, tiny, tmp_path):
    def rk(g, x, K):
        return g(x)

    class Forgetful(Core):
        def __init__(self, items, scale=1, **options):
            super().__init__(items, **options)
            self.scale = scale

    model = ordered('core')
    for step, words in ((type('Core', (Core,), {})([1]), 'is not the Core that a checkpoint knows'),
                        (type('Core', (Step,), {})([1]), 'is not the Core'),
                        (type('Window', (Window,), {})([1]), 'is not the Window'),
                        (Times([type('Window', (Step,), {})([1])]), 'is not the Window'),
                        (Window([1], rk), 'no file can name the solver rk'),
                        (Forgetful([1], scale=2), r'Forgetful.settings\(\) leaves out scale')):
        model.order = [0, step, 2]
        with pytest.raises(Refused, match=words):
            save(tmp_path, model, [])
    patched = tiny()
    patch(patched, (1, 2))              # the package's Window, which knows more than the book's
    with pytest.raises(Refused, match='is not the Window'):
        save(tmp_path, patched, [])
    assert not list(tmp_path.iterdir())


def test_a_class_that_is_brought_takes_no_known_name(ordered, tmp_path):
    model = ordered('core')
    save(tmp_path, model, [])
    tokens = torch.arange(24).view(2, 12)
    back = load_model(tmp_path, classes=[type('Core', (Again,), {})])
    assert torch.equal(logits(back, tokens), logits(model, tokens))


@pytest.mark.parametrize('name', ORDERS)
def test_only_a_plain_core_is_exported_and_in_its_authors_format(name, ordered, tmp_path, capsys,
                                                                       monkeypatch):
    monkeypatch.setattr(checkpoint, 'BROUGHT', [Times, Again])
    model, out = ordered(name), tmp_path / 'out'
    run = save_run(tmp_path / 'run', model)
    with pytest.raises(Refused, match='in a way that no family of transformers knows'):
        save_hf(model, out)
    if name == 'core':
        nanodepth('export', [run, str(out)])
        assert '"huginn_raven"' in (out / 'config.json').read_text()
    else:
        words = ('no family of transformers knows' if core_of(model) is None else
                 'holds one Core and no other Step')
        assert words in refused(capsys, 'export', run, out)
        assert not out.exists()


def test_a_file_that_a_checkpoint_names_is_never_run(ordered, tmp_path, monkeypatch):
    file, ran = tmp_path / 'evil.py', tmp_path / 'it ran'
    file.write_text(f'open({str(ran)!r}, "w")\nfrom nanodepth.retrofit import Core as Again\n'
                    'rk = Again\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    save(tmp_path, ordered('core'), [])
    state = state_of(tmp_path)
    (tmp_path / 'run').mkdir()
    for name in ('Again', 'evil', 'evil.Again', 'evil:Again', str(file), f'{file}:Again'):
        said = dict(classes=str(file), file=str(file), module='evil')
        step = dict(step=name, items=[1], settings={}, **said)
        torch.save(state | said | dict(order=[0, step, 2], config=said), tmp_path / 'run/ckpt.pt')
        with pytest.raises(Refused, match='has a Step'):
            load_model(tmp_path / 'run')
    step = dict(step='Window', items=[1], settings=dict(solver='evil.rk'))
    state |= dict(order=[0, step, 2], model=ordered('window').state_dict())
    torch.save(state, tmp_path / 'run/ckpt.pt')
    with pytest.raises(TypeError, match='not callable'):
        load_model(tmp_path / 'run')(torch.arange(4)[None])
    assert not ran.exists() and 'evil' not in sys.modules


def test_broken_checkpoints_are_refused(tmp_path, tiny):
    save(tmp_path, tiny(), [])
    path = tmp_path / 'ckpt.pt'
    for raw in (b'', path.read_bytes()[:-1]):
        path.write_bytes(raw)
        with pytest.raises(Refused, match='is damaged'):
            load_model(tmp_path)
        with pytest.raises((EOFError, RuntimeError)):
            load(tmp_path)
    with pytest.raises(Refused, match='there is no checkpoint at .*nowhere'):
        load_model(tmp_path / 'nowhere')


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'it ran'),)

    torch.save(dict(model=Code()), tmp_path / 'ckpt.pt')
    raw = (tmp_path / 'ckpt.pt').read_bytes()
    for content in (raw, pickle.dumps(Code())):
        (tmp_path / 'ckpt.pt').write_bytes(content)
        with pytest.raises(Refused, match='more than tensors and plain values|is damaged'):
            load_model(tmp_path)
        with pytest.raises((pickle.UnpicklingError, RuntimeError)):
            load(tmp_path)
    assert not (tmp_path / 'it ran').exists()


def write_without_a_pause(folder, pipe):
    model = LM(ModelConfig(vocab_size=2000, n_layer=1, n_embd=256, n_head=2))
    for step in range(10 ** 6):
        model.embed.weight.data.fill_(step)
        save(folder, model, [], step=step)
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
        model, saved = load(tmp_path)
        assert saved['step'] in (said, said + 1)
        assert (model.embed.weight == saved['step']).all()


def test_a_failed_write_keeps_the_old_one(tmp_path, tiny, monkeypatch):
    save(tmp_path, tiny(), [], step=1)

    def full(state, path):
        path.write_bytes(b'half a check')
        raise OSError('no space left on device')
    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(OSError, match='no space left'):
        save(tmp_path, tiny(), [], step=2)
    assert load(tmp_path)[1]['step'] == 1


def test_a_model_that_is_not_finite_is_opened_by_nobody(tiny, tmp_path):
    model = tiny(vocab_size=257, n_layer=2)
    model.layers[1].mlp.up.weight.data[3, 2] = math.inf
    with pytest.raises(Refused, match='not finite, so they are not saved'):
        save(tmp_path, model, [])
    save(tmp_path, tiny(vocab_size=257, n_layer=2), [])
    torch.save(state_of(tmp_path) | dict(model=model.state_dict()), tmp_path / 'ckpt.pt')
    with pytest.raises(Refused, match='up.weight holds numbers that are not finite'):
        load_model(tmp_path)


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
