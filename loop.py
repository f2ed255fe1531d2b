"""Run the same layers several times: fewer weights than depth.

The idea: a looped model is an order with repeats. In the notation here, 4x6 is four layers that run
six times, and 4-4x4-4 is four layers, the next four run four times, and then four more. Its weights
are tied across depth, so it costs as much to run as a deep model and as little to store as a
shallow one. `untie` (grow.py, the next file) cuts the ties without changing a single logit: growing
is untied looping, and looping is tied growing.

Paper: "From Growing to Looping", section 3.1 (the notation), 4.2 (repeating a middle block that was
never trained to loop), 5.2 (recurrence added in the cool-down), Table 1 and Figure 1 (what it is
worth at equal parameters and equal compute).
Here: the number after the x counts all runs of a block, so that x2 runs it twice.

Usage:
    order = parse_loop('4-4x4-4')                       # 12 unique layers, 24 deep
    order = repeat_block(model.order, 3, 2, times=2)    # positions 3 and 4 of any order twice
    python loop.py 4-4x4-4                              # the order that it means
    nanodepth cut out/loop_2x4 --untie                  # layers of its own, to train on
"""
import contextlib
import re
import sys

from nanodepth.common.errors import Refused, refusals


def repeat_block(order, start, length, times=2):
    "The order in which `length` positions, from `start` on, run `times` times in all."
    if times < 1:
        raise Refused(f'times={times}: a block runs at least once (to leave it out, take it out '
                      'of the order)')
    before, block, after = split(order, start, length)
    return before + block * times + after


def split(order, start, length):
    "An order in three parts: `length` positions from `start` on, and those before and after."
    order = list(order)
    if not (0 <= start and 1 <= length and start + length <= len(order)):
        raise Refused(f'a block of {length} layers from position {start} on does not lie within an '
                      f'order of {len(order)} positions')
    return order[:start], order[start:start + length], order[start + length:]


def parse_loop(text):
    """'4-4x4-4' to an order: segments joined by '-', each SIZE layers, or SIZExTIMES for a block
    that runs TIMES times."""
    order, unique = [], 0
    for part in text.replace('×', 'x').replace(' ', '').split('-'):
        segment = re.fullmatch('([1-9][0-9]*)(x[1-9][0-9]*)?', part)
        if segment is None:
            raise Refused(f'the loop {text!r} must be segments joined by -, as in 4-4x4-4: each is '
                          'layers, such as 4, or layers by times, such as 4x6')
        size, times = int(segment[1]), int((segment[2] or 'x1')[1:])
        order += [*range(unique, unique + size)] * times
        unique += size
    return order


def fit_loop(text, n_layer):
    "parse_loop for a model of n_layer unique layers: each must run."
    order = parse_loop(text)
    if max(order) + 1 != n_layer:
        raise Refused(f'the loop {text!r} has {max(order) + 1} unique layers, but the model has '
                      f'{n_layer}')
    return order


def format_loop(order):
    "An order in the notation: the inverse of parse_loop, with neighbouring plain segments joined."
    parts, new = [], 0          # layers below `new` are written
    rest = list(order)
    while rest:
        times = max(1, rest.count(new))
        size = rest.index(new, 1) if times > 1 else 1       # the block lasts until it returns
        block = [*range(new, new + size)] * times
        if rest[:len(block)] != block:
            raise Refused(f'the order {list(order)} is not a loop of blocks in the order of their '
                          'layers, so it has no notation')
        rest = rest[len(block):]
        if times == 1 and parts and parts[-1][1] == 1:
            parts[-1][0] += 1
        else:
            parts.append([size, times])
        new += size
    return '-'.join(f'{size}x{times}' if times > 1 else str(size) for size, times in parts)


@contextlib.contextmanager
def running(model, order):
    """The model with another order, inside a `with`: for what takes a model and no order, such as a
    function that scores it."""
    own = model.order
    in_config = model.config.order      # None there is each layer once, and stays so
    model.order = model.check_steps(order)
    try:
        yield model
    finally:
        model.config.order = in_config
        model.order = own


if __name__ == '__main__':
    if len(sys.argv) != 2 or sys.argv[1] in ('-h', '--help'):
        print(__doc__)
    else:
        with refusals('loop'):
            print(*parse_loop(sys.argv[1]))
