"""An order as it is shown: the inverse of loop.py's parse_loop.

Usage:
    format_loop([0, 1, 2, 1, 2, 3])         # '1-2x2-1'
    name_of([0, 2, 1])                      # '0 2 1': it has no notation
"""
from nanodepth.common.errors import Refused


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
