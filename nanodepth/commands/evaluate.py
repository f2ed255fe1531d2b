"""lm-eval over any checkpoint: ours, looped or not, or a Hugging Face folder.

The idea: the language model evaluation harness knows thousands of tasks, and its `hf` reads what
transformers reads. So a run of ours is exported to a temporary folder, looped or not, and gets the
scores that everybody else reports.

Paper: all four use the harness. LISTS holds their benchmarks by name: "From Growing to Looping",
section 3.2 (22 of them), "Retrofitted Recurrence", section 4 (GSM8K with one shot, read leniently),
the training-free wrapper's section 3.1.
Here: what the harness does not have comes from data/evals/, the primitives from primitives.py.
Documents begin with what a tokenizer.json puts first; an export's puts an end of text there, as in
training.

Usage:
    # a table with standard errors, out/evals/SmolLM-360M.json
    nanodepth evaluate SmolLM-360M --tasks=arc_easy,hellaswag
    nanodepth evaluate out/lidas --tasks=toy_assign/3 --loop=3-2x2-3  # no network needed
    nanodepth evaluate out/tinyllama --tasks=recurrent --r=8 --max_length=1024
"""
import functools
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanodepth import ROOT
from nanodepth.common.columns import columns
from nanodepth.common.errors import Refused, nearest, refusing
from nanodepth.common.files import read_json, reading, write_json
from nanodepth.common.options import read
from nanodepth.data.primitives import TASKS, TOY_TASKS, task_and_depth
from nanodepth.engine.checkpoint import (is_hugging_face, load_model, refuse_looped,
                                         refuse_not_finite)
from nanodepth.engine.foreign import is_foreign, repeated_block
from nanodepth.engine.hf import save_hf
from nanodepth.engine.measure import set_depth
from nanodepth.engine.raven import save_raven
from nanodepth.engine.world import pick_device
from nanodepth.loop import fit_loop
from nanodepth.variants.hosts import depth_of
from nanodepth.wrapper import patch

EVALS = ROOT / 'data/evals'
# The papers' benchmarks: (task, shots or None for the task's own). data/evals/README.md says of
# each whether it is the harness's or ours, and which are not here.
LISTS = {
    'closed': [(task, 0) for task in ('triviaqa', 'nq_open', 'webqs')],
    'open': [(task, 0) for task in ('tydiqa_goldp_en', 'squadv2', 'drop', 'coqa')],
    'language': [('lambada_openai', 0), ('hellaswag', 0)],
    'math': [('svamp', 5), ('asdiv', 5)],
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
    WORDS = ['run']
    run: str                            # a folder that train.py wrote, or a Hugging Face checkpoint
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
def lm_class():
    "lm-eval's `hf`, which takes nan for a score: one that does not. (lm-eval is no core package.)"
    with refusing(ImportError, why=lambda error: f'this needs lm-eval (pip install "lm-eval[hf]"): '
                  f'{error}'):
        from lm_eval.models.huggingface import HFLM

    class Harness(HFLM):
        def _model_call(self, *args, **kwargs):
            logits = super()._model_call(*args, **kwargs)
            if logits.isnan().any():
                raise Refused('the model gives logits that are not numbers: it has no score')
            return logits
    return Harness


def open_model(path, loop=None, r=None, device='auto', **options):
    """A checkpoint as lm-eval sees it. A run of ours, and one that shall run its layers in another
    order or another number of times, is exported first."""
    refuse_looped(path)
    options |= dict(device=str(pick_device(device)))
    if is_foreign(path):
        if r is not None:
            raise Refused(f'--r={r} is for models with a recurrent core')
        lm = lm_class()(str(path), **options)
        if loop:
            n = len(depth_of(lm.model)[0])
            start, block, times = repeated_block(fit_loop(loop, n), n)
            patch(lm.model, (start, start + block - 1), 'naive', times)
    elif is_hugging_face(path) and not loop and r is None:
        lm = lm_class()(str(path), **options)
    else:
        model = set_depth(load_model(path), loop=loop, r=r)
        with tempfile.TemporaryDirectory() as folder:
            save = save_raven if model.recurs else save_hf
            save(model, f'{folder}/export', tokenizer=path)
            lm = lm_class()(f'{folder}/export', trust_remote_code=model.recurs, **options)
    refuse_not_finite(lm.model, path)
    return lm


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


def scores_in(path):
    "The rows of a file of scores, none where there is none yet."
    with reading(path, then=': choose another --out'):
        return read_json(path)['rows'] if path.exists() else []


def add_scores(path, rows, keys):
    "Add rows to a file of scores. Those that stood there stay, also new ones, but for these keys."
    key_of = lambda row: [row.get(key) for key in keys]
    measured = [key_of(row) for row in rows]
    stay = [row for row in scores_in(path) if key_of(row) not in measured]
    write_json(path, dict(rows=stay + rows))


def main(argv=None):
    args = read(Options, argv, __doc__)
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
    out = args.out or Path('out/evals') / f'{Path(args.run).name}.json'
    scores_in(out)          # what cannot be added to is refused before the work
    lm = open_model(args.run, args.loop, args.r, args.device, batch_size=args.batch_size,
                    dtype=args.dtype, max_length=args.max_length)
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
