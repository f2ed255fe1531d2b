"""The pictures of runs, and of several side by side with a table of them.

Usage:
    python nanodepth.py plot out/baseline                     # out/baseline/loss.png
    python nanodepth.py plot out/baseline out/lidas           # both: out/baseline/compare.png, .csv
    python nanodepth.py plot out/toys/* --out=out/toys.png    # NAME-SEED: averaged over the seeds
"""
from pathlib import Path

from report.logs import print_table, read_groups, table
from report.plot import draw_runs, show
from report.tables import write_csv
from tools.options import make_parser, picture


def main(argv=None):
    parser = make_parser(__doc__, out=(picture, 'the picture (default: in the first folder)'))
    parser.add_argument('runs', nargs='+', help='folders that train.py wrote')
    args = parser.parse_args(argv)
    groups = read_groups(args.runs)
    rows = table(groups) if len(args.runs) > 1 else []
    out = args.out or Path(args.runs[0]) / ('loss.png' if len(args.runs) == 1 else 'compare.png')
    show(out, draw_runs, groups)
    if len(args.runs) == 1:
        return print(f'numbers: {args.runs[0]}/log.jsonl')
    print_table(rows)
    write_csv(rows, out)
