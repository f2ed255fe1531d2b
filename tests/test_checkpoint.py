"Checkpoints: what is saved comes back, a bad file is refused, and none is half written."
import math
import os
import pickle
import sys
import time

import pytest
import torch
from conftest import BEGUN, Times, logits, refused, same, save_run, state_of

from nanodepth import patch, save_hf, wrapper
from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.common.files import claim
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
    save(tmp_path, model, [], step=4)
    back, saved = load(tmp_path / 'ckpt-3.pt')
    assert saved['step'] == 3 and saved['config'] == config
    assert same(back.state_dict(), model.state_dict())
    assert same(saved['optimizers'][0]['state'][0], optimizer.state_dict()['state'][0])
    for path in (tmp_path, tmp_path / 'ckpt.pt'):
        assert load(path)[1]['step'] == 4
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
    'none, with an adapter': ([0, 1, 2, 3], []),
    'own': ([0, Times([1, Window([2], K=2)], times=3), 3], ['Times']),
    'own core': ([0, Again([1, 2], r=3), 3], ['Again'])}


@pytest.fixture
def ordered(tiny):
    "ordered(name) -> a model of this order."
    def make(name):
        model = tiny(vocab_size=257)
        model.order = ORDERS[name][0]
        if core_of(model) or 'adapter' in name:
            model.adapter = new_adapter(32, 'linear')
        return model
    return make


@pytest.mark.parametrize('name', ORDERS)
def test_what_is_written_is_the_same_step_or_a_line(name, ordered, tmp_path):
    "Classes that are brought take no known name."
    model = ordered(name)
    save(tmp_path, model, [])
    for kind in ORDERS[name][1]:
        with pytest.raises(Refused, match=f'has a Step {kind}: --classes=FILE.py, where its class'):
            load_model(tmp_path)
    classes = Times, Again, type('Core', (Again,), {})
    back, tokens = load_model(tmp_path, classes=classes), torch.arange(24).view(2, 12)
    assert torch.equal(logits(back, tokens), logits(model, tokens))
    assert torch.equal(back.generate(tokens, 4, 0), model.generate(tokens, 4, 0))
    assert written(back.order) == written(model.order)
    assert list(map(type, steps_in(back.order))) == list(map(type, steps_in(model.order)))
    assert back.head.weight is back.embed.weight and not back.training
    assert same(back.state_dict(), model.state_dict())


def test_what_no_checkpoint_can_say_is_not_written(ordered, tiny, tmp_path):
    class Forgetful(Core):
        def __init__(self, items, scale=1, **options):
            super().__init__(items, **options)
            self.scale = scale

    model, patched = ordered('core'), tiny()
    patch(patched, (1, 2))              # the package's Window, which knows more than the book's
    for step, words in (
            (type('Core', (Core,), {})([1]), 'is not the Core that a checkpoint knows'),
            (Times([type('Window', (Step,), {})([1])]), 'is not the Window'),
            (patched.order[1], 'is not the Window'),
            (Window([1], lambda g, x, K: g(x)), 'no file can name the solver'),
            (Forgetful([1], scale=2), r'Forgetful.settings\(\) leaves out scale')):
        model.order = [0, step, 2]
        with pytest.raises(Refused, match=words):
            save(tmp_path, model, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', [name for name in ORDERS if 'adapter' not in name])
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
        words = 'holds one Core and no other' if core_of(model) else 'no family of transformers'
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
    window = dict(step='Window', items=[1], settings=dict(solver='evil.rk'))
    for name in ('Again', 'evil', 'evil.Again', 'evil:Again', str(file), f'{file}:Again'):
        said = dict(classes=str(file), file=str(file), module='evil')
        step = dict(step=name, items=[1], settings={}, **said)
        torch.save(state | said | dict(order=[0, step, 2], config=said), tmp_path / 'ckpt.pt')
        with pytest.raises(Refused, match='has a Step'):
            load_model(tmp_path)
    state |= dict(order=[0, window, 2], model=ordered('window').state_dict())
    torch.save(state, tmp_path / 'ckpt.pt')
    with pytest.raises(TypeError, match='not callable'):
        load_model(tmp_path)(torch.arange(4)[None])
    assert not ran.exists() and 'evil' not in sys.modules


def test_broken_checkpoints_are_refused_and_their_code_does_not_run(tmp_path, tiny):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'it ran'),)

    path = tmp_path / 'ckpt.pt'
    torch.save(dict(model=Code()), path)
    with_code = path.read_bytes()
    save(tmp_path, tiny(), [])
    whole = path.read_bytes()
    for raw in (b'', whole[:-1], with_code, pickle.dumps(Code())):
        path.write_bytes(raw)
        with pytest.raises(Refused, match='more than tensors and plain values|is damaged'):
            load_model(tmp_path)
        with pytest.raises((EOFError, RuntimeError, pickle.UnpicklingError)):
            load(tmp_path)
    assert not (tmp_path / 'it ran').exists()
    with pytest.raises(Refused, match='there is no checkpoint at .*nowhere'):
        load_model(tmp_path / 'nowhere')


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


def test_a_model_that_is_not_finite_is_opened_by_nobody(tiny, tmp_path):
    model = tiny(vocab_size=257, n_layer=2)
    model.layers[1].mlp.up.weight.data[3, 2] = math.inf
    with pytest.raises(Refused, match='not finite, so they are not saved'):
        save(tmp_path, model, [])
    save(tmp_path, tiny(vocab_size=257, n_layer=2), [])
    torch.save(state_of(tmp_path) | dict(model=model.state_dict()), tmp_path / 'ckpt.pt')
    with pytest.raises(Refused, match='up.weight holds numbers that are not finite'):
        load_model(tmp_path)


def test_a_claimed_folder_keeps_what_its_owner_calls_tmp(tmp_path):
    for name in ('thesis.12.tmp', 'ckpt.pt.123.nanodepth.tmp'):
        (tmp_path / name).touch()
    (tmp_path / 'old.12.nanodepth.tmp').mkdir()
    with claim(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {
            'thesis.12.tmp', 'old.12.nanodepth.tmp', 'lock'}
