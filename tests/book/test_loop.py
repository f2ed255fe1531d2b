"Test loop.py: orders with repeats, and their notation."
import pytest
import torch
from helpers import state_of

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.models.checkpoint import load_model
from nanodepth.loop import parse_loop, repeat_block
from nanodepth.train import train


@pytest.mark.parametrize('text, order', [
    ('12', [*range(12)]), ('4x6', [0, 1, 2, 3] * 6), ('1x9', [0] * 9),
    ('4-4x4-4', [*range(4), *[4, 5, 6, 7] * 4, *range(8, 12)]),
    ('8-4x2-12', repeat_block(range(24), 8, 4)),
    ('2x3-2x2', [0, 1] * 3 + [2, 3] * 2)])
def test_parse_loop(text, order):
    assert parse_loop(text) == order
    assert repeat_block([0, 1, 2, 3], 1, 2, 3) == [0, 1, 2, 1, 2, 1, 2, 3]


def test_parse_loop_refuses():
    for text in ('', '4x', '4--4', '0x4', '4x0', '2.5', ' 2x2'):
        with pytest.raises(Refused, match='is neither layers, such as 4, nor a block'):
            parse_loop(text)


def test_looped_run_is_untied(config, tmp_path):
    c, cut = config(n_layer=3, loop='1-1x2-1'), str(tmp_path / 'untied')
    train(c)
    looped = load_model(c.out_dir)
    assert looped.order == [0, 1, 1, 2] and len(looped.layers) == 3
    nanodepth('cut', [c.out_dir, '--untie', f'--out={cut}'])
    with pytest.raises(Refused, match='has only weights, or is of an earlier version'):
        train(config('untied', n_layer=3, loop='1-1x2-1'))
    tokens, untied = torch.arange(9)[None], load_model(cut)
    assert torch.equal(untied(tokens), looped(tokens)) and len(untied.layers) == 4
    assert state_of(cut)['inherited_flops'] == state_of(c)['flops'] > 0
