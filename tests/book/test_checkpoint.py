"Test training/checkpoint.py: what is saved can be read again, and a bad file is refused."
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
from helpers import Times, logits, same, state_of

from model import Refused, Span, spans_in
from retrofit import Core, core_of
from train import train
from training.checkpoint import load, save, span_class, written
from wrapper import Window


class StreamCore(Core):
    "A core whose first state is the stream as it comes in."

    def first_state(self, run, e):
        return e


ORDERS = dict(
    core=[0, Core([1, 2], 3, 2), 3],
    window=[0, Window([1, 2], 'euler', K=2, cache='last', T=1.5), 3],
    window_in_core=[0, Core([1, Window([2], K=3, beta=0.3)], r=2), 3],
    window_beside_core=[Window([0], K=2, decode='bypass'), Core([1, 2], r=2), 3],
    own=[0, Times([1, Window([2], K=2)], times=3), 3],
    own_core=[0, StreamCore([1, 2], r=3), 3])


@pytest.mark.parametrize('name', ORDERS)
def test_a_model_that_was_saved_is_the_same_when_it_is_read(name, tiny, tmp_path):
    model = tiny(vocab_size=257, order=ORDERS[name])
    if core := core_of(model):
        torch.nn.init.normal_(core.adapter.weight, std=0.1)
    save(tmp_path, model, [])
    back, tokens = load(tmp_path)[0].eval(), torch.arange(24).view(2, 12)
    assert torch.equal(logits(back, tokens), logits(model, tokens))
    assert torch.equal(back.generate(tokens, 4, 0), model.generate(tokens, 4, 0))
    assert written(back.order) == written(model.order)
    assert list(map(type, spans_in(back.order))) == list(map(type, spans_in(model.order)))
    assert back.head.weight is back.embed.weight
    assert same(back.state_dict(), model.state_dict())
    for span in spans_in(model.order):          # settings() are the arguments of the class
        assert str(type(span)(span.items, **span.settings())) == str(span)


def test_the_class_of_a_span_is_found_by_its_name(tmp_path):
    """If a file was run twice, its last class counts. If two files define a class of this name, the
    name is refused."""
    with pytest.raises(Refused, match='the class Named of a Span is needed: name its file first'):
        span_class('Named')
    files = [tmp_path / 'one.py', tmp_path / 'two.py']
    for file, times in zip(files, (2, 3)):
        file.write_text('from model import Span\n'
                        f'class Named(Span):\n    def times(self):\n        return {times}\n')
    kept = [runpy.run_path(str(files[0]), run_name=name) for name in ('__main__', 'one', 'config')]
    assert span_class('Named') is kept[2]['Named']
    kept.append(runpy.run_path(str(files[1]), run_name='two'))
    with pytest.raises(Refused, match='Spans of several files are called Named: .*one'):
        span_class('Named')
    kept.clear()
    gc.collect()


def test_save_refuses_what_could_not_be_read(tiny, tmp_path):
    "The checkpoint that was saved before stays."
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


def test_a_span_with_the_name_of_another_is_refused_before_the_first_step(config):
    "No checkpoint is left, because the next start would have to resume it."
    class Core(Span):                           # retrofit.py has a Core
        pass
    c = config(n_layer=3, order=[0, Core([1]), 2])
    with pytest.raises(Refused, match='could be opened again: .*Spans of several files are called'):
        train(c)
    assert not (Path(c.out_dir) / 'ckpt.pt').exists()
    c.order.clear()
    del Core
    gc.collect()


def span(step, **settings):
    "Return a Span as a checkpoint stores it, with a file that must not be run."
    return dict(step=step, items=[1], settings=settings, file='evil.py', module='evil')


@pytest.mark.parametrize('item, message', [
    (span('Core', r=3, start='normal'), "'start'"),         # as an earlier version wrote
    (span('Window', solver='butcher', K=3), 'solver=butcher: known are'),
    (span('Window', cache='exact'), 'cache=exact'),
    (span('Window', solver='evil.rk'), 'solver=evil.rk: known are naive, anchored'),
    *((span(name), 'of a Span is needed')
      for name in ('Evil', 'evil', 'evil.Evil', 'evil:Evil', 'evil.py', './evil.py:Evil'))])
def test_an_unknown_span_is_refused_and_its_file_not_run(item, message, tiny, tmp_path,
                                                         monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'evil.py').write_text('open("it ran", "w")\nfrom retrofit import Core\n'
                                      'rk = Evil = Core\n')
    save(tmp_path, tiny(), [])
    state = state_of(tmp_path) | dict(order=[0, item, 3], classes='evil.py', config=item)
    torch.save(state, tmp_path / 'ckpt.pt')
    with pytest.raises(Refused, match=message):
        load(tmp_path)
    assert not (tmp_path / 'it ran').exists() and 'evil' not in sys.modules


def test_a_broken_checkpoint_is_refused_and_its_code_not_run(tmp_path, tiny):
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
        with pytest.raises((EOFError, RuntimeError, pickle.UnpicklingError)):
            load(tmp_path)
    assert not (tmp_path / 'it ran').exists()
