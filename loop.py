"""Run the same layers several times: fewer weights than depth.

The idea: a looped model is an order with repeats. In the notation here, 4x6 is four layers that run
six times, and 4-4x4-4 is four layers, then four layers that run four times, and then four more. Its
weights are tied across depth, so it costs as much to run as a deep model and as little to store as
a shallow one. `untie` (grow.py, the next file) gives each run its own weights without changing a
single logit. Nothing in this file runs a model: Pass in model.py runs any list, and this file
writes lists.

Paper: "From Growing to Looping", section 3.1 (the notation), 4.2 (repeating a middle block that was
never trained to loop), 5.2 (recurrence added in the cool-down), Table 1 and Figure 1 (how good
loops are at equal parameters and at equal compute). In this notation the number after the x counts
all runs of a block, so x2 runs it twice.

Usage:
    order = parse_loop('4-4x4-4')                       # 12 unique layers, 24 deep
    order = repeat_block(model.order, 3, 2, times=2)    # items 3 and 4 of any order twice
    with in_order(model, order): ...                    # inside, the model runs this order
    python loop.py 4-4x4-4                              # prints the order
"""
import contextlib
import re
import sys

from model import Refused, require


def repeat_block(order, start, length, times=2):
    "Return the order in which `length` items, from `start` on, run `times` times in all."
    before, block, after = three_parts(order, start, length)
    return before + block * times + after


def three_parts(order, start, length):
    "Return the items of an order before `start`, the `length` items from there on, and the rest."
    order = list(order)
    end = start + length
    require(0 <= start < end <= len(order), f'items {start} to {end - 1} are not in {order}')
    return order[:start], order[start:end], order[end:]


def parse_loop(text):
    """Return the order of a text such as '4-4x4-4'. A segment is SIZE for layers that run once, or
    SIZExTIMES for a block that runs TIMES times."""
    order, unique = [], 0
    for segment in text.split('-'):
        match = re.fullmatch(r'([1-9]\d*)(?:x([1-9]\d*))?', segment)
        require(match, f'{segment!r} in the loop {text!r} is neither layers, such as 4, nor a '
                'block that runs several times, such as 4x6')
        size, times = int(match[1]), int(match[2] or 1)
        order += [*range(unique, unique + size)] * times
        unique += size
    return order


def fit_loop(text, n_layer):
    "Return parse_loop(text), which must name all layers of a model of n_layer layers."
    order = parse_loop(text)
    require(max(order) + 1 == n_layer, f'the loop {text} has {max(order) + 1} unique layers, but '
            f'the model has {n_layer}')
    return order


@contextlib.contextmanager
def in_order(model, order):
    """Inside this `with`, the model has another order. (Use it with functions that take a model,
    but no order.)"""
    before, model.order = model.order, list(order)
    try:
        yield model
    finally:
        model.order = before


if __name__ == '__main__':
    if len(sys.argv) != 2 or sys.argv[1].startswith('-'):
        raise SystemExit(__doc__)
    try:
        print(parse_loop(sys.argv[1]))
    except Refused as error:
        sys.exit(f'loop: {error}')
