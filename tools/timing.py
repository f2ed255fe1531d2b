"""Two things that take turns, and their ratio turn by turn.

Usage:
    seconds = against(device, 5, ours=step, theirs=other)       # {name: seconds of each turn}
    middle, low, high = ratio(seconds['theirs'], seconds['ours'])
"""
import os
import platform
import re
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from common.errors import Refused


def clock(device, call):
    "Seconds of one call, after whatever the GPU still had to do."
    wait = getattr(torch, device.type).synchronize
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def against(device, turns=5, **calls):
    "{name: seconds of each turn} of calls that take turns, the first turn not counted."
    found = [[clock(device, call) for call in calls.values()] for _ in range(turns + 1)]
    return dict(zip(calls, map(list, zip(*found[1:]))))


def ratio(peer, mine):
    "(median, quarter, three quarters) of the peer's time over ours: above 1, we are faster."
    found = sorted(p / m for p, m in zip(peer, mine))
    return median(found), found[len(found) // 4], found[-1 - len(found) // 4]


def row(what, seconds, peer, mine='ours', note=lambda ours: ''):
    "What a benchmark yields; `note` says something about the median of our seconds."
    a, b = median(seconds[mine]), median(seconds[peer])
    medians = f'{mine} {a:.4g} s, {peer} {b:.4g} s'
    return what, *ratio(seconds[peer], seconds[mine]), medians + note(a)


def single(what, value, note):
    return what, value, value, value, note


def apart(call, *args, **environment):
    "call(*args) in a new process with these environment variables."
    with (patch.dict(os.environ, environment),
          ProcessPoolExecutor(1, get_context('spawn')) as pool):
        return pool.submit(call, *args).result()


def processor():
    info = Path('/proc/cpuinfo')
    found = re.findall(r'model name\s*: (.*)', info.read_text()) if info.exists() else []
    return found[0] if found else platform.processor() or platform.machine()


def known(kind, names, all):
    "The names asked for, or all there are."
    for name in names:
        if name not in all:
            raise Refused(f'there is no {kind} {name!r}: {", ".join(all)}')
    return names or list(all)
