"""Speed and memory, always as a ratio of two things measured in one run: a number of seconds means
little elsewhere.

The idea: a thing and its peer (peers.py) take turns, so that a busy machine slows both, and the
ratio is taken turn by turn: the peer's time over ours, so that above 1 we are faster. Its median
counts, with the middle half of the turns beside it (compiling is measured once). A CPU is measured
twice: as it is, and as an ordinary laptop, without what came after AVX2. gpu.py asks a GPU.

Usage:
    python nanodepth.py bench --out=docs/bench.md      # all of them, twice: 25 minutes
    python nanodepth.py bench training memory --capped=false     # some, as the machine is
"""
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from common.columns import columns
from common.options import read, words
from engine.world import has_compiler
from tools.benchmarks import BENCHMARKS, EMULATED
from tools.timing import apart, known, processor

# These limit a newer x86 processor to AVX2: one variable each for torch's own kernels, oneDNN and
# MKL.
LAPTOP = dict(ATEN_CPU_CAPABILITY='avx2', ONEDNN_MAX_CPU_ISA='AVX2', MKL_ENABLE_INSTRUCTIONS='AVX2')


@dataclass
class Options:
    names: list[str] = words(least=0)       # some of benchmarks.BENCHMARKS; none: all of them
    capped: bool = True         # once more with AVX2 and nothing newer (x86)
    out: Path | None = None     # write the table there too, such as docs/bench.md


def measure(names):
    "A row for each thing measured, printed as it comes: what, ratio, the middle half, note."
    found = []
    for name in names:
        if name == 'recompiling' and not has_compiler():
            print('recompiling: left out: torch.compile needs a C++ compiler')
            continue
        try:
            for what, middle, low, high, note in BENCHMARKS[name]():
                spread = f'{low:.3f} to {high:.3f}' if low != high else ''
                found.append([what, f'{middle:.3f}', spread, note])
                print(f'{name:12} {middle:6.3f}  {what}: {note}', flush=True)
        except ImportError as error:
            print(f'{name}: left out: {error}')
    return found


def merged(rows, capped):
    "Two ratios beside each other; the notes are those of the machine as it is."
    other = {what: cells for what, *cells in capped}
    return [[what, middle, spread, *other.get(what, ['', ''])[:2], note]
            for what, middle, spread, note in rows]


def main(argv=None):
    args = read(Options, argv, __doc__)
    names = known('benchmark', args.names, BENCHMARKS)
    machine = (f'{processor()} ({torch.backends.cpu.get_cpu_capability()}), '
               f'{torch.get_num_threads()} threads, torch {torch.__version__}, '
               f'Python {platform.python_version()}')
    print(machine)
    head = ['what, against what', 'ratio', 'half of the turns', 'medians']
    rows, about = measure(names), ''
    if args.capped and platform.machine().lower() in ('x86_64', 'amd64'):
        print('\nonce more, with AVX2 and nothing newer')
        capped = apart(measure, names, **LAPTOP)
        rows = merged(rows, capped)
        head[3:] = 'AVX2: ratio', 'half of the turns', 'medians, as it is'
        cap = ' '.join(f'{name}={value}' for name, value in LAPTOP.items())
        about = f'\nThe columns headed AVX2: the same machine with {cap}.'
        slow = next((float(ratio) for what, ratio, *_ in capped if what == EMULATED), 0.0)
        if slow > 0.5:
            about += f'\nThe cap had no effect: bfloat16 is still fast ({slow:.2f} of float32).'
    if args.out:
        args.out.write_text(f'# Speed\n\n`python nanodepth.py bench` on {machine}, '
                            f'{time.strftime("%Y-%m-%d")}. The ratio is what the peer takes of our '
                            'time (or memory),\nturn by turn: above 1, we need '
                            f'less.{about}\n\n{columns([head, *rows])}\n')
        print(args.out)
