"Test loop.py: orders with repeats, and their notation."
import pytest

from loop import parse_loop, repeat_block
from model import Refused


@pytest.mark.parametrize('text, order', [
    ('12', [*range(12)]), ('4x6', [0, 1, 2, 3] * 6), ('1x9', [0] * 9),
    ('4-4x4-4', [*range(4), *[4, 5, 6, 7] * 4, *range(8, 12)]),
    ('8-4x2-12', repeat_block(range(24), 8, 4)),
    ('2x3-2x2', [0, 1] * 3 + [2, 3] * 2)])
def test_parse_loop_by_hand(text, order):
    assert parse_loop(text) == order
    assert repeat_block([0, 1, 2, 3], 1, 2, 3) == [0, 1, 2, 1, 2, 1, 2, 3]


def test_parse_loop_refuses_other_texts():
    for text in ('', '4x', '4--4', '0x4', '4x0', '2.5', ' 2x2'):
        with pytest.raises(Refused, match='is neither layers, such as 4, nor a block'):
            parse_loop(text)
