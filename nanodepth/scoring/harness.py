"""Tasks of lm-eval. Its own HFLM scores our models and other families' models, in any way of
running. Only this file imports lm-eval, and it is imported only if a task of lm-eval is named.
Usage: lm_scores(Subject('out/smollm2', ScoreOptions(tasks='piqa')))    # {'piqa acc': Score, ...}
"""
import functools
import logging
import math
import tempfile
import tomllib
from types import SimpleNamespace

import torch
from lm_eval import simple_evaluate
from lm_eval.api import task as lm_eval_task
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from lm_eval.tasks import TaskManager
from tqdm import tqdm
from transformers import AutoTokenizer

from nanodepth import ROOT
from nanodepth.common.errors import nearest, as_refusal, say
from nanodepth.common.origin import device_of, is_ours
from nanodepth.model import Refused, require
from nanodepth.models.hf import not_opened
from nanodepth.report.contrasts import mean
from nanodepth.report.tables import Score
from nanodepth.scoring.likelihoods import likelihoods
from nanodepth.text.primitives import TASKS, TOY_TASKS
from nanodepth.text.tokenizer import json_next_to, generation_of, write_tokenizer

EVALS = ROOT / 'data/evals'
# {name of a list: [(task, shots or None for the task's own, metric or None for its first)]}
LISTS = {name: [(*task, None, None)[:3] for task in tasks] for name, tasks in
         tomllib.loads((EVALS / 'lists.toml').read_text(encoding='utf-8')).items()}
LISTS['benchmarks'] = sum((LISTS[name] for name in ('closed', 'open', 'language', 'math')), [])
lm_eval_task.tqdm = functools.partial(tqdm, disable=True)       # evaluate has a bar already
logging.getLogger('lm_eval').setLevel(logging.ERROR)
say_once = functools.cache(say)


class Model(HFLM):
    """Wraps a Subject's model for lm-eval. HFLM tokenizes, cuts and post-processes. How likely an
    answer is comes from likelihoods.py, which reads all options of a prompt in one forward pass."""

    def __init__(self, subject):
        model, options = subject.model, subject.options
        self.answer, self.path, context = subject.answer, subject.path, options.max_length
        if is_ours(model):      # HFLM needs its device, and a config of transformers
            context = min(context or math.inf, model.config.context)
            model = SimpleNamespace(device=device_of(model), config=SimpleNamespace(model_type=''))
        super().__init__(model, backend='causal', max_length=context, batch_size=1,
                         tokenizer=tokenizer_of(subject))
        require(self.tokenizer.chat_template or not options.chat,
                f'{self.path} has no chat template: leave out --chat')

    def loglikelihood(self, requests, disable_tqdm=True):
        return super().loglikelihood(requests, disable_tqdm=True)       # evaluate has a bar

    def _loglikelihood_tokens(self, requests, **_):
        requests_of = {}        # {prompt: [the indices of its requests]}
        for i, (_, prompt, option) in enumerate(requests):
            room = self.max_length + 1 - len(option)
            require(room > 0, f'an answer has {len(option)} tokens, but the context is only '
                    f'{self.max_length}')
            if len(prompt) > room:
                say_once(f'of prompts longer than {self.max_length} tokens, only the end is read')
            requests_of.setdefault(tuple(prompt[-room:]), []).append(i)
        found = likelihoods(self.answer, [list(prompt) for prompt in requests_of],
                            [[requests[i][2] for i in indices] for indices in requests_of.values()])
        answers = {}
        for indices, (values, is_greedy) in zip(requests_of.values(), found):
            require(not values.isnan().any(), 'the model computes logits that are not numbers')
            answers |= zip(indices, zip(values.tolist(), is_greedy.tolist()))
        return [answers[i] for i in range(len(requests))]

    def _model_generate(self, context, max_length, stop, **how):
        "Return a prompt (1, T) and, after it, the likeliest tokens up to the end of an answer."
        if not is_ours(self.answer):
            return super()._model_generate(context, max_length, stop, **how)
        require(not how.get('do_sample'), 'a task wants texts that are drawn (do_sample), but a '
                'model of ours writes the likeliest tokens here')
        ends = generation_of(self.path).get('eos_token_id')
        ends = {self.eot_token_id, *(ends if isinstance(ends, list) else [ends])}
        is_stopped = stop_sequences_criteria(self.tokenizer, stop, context.shape[1], 1)
        cache, inputs = {}, context
        while context.shape[1] < max_length:
            x = self.answer.norm(self.answer.hidden(inputs, cache=cache)[:, -1])
            inputs = self.answer.head(x).argmax(-1, keepdim=True)
            context = torch.cat((context, inputs), dim=1)
            if inputs.item() in ends or is_stopped(context, None).all():
                break
        return context


def tokenizer_of(subject):
    "Return the tokenizer as a transformers object. For a run of ours, it is written out first."
    with not_opened(subject.path), tempfile.TemporaryDirectory() as folder:
        if is_ours(subject.model) and not json_next_to(subject.path, 'tokenizer_config.json'):
            write_tokenizer(subject.path, folder, subject.model.config.context)
            return AutoTokenizer.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(subject.path, trust_remote_code=False)


@functools.cache
def find(names, shots=None):
    """Return lm-eval's tasks and groups with these names, the task manager that knows them, and the
    names. A name may be one of LISTS. `shots` replaces the number of shots that a list sets."""
    wanted = {}             # {task: its number of shots, or None for lm-eval's}
    for name in names:
        for task, shots_in_list, _ in LISTS.get(name, [(name, None, None)]):
            n = shots_in_list if shots is None else shots
            require(wanted.setdefault(task, n) == n, f'{task} is in two of {", ".join(names)}, '
                    'with different numbers of shots: run one command for each')
    known = TaskManager(include_path=str(EVALS), include_defaults=False)
    if not wanted.keys() <= {*known.all_tasks}:         # reading all of its own takes seconds
        known = TaskManager(include_path=str(EVALS))
    found = []
    for name, n in wanted.items():
        if name not in known.all_tasks:
            near = nearest(name, [*TASKS, *TOY_TASKS, *LISTS, *known.all_tasks])
            raise Refused(f'there is no task {name!r}{near} (lists: {", ".join(LISTS)}; '
                          f'questions_... are made by python {EVALS / "questions/prepare.py"})')
        loaded = known.load([name])
        if n is not None:
            for task in loaded['tasks'].values():
                task.set_config('num_fewshot', n)
        group = loaded['groups'].get(name)
        found += [group] if group else loaded['tasks'].values()
    return found, known, names


def lm_scores(subject):
    "Return {'arc_easy acc': Score, ...} for a Subject's model, as it runs now."
    options, scores, (tasks, known, names) = subject.options, {}, subject.theirs
    with as_refusal(AssertionError), torch.no_grad():
        results = simple_evaluate(Model(subject), tasks=tasks, task_manager=known,
                                  limit=options.limit, apply_chat_template=options.chat,
                                  log_samples=True)
    shots = ', '.join(f'{task} {n}' for task, n in results['n-shot'].items())
    say_once(f'examples before a question: {shots}')
    for task, result in results['results'].items():
        for key, value in result.items():       # a key is 'METRIC,FILTER'
            metric, _, filter_name = key.partition(',')
            if filter_name and not metric.endswith('_stderr') and isinstance(value, (int, float)):
                name = f'{task} {metric}'
                if filter_name != 'none':
                    name += f' ({filter_name})'
                scores[name] = score_of(results, task, metric, filter_name)
    for name in names:
        if score := mean_of_list(LISTS.get(name, []), scores):
            scores[f'mean of {name}'] = score
    return scores


def mean_of_list(tasks, scores):
    """Return the mean Score of a list of tasks, each in the metric that the list names or else in
    its first share, or None if a task has no share."""
    of_tasks = []
    for task, _, metric in tasks:
        of_task = [score for key, score in scores.items() if score.kind == 'share' and (
            key == f'{task} {metric}' if metric else key.startswith(f'{task} '))]
        of_tasks += of_task[:1]
    if not tasks or len(of_tasks) < len(tasks):
        return None
    errors = [math.nan if score.error is None else score.error for score in of_tasks]
    return Score('share', mean([score.mean for score in of_tasks]),
                 math.hypot(*errors) / len(errors), [])


def score_of(results, task, metric, filter_name):
    """Return a metric as a Score. It is a share if each document has a value from 0 to 1. A group
    of tasks has no documents, and is a share if its own value is from 0 to 1."""
    of_task = results['results'][task]
    value, error = of_task[f'{metric},{filter_name}'], of_task.get(f'{metric}_stderr,{filter_name}')
    samples = sorted(results['samples'].get(task, []), key=lambda sample: sample['doc_id'])
    answers = [sample.get(metric) for sample in samples if sample['filter'] == filter_name]
    if not all(isinstance(answer, (int, float)) for answer in answers):
        answers = []
    is_group = task in results.get('group_subtasks', {})
    is_share = (answers or is_group) and all(0 <= number <= 1 for number in (value, *answers))
    kind = 'share' if is_share else 'score'
    if results['higher_is_better'].get(task, {}).get(metric) is False:      # (None: not known)
        kind = 'less'
    return Score(kind, value, error if isinstance(error, float) else None, answers)
