"""Looped runs beside their partners, with equal parameters and with equal compute; and every block
of each run several times.

Usage:
    python loop.py out/loop_2x4 out/standard_2 out/baseline     # a table and two pictures
    python loop.py --untie out/loop_2x4 out/untied  # cut the ties, to train on from there
"""
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from nanodepth.common.columns import columns
from nanodepth.common.errors import Refused
from nanodepth.common.files import new_model
from nanodepth.common.options import read
from nanodepth.data.tokenizer import keep_tokenizer
from nanodepth.engine.checkpoint import build_model, describe, load, save
from nanodepth.engine.foreign import answer_of, open_any, repeated
from nanodepth.engine.measure import parse_tasks, refuse_other_kinds, run_scorer
from nanodepth.engine.world import pick_device
from nanodepth.grow import untie
from nanodepth.loop import name_of
from nanodepth.model import LM
from nanodepth.report.plot import draw_repetitions, draw_tradeoffs, show
from nanodepth.report.tables import (difference, in_percent, number, numbers, over_seeds,
                                     pick_shown, run_names, write_csv)
from nanodepth.retrofit import Recurrent
from nanodepth.variants.hosts import depth_of


@dataclass
class Options:
    WORDS = ['runs']
    # folders that train.py wrote, or Hugging Face checkpoints; NAME-SEED are averaged over seeds
    runs: list[str]
    untie: bool = False         # of two folders, write the first's untied layers into the second
    block: int = 2              # how many layers are repeated
    times: tuple[int, ...] = (1, 2, 3)      # how often they run
    data: str | None = None     # a dataset; None: what the run was trained on
    batches: int = 8            # batches of validation data for each measurement
    tasks: str = ''             # primitives to score too: assign_code/1,copy_words
    n: int = 200                # examples of each task
    shots: int = 0              # examples before each question
    show: tuple[str, ...] = ()  # what the picture shows, such as loss,assign_code/1; (): all
    device: str = 'auto'        # auto: cuda, else mps, else cpu
    out: Path = Path('out/loop.png')


def facts(name, state, model):
    "What a checkpoint is and what it cost. A forward pass costs a third of a training step."
    layers, order = depth_of(model)
    unknown = float('nan')
    return dict(run=name, loop=name_of(order), unique=len(layers), depth=len(order),
                params=sum(p.numel() for p in model.parameters()),
                inference_flops=model.flops_per_token() // 3 if isinstance(model, LM) else unknown,
                training_flops=state.get('flops', unknown) + state.get('inherited_flops', 0))


def repetitions(model, score, block, times, plain):
    """Every block of the order run several times: [{'start', 'times', 'loss', kind: accuracy}].
    `plain` is what `score` says of the model as it is."""
    rows = []
    answer = answer_of(model)
    cases = [(start, k) for start in range(len(depth_of(model)[1]) - block + 1) for k in times]
    for start, k in tqdm(cases, 'blocks', unit='block', leave=False):
        scores = plain
        if k > 1:
            with repeated(model, start, block, k):
                scores = score(answer)
        rows.append(dict(start=start, times=k, **scores))
    return rows


def partners(row, rows):
    """Of a looped model: ('equal parameters', an ordinary model), ('equal compute', one that costs
    as much to run)."""
    ordinary = [r for r in rows if r['unique'] == r['depth']]
    return [(kind, r) for kind, key in (('equal parameters', 'params'),
                                        ('equal compute', 'inference_flops'))
            for r in ordinary if row['unique'] < row['depth'] and r[key] == row[key]]


def cut_ties(source, target):
    "A looped run as an ordinary checkpoint of its unrolled depth, to go on from with init_from."
    state = load(source)
    if state['kind'] != 'lm':
        raise Refused(f'{source} is a checkpoint of the kind {state["kind"]!r}, but only a run '
                      'of ours can be looped')
    model = build_model(state, source)
    free = untie(model, model.order)
    with new_model(target):
        keep_tokenizer(source, target)
        save(target, **{**state, **describe(free), 'optimizers': []})
    print(f'{target}: {len(free.layers)} layers of their own, where {source} runs '
          f'{state["model_config"]["n_layer"]}')


def main(argv=None):
    options = read(Options, argv, __doc__)
    if options.untie:
        if len(options.runs) != 2:
            raise Refused('--untie takes two folders: a looped run, and where to write it')
        return cut_ties(*options.runs)
    rows, sweeps = measure_runs(options)
    kinds = [key for key in sweeps[0] if key not in ('run', 'start', 'times')]
    rows = over_seeds(rows, [], kinds)
    print_rows(rows, kinds)
    tradeoffs = options.out.with_stem(options.out.stem + '_tradeoffs')
    write_csv(sweeps, options.out)
    write_csv(rows, tradeoffs)
    shown = pick_shown('show', options.show, kinds)
    show(options.out, draw_repetitions, sweeps, shown, options.block)
    show(tradeoffs, draw_tradeoffs, rows, kinds)


def measure_runs(options):
    "([a row for each run: what it is and how good], [a row for each repetition])."
    device = pick_device(options.device)
    rows = []
    sweeps = []
    plain = None
    examples = parse_tasks(options.tasks, options.n, options.shots)
    for name, path in tqdm(run_names(options.runs).items(), desc='measuring', unit='run'):
        state, model = open_any(path, device)
        if isinstance(model, Recurrent):
            raise Refused(f'{name} has a recurrent core, which is measured by: python retrofit.py '
                          f'{path} --eval')
        answer = answer_of(model)
        depth = len(depth_of(model)[1])
        score = run_scorer(path, state, answer, options.data, options.batches, examples)
        if options.block > depth:
            raise Refused(f'--block={options.block}: {name} is {depth} layers deep')
        before = plain
        plain = score(answer)
        refuse_other_kinds(name, plain, before)
        rows.append(facts(name, state, model) | plain)
        sweeps += [dict(run=name, **row) for row in
                   repetitions(model, score, options.block, sorted({1, *options.times}), plain)]
    return rows, sweeps


def print_rows(rows, kinds):
    """A line for each run, and below a looped one how it differs from its partners; after each
    number its standard error over the seeds, after a difference how many standard errors it
    is: below 2 it is not resolved."""
    lines = [['run', 'loop', 'unique', 'deep', 'params', 'FLOPs/token', 'training FLOPs', *kinds]]
    for r in rows:
        lines.append([r['run'], r['loop'], f'{r["unique"]:.0f}', f'{r["depth"]:.0f}',
                      f'{r["params"]:,.0f}',
                      f'{r["inference_flops"]:.2e}'.replace('nan', 'unknown'),
                      f'{r["training_flops"]:.2e}'.replace('nan', 'unknown'),
                      *numbers(r, kinds)])
        for kind, p in partners(r, rows):
            lines.append([f'  minus {p["run"]}', kind, '', '', '', '', ''])
            for kind in kinds:
                change, errors = difference(r, p, kind)
                lines[-1].append(number(change, percent=in_percent(kind))
                                 + ('' if errors is None else f' ({errors:+.1f} se)'))
    print(columns(lines))
