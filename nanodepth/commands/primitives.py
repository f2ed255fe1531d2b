"""Accuracy on the reasoning primitives: runs, looped or not, against shots.

Usage:
    # a table, a picture, a CSV file
    nanodepth primitives out/lidas out/baseline --depths=0,1,2
"""
import itertools
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from nanodepth.common.columns import columns
from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.data.primitives import TASKS, few_shot, with_depths
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.engine.checkpoint import load_model
from nanodepth.engine.measure import score, set_depth
from nanodepth.engine.world import pick_device
from nanodepth.report.plot import draw_shots, show
from nanodepth.report.tables import by_seed, number, over_seeds, run_names, where, write_csv


@dataclass
class Options:
    WORDS = ['runs']
    # folders that train.py wrote, or Hugging Face checkpoints; NAME-SEED are averaged over seeds
    runs: list[str]
    # toy (toy_copy, toy_assign), papers (copy_random, copy_words, assign_basic, assign_math,
    # assign_code), or some of them and toy_code by name; toy_assign/3 is asked at that depth only.
    # auto: toy for a short context
    tasks: str = 'auto'
    depths: tuple[int, ...] = (0, 1, 2)         # of assignment: aliases before the value
    shots: tuple[int, ...] = (0,)   # such as 0,1,2,5: accuracy against shots; the papers have 5
    n: int = 200                    # examples of each task
    seed: int = 0                   # of every draw
    loop: str | None = None         # run the layers in another order, such as 3-2x2-3
    r: int | None = None            # how often a recurrent core runs
    device: str = 'auto'            # auto: cuda, else mps, else cpu
    out: Path = Path('out/primitives.png')


def pick_tasks(text, context):
    "The tasks' names. `auto`: the papers' where they fit into the context, else the toy's."
    if text == 'auto':
        text = 'toy' if context < 256 else 'papers'
    return {'toy': ['toy_copy', 'toy_assign'], 'papers': list(TASKS)}.get(text) or text.split(',')


def main(argv=None):
    options = read(Options, argv, __doc__)
    depths, shots = options.depths, options.shots
    device = pick_device(options.device)
    rows = []
    left_out = []
    paths = run_names(options.runs)
    lines = {name: group for group, names in by_seed(paths).items() for name in names}
    for name, path in tqdm(paths.items(), desc='scoring', unit='run'):
        model = load_model(path, device)
        tokenizer = get_tokenizer(path)
        set_depth(model, loop=options.loop, r=options.r)
        asked = with_depths(pick_tasks(options.tasks, model.config.context), depths)
        for (label, (task, depth)), k in itertools.product(asked.items(), shots):
            examples = few_shot(task, options.n, shots=k, depth=depth, seed=options.seed)
            try:
                accuracy, (low, high) = score(model, tokenizer, examples)
            except ValueError as error:         # too long for this model
                left_out.append(f'{label} with {k} shots is left out: {error}')
                continue
            rows.append(dict(run=name, line=lines[name], shots=k, task=label, n=options.n,
                             chance=1 / len(examples[0].options), accuracy=accuracy, low=low,
                             high=high))
    if not rows:
        raise Refused(f'nothing could be scored: {left_out[0]}')
    for line in dict.fromkeys(left_out):
        print(line)
    print_scores(rows)
    write_csv(rows, options.out)
    show(options.out, draw_shots, rows)


def print_scores(rows):
    """A line for each run and number of shots, a column a task: in %, with the standard error over
    the seeds, or else the interval."""
    tasks = {row['task']: f'{row["task"]}, % (chance {row["chance"]:.0%})' for row in rows}
    keys = 'line', 'shots'
    table = [['run', 'shots', *tasks.values()]]
    cells = over_seeds(rows, [*keys, 'task'], ['accuracy'])
    for at in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        table.append(list(map(str, at)))
        for task in tasks:
            matching = where(cells, **dict(zip(keys, at)), task=task)
            table[-1].append(' '.join(
                number(row['accuracy'], row['accuracy se'], percent=True) if row['seeds'] > 1 else
                f'{100 * row["accuracy"]:.1f} ({100 * row["low"]:.1f} to {100 * row["high"]:.1f})'
                for row in matching))
    print(columns(table))
