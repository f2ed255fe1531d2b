"loop.py: the same layers several times, in an order that has a notation."
import pytest
import torch
from conftest import log_of, same, state_of, weights_of

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.models.checkpoint import load_model
from nanodepth.loop import fit_loop, parse_loop, repeat_block
from nanodepth.model import LM, ModelConfig
from nanodepth.scoring.way import format_loop
from nanodepth.train import Config, plan, train


def test_by_hand():
    assert parse_loop('4x6') == [0, 1, 2, 3] * 6
    assert parse_loop('4-4x4-4') == [*range(4), *[4, 5, 6, 7] * 4, *range(8, 12)]
    assert parse_loop('8-4x2-12') == [*range(12), *range(8, 24)]
    assert repeat_block([0, 1, 2, 3], 1, 2, 3) == [0, 1, 2, 1, 2, 1, 2, 3]
    assert repeat_block(range(24), 8, 4, 2) == parse_loop('8-4x2-12')
    assert repeat_block([0, 1], 0, 2, 1) == [0, 1]


@pytest.mark.parametrize('text', ['1', '12', '4x6', '4-4x4-4', '8-4x2-12', '2x3-2x2', '3-2x2-2x3-1',
                                  '1x9', '1x2-1x2-1x2'])
def test_notation_there_and_back(text):
    assert format_loop(parse_loop(text)) == text
    assert format_loop(parse_loop('4-4-2x2-1-1')) == '8-2x2-2'      # neighbours are one


def test_loops_that_cannot_be():
    for text in ('', '4x', '4--4', '0x4', '4x0', '2.5', ' 2x2'):
        with pytest.raises(Refused, match='is neither layers, such as 4, nor a block'):
            parse_loop(text)
    with pytest.raises(Refused, match='4x2 has 4 unique layers, but the model has 3'):
        fit_loop('4x2', 3)
    assert fit_loop('1-2x2', 3) == [0, 1, 2, 1, 2]
    for order in ([0, 1, 0], [0, 2], [0, 0, 1, 0, 1]):
        with pytest.raises(Refused, match='so it has no notation'):
            format_loop(order)
    for start, length in ((3, 2), (-1, 2), (0, 0), (0, 5)):
        with pytest.raises(AssertionError):
            repeat_block(range(4), start, length)


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


def test_an_untied_loop_is_trained_on_with_layers_of_its_own(config, tmp_path):
    c, cut = config(**LOOPED), str(tmp_path / 'untied')
    train(c)
    nanodepth('cut', [c.out_dir, '--untie', f'--out={cut}'])
    with pytest.raises(Refused, match='weights without their optimizers: start .* --init_from='):
        train(config('untied', **LOOPED))
    free = config('free', init_from=cut, warmup_steps=0)
    train(free)
    tokens, layers = torch.arange(9)[None], load_model(free.out_dir).layers
    assert torch.equal(load_model(cut)(tokens), load_model(c.out_dir)(tokens)) and len(layers) == 4
    assert not any(map(torch.equal, layers[1].parameters(), layers[2].parameters()))
    assert state_of(free)['inherited_flops'] == state_of(c)['flops'] > 0


def test_cooldown_data_counts_from_its_first_step():
    c = Config(steps=12, warmup_steps=2, decay_steps=4, cooldown_data='other')
    assert [(now.data, now.batch) for now in (plan(c, step) for step in (0, 7, 8, 11))] == [
        ('data', 0), ('data', 7), ('cooldown_data', 0), ('cooldown_data', 3)]
