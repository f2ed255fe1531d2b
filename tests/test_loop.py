"""loop.py: the same layers several times, in an order that has a notation.

Promised: the notation there and back; a run that is looped from its first step, or from its
cool-down on, by the data of its own; a loop of times 1 as the off value; and that an untied loop
goes on with the same loss, growing apart from there.
"""
import shutil

import numpy as np
import pytest
import torch
from conftest import log_of, same, weights_of

from nanodepth import train as train_file
from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.models.checkpoint import load, load_model
from nanodepth.loop import fit_loop, format_loop, parse_loop, repeat_block
from nanodepth.model import LM, ModelConfig
from nanodepth.text.loader import Loader, write_dataset
from nanodepth.train import train


def test_by_hand():
    assert parse_loop('4x6') == [0, 1, 2, 3] * 6
    assert parse_loop('4-4x4-4') == [*range(4), *[4, 5, 6, 7] * 4, *range(8, 12)]
    assert parse_loop('8-4x2-12') == [*range(12), *range(8, 24)]
    assert parse_loop(' 2 × 2 ') == [0, 1, 0, 1]
    assert repeat_block([0, 1, 2, 3], 1, 2, 3) == [0, 1, 2, 1, 2, 1, 2, 3]
    assert repeat_block(range(24), 8, 4, 2) == parse_loop('8-4x2-12')
    assert repeat_block([0, 1], 0, 2, 1) == [0, 1]


@pytest.mark.parametrize('text', ['1', '12', '4x6', '4-4x4-4', '8-4x2-12', '2x3-2x2', '3-2x2-2x3-1',
                                  '1x9', '1x2-1x2-1x2'])
def test_notation_there_and_back(text):
    assert format_loop(parse_loop(text)) == text
    assert format_loop(parse_loop('4-4-2x2-1-1')) == '8-2x2-2'      # neighbours are one


def test_loops_that_cannot_be():
    for text in ('', '4x', '4--4', '0x4', '2.5'):
        with pytest.raises(ValueError, match='must be segments joined by -'):
            parse_loop(text)
    with pytest.raises(ValueError, match="'4x2' has 4 unique layers, but the model has 3"):
        fit_loop('4x2', 3)
    for order in ([0, 1, 0], [0, 2], [0, 0, 1, 0, 1]):
        with pytest.raises(ValueError, match='so it has no notation'):
            format_loop(order)


LOOPED = dict(n_layer=3, loop='1-1x2-1')


def test_a_looped_run_is_logged_and_saved_as_such(config):
    c = config(**LOOPED)
    train(c)
    last, model = log_of(c)[-1], load_model(c.out_dir)
    assert (last['n_layer'], last['depth'], model.order) == (3, 4, [0, 1, 1, 2])
    assert (last['flops'] == 12 * 64
            * LM(ModelConfig(n_layer=4, n_embd=32, n_head=2, context=16)).flops_per_token())
    plain = config('plain', n_layer=3)
    train(plain)
    assert log_of(plain)[-1]['loss'] != last['loss']
    once = config('once', n_layer=3, loop='3')          # the off value
    train(once)
    assert same(weights_of(plain), weights_of(once))


def test_an_untied_loop_goes_on_with_the_same_loss(config, tmp_path, capsys):
    c = config(**LOOPED)
    train(c)
    nanodepth('cut', [c.out_dir, '--untie', f'--out={tmp_path / "untied"}'])
    assert load_model(tmp_path / 'untied').order == [0, 1, 2, 3]
    with pytest.raises(Refused,
                       match='holds weights without their optimizers, .* with --init_from='):
        train(config('untied', **LOOPED))
    runs = [config(name, init_from=str(path), warmup_steps=0)
            for name, path in (('tied', c.out_dir), ('free', tmp_path / 'untied'))]
    for run in runs:
        train(run)
    tied, free = ([line['loss'] for line in log_of(run)[1:]] for run in runs)
    assert tied[0] == free[0]
    # 1 and 2 were one layer: each has gone its own way since
    layers = load_model(runs[1].out_dir).layers
    assert (all(not torch.equal(a, b) for a, b in zip(layers[1].parameters(),
                                                      layers[2].parameters(), strict=True)))
    state = load(runs[0].out_dir)
    assert (load_model(runs[0].out_dir).order == [0, 1, 1, 2] and state['model_config']['n_layer']
            == 3)
    assert state['inherited_flops'] == load(c.out_dir)['flops'] > 0


def test_cooldown_data_counts_from_its_first_step(config, data, tmp_path, monkeypatch):
    rng, other = np.random.default_rng(1), str(tmp_path / 'other')
    for split in ('train', 'val'):
        write_dataset(other, split, 'bytes', rng.integers(0, 256, 4000))
    seen, update = [], train_file.backward
    monkeypatch.setattr(train_file, 'backward',
                        lambda *args: (seen.append(args[3][0]), update(*args))[1])
    c = config(cooldown_data=other)
    train(c)
    first, then = (Loader(folder, c.batch_size, c.context, seed=c.seed) for folder in (c.data,
            other))
    assert all(torch.equal(seen[i], first.batch(i)[0]) for i in range(8))
    assert all(torch.equal(seen[8 + i], then.batch(i)[0]) for i in range(4))


def test_a_trunk_branches_before_its_decay_and_not_after(config):
    fields = dict(n_layer=3, grow='lidas', grow_block=1)
    whole = config('whole', cooldown_loop='1-1x2-1', **fields)
    train(whole)
    trunk = config('trunk', steps=8, decay_steps=0, **fields)
    train(trunk)
    branch = config('branch', cooldown_loop='1-1x2-1', **fields)
    shutil.copytree(trunk.out_dir, branch.out_dir)
    train(branch)
    assert same(weights_of(whole), weights_of(branch))
    depths = [line['depth'] for line in log_of(whole)]
    assert depths == [1] * 2 + [2] * 2 + [3] * 5 + [4] * 4      # looped from the decay on
    with pytest.raises(Refused, match="holds a run with cooldown_loop='1-1x2-1', but this config "
                       "has '1-1x3-1'"):
        train(config('branch', cooldown_loop='1-1x3-1', **fields))
    with pytest.raises(Refused, match='holds a run with steps=8, but this config has 40'):
        train(config('trunk', steps=40, **fields))      # other stages would have begun
