"""Run the same layers several times: fewer weights than depth.

The idea: a looped model is an order with repeats, [0, 1, 2, 3] * 6 or [0..3] + [4..7] * 4 + [8..11]. Its weights are tied
across depth, so it costs as much to run as a deep model and as little to store as a shallow one. `untie` from grow.py cuts
the ties without changing a single logit: growing is untied looping, and looping is tied growing.

Paper: "From Growing to Looping", section 3.1 (the notation), 4.2 (repeating a middle block that was never trained to
loop), 5.2 (recurrence added in the cool-down), Table 1 and Figure 1 (what it is worth at equal parameters and equal compute).
Here: `4x6` is six runs of four layers in all, and `8-4x2-12` runs layers 8 to 11 once more than an ordinary model does.

Each run goes with its partners: as many unique layers run once (equal parameters), or as many layers in all, each its own
(equal compute at inference).

Usage:
    order = parse_loop('4-4x4-4')                       # 12 unique layers, 24 deep; model(tokens, order=order) runs it
    order = repeat_block(model.order, 3, 2, times=2)    # positions 3 and 4 of any order twice
    python train.py config/loop_2x4.py                  # train one; then compare at equal parameters and at equal depth:
    python loop.py out/loop_2x4 out/standard_2 out/baseline
"""
import argparse
import contextlib
import re
import shutil
import sys
from pathlib import Path

from common.errors import Refused
from model import check_order


def parse_loop(text):
    "'4-4x4-4' to an order: segments joined by '-', each SIZE layers, or SIZExTIMES for a block that runs TIMES times."
    order, unique = [], 0
    for part in text.replace('×', 'x').split('-'):
        match = re.fullmatch(r'\s*(\d+)\s*(?:x\s*(\d+)\s*)?', part)
        size, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if size < 1 or times < 1:
            raise Refused(f'the loop {text!r} has a segment {part!r}, which is neither layers, such as 4, nor layers by '
                             "times, such as 4x6; segments are joined by '-', as in 4-4x4-4")
        order += [*range(unique, unique + size)] * times
        unique += size
    return order


def fit_loop(text, n_layer):
    "The same for a model of n_layer unique layers: each must run."
    order = parse_loop(text)
    if max(order) + 1 != n_layer:
        raise Refused(f'the loop {text!r} has {max(order) + 1} unique layers, but the model has {n_layer}')
    return order


def format_loop(order):
    "An order to the notation: the inverse of parse_loop, with neighbouring plain segments as one."
    order, parts, first, at = list(order), [], 0, 0     # layers below `first` are written down already
    while at < len(order):
        top = first                                     # a run of new layers: first, first + 1, ..., top - 1
        while at < len(order) and order[at] == top:
            top, at = top + 1, at + 1
        start = order[at] if at < len(order) else top   # here it jumps back to, or the end
        block = [*range(start, top)]
        times = 1
        while block and order[at:at + len(block)] == block:
            times, at = times + 1, at + len(block)
        if start < first or start < top and times == 1 or start >= top and at < len(order):
            raise Refused(f'the order {order} is not a loop of blocks in the order of their layers, so it has no notation')
        parts += [str(start - first)] * (start > first) + [f'{top - start}x{times}'] * (top > start)
        first = top
    return '-'.join(parts)


def repeat_block(order, start, length, times):
    "The order with the `length` positions from `start` on run `times` times in all."
    order = list(order)
    if not (0 <= start and 1 <= length and start + length <= len(order)):
        raise Refused(f'a block of {length} from position {start} on does not lie within an order of {len(order)} positions')
    if times < 1:
        raise Refused(f'times={times}: a block runs at least once (to leave it out, take it out of the order)')
    block = order[start:start + length]
    return order[:start] + block * times + order[start + length:]


@contextlib.contextmanager
def running(model, order):
    "The model with another order, for a while."
    before, model.config.order = model.config.order, check_order(order, len(model.layers))
    try:
        yield model
    finally:
        model.config.order = before


# ---------------------------------------------------------------------------------------------- what is measured

def asked(tasks, n, shots=0, seed=0):
    "'assign_code/1,copy_words' to examples of each: {'assign_code/1': [Example]}."
    from common.errors import whole_numbers
    from data.primitives import few_shot
    return {name: few_shot(name.partition('/')[0], n, shots=shots, depth=whole_numbers('--tasks', name.partition('/')[2] or '0')[0],
                           seed=seed)
            for name in filter(None, tasks.split(','))}


def looker(path, state, model, data, batches, examples, first=0):
    "A function that measures a model, on batches from the `first` on: {'loss', and the accuracy on each kind of answer and on each task}."
    from data.primitives import score
    from data.tokenizer import get_tokenizer
    from data.tokens import Loader, measure
    tokenizer, c = get_tokenizer(path), state.get('config', {})
    val, weights, data = None, None if data else c.get('data_weights'), data or c.get('data')
    if not (data or examples):
        raise Refused(f'{path} does not say what it was trained on: give --data, a dataset for its tokenizer, or --tasks')
    if data:
        val = Loader(data, c.get('batch_size', 8), c.get('context', min(model.config.context, 1024)), split='val', weights=weights,
                     vocab_size=model.config.vocab_size)
        if first and first + batches > len(val):
            raise Refused(f'the validation data has {len(val)} batches, {first + batches} were asked for: lower --batches')

    def look(model):
        loss, kinds = measure(model, val, batches, c.get('grad_accum', 1), first) if val else (None, {})
        return dict(**dict(loss=loss) if val else {}, **{kind: k['accuracy'] for kind, k in kinds.items() if kind != 'text'},
                    **{name: score(model, tokenizer, e)[0] for name, e in examples.items()})
    look.val = val
    return look


# ---------------------------------------------------------------------------------------------- the command

def facts(name, state, model):
    "What a checkpoint is and what it cost. A forward pass costs a third of a training step."
    try:
        loop = format_loop(model.order)
    except ValueError:
        loop = 'other'
    return dict(run=name, loop=loop, unique=len(model.layers), depth=len(model.order), params=model.num_params(),
                inference_flops=model.flops_per_token() // 3,
                training_flops=state.get('flops', float('nan')) + state.get('inherited_flops', 0))      # nan: nobody knows


def repetitions(model, look, block, times, plain):
    """Every block of the order run several times: [{'start', 'times', 'loss', kind: accuracy}]. `look` measures a model, and
    `plain` is what it said of this one as it is."""
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
    "Of a looped model: ('equal parameters', an ordinary model), ('equal compute', one that costs as much to run)."
    ordinary = [r for r in rows if r['unique'] == r['depth']]
    return [(what, r) for what, key in (('equal parameters', 'params'), ('equal compute', 'inference_flops'))
            for r in ordinary if row['unique'] < row['depth'] and r[key] == row[key]]


def cut_ties(source, target):
    "A looped run as an ordinary checkpoint of its unrolled depth, to go on from with init_from."
    from engine.checkpoint import build_model, describe, exists, load, save
    from grow import untie
    if exists(target):
        raise Refused(f'{target} holds a checkpoint already: choose another folder')
    state = load(source)
    if state['kind'] != 'lm':
        raise Refused(f'{source} is a checkpoint of the kind {state["kind"]!r}, but only a run of ours can be looped')
    model = build_model(state, source)
    free = untie(model, model.order)
    save(target, **{**state, **describe(free), 'optimizers': []})
    about = Path(source) / 'run.json'           # which tokenizer it reads
    if about.exists():
        shutil.copy(about, target)
    print(f'{target}: {len(free.layers)} layers of their own, where {source} runs {len(model.layers)}')


def main(argv=None):
    parser = argparse.ArgumentParser(description='Compare looped, grown and ordinary models, and repeat their blocks.')
    parser.add_argument('runs', nargs='+', help='folders that train.py wrote, or Hugging Face checkpoints; NAME-SEED are averaged over their seeds')
    parser.add_argument('--untie', action='store_true', help='with two folders: write the first, a looped run, to the second, its ties cut')
    parser.add_argument('--block', type=int, default=2, help='how many layers are repeated')
    parser.add_argument('--times', default='1,2,3', help='how often they run')
    parser.add_argument('--data', help='the dataset whose validation loss is measured (default: what the run was trained on)')
    parser.add_argument('--batches', type=int, default=8, help='batches of validation data for each measurement')
    parser.add_argument('--tasks', default='', help='primitives to score too, with their depth, such as assign_code/1,copy_words')
    parser.add_argument('--shots', type=int, default=0)
    parser.add_argument('--n', type=int, default=200, help='examples of each task')
    parser.add_argument('--show', help='what the picture of the repetitions shows, such as loss,assign_code/1 (default: all)')
    parser.add_argument('--device', default='auto')
    parser.add_argument('--out', type=Path, default=Path('out/loop.png'))
    args = parser.parse_args(argv)
    from tqdm import tqdm

    from common.errors import whole_numbers
    from engine.checkpoint import build_model, load
    from engine.launch import pick_device
    from report.logs import by_seed, mean, run_names, standard_error, write_csv
    from report.plot import draw_repetitions, draw_tradeoffs, show
    try:
        if args.untie:
            if len(args.runs) != 2:
                parser.error('--untie takes two folders: a looped run, and where to write it')
            return cut_ties(*args.runs)
        times, device = whole_numbers('--times', args.times), pick_device(args.device)
        if min(times) < 1 or args.block < 1 or args.batches < 1 or args.n < 1:
            raise Refused('--times, --block, --batches and --n must be at least 1')
        times = sorted({1, *times})
        found, sweeps = {}, {}
        examples = asked(args.tasks, args.n, args.shots)
        for name, path in tqdm(run_names(args.runs).items(), desc='measuring', unit='run'):
            state = load(path)
            model = build_model(state, path).to(device).eval()
            if state['kind'] == 'recurrent':
                raise Refused(f'{name} has a recurrent core, which is measured by: python retrofit.py {path} --eval')
            look = looker(path, state, model, args.data, args.batches, examples)
            if args.block > len(model.order):
                raise Refused(f'--block={args.block}: {name} is {len(model.order)} layers deep')
            plain = look(model)
            if found and plain.keys() != next(iter(sweeps.values()))[0].keys() - {'start', 'times'}:
                raise Refused(f'{name} was trained on data with other kinds of answers ({", ".join(plain)}): compare it apart')
            found[name] = facts(name, state, model) | plain
            sweeps[name] = repetitions(model, look, args.block, times, plain)
    except ValueError as error:
        print(f'loop.py: {error}', file=sys.stderr)
        raise SystemExit(2) from None
    rows = []
    for group, names in by_seed({name: name for name in found}).items():
        numbers = {key: [found[n][key] for n in names] for key, v in found[names[0]].items() if not isinstance(v, str)}
        rows.append(found[names[0]] | dict(run=group, seeds=len(names)) | {key: mean(v) for key, v in numbers.items()}
                    | {f'{key} se': standard_error(numbers[key]) for key in plain})
    kinds = list(plain)
    print_rows(rows, kinds)
    write_csv([dict(run=n, **row) for n, sweep in sweeps.items() for row in sweep], args.out)
    write_csv(rows, args.out.with_stem(args.out.stem + '_tradeoffs'))
    shown = [kind for kind in kinds if not args.show or kind in args.show.split(',')] or kinds
    show(draw_repetitions, (sweeps, shown, args.block), args.out)
    show(draw_tradeoffs, (rows, kinds), args.out.with_stem(args.out.stem + '_tradeoffs'))


def print_rows(rows, kinds):
    """A line for each run, and below a looped one how it differs from its partners; behind each number its standard error over
    the seeds, and behind a difference how many standard errors it is: below 2 it is not resolved."""
    from common.columns import columns
    from report.logs import number
    lines = [['run', 'loop', 'unique', 'deep', 'params', 'FLOPs/token', 'training FLOPs', *kinds]]
    for r in rows:
        lines.append([r['run'], r['loop'], f'{r["unique"]:.0f}', f'{r["depth"]:.0f}', f'{r["params"]:,.0f}',
                      f'{r["inference_flops"]:.2e}', f'{r["training_flops"]:.2e}', *(number(r[k], r[f'{k} se'], k != 'loss') for k in kinds)])
        for what, p in partners(r, rows):
            lines.append([f'  minus {p["run"]}', what, '', '', '', '', ''])
            for kind in kinds:
                difference, error = r[kind] - p[kind], (r[f'{kind} se'] ** 2 + p[f'{kind} se'] ** 2) ** 0.5
                lines[-1].append(number(difference, percent=kind != 'loss') + (f' ({difference / error:+.1f} se)' if error > 0 else ''))
    print(columns(lines))


if __name__ == '__main__':
    from nanodepth import main; main('loop')        # noqa: E702
