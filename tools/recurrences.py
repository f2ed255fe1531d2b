"""Loss and primitives against the number of recurrences. An ordinary model among the runs is a line
to compare with.

Usage:
    python retrofit.py out/retrofit --eval --r=1,2,4,8,16       # a table, out/retrofit.png and .csv
"""
from pathlib import Path

from tqdm import tqdm

from common.columns import columns
from common.errors import Refused, number_list
from engine.checkpoint import build_model, load
from engine.measure import Scorer, parse_tasks
from engine.world import pick_device
from report.plot import draw_recurrences, show
from report.tables import numbers, over_seeds, run_names, write_csv
from retrofit import Recurrent
from tools.options import make_parser, pick_shown, picture


def measure_recurrences(args):
    "[{run, r, effective_params, loss, accuracies}]: r is 0 for an ordinary model."
    device, examples, rows = pick_device(args.device), parse_tasks(args.tasks, args.n), []
    rs = number_list('--r', args.r)
    if min(rs) < 1:
        raise Refused(f'--r={args.r}: the core runs at least once')
    for name, path in tqdm(run_names(args.paths).items(), desc='measuring', unit='run'):
        state = load(path)
        model = build_model(state, path).to(device).eval()
        score = Scorer(path, state, model, args.data, args.batches, examples)
        for r in rs if isinstance(model, Recurrent) else [0]:
            if r:
                model.mean = r
            effective = sum(p.numel() for i in model.order for p in model.layers[i].parameters())
            rows.append(dict(run=name, r=r, effective_params=effective, **score(model)))
    return rows


def main(argv=None):
    parser = make_parser(__doc__, 'data', 'batches', 'tasks', 'n', 'show', 'device',
                         r=('1,2,4,8,16', 'recurrences'), out=(picture, 'the picture'))
    parser.add_argument('paths', metavar='runs', nargs='+',
                        help='runs with a recurrent core, and ordinary ones to compare with')
    args = parser.parse_args(argv)
    rows = measure_recurrences(args)
    kinds = [key for key in rows[0] if key not in ('run', 'r', 'effective_params')]
    print(columns([['run', 'r', 'effective parameters', *kinds],
                   *([row['run'], str(row['r'] or 'ordinary'), f'{row["effective_params"]:,.0f}',
                      *numbers(row, kinds)] for row in over_seeds(rows, ['r'], kinds))]))
    out = args.out or Path('out') / f'{Path(args.paths[0]).name}.png'
    write_csv(rows, out)
    show(out, draw_recurrences, rows, pick_shown('show', args.show, kinds))
