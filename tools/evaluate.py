"""lm-eval over any checkpoint: ours, looped or not, or a Hugging Face folder.

The idea: the language model evaluation harness knows thousands of tasks. adapters.py tells it what
our models are, so every checkpoint of this repo gets the scores that everybody else reports.

Paper: all four use the harness. LISTS holds their benchmarks by name: "From Growing to Looping",
section 3.2 (22 of them), "Retrofitted Recurrence", section 4 (GSM8K with one shot, read leniently),
the training-free wrapper's section 3.1.
Here: what the harness does not have comes from data/evals/, the primitives from primitives.py.
Documents begin as the model was trained: our own with an end of text, a Hugging Face checkpoint
with what its tokenizer.json puts first (as lm-eval's `hf`).

Usage:
    # a table with standard errors, out/evals/SmolLM-360M.json
    python nanodepth.py evaluate SmolLM-360M --tasks=arc_easy,hellaswag
    python nanodepth.py evaluate out/lidas --tasks=toy_assign/3 --loop=3-2x2-3  # no network needed
    python nanodepth.py evaluate out/tinyllama --tasks=recurrent --r=8 --max_length=1024
    # its own command line
    python nanodepth.py evaluate lm-eval run --model nanodepth --model_args pretrained=out/lidas ...
    python nanodepth.py evaluate lm-eval run --model nanodepth-hf --model_args \\
        pretrained=HF_FOLDER,window=3-5,K=3 --tasks arc_easy
"""
import contextlib
import errno
import functools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.columns import columns
from common.errors import Refused, nearest, refusing
from common.files import ROOT, read_fields, reading, write_json
from common.options import read, word
from data.primitives import TASKS, TOY_TASKS, task_and_depth
from engine.foreign import is_foreign, repeated_block
from loop import fit_loop
from tools.adapters import adapter, hf_adapter
from variants.hosts import depth_of
from wrapper import patch

EVALS = ROOT / 'data/evals'
# The papers' benchmarks: (task, shots or None for the task's own). data/evals/README.md says of
# each whether it is the harness's or ours.
LISTS = {
    'closed': [(task, 0) for task in ('triviaqa', 'tydiqa_nocontext', 'nq_open', 'webqs')],
    'open': [(task, 0) for task in ('tydiqa_goldp_en', 'squadv2', 'drop', 'quac', 'coqa')],
    'language': [('lambada_openai', 0), ('hellaswag', 0)],
    'math': [(task, 5) for task in ('svamp', 'asdiv', 'mawps_addsub', 'mawps_multiarith',
                                    'mawps_singleop', 'mawps_singleeq')],
    'primitives': [(f'primitive_{task}', None) for task in TASKS],
    'retrofit': [(task, 0) for task in ('arc_easy', 'arc_challenge', 'hellaswag', 'winogrande',
                                        'mmlu', 'piqa', 'openbookqa')] + [('gsm8k', 1)],
    'recurrent': [('gsm8k_cot_sean', 1), ('minerva_math', 1)],      # with --max_length=1024
    'looped': [(task, 0) for task in (
        'arc_easy', 'arc_challenge', 'hellaswag', 'piqa', 'winogrande', 'lambada_openai', 'sciq',
        'openbookqa', 'commonsense_qa', 'truthfulqa_mc1', 'mmlu_elementary_mathematics',
        'mmlu_high_school_mathematics', 'mmlu_high_school_physics', 'mmlu_college_mathematics',
        'mmlu_formal_logic', 'mmlu_abstract_algebra')],
    'knowledge': [('mmlu_pro', None), ('gpqa_main_zeroshot', None), ('commonsense_qa', 7),
                  ('arc_challenge', 25), ('mmlu', 0), ('openbookqa', 0)],
}
LISTS['depth'] = [task for name in ('closed', 'open', 'language', 'math', 'primitives')
                  for task in LISTS[name]]


@dataclass
class Options:
    run: str = word()                   # a folder that train.py wrote, or a Hugging Face checkpoint
    # names of tasks, or of lists: closed, open, language, math, primitives, depth, retrofit,
    # recurrent, looped, knowledge
    tasks: str = 'primitives'
    limit: int | None = None            # documents of each task: to try things, not to report them
    loop: str | None = None             # run the layers in another order, such as 3-2x2-3
    r: int | None = None                # how often a recurrent core runs
    batch_size: int = 8                 # texts read at once
    max_length: int | None = None       # tokens of a prompt and its answer; None: the context
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'auto'           # of the weights
    device: str = 'auto'                # auto: cuda, else mps, else cpu
    out: Path | None = None             # the numbers as JSON; None: out/evals/NAME.json


@functools.cache
def manager(everything):
    "lm-eval's task manager. Reading all of its tasks takes seconds, ours take none."
    from lm_eval.tasks import TaskManager

    class Manager(TaskManager):
        keep = None     # a dict: what it holds is not loaded again, in any cell of a sweep
        shots = {}      # by name; the harness takes a dict of name and shots for a new task

        def load(self, tasks, *args, **kwargs):
            key = json.dumps([tasks, self.shots], default=str)
            if self.keep is not None and key in self.keep:
                return self.keep[key]
            loaded = super().load(tasks, *args, **kwargs)
            for name, n in self.shots.items():
                group = loaded['groups'].get(name)
                for task in group.get_all_tasks() if group else [loaded['tasks'][name]]:
                    task.set_config('num_fewshot', n)
            if self.keep is not None:
                self.keep[key] = loaded
            return loaded
    return Manager(include_path=str(EVALS), include_defaults=everything)


def in_harness(name):
    "assign_math/1 as the harness knows it: primitive_assign_math_d1. Other names stay."
    if name.partition('/')[0] not in (*TASKS, *TOY_TASKS):
        return name
    task, depth = task_and_depth(name)
    for known in [f'primitive_{task}_d{depth}'] + [f'primitive_{task}'] * (depth == 0):
        if (EVALS / f'{known}.yaml').exists():
            return known
    raise Refused(f'{name}: lm-eval has no form of that depth; there are '
                  f'{", ".join(sorted(p.stem for p in EVALS.glob(f"primitive_{task}*.yaml")))}')


def harness(model, tasks, keep=None, **options):
    """lm-eval's results for a model that it knows: a dict. `tasks` are names of tasks and of lists;
    those that the dict `keep` holds are not loaded again."""
    from lm_eval import simple_evaluate
    wanted = dict.fromkeys(task for name in tasks.split(',')
                           for task in LISTS.get(name, [(in_harness(name), None)]))
    names = [name for name, _ in wanted]
    known = manager(everything=not set(names) <= set(manager(everything=False).all_tasks))
    for name in names:
        if name not in known.all_tasks:
            near = nearest(name, [*LISTS, *known.all_tasks])
            raise Refused(f'there is no task {name!r}{near} Lists: {", ".join(LISTS)}')
    known.keep = keep
    known.shots = {name: shots for name, shots in wanted if shots is not None}
    return simple_evaluate(model, tasks=names, task_manager=known,
                           **dict(log_samples=False) | options)


def rows_of(results):
    "[{task, shots, metric, value, stderr}] in the order of the results."
    rows = []
    is_number = lambda value: isinstance(value, (int, float))
    for task, result in results['results'].items():
        for key, value in result.items():
            metric, _, how = key.partition(',')
            if how and not metric.endswith('_stderr') and is_number(value):
                error = result.get(f'{metric}_stderr,{how}')
                rows.append(dict(task=task, version=results['versions'].get(task),
                                 shots=results['n-shot'].get(task),
                                 metric=metric if how == 'none' else f'{metric} ({how})',
                                 filter=how, value=value,
                                 stderr=error if is_number(error) else None))
    return rows


# what the disk says, and not the network
LOCAL = errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR


def explain(error, tasks):
    "One line for what went wrong. The hub's errors are OSErrors."
    if isinstance(error, ValueError):
        return error
    if isinstance(error, OSError) and error.errno in LOCAL:
        return f'{error.filename or "a file"}: {error.strerror}'
    first, *_ = [*str(error).splitlines(), '']
    return (f'the checkpoint or the data of {tasks} could not be loaded ({type(error).__name__}): '
            'tasks of the harness and names on the hub need a network once, the primitives never. '
            f'{first}')


@dataclass
class Scores:
    "A file of scores: a row for each task or dataset, metric and setting."
    rows: list[dict]


def scores_in(path):
    "The rows of a file of scores, none where there is none yet."
    with reading(path, then=': choose another --out'):
        return read_fields(Scores, path).rows if path.exists() else []


def add_scores(path, rows, keys):
    "Add rows to a file of scores. Those that stood there stay, also new ones, but for these keys."
    key_of = lambda row: [row.get(key) for key in keys]
    measured = [key_of(row) for row in rows]
    stay = [row for row in scores_in(path) if key_of(row) not in measured]
    write_json(path, dict(rows=stay + rows))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ['lm-eval']:
        adapter()
        with contextlib.suppress(ImportError):      # `hf` wants more packages than lm-eval
            hf_adapter()
        from lm_eval.__main__ import cli_evaluate
        runs = argv[1:] and argv[1] not in ('ls', 'validate')   # the word `run` may be left out
        if runs and not any(arg.startswith('--include_path') for arg in argv):
            argv = [*argv, '--include_path', str(EVALS)]        # our tasks are found, too
        sys.argv = argv
        with refusing(ValueError, KeyError, OSError, why=lambda error: f'lm-eval: {error}'):
            return cli_evaluate()
    args = read(Options, argv, __doc__)
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
    out = args.out or Path('out/evals') / f'{Path(args.run).name}.json'
    scores_in(out)          # what cannot be added to is refused before the work
    with refusing(ValueError, OSError, ImportError, why=lambda error: explain(error, args.tasks)):
        options = dict(batch_size=args.batch_size, dtype=args.dtype, device=args.device,
                       max_length=args.max_length)
        if is_foreign(args.run):
            lm = hf_adapter()(args.run, **options)
            if args.r is not None:
                raise Refused(f'--r={args.r} is for models with a recurrent core')
            if args.loop:
                n = len(depth_of(lm.model)[0])
                start, block, times = repeated_block(fit_loop(args.loop, n), n)
                patch(lm.model, (start, start + block - 1), 'naive', times)
        else:
            lm = adapter()(args.run, loop=args.loop, r=args.r, **options)
        scores = rows_of(harness(lm, args.tasks, limit=args.limit))
    asked = dict(path=args.run, loop=args.loop, r=args.r, limit=args.limit)
    if args.max_length:
        asked |= dict(max_length=args.max_length)
    if args.dtype != 'auto':
        asked |= dict(dtype=args.dtype)
    rows = [asked | row for row in scores]
    add_scores(out, rows, ['task', 'path', 'loop', 'r', 'limit', 'max_length', 'dtype'])
    print(columns([['task', 'shots', 'metric', 'value', 'standard error'],
                   *([row['task'], str(row['shots']), row['metric'], f'{row["value"]:.4f}',
                      '' if row['stderr'] is None else f'{row["stderr"]:.4f}']
                     for row in rows)]))
    print(f'numbers: {out}')
