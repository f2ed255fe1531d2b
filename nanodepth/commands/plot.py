"""Draw the curves of runs side by side, and write their numbers as CSV. Runs named NAME-0, NAME-1
and so on are averaged, up to the last step that all of them have reached.
    nanodepth plot out/baseline out/lidas           # writes out/baseline/curves.png and .csv
    nanodepth plot out/toys/* "--show=loss,aliases 3" --out=out/toys.png
"""
from dataclasses import dataclass
from pathlib import Path

from nanodepth.common.errors import check_choice
from nanodepth.common.options import read
from nanodepth.report.logs import kinds_of, measured, read_groups
from nanodepth.report.plot import draw_runs, show
from nanodepth.report.tables import write_csv


@dataclass
class Options:
    runs: list[str]             # folders that train.py wrote
    out: Path | None = None     # None: curves.png in the first folder
    show: tuple[str, ...] = ()  # some of the panels, such as loss,aliases 3; (): all


def main(argv=None):
    options = read(Options, argv, ['runs'])
    groups = read_groups(options.runs)
    kinds = ['loss', *(kind for kind in kinds_of(groups) if kind != 'text')]
    out = options.out or Path(options.runs[0]) / 'curves.png'
    for name in options.show:
        check_choice('--show', name, kinds)
    show(out, draw_runs, groups, options.show or kinds)
    rows = [dict(run=name) | row for name, group in groups.items() for row in measured(group)]
    print(f'numbers: {write_csv(rows, out)}')
