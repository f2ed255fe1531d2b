"""The pictures of runs, and of several side by side with a table of them.

Usage:
    python nanodepth.py plot out/baseline                     # out/baseline/loss.png
    python nanodepth.py plot out/baseline out/lidas           # both: out/baseline/compare.png, .csv
    python nanodepth.py plot out/toys/* --out=out/toys.png    # NAME-SEED: averaged over the seeds
    python nanodepth.py plot out/toys/* "--show=loss,depth 3"
"""
from dataclasses import dataclass
from pathlib import Path

from common.options import read, words
from report.plot import draw_runs, picture, show
from report.runs import kinds_of, print_table, read_groups, table
from report.tables import pick_shown, write_csv


@dataclass
class Options:
    runs: list[str] = words()           # folders that train.py wrote
    out: Path | None = picture()        # None: a picture in the first folder
    show: tuple[str, ...] = ()  # of several runs, such as loss,depth 3; (): all


def main(argv=None):
    options = read(Options, argv, __doc__)
    groups = read_groups(options.runs)
    rows = table(groups) if len(options.runs) > 1 else []
    name = 'loss.png' if len(options.runs) == 1 else 'compare.png'
    out = options.out or Path(options.runs[0]) / name
    kinds = kinds_of([log for group in groups.values() for log in group])
    rows_shown = pick_shown('show', options.show, ['loss', *(k for k in kinds if k != 'text')])
    show(out, draw_runs, groups, rows_shown)
    if len(options.runs) == 1:
        return print(f'numbers: {options.runs[0]}/log.jsonl')
    print_table(rows)
    write_csv(rows, out)
