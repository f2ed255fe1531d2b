"""Looped runs beside their partners, with equal parameters and with equal compute; and every block
of each run several times.

Usage:
    # a table, out/loop.png, out/loop_tradeoffs.png
    python loop.py out/loop_2x4 out/standard_2 out/baseline
    python loop.py --untie out/loop_2x4 out/untied  # cut the ties, to train on from there
"""
import shutil
from pathlib import Path

from tqdm import tqdm

from common.columns import columns
from common.errors import Refused, whole_numbers
from engine.checkpoint import build_model, describe, exists, load, save
from engine.launch import pick_device
from engine.measure import asked, looker
from grow import untie
from loop import format_loop, repeat_block, running
from report.logs import by_seed, mean, number, run_names, standard_error, write_csv
from report.plot import draw_repetitions, draw_tradeoffs, show
from tools.options import RUNS, make_parser


def facts(name, state, model):
    "What a checkpoint is and what it cost. A forward pass costs a third of a training step."
    try:
        loop = format_loop(model.order)
    except ValueError:
        loop = 'other'
    return dict(run=name, loop=loop, unique=len(model.layers), depth=len(model.order),
                params=model.num_params(),
                inference_flops=model.flops_per_token() // 3,
                # nan: nobody knows
                training_flops=state.get('flops', float('nan')) + state.get('inherited_flops', 0))


def repetitions(model, look, block, times, plain):
    """Every block of the order run several times: [{'start', 'times', 'loss', kind: accuracy}].
    `look` measures a model, and `plain` is what it said of this one as it is."""
    rows = []
    for start in range(len(model.order) - block + 1):
        for k in times:
            if k == 1:
                found = plain
            else:
                with running(model, repeat_block(model.order, start, block, k)):
                    found = look(model)
            rows.append(dict(start=start, times=k, **found))
    return rows


def partners(row, rows):
    """Of a looped model: ('equal parameters', an ordinary model), ('equal compute', one that costs
    as much to run)."""
    ordinary = [r for r in rows if r['unique'] == r['depth']]
    return [(what, r) for what, key in (('equal parameters', 'params'),
                                        ('equal compute', 'inference_flops'))
            for r in ordinary if row['unique'] < row['depth'] and r[key] == row[key]]


def cut_ties(source, target):
    "A looped run as an ordinary checkpoint of its unrolled depth, to go on from with init_from."
    if exists(target):
        raise Refused(f'{target} holds a checkpoint already: choose another folder')
    state = load(source)
    if state['kind'] != 'lm':
        raise Refused(f'{source} is a checkpoint of the kind {state["kind"]!r}, but only a run '
                      'of ours can be looped')
    model = build_model(state, source)
    free = untie(model, model.order)
    save(target, **{**state, **describe(free), 'optimizers': []})
    about = Path(source) / 'run.json'           # which tokenizer it reads
    if about.exists():
        shutil.copy(about, target)
    print(f'{target}: {len(free.layers)} layers of their own, where {source} runs '
          f'{len(model.layers)}')


def main(argv=None):
    parser = make_parser('Compare looped, grown and ordinary models, and repeat their blocks.',
                         'data',
                    'batches', 'tasks', 'n', 'show', 'device', out='out/loop.png')
    parser.add_argument('runs', nargs='+', help=RUNS)
    parser.add_argument('--untie', action='store_true',
                        help='with two folders: write the first, a looped run, to the second, its '
                        'ties cut')
    parser.add_argument('--block', type=int, default=2, help='how many layers are repeated')
    parser.add_argument('--times', default='1,2,3', help='how often they run')
    parser.add_argument('--shots', type=int, default=0)
    args = parser.parse_args(argv)
    if args.untie:
        if len(args.runs) != 2:
            parser.error('--untie takes two folders: a looped run, and where to write it')
        return cut_ties(*args.runs)
    found, sweeps = measure_runs(args)
    rows, kinds = [], [key for key in next(iter(sweeps.values()))[0] if key not in ('start',
            'times')]
    for group, names in by_seed({name: name for name in found}).items():
        numbers = {key: [found[n][key] for n in names] for key, v in found[names[0]].items()
                   if not isinstance(v, str)}
        rows.append(found[names[0]] | dict(run=group, seeds=len(names))
                    | {key: mean(v) for key, v in numbers.items()}
                    | {f'{key} se': standard_error(numbers[key]) for key in kinds})
    print_rows(rows, kinds)
    tradeoffs = args.out.with_stem(args.out.stem + '_tradeoffs')
    write_csv([dict(run=n, **row) for n, sweep in sweeps.items() for row in sweep], args.out)
    write_csv(rows, tradeoffs)
    shown = [kind for kind in kinds if not args.show or kind in args.show.split(',')] or kinds
    show(draw_repetitions, (sweeps, shown, args.block), args.out)
    show(draw_tradeoffs, (rows, kinds), tradeoffs)


def measure_runs(args):
    "({run: what it is and how good}, {run: its repetitions})."
    times, device = whole_numbers('--times', args.times), pick_device(args.device)
    if min(times) < 1 or args.block < 1 or args.batches < 1 or args.n < 1:
        raise Refused('--times, --block, --batches and --n must be at least 1')
    times, found, sweeps = sorted({1, *times}), {}, {}
    examples = asked(args.tasks, args.n, args.shots)
    for name, path in tqdm(run_names(args.runs).items(), desc='measuring', unit='run'):
        state = load(path)
        model = build_model(state, path).to(device).eval()
        if state['kind'] == 'recurrent':
            raise Refused(f'{name} has a recurrent core, which is measured by: python retrofit.py '
                          f'{path} --eval')
        look = looker(path, state, model, args.data, args.batches, examples)
        if args.block > len(model.order):
            raise Refused(f'--block={args.block}: {name} is {len(model.order)} layers deep')
        plain = look(model)
        if found and plain.keys() != next(iter(sweeps.values()))[0].keys() - {'start', 'times'}:
            raise Refused(f'{name} was trained on data with other kinds of answers '
                          f'({", ".join(plain)}): compare it apart')
        found[name] = facts(name, state, model) | plain
        sweeps[name] = repetitions(model, look, args.block, times, plain)
    return found, sweeps


def print_rows(rows, kinds):
    """A line for each run, and below a looped one how it differs from its partners; behind each
    number its standard error over the seeds, and behind a difference how many standard errors it
    is: below 2 it is not resolved."""
    lines = [['run', 'loop', 'unique', 'deep', 'params', 'FLOPs/token', 'training FLOPs', *kinds]]
    for r in rows:
        lines.append([r['run'], r['loop'], f'{r["unique"]:.0f}', f'{r["depth"]:.0f}',
                      f'{r["params"]:,.0f}',
                      f'{r["inference_flops"]:.2e}', f'{r["training_flops"]:.2e}',
                      *(number(r[k], r[f'{k} se'], k != 'loss') for k in kinds)])
        for what, p in partners(r, rows):
            lines.append([f'  minus {p["run"]}', what, '', '', '', '', ''])
            for kind in kinds:
                difference, error = (r[kind] - p[kind],
                                     (r[f'{kind} se'] ** 2 + p[f'{kind} se'] ** 2) ** 0.5)
                lines[-1].append(number(difference, percent=kind != 'loss')
                                 + (f' ({difference / error:+.1f} se)' if error > 0 else ''))
    print(columns(lines))
