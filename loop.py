"""Run the same layers several times: fewer weights than depth.

The idea: a looped model is an order with repeats, [0, 1, 2, 3] * 6 or [0..3] + [4..7] * 4 +
[8..11]. Its weights are tied across depth, so it costs as much to run as a deep model and as little
to store as a shallow one. `untie` from grow.py cuts the ties without changing a single logit:
growing is untied looping, and looping is tied growing.

Paper: "From Growing to Looping", section 3.1 (the notation), 4.2 (repeating a middle block that was
never trained to loop), 5.2 (recurrence added in the cool-down), Table 1 and Figure 1 (what it is
worth at equal parameters and equal compute).
Compare each run with two partners: as many unique layers run once (equal parameters), and as many
layers in all, none shared (equal compute at inference).
Here: the number after the x counts all runs, so that `8-4x2-12` runs layers 8 to 11 once more
than usual.

Usage:
    order = parse_loop('4-4x4-4')                       # 12 unique layers, 24 deep
    order = repeat_block(model.order, 3, 2, times=2)    # positions 3 and 4 of any order twice
    nanodepth evaluate out/loop_2x4 out/standard_2 out/baseline     # beside its partners
    python loop.py out/loop_2x4 --untie         # layers of its own (nanodepth cut), to train on
"""
import contextlib
import re

from nanodepth.common.errors import Refused
from nanodepth.model import check_order     # model.py beside this file (nanodepth/__init__.py)


def repeat_block(order, start, length, times=2):
    "The order with the `length` positions from `start` on run `times` times in all."
    if times < 1:
        raise Refused(f'times={times}: a block runs at least once (to leave it out, take it out '
                      'of the order)')
    before, block, after = cut_out(order, start, length)
    return before + block * times + after


def cut_out(order, start, length):
    "An order in three parts: the `length` positions from `start` on, and those before and after."
    order = list(order)
    if not (0 <= start and 1 <= length and start + length <= len(order)):
        raise Refused(f'a block of {length} layers from position {start} on does not lie within an '
                      f'order of {len(order)} positions')
    return order[:start], order[start:start + length], order[start + length:]


SEGMENT = r' *[1-9]\d* *(x *[1-9]\d* *)?'


def parse_loop(text):
    """'4-4x4-4' to an order: segments joined by '-', each SIZE layers, or SIZExTIMES for a block
    that runs TIMES times."""
    text = text.replace('×', 'x')
    if not re.fullmatch(f'{SEGMENT}(-{SEGMENT})*', text):
        raise Refused(f'the loop {text!r} must be segments joined by -, as in 4-4x4-4: each is '
                      'layers, such as 4, or layers by times, such as 4x6')
    order, unique = [], 0
    for part in text.split('-'):
        size, _, times = part.partition('x')
        order += [*range(unique, unique + int(size))] * int(times or 1)
        unique += int(size)
    return order


def fit_loop(text, n_layer):
    "parse_loop for a model of n_layer unique layers: each must run."
    order = parse_loop(text)
    if max(order) + 1 != n_layer:
        raise Refused(f'the loop {text!r} has {max(order) + 1} unique layers, but the model has '
                      f'{n_layer}')
    return order


def format_loop(order):
    """An order in the notation: the inverse of parse_loop, with neighbouring plain segments joined.
    [0, 1, 2, 1, 2, 3]: 0 to 2 are new, then it jumps back to 1. So 1 and 2 repeat: '1-2x2-1'."""
    order, parts = list(order), []
    done = at = 0       # layers below `done` are written down
    while at < len(order):
        seen = done     # the new layers are done, ..., seen - 1
        while at < len(order) and order[at] == seen:
            seen, at = seen + 1, at + 1
        back_to = order[at] if at < len(order) else seen
        block = [*range(back_to, seen)]
        times = 1
        while block and order[at:at + len(block)] == block:
            times, at = times + 1, at + len(block)
        back_into_what_is_written = back_to < done
        back_for_a_part_only = back_to < seen and times == 1
        ahead = back_to >= seen and at < len(order)
        if back_into_what_is_written or back_for_a_part_only or ahead:
            raise Refused(f'the order {order} is not a loop of blocks in the order of their '
                          'layers, so it has no notation')
        if back_to > done:
            parts.append(str(back_to - done))
        if seen > back_to:
            parts.append(f'{seen - back_to}x{times}')
        done = seen
    return '-'.join(parts)


def name_of(order):
    "An order in the notation, or layer by layer where it has none; '1,' is layer 1 alone."
    try:
        return format_loop(order)
    except Refused:
        return ' '.join(map(str, order)) + ',' * (len(order) == 1)


@contextlib.contextmanager
def running(model, order):
    "The model with another order, inside a `with`."
    if model.recurs:
        raise Refused('a recurrent core takes no other order of its layers')
    before = model.config.order
    model.config.order = check_order(order, len(model.layers))
    try:
        yield model
    finally:
        model.config.order = before


if __name__ == '__main__':
    from nanodepth.__main__ import main as nanodepth
    nanodepth('cut')        # which makes another model of a trained one: here, by --untie
