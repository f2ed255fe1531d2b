"""A progress bar that says, once it knows, how many minutes the work will take.

The idea: whoever waits wants to know for how long, and what would make it shorter.

Usage:
    for cell in timed(cells, 'cells', 'cell', shorter='--batches=1'): measure(cell)
"""
import math
import sys
import time

from tqdm import tqdm

ENOUGH = 1.0        # seconds of work, after which the rest is estimated


def timed(items, desc, unit, shorter):
    "The items, behind a bar. If they will take more than a minute, a line says so, once."
    began = time.monotonic()
    warned = False
    for i, item in enumerate(tqdm(items, desc=desc, unit=unit, leave=False), 1):
        yield item
        seconds = time.monotonic() - began
        if not warned and seconds > ENOUGH:
            warned = True
            minutes = seconds / i * len(items) / 60
            if minutes > 1:
                tqdm.write(f'{desc}: about {math.ceil(minutes)} minutes; {shorter} makes it '
                           'shorter', file=sys.stderr)
