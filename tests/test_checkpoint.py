"""Checkpoints: what is saved comes back, and a bad file is refused. And no command writes over a
file of somebody else: it says a line before the work.
"""
import gc
import math
import os
import pickle
import runpy
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, Times, logits, refused, same, save_run, state_of

from nanodepth import save_hf, wrapped
from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused, refusals
from nanodepth.common.files import new_folder
from nanodepth.model import Span, spans_in
from nanodepth.models.authors import AuthorsCore
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import Adapter, Core, core_of
from nanodepth.training.checkpoint import load, save, span_class, written
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


class StreamCore(Core):
    "A core whose first state is the stream as it comes in."

    def first_state(self, run, e):
        return e


ORDERS = dict(
    core=[0, Core([1, 2], 3, 2), 3],
    authors=[0, AuthorsCore([1, 2], 3, 2, start='authors', state_std=0.3), 3],
    window=[0, Window([1, 2], 'euler', K=2, cache='last', T=1.5), 3],
    window_in_core=[0, Core([1, Window([2], K=3, beta=0.3)], r=2), 3],
    window_beside_core=[Window([0], K=2, decode='bypass'), Core([1, 2], r=2), 3],
    adapter_alone=[0, 1, 2, 3],
    own=[0, Times([1, Window([2], K=2)], times=3), 3],
    own_core=[0, StreamCore([1, 2], r=3), 3])


@pytest.fixture
def ordered(tiny):
    "ordered(name) -> a model of this order."
    def make(name):
        model = tiny(vocab_size=257)
        model.order = ORDERS[name]
        if core_of(model) or 'adapter' in name:
            model.adapter = Adapter(32)
            torch.nn.init.normal_(model.adapter.weight, std=0.1)
        return model
    return make


@pytest.mark.parametrize('name', ORDERS)
def test_an_order_that_is_saved_comes_back(name, ordered, tmp_path):
    model = ordered(name)
    save(tmp_path, model, [])
    back, tokens = load_model(tmp_path), torch.arange(24).view(2, 12)
    assert torch.equal(logits(back, tokens), logits(model, tokens))
    assert torch.equal(back.generate(tokens, 4, 0), model.generate(tokens, 4, 0))
    assert written(back.order) == written(model.order)
    assert list(map(type, spans_in(back.order))) == list(map(type, spans_in(model.order)))
    assert back.head.weight is back.embed.weight and not back.training
    assert same(back.state_dict(), model.state_dict())
    for span in spans_in(model.order):          # as a Span promises
        assert str(type(span)(span.items, **span.settings())) == str(span)


def test_times_may_stand_on_one_span():
    span = Times([1, 2])
    span.times = 5
    again = Times(span.items, **span.settings())
    assert again.unrolled() == [1, 2] * 5 and Times([1]).unrolled() == [1, 1]


NAMED = 'from nanodepth.model import Span\n\n\nclass Named(Span):\n    times = {times}\n'


def test_span_class_is_known_by_its_name(tmp_path):
    """Once it is imported. Of one file the last one counts, as of a cell that is run again, or of a
    script that is imported, too. Of several files they are refused."""
    with pytest.raises(Refused, match='the class Named of a Span is needed: import its file'):
        span_class('Named')
    files = [tmp_path / 'one.py', tmp_path / 'two.py']
    for file, times in zip(files, (2, 3)):
        file.write_text(NAMED.format(times=times))
    kept = [runpy.run_path(str(files[0]), run_name=name) for name in ('__main__', 'one')]
    assert span_class('Named') is kept[1]['Named']
    cells = [{}, {}]
    for cell in cells:
        exec('from nanodepth.model import Span\nclass Cell(Span): times = 4', cell)
    assert span_class('Cell') is cells[1]['Cell']
    kept.append(runpy.run_path(str(files[1]), run_name='two'))
    with pytest.raises(Refused, match='Spans of several files are called Named: .*one'):
        span_class('Named')
    kept.clear()
    gc.collect()


def test_what_no_checkpoint_can_say_is_not_saved(tiny, tmp_path):
    class Core(Span):                           # the name of the book's
        pass
    for order, message in (([0, Core([1]), 2], 'Spans of several files are called Core'),
                           ([0, Times([1], print), 2], 'no checkpoint of this run could be read')):
        with pytest.raises(Refused, match=message):
            save(tmp_path, tiny(order=order), [])
        assert not [*tmp_path.glob('*.pt')]
    order.clear()
    del Core
    gc.collect()


def test_a_checkpoint_of_other_settings_is_a_line(ordered, tmp_path):
    "As one that an earlier version wrote."
    save(tmp_path, ordered('core'), [])
    state = state_of(tmp_path)
    for order, message in (
            (dict(step='Core', items=[1, 2], settings=dict(r=3, start='normal')), "'start'"),
            (dict(step='Window', items=[1], settings=dict(solver='butcher', K=3)),
             'solver=butcher: known are'),
            (dict(step='Window', items=[1], settings=dict(cache='exact')), 'cache=exact')):
        torch.save(state | dict(order=[0, order, 3]), tmp_path / 'ckpt.pt')
        with pytest.raises(Refused, match=message):
            load_model(tmp_path)


def test_a_state_that_nobody_could_read_takes_no_checkpoints_place(tiny, tmp_path):
    "An optimizer makes its states at its first step, and so after the look at it before a run."
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters())
    save(tmp_path, model, [optimizer])
    optimizer.state[model.norm.weight]['n'] = np.float64(1)
    with pytest.raises(Refused, match='no checkpoint of this run could be read'):
        save(tmp_path, model, [optimizer])
    assert load(tmp_path)[1]['optimizers'][0]['state'] == {}


def test_a_file_that_a_checkpoint_names_is_never_run(ordered, tmp_path, monkeypatch):
    file, ran = tmp_path / 'evil.py', tmp_path / 'it ran'
    file.write_text(f'open({str(ran)!r}, "w")\nfrom nanodepth.retrofit import Core as Evil\n'
                    'rk = Evil\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    save(tmp_path, ordered('core'), [])
    state = state_of(tmp_path)
    window = dict(step='Window', items=[1], settings=dict(solver='evil.rk'))
    for name in ('Evil', 'evil', 'evil.Evil', 'evil:Evil', str(file), f'{file}:Evil'):
        said = dict(classes=str(file), file=str(file), module='evil')
        step = dict(step=name, items=[1], settings={}, **said)
        torch.save(state | said | dict(order=[0, step, 2], config=said), tmp_path / 'ckpt.pt')
        with pytest.raises(Refused, match='of a Span is needed'):
            load_model(tmp_path)
    state |= dict(order=[0, window, 2], model=ordered('window').state_dict())
    torch.save(state, tmp_path / 'ckpt.pt')
    with pytest.raises(Refused, match='solver=evil.rk: known are naive, rk'):
        load_model(tmp_path)
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
        for open_it in (load_model, load):
            with pytest.raises((EOFError, RuntimeError, pickle.UnpicklingError)):
                open_it(tmp_path)
    assert not (tmp_path / 'it ran').exists()
    with pytest.raises(Refused, match='there is no checkpoint at .*nowhere'):
        load_model(tmp_path / 'nowhere')


def test_a_model_that_is_not_finite_is_opened_by_nobody(tiny, tmp_path):
    model = tiny(vocab_size=257, n_layer=2)
    model.layers[1].mlp.up.weight.data[3, 2] = math.inf
    with pytest.raises(Refused, match='weights that are not finite are not saved'):
        save(tmp_path, model, [])
    save(tmp_path, tiny(vocab_size=257, n_layer=2), [])
    torch.save(state_of(tmp_path) | dict(model=model.state_dict()), tmp_path / 'ckpt.pt')
    with pytest.raises(Refused, match='up.weight holds numbers that are not finite'):
        load_model(tmp_path)


def test_a_models_folder_is_new_and_whole_or_not_there(tmp_path):
    (tmp_path / 'empty').mkdir()
    for name in ('new', 'empty'):
        with new_folder(tmp_path / name) as folder:
            (folder / 'file').touch()
        assert [path.name for path in (tmp_path / name).iterdir()] == ['file']
    with pytest.raises(Refused, match='new is there already'), new_folder(tmp_path / 'new'):
        pass
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / 'other'):
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ['empty', 'new']


COMMANDS = [        # (a command, files that stand in its way: any in a model's folder; in that of a
                    # dataset, one that would be written over or read with it)
    ('export', ['{run}', '{out}'], ['README.md', 'model.safetensors']),
    ('cut', ['{run}', '1-1-1', '--out={out}'], ['notes.txt', 'tokenizer.json']),
    ('evaluate', ['{run}', '--tasks=toy_copy', '--out={out}/e.csv'], ['e.csv']),
    ('prepare', ['{text}', '--out={out}'],
     ['train.json', 'val.json', 'val_000.bin', 'train_000.mask', 'ckpt.pt', 'mixture.json'])]
MINE = 'three weeks of notes'


def prepare(argv):
    with refusals('prepare'):
        runpy.run_path(str(ROOT / 'data/text/prepare.py'))['main'](argv)


@pytest.mark.parametrize('name, argv, file', [
    (name, argv, file) for name, argv, files in COMMANDS for file in files])
def test_no_command_writes_over_what_is_not_its_own(name, argv, file, tiny, tmp_path, capsys):
    run, out, text = tmp_path / 'run', tmp_path / 'out', tmp_path / 'notes.txt'
    save_run(run, tiny(vocab_size=257, n_layer=3, context=64))
    text.write_text('\n\n'.join(f'{i} ' * 900 for i in range(20)))
    out.mkdir()
    (out / file).write_text(MINE)
    argv = [word.format(run=run, out=out, text=text) for word in argv]
    with pytest.raises(SystemExit) as end:
        prepare(argv) if name == 'prepare' else nanodepth(name, argv)
    said = capsys.readouterr()
    assert end.value.code == 2 and said.err.startswith(f'{name}: ') and not said.out
    assert str(out) in said.err and [path.name for path in out.iterdir()] == [file]
    assert (out / file).read_text() == MINE
