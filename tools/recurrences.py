"""Loss and primitives against the number of recurrences. An ordinary model among the runs is a line
to compare with.

Usage:
    python retrofit.py out/retrofit --eval --r=1,2,4,8,16       # a table, out/retrofit.png and .csv
"""
from pathlib import Path

from tqdm import tqdm

from common.columns import columns
from common.errors import Refused, whole_numbers
from engine.checkpoint import build_model, load
from engine.launch import pick_device
from engine.measure import asked, looker
from report.logs import by_seed, mean, number, run_names, standard_error, write_csv
from report.plot import draw_recurrences, show
from retrofit import Recurrent
from tools.options import make_parser


def evaluate_recurrences(args):
    """python retrofit.py RUNS --eval: loss and primitives against r. An ordinary model among them
    is a line to compare with."""

    device, examples, rows = pick_device(args.device), asked(args.tasks, args.n), []
    paths, rs = run_names(args.paths), whole_numbers('--r', args.r)
    if min(rs) < 1:
        raise Refused(f'--r={args.r}: the core runs at least once')
    for name, path in tqdm(paths.items(), desc='measuring', unit='run'):
        state = load(path)
        model = build_model(state, path).to(device).eval()
        look = looker(path, state, model, args.data, args.batches, examples)
        for r in rs if isinstance(model, Recurrent) else [0]:
            if r:
                model.mean = r
            body = (model.effective_params(r) if r
                    else sum(p.numel() for p in model.layers.parameters())
                    * len(model.order) // len(model.layers))
            rows.append(dict(run=name, r=r, effective_params=body, **look(model)))
    kinds = [key for key in rows[0] if key not in ('run', 'r', 'effective_params')]
    lines = [['run', 'r', 'effective parameters', *kinds]]
    groups = by_seed({name: name for name in paths})
    for group, names in groups.items():
        for r in dict.fromkeys(row['r'] for row in rows if row['run'] in names):
            mine = [row for row in rows if row['run'] in names and row['r'] == r]
            lines.append([group, str(r or 'ordinary'), f'{mine[0]["effective_params"]:,}',
                          *(number(mean([m[k] for m in mine]), standard_error([m[k] for m in mine]),
                                   k != 'loss') for k in kinds)])
    print(columns(lines))
    out = args.out or Path('out') / f'{Path(args.paths[0]).name}.png'
    write_csv(rows, out)
    shown = [kind for kind in kinds if not args.show or kind in args.show.split(',')] or kinds
    show(draw_recurrences, (rows, shown, groups), out)


def main(argv=None):
    parser = make_parser('Loss and primitives against the number of recurrences.', 'data',
                         'batches', 'tasks', 'n', 'show', 'device')
    parser.add_argument('paths', nargs='+',
                        help='runs with a recurrent core, and ordinary ones to compare with')
    parser.add_argument('--out', type=Path, help='the picture')
    parser.add_argument('--r', default='1,2,4,8,16', help='recurrences')
    evaluate_recurrences(parser.parse_args(argv))
