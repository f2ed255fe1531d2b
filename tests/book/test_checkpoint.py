"""Test checkpoints: what is saved can be read again, and a bad file is refused. No command writes
over a file of somebody else: it refuses before the work."""
import gc
import math
import os
import pickle
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, Times, logits, same, save_run, state_of

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused, refusals
from nanodepth.common.files import new_folder
from nanodepth.model import Span, spans_in
from nanodepth.models.authors import AuthorsCore
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import Core, core_of
from nanodepth.train import train
from nanodepth.training.checkpoint import load, save, span_class, written
from nanodepth.wrapper import Window


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
    own=[0, Times([1, Window([2], K=2)], times=3), 3],
    own_core=[0, StreamCore([1, 2], r=3), 3])


@pytest.mark.parametrize('name', ORDERS)
def test_order_that_is_saved_comes_back(name, tiny, tmp_path):
    model = tiny(vocab_size=257, order=ORDERS[name])
    if core := core_of(model):
        torch.nn.init.normal_(core.adapter.weight, std=0.1)
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


def test_span_class_is_known_by_its_name(tmp_path):
    "Of one file the last one counts, as of a script that is imported, too. Of several files, none."
    with pytest.raises(Refused, match='the class Named of a Span is needed: name its file first'):
        span_class('Named')
    files = [tmp_path / 'one.py', tmp_path / 'two.py']
    for file, times in zip(files, (2, 3)):
        file.write_text('from nanodepth.model import Span\n'
                        f'class Named(Span):\n    def times(self):\n        return {times}\n')
    kept = [runpy.run_path(str(files[0]), run_name=name) for name in ('__main__', 'one', 'config')]
    assert span_class('Named') is kept[2]['Named']
    kept.append(runpy.run_path(str(files[1]), run_name='two'))
    with pytest.raises(Refused, match='Spans of several files are called Named: .*one'):
        span_class('Named')
    kept.clear()
    gc.collect()


def test_save_refuses_what_could_not_be_read(tiny, tmp_path):
    "And what was saved before stays."
    class Keeps(Span):
        def __init__(self, items, kept):
            super().__init__(items)
            self.kept = kept
    model, infinite = tiny(), tiny()
    infinite.layers[1].mlp.up.weight.data[3, 2] = math.inf
    save(tmp_path, model, {})
    before = (tmp_path / 'ckpt.pt').read_bytes()
    printing = [0, Keeps([1], print), 2]
    counts = dict(SGD={'norm.weight': dict(n=np.float64(1))})
    for refused_model, states, message in (
            (tiny(order=printing), {}, 'no checkpoint of this run could be read'),
            (model, counts, 'no checkpoint of this run could be read'),
            (infinite, {}, 'weights that are not finite are not saved')):
        with pytest.raises(Refused, match=message):
            save(tmp_path, refused_model, states)
        assert (tmp_path / 'ckpt.pt').read_bytes() == before


def test_a_span_that_could_not_be_opened_again_is_told_before_the_first_step(config):
    "And no checkpoint is left, which the next start would have to resume."
    class Core(Span):                           # the name of the book's
        pass
    c = config(n_layer=3, order=[0, Core([1]), 2])
    with pytest.raises(Refused, match='could be opened again: .*Spans of several files are called'):
        train(c)
    assert not (Path(c.out_dir) / 'ckpt.pt').exists()
    c.order.clear()
    del Core
    gc.collect()


def span(step, **settings):
    return dict(step=step, items=[1], settings=settings, file='evil.py', module='evil')


@pytest.mark.parametrize('item, message', [
    (span('Core', r=3, start='normal'), "'start'"),         # as an earlier version wrote
    (span('Window', solver='butcher', K=3), 'solver=butcher: known are'),
    (span('Window', cache='exact'), 'cache=exact'),
    (span('Window', solver='evil.rk'), 'solver=evil.rk: known are naive, anchored'),
    *((span(name), 'of a Span is needed')
      for name in ('Evil', 'evil', 'evil.Evil', 'evil:Evil', 'evil.py', './evil.py:Evil'))])
def test_order_of_a_checkpoint_is_known_or_refused(item, message, tiny, tmp_path, monkeypatch):
    "And a file that it names is never run."
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'evil.py').write_text('open("it ran", "w")\nfrom nanodepth.retrofit import Core\n'
                                      'rk = Evil = Core\n')
    save(tmp_path, tiny(), [])
    state = state_of(tmp_path) | dict(order=[0, item, 3], classes='evil.py', config=item)
    torch.save(state, tmp_path / 'ckpt.pt')
    with pytest.raises(Refused, match=message):
        load_model(tmp_path)
    assert not (tmp_path / 'it ran').exists() and 'evil' not in sys.modules


def test_broken_checkpoint_is_refused_and_its_code_not_run(tmp_path, tiny):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'it ran'),)

    path = tmp_path / 'ckpt.pt'
    torch.save(dict(model=Code()), path)
    with_code = path.read_bytes()
    save(tmp_path, tiny(), [])
    whole, state = path.read_bytes(), state_of(tmp_path)
    for raw in (b'', whole[:-1], with_code, pickle.dumps(Code())):
        path.write_bytes(raw)
        for open_it in (load_model, load):
            with pytest.raises((EOFError, RuntimeError, pickle.UnpicklingError)):
                open_it(tmp_path)
    assert not (tmp_path / 'it ran').exists()
    state['model']['norm.weight'][3] = math.inf
    torch.save(state, path)
    with pytest.raises(Refused, match='norm.weight has numbers that are not finite'):
        load_model(tmp_path)


def test_models_folder_is_whole_or_not_there(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / 'new') as folder:
        (folder / 'half').touch()
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]


COMMANDS = [        # (a command, files that stand in its way: any in a model's folder; in that of a
                    # dataset, one that would be written over or read with it)
    ('export', ['{run}', '{out}'], ['README.md', 'model.safetensors']),
    ('cut', ['{run}', '1-1-1', '--out={out}'], ['notes.txt', 'tokenizer.json']),
    ('evaluate', ['{run}', '--tasks=toy_copy', '--out={out}/e.csv'], ['e.csv']),
    ('prepare', ['{text}', '--out={out}'],
     ['train.json', 'val.json', 'val_000.bin', 'train_000.mask', 'ckpt.pt'])]
MINE = 'three weeks of notes'


def prepare(argv):
    with refusals('prepare'):
        runpy.run_path(str(ROOT / 'data/text/prepare.py'))['main'](argv)


@pytest.mark.parametrize('name, argv, file', [
    (name, argv, file) for name, argv, files in COMMANDS for file in files])
def test_command_writes_over_no_other_file(name, argv, file, tiny, tmp_path, capsys):
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
