"loop.py: the same layers several times, in an order that has a notation."
import pytest
import torch
from helpers import log_of, state_of

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.models.checkpoint import load_model
from nanodepth.loop import parse_loop, repeat_block
from nanodepth.model import LM, ModelConfig
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


def test_train_looped_then_untied(config, tmp_path):
    c, cut = config(n_layer=3, loop='1-1x2-1'), str(tmp_path / 'untied')
    train(c)
    last, looped = log_of(c)[-1], load_model(c.out_dir)
    assert (last['n_layer'], last['depth'], looped.order) == (3, 4, [0, 1, 1, 2])
    deep = LM(ModelConfig(n_layer=4, n_embd=32, n_head=2, context=16))
    assert last['flops'] == 12 * 64 * deep.flops_per_token()
    train(config('plain', n_layer=3))
    assert log_of(config('plain'))[-1]['loss'] != last['loss']

    nanodepth('cut', [c.out_dir, '--untie', f'--out={cut}'])
    with pytest.raises(Refused, match='has weights alone, or is of an earlier version'):
        train(config('untied', n_layer=3, loop='1-1x2-1'))
    free = config('free', init_from=cut, warmup_steps=0)
    train(free)
    tokens, layers = torch.arange(9)[None], load_model(free.out_dir).layers
    assert torch.equal(load_model(cut)(tokens), looped(tokens)) and len(layers) == 4
    assert not any(map(torch.equal, layers[1].parameters(), layers[2].parameters()))
    assert state_of(free)['inherited_flops'] == state_of(c)['flops'] > 0
