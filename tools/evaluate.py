"""lm-eval over any checkpoint: ours, looped or not, or a Hugging Face folder.

The idea: the language model evaluation harness knows thousands of tasks. adapters.py tells it what
our models are, so every checkpoint of this repo gets the scores that everybody else reports, in any
order of its layers, looped or not.

Paper: all four use the harness. LISTS holds their benchmarks by name: "From Growing to Looping",
section 3.2 (22 of them), "Retrofitted Recurrence", section 4 (GSM8K with one shot, read leniently),
the training-free wrapper's section 3.1.
Here: what the harness does not have comes from data/evals/, the primitives from primitives.py.
Documents begin as the model was trained: our own with an end of text, a Hugging Face checkpoint
with what its tokenizer.json puts first (as lm-eval's `hf`).

Usage:
    # a table with standard errors, out/evals/lidas.json
    python nanodepth.py evaluate out/lidas --tasks=arc_easy,hellaswag
    # no network needed; a list's name, another order
    python nanodepth.py evaluate out/lidas --tasks=primitives --loop=3-2x2-3
    # its own command line
    python nanodepth.py evaluate lm-eval run --model nanodepth --model_args pretrained=out/lidas ...
    python nanodepth.py evaluate lm-eval run --model nanodepth-hf --model_args \
        pretrained=HF_FOLDER,window=3-5,K=3 --tasks arc_easy
"""
import contextlib
import difflib
import functools
import json
import os
import sys
from pathlib import Path

from common.columns import columns
from common.errors import Refused, refusing
from common.files import read_json
from tools.adapters import adapter, hf_adapter
from tools.options import make_parser

ROOT = Path(__file__).resolve().parents[1]

# --------------------------------------------------------------------------- the papers' benchmarks
# (task, shots or None for the task's own); data/evals/README.md says of each whether it is the
# harness's or ours.

LISTS = {
    'closed': [(task, 0) for task in ('triviaqa', 'tydiqa_nocontext', 'nq_open', 'webqs')],
    'open': [(task, 0) for task in ('tydiqa_goldp_en', 'squadv2', 'drop', 'quac', 'coqa')],
    'language': [('lambada_openai', 0), ('hellaswag', 0)],
    'math': [(task, 5) for task in ('svamp', 'asdiv', 'mawps_addsub', 'mawps_multiarith',
                                    'mawps_singleop', 'mawps_singleeq')],
    'primitives': [(f'primitive_{task}', None) for task in ('copy_random', 'copy_words',
            'assign_basic', 'assign_math', 'assign_code')],
    'retrofit': [(task, 0) for task in ('arc_easy', 'arc_challenge', 'hellaswag', 'winogrande',
                                        'mmlu', 'piqa', 'openbookqa')] + [('gsm8k', 1)],
    'knowledge': [('mmlu_pro', None), ('gpqa_main_zeroshot', None), ('commonsense_qa', 7),
                  ('arc_challenge', 25), ('mmlu', 0), ('openbookqa', 0)],
}
LISTS['depth'] = [task for name in ('closed', 'open', 'language', 'math', 'primitives')
                  for task in LISTS[name]]


def pick_tasks(text):
    "Names of tasks and of lists, to what lm-eval takes."
    chosen = [task for name in text.split(',') for task in LISTS.get(name, [(name, None)])]
    return [name if shots is None else dict(task=name, num_fewshot=shots)
            for name, shots in dict.fromkeys(chosen)]


# -------------------------------------------------------------------------------------- the command

@functools.cache
def manager(everything):
    "Who knows the tasks. Reading all of the harness's thousands takes seconds, ours take none."
    from lm_eval.tasks import TaskManager

    class Manager(TaskManager):
        # a dict: tasks are loaded once, and stay; for a sweep, which asks for the same ones in
        # every cell
        keep = None

        def load(self, tasks, *args, **kwargs):
            key = json.dumps(tasks, default=str)
            if self.keep is None or key not in self.keep:
                found = super().load(tasks, *args, **kwargs)
                if self.keep is None:
                    return found
                self.keep[key] = found
            return self.keep[key]
    return Manager(include_path=str(ROOT / 'data/evals'), include_defaults=everything)


def run(path, tasks, *, limit=None, **options):
    "lm-eval's results for a checkpoint: a dict."
    return harness(adapter()(path, **options), tasks, limit=limit)


def harness(model, tasks, keep=None, **options):
    """lm-eval's results for a model that it knows: a dict. With a dict `keep`, tasks that it holds
    are not loaded again."""
    wanted = pick_tasks(tasks)
    from lm_eval import simple_evaluate
    names = [task['task'] if isinstance(task, dict) else task for task in wanted]
    known = manager(everything=not set(names) <= set(manager(everything=False).all_tasks))
    for name in names:
        if name not in known.all_tasks:
            near = difflib.get_close_matches(name, [*LISTS, *known.all_tasks], n=1)
            raise Refused(f'there is no task {name!r}' + (f': did you mean {near[0]!r}?' if near
                                                          else '') + f' Lists: {", ".join(LISTS)}')
    known.keep = keep
    return simple_evaluate(model, tasks=wanted, task_manager=known,
                           **dict(log_samples=False) | options)


def rows_of(results):
    "[{task, shots, metric, value, stderr}] in the order of the results."
    rows = []
    for task, found in results['results'].items():
        for key, value in found.items():
            metric, _, how = key.partition(',')
            if how and not metric.endswith('_stderr') and isinstance(value, (int, float)):
                error = found.get(f'{metric}_stderr,{how}')
                rows.append(dict(task=task, version=results['versions'].get(task),
                                 shots=results['n-shot'].get(task),
                                 metric=metric if how == 'none' else f'{metric} ({how})',
                                 filter=how, value=value,
                                 stderr=error if isinstance(error, (int, float)) else None))
    return rows


def explain(error, tasks):
    "One line for what went wrong. The hub's errors are OSErrors."
    if isinstance(error, ValueError):
        return error
    return (f'the checkpoint or the data of {tasks} could not be loaded '
            f'({type(error).__name__}): the tasks of the harness and names on the hub need a '
            'network once, those of the list primitives never. '
            f'{str(error).splitlines()[0] if str(error) else ""}')


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ['lm-eval']:
        adapter()
        # lm-eval's `hf` wants more packages than lm-eval
        with contextlib.suppress(ImportError):
            hf_adapter()
        from lm_eval.__main__ import cli_evaluate
        sys.argv = argv
        return cli_evaluate()
    parser = make_parser('Score a checkpoint with the language model evaluation harness.', 'loop',
                         'r', 'limit', 'dtype', 'device')
    parser.add_argument('--tasks', default='primitives',
                        help=f'names of tasks, or of lists: {", ".join(LISTS)}')
    parser.add_argument('path', help="a run of ours or a Hugging Face folder; 'lm-eval ...' is its "
                        "own command line, knowing the model nanodepth")
    parser.add_argument('--batch_size', type=int, default=8)
    parser.add_argument('--out', type=Path,
                        help='the numbers as JSON (default: out/evals/NAME.json)')
    args = parser.parse_args(argv)
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
    out = args.out or Path('out/evals') / f'{Path(args.path).name}.json'
    with refusing(ValueError, OSError, why=lambda error: explain(error, args.tasks)):
        results = run(args.path, args.tasks, limit=args.limit, loop=args.loop, r=args.r,
                      batch_size=args.batch_size, dtype=args.dtype, device=args.device)
    rows = rows_of(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    asked = dict(path=args.path, loop=args.loop, r=args.r, limit=args.limit)
    # of other tasks, orders or models
    kept = [row for row in (read_json(out)['rows'] if out.exists() else [])
            if (row['task'], {key: row[key] for key in asked}) not in [(new['task'], asked)
                    for new in rows]]
    out.write_text(json.dumps(dict(rows=kept + [asked | row for row in rows]), indent=1))
    print(columns([['task', 'shots', 'metric', 'value', 'standard error'],
                   *([row['task'], str(row['shots']), row['metric'], f'{row["value"]:.4f}',
                      '' if row['stderr'] is None else f'{row["stderr"]:.4f}']
                     for row in rows)]))
    print(f'numbers: {out}')
