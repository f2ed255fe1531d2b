"""Two things that take turns, and their ratio turn by turn.

Usage:
    seconds = against(device, 5, ours=step, theirs=other)       # {name: seconds of each turn}
    middle, low, high = ratio(seconds['theirs'], seconds['ours'])
"""
import platform
import statistics
import time
from pathlib import Path

import torch


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
    seconds = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            took = clock(device, call)
            if turn:
                seconds[name].append(took)
    return seconds


def ratio(peer, mine):
    """(median, quarter, three quarters) of what the peer takes of our time, turn by turn: above 1,
    we are faster."""
    found = sorted(p / m for p, m in zip(peer, mine))
    return statistics.median(found), found[len(found) // 4], found[-1 - len(found) // 4]


def row(what, seconds, peer, mine='ours', note=''):
    a, b = statistics.median(seconds[mine]), statistics.median(seconds[peer])
    return what, *ratio(seconds[peer], seconds[mine]), f'{mine} {a:.4g} s, {peer} {b:.4g} s{note}'


def single(what, value, note):
    return what, value, value, value, note


def processor():
    info = Path('/proc/cpuinfo')
    found = ([line.split(':')[1].strip() for line in info.read_text().splitlines()
              if line.startswith('model name')] if info.exists() else [])
    return found[0] if found else platform.processor() or platform.machine()
