"""lm-eval over any model, in any way of running. The harness knows thousands of tasks, so it is
shown a model of transformers with the same weights, which runs in the same way. Then a checkpoint
gets the scores that everybody else reports.
Usage: Harness(subject, ['arc_easy']).scores()      # {'arc_easy acc': Score, ...}
"""
import contextlib
import functools
import math
import shutil
import tempfile
import tomllib

from tqdm import tqdm

from nanodepth import ROOT
from nanodepth.common.errors import Refused, nearest, refusing, say
from nanodepth.common.whose import is_ours, local_folder
from nanodepth.grow import numbered_anew
from nanodepth.loop import in_order
from nanodepth.model import spans_in
from nanodepth.models.checkpoint import OURS, kind_of
from nanodepth.models.hf import as_theirs
from nanodepth.models.hf_recurrent import as_raven
from nanodepth.report.tables import UNITS, Score, mean
from nanodepth.retrofit import Core, core_of
from nanodepth.text.primitives import TASKS, TOY_TASKS
from nanodepth.text.tokenizer import write_tokenizer
from nanodepth.wrapper import Window
from nanodepth.wrapping.others import layers_of, replaying

EVALS = ROOT / 'data/evals'
# {name of a list: [(task, shots or None for the task's own, metric or None for its first)]}
LISTS = {name: [(*task, None, None)[:3] for task in tasks] for name, tasks in
         tomllib.loads((EVALS / 'lists.toml').read_text(encoding='utf-8')).items()}
LISTS['benchmarks'] = [task for name in ('closed', 'open', 'language', 'math')
                       for task in LISTS[name]]


@functools.cache
def manager(everything):
    "lm-eval's task manager. Reading all of its tasks takes seconds, ours take none."
    from lm_eval.tasks import TaskManager
    return TaskManager(include_path=str(EVALS), include_defaults=everything)


def loaded(manager, name, shots):
    """The group of that name, or its tasks. With `shots`, which the harness takes for a task only
    where it makes a new one of it."""
    found = manager.load([name])
    group = found['groups'].get(name)
    for task in () if shots is None else found['tasks'].values():
        task.set_config('num_fewshot', shots)
    return [group] if group else [*found['tasks'].values()]


def check_tasks(tasks, shots=None):
    """({task: its shots} of some tasks and lists, lm-eval's manager that knows them), or a
    refusal."""
    wanted = dict.fromkeys(task[:2] for name in tasks for task in LISTS.get(name, [(name, None)]))
    if shots is not None:
        wanted = dict.fromkeys((name, shots) for name, _ in wanted)
    names = [name for name, _ in wanted]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise Refused(f'{twice[0]} stands in two of {", ".join(tasks)}, with different numbers of '
                      'shots: give a command to each')
    known = manager(everything=not set(names) <= set(manager(everything=False).all_tasks))
    for name in names:
        if name not in known.all_tasks:
            near = nearest(name.partition('/')[0],
                           [*TASKS, *TOY_TASKS, *LISTS, *known.all_tasks])
            if name.startswith('questions_'):
                near = f': python {EVALS / "questions/prepare.py"} makes it, or make smollm2.'
            raise Refused(f'there is no task {name!r}{near} Lists: {", ".join(LISTS)}')
    return wanted, known


def evaluate(lm, tasks, keep, shots=None, **options):
    """lm-eval's results for a model that it knows: a dict. `tasks` are names of tasks and of lists;
    those that the dict `keep` holds are not loaded again. `shots`: instead of the tasks' own."""
    import lm_eval.api.task
    from lm_eval import simple_evaluate
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=True)       # ours says what is left
    wanted, known = check_tasks(tasks, shots)
    if (key := tuple(wanted)) not in keep:
        found = [each for name, shots in wanted for each in loaded(known, name, shots)]
        with refusing(ValueError):      # a task that stands in two of them
            known.load(found)
        keep[key] = found
    return simple_evaluate(lm, tasks=keep[key], task_manager=known, **options)


def scores_of(results):
    """{'arc_easy acc': Score} of lm-eval's results, in their order. A metric is a share if each
    document has from 0 to 1 of it, and more is better; that of a group, if each of its tasks'
    is."""
    is_number = lambda value: isinstance(value, (int, float))

    def documents(task, metric, how):
        samples = sorted(results.get('samples', {}).get(task, []), key=lambda each: each['doc_id'])
        return [each.get(metric) for each in samples if each['filter'] == how]

    def kind(task, metric, how):
        if not results['higher_is_better'].get(task, {}).get(metric, True):
            return 'less'
        within = results.get('group_subtasks', {}).get(task)
        values = documents(task, metric, how)
        is_share = (all(kind(each, metric, how) == 'share' for each in within) if within else
                    values and all(is_number(value) and 0 <= value <= 1 for value in values))
        return 'share' if is_share else 'score'
    scores = {}
    for task, result in results['results'].items():
        for key, value in result.items():
            metric, _, how = key.partition(',')
            if not how or metric.endswith('_stderr') or not is_number(value):
                continue
            error = result.get(f'{metric}_stderr,{how}')
            scores[f'{task} {metric}' + ('' if how == 'none' else f' ({how})')] = Score(
                kind(task, metric, how), value, error if is_number(error) else None,
                [d if is_number(d) else None for d in documents(task, metric, how)])
    return scores


def means_of(scores, names):
    """{'mean of wrapped': Score} of the lists among some names: over its tasks, each by the metric
    that counts. A list with a metric that is no share has none."""
    means = {}
    for name in names:
        of_list = []
        for task, _, metric in LISTS.get(name, ()):
            of_task = {key.removeprefix(f'{task} '): score for key, score in scores.items()
                       if key.startswith(f'{task} ') and not UNITS[score.kind].less_is_better}
            of_list.append(of_task.get(metric or next(iter(of_task), None)))
        if of_list and all(score and score.kind == 'share' for score in of_list):
            errors = [math.nan if score.error is None else score.error for score in of_list]
            means[f'mean of {name}'] = Score('share', mean([score.mean for score in of_list]),
                                             math.hypot(*errors) / len(errors), [])
    return means


class Harness:
    "lm-eval's tasks for a Subject."

    def __init__(self, subject, tasks):
        from transformers import AutoTokenizer
        self.subject, self.tasks, self.keep = subject, tasks, {}
        self.shots = next(iter(subject.asked.shots or ()), None)
        self.said = False           # how many examples stand before a question
        why = lambda error: (f"{subject.path} has no tokenizer of transformers' "
                             f'({str(error).splitlines()[0]})')
        with tempfile.TemporaryDirectory() as folder, refusing(ValueError, why=why):
            write_tokenizer(subject.path, folder, subject.answer.config.context)
            if kind_of(subject.path) != OURS:       # which says how transformers opens the others
                shutil.copy(local_folder(subject.path) / 'config.json', folder)
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if subject.asked.chat and not self.tokenizer.chat_template:
            raise Refused(f'{subject.path} has no chat template: leave --chat out')

    def refuse_spans(self):
        "What runs now, if lm-eval cannot be shown it as a model of transformers."
        spans = spans_in(getattr(self.subject.model, 'order', ()))
        are_known = all(isinstance(span, (Core, Window)) for span in spans)
        within = any(spans_in(span.items) for span in spans)
        if not are_known or within or core_of(self.subject.model) and len(spans) > 1:
            raise Refused('lm-eval is shown a model of transformers, which runs one core or '
                          f'windows, and not {spans}: ask without its tasks')

    def scores(self):
        "{name: Score} of the subject's model, as it runs now."
        from nanodepth.scoring.lm_eval_model import ScoredModel
        subject, asked = self.subject, self.subject.asked
        theirs, as_now = subject.model, contextlib.ExitStack()
        if core_of(theirs):
            theirs = as_raven(theirs)
        elif is_ours(theirs):       # its layers as they run, and the windows of them
            order, numbers = numbered_anew(theirs.order)
            with in_order(theirs, numbers):
                theirs = as_theirs(theirs)
            for window in spans_in(order):
                window.items = [layers_of(theirs)[i] for i in window.items]
                as_now.enter_context(replaying(window, layers_of(theirs), pin=False))
        with as_now, refusing(AssertionError):
            lm = ScoredModel(subject.answer, theirs, self.tokenizer, subject.path, asked.max_length)
            results = evaluate(lm, self.tasks, self.keep, shots=self.shots, log_samples=True,
                               apply_chat_template=asked.chat, limit=asked.limit)
        if not self.said:
            self.said = True
            each = ', '.join(f'{task} {n}' for task, n in results['n-shot'].items())
            say(f'examples before a question: {each}')
        scores = scores_of(results)
        return scores | means_of(scores, self.tasks)
