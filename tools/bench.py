"""Speed and memory, always as a ratio of two things measured in one run: a number of seconds means
little elsewhere.

The idea: what this repo claims to save, it measures. Each benchmark times a thing and its peer;
they take turns, so that a busy machine slows both, and the ratio is taken turn by turn: the peer's
time over ours, so that above 1 we are faster. Its median counts, with the middle half of the turns
beside it (compiling is measured once).

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", Table 7 (FLOPs saved by growing;
`growing` shows what of it arrives on the clock).
Here: small shapes on a CPU; the peers are in peers.py. A CPU is measured twice: as it is, and as an
ordinary laptop, with the instruction sets that came after AVX2 switched off. gpu.py asks a GPU,
in nine minutes.

Usage:
    python nanodepth.py bench --out=docs/bench.md      # all of them, twice: 25 minutes
    python nanodepth.py bench training memory --capped=false     # some, as the machine is
"""
import argparse
import csv
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from common.columns import columns
from common.files import ROOT
from engine.launch import has_compiler
from tools.benchmarks import BENCHMARKS, EMULATED
from tools.timing import processor

# What makes of a newer x86 processor one that has AVX2 and no more: a variable each for torch's own
# kernels, oneDNN's and MKL's.
LAPTOP = dict(ATEN_CPU_CAPABILITY='avx2', ONEDNN_MAX_CPU_ISA='AVX2', MKL_ENABLE_INSTRUCTIONS='AVX2')


def measure(names, device):
    "A row for each thing measured, said as it comes: what, ratio, a quarter, three quarters, note."
    found = []
    for name in names:
        if name == 'recompiling' and not has_compiler():
            print('recompiling: left out: torch.compile needs a C++ compiler')
            continue
        try:
            for what, middle, low, high, note in BENCHMARKS[name](device):
                found.append([what, f'{middle:.3f}', f'{low:.3f} to {high:.3f}' if low != high
                              else '', note])
                print(f'{name:12} {middle:6.3f}  {what}: {note}', flush=True)
        except ImportError as error:
            print(f'{name}: left out: {error}')
    return found


def measure_capped(names):
    """The same in a process of its own, with the instruction set of an ordinary laptop: its rows,
    and what its torch calls the set."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'rows.csv'
        subprocess.run([sys.executable, str(ROOT / 'nanodepth.py'), 'bench', *names, '--device=cpu',
                        '--capped=only', f'--out={path}'], env=os.environ | LAPTOP, check=True)
        return list(csv.reader(path.open()))


def merged(rows, capped):
    "Two ratios beside each other; the notes are those of the machine as it is."
    other = {what: cells for what, *cells in capped}
    return [[what, middle, spread, *other.get(what, ['', ''])[:2], note]
            for what, middle, spread, note in rows]


def main(argv=None):
    parser = argparse.ArgumentParser(description='Measure speed, each thing against its peer.')
    parser.add_argument('names', nargs='*', help=f'of {", ".join(BENCHMARKS)}; none: all')
    parser.add_argument('--capped', choices=['true', 'false', 'only'], default='true',
                        help='measure once more with AVX2 and nothing newer (x86 alone); '
                        'only: that once, as CSV')
    parser.add_argument('--out', type=Path, help='write the table there too, such as docs/bench.md')
    parser.add_argument('--device', default='cpu', choices=['cpu'], help='gpu.py is for the others')
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f'there is no benchmark {unknown[0]!r}: {", ".join(BENCHMARKS)}')
    device, names = torch.device('cpu'), args.names or list(BENCHMARKS)
    instructions = torch.backends.cpu.get_cpu_capability()
    machine = (f'{processor()} ({instructions}), {torch.get_num_threads()} threads, torch '
               f'{torch.__version__}, Python {platform.python_version()}')
    print(machine)
    rows, head = measure(names, device), ['what, against what', 'ratio', 'half of the turns',
                                          'medians']
    if args.capped == 'only':
        csv.writer(args.out.open('w', newline='')).writerows(rows)
        return
    about = ''
    if args.capped == 'true' and platform.machine().lower() in ('x86_64', 'amd64'):
        print('\nonce more, with AVX2 and nothing newer')
        capped = measure_capped(names)
        rows, head = merged(rows, capped), [*head[:3], 'AVX2: ratio', 'half of the turns',
                                            'medians, as it is']
        slow = next((float(cells[1]) for cells in capped if cells[0] == EMULATED), 0.0)
        about = ('\nThe columns headed AVX2: the same machine with '
                 + ' '.join(f'{k}={v}' for k, v in LAPTOP.items()) + '.') + (
            f'\nThis cap had no effect: bfloat16 is as fast as before ({slow:.2f} of float32).'
            if slow > 0.5 else '')
    if args.out:
        args.out.write_text(f'# Speed\n\n`python nanodepth.py bench` on {machine}, '
                            f'{time.strftime("%Y-%m-%d")}. The ratio is what the peer takes of our '
                            'time (or memory),\nturn by turn: above 1, we need '
                            f'less.{about}\n\n{columns([head, *rows])}\n')
        print(args.out)
