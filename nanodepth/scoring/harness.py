"""lm-eval's tasks: its own HFLM scores our models and other families' models, as they run now, in
any way. Only this file imports lm-eval, and only if one of its tasks is named.
Usage: lm_scores(Subject('out/smollm2', Asked(tasks='piqa')))       # {'piqa acc': Score, ...}
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
from nanodepth.common.errors import nearest, refusing, say
from nanodepth.common.whose import device_of, is_ours
from nanodepth.model import Refused, require
from nanodepth.models.hf import not_opened
from nanodepth.report.contrasts import mean
from nanodepth.report.tables import Score
from nanodepth.scoring.likelihoods import likelihoods
from nanodepth.text.primitives import TASKS, TOY_TASKS
from nanodepth.text.tokenizer import beside, generation_of, write_tokenizer

EVALS = ROOT / 'data/evals'
# {name of a list: [(task, shots or None for the task's own, metric or None for its first)]}
LISTS = {name: [(*task, None, None)[:3] for task in tasks] for name, tasks in
         tomllib.loads((EVALS / 'lists.toml').read_text(encoding='utf-8')).items()}
LISTS['benchmarks'] = sum((LISTS[name] for name in ('closed', 'open', 'language', 'math')), [])
lm_eval_task.tqdm = functools.partial(tqdm, disable=True)       # ours says what is left
logging.getLogger('lm_eval').setLevel(logging.ERROR)
say_once = functools.cache(say)


class Model(HFLM):
    """Wraps a Subject's model for lm-eval. HFLM tokenizes, cuts and post-processes, and
    likelihoods.py, which reads options after one prompt together, how likely an answer is."""

    def __init__(self, subject):
        model, asked = subject.model, subject.asked
        self.answer, self.path, context = subject.answer, subject.path, asked.max_length
        if is_ours(model):      # HFLM needs its device, and a config of transformers
            context = min(context or math.inf, model.config.context)
            model = SimpleNamespace(device=device_of(model), config=SimpleNamespace(model_type=''))
        super().__init__(model, backend='causal', max_length=context, batch_size=1,
                         tokenizer=tokenizer_of(subject))
        require(self.tokenizer.chat_template or not asked.chat,
                f'{self.path} has no chat template: leave out --chat')

    def loglikelihood(self, requests, disable_tqdm=True):
        return super().loglikelihood(requests, disable_tqdm=True)       # our bar is enough

    def _loglikelihood_tokens(self, requests, **_):
        prompts, answers = {}, {}           # {prompt: [the numbers of its requests]}
        for i, (_, prompt, option) in enumerate(requests):
            most = self.max_length + 1 - len(option)        # a long prompt is read from its end
            require(most > 0, f'an answer has {len(option)} tokens, the context {self.max_length}')
            if len(prompt) > most:
                say_once(f'prompts of more than {self.max_length} tokens are read from their end')
            prompts.setdefault(tuple(prompt[-most:]), []).append(i)
        found = likelihoods(self.answer, [list(prompt) for prompt in prompts],
                            [[requests[i][2] for i in numbers] for numbers in prompts.values()])
        for numbers, (values, greedy) in zip(prompts.values(), found):
            require(not values.isnan().any(), 'the model gives logits that are not numbers')
            answers |= zip(numbers, zip(values.tolist(), greedy.tolist()))
        return [answers[i] for i in range(len(requests))]

    def _model_generate(self, context, max_length, stop, **how):
        "Return a prompt, (1, T), with the likeliest tokens after it, up to the end of an answer."
        if not is_ours(self.answer):
            return super()._model_generate(context, max_length, stop, **how)
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
    "Return the tokenizer as transformers has it. A run's is written for it."
    with not_opened(subject.path), tempfile.TemporaryDirectory() as folder:
        if is_ours(subject.model) and not beside(subject.path, 'tokenizer_config.json'):
            write_tokenizer(subject.path, folder, subject.model.config.context)
            return AutoTokenizer.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(subject.path, trust_remote_code=False)


@functools.cache
def find(names, shots=None):
    "Return lm-eval's tasks and groups with these names, the manager that knows them, the names."
    wanted = {}
    for name in names:
        for task, own, _ in LISTS.get(name, [(name, None, None)]):
            n = own if shots is None else shots
            require(wanted.setdefault(task, n) == n, f'{task} is in two of {", ".join(names)}, '
                    'with different numbers of shots: give each a command')
    known = TaskManager(include_path=str(EVALS), include_defaults=False)
    if not wanted.keys() <= {*known.all_tasks}:         # reading all of its own takes seconds
        known = TaskManager(include_path=str(EVALS))
    found = []
    for name, n in wanted.items():
        if name not in known.all_tasks:
            near = nearest(name, [*TASKS, *TOY_TASKS, *LISTS, *known.all_tasks])
            raise Refused(f'there is no task {name!r}{near} (lists: {", ".join(LISTS)}; '
                          f'questions_...: python {EVALS / "questions/prepare.py"})')
        here = known.load([name])
        for task in here['tasks'].values() if n is not None else ():
            task.set_config('num_fewshot', n)
        group = here['groups'].get(name)
        found += [group] if group else here['tasks'].values()
    return found, known, names


def lm_scores(subject):
    "Return {'arc_easy acc': Score} for a Subject's model, as it runs now."
    asked, scores, (tasks, known, names) = subject.asked, {}, subject.theirs
    with refusing(AssertionError), torch.no_grad():
        results = simple_evaluate(Model(subject), tasks=tasks, task_manager=known,
                                  limit=asked.limit, apply_chat_template=asked.chat,
                                  log_samples=True)
    shots = ', '.join(f'{task} {n}' for task, n in results['n-shot'].items())
    say_once(f'examples before a question: {shots}')
    for task, result in results['results'].items():
        for key, value in result.items():
            metric, _, how = key.partition(',')
            if how and not metric.endswith('_stderr') and isinstance(value, (int, float)):
                scores[f'{task} {metric}' + f' ({how})' * (how != 'none')] = score_of(
                    results, task, metric, how)
    for name in names:          # a list also gets the mean of its tasks, in the metric that counts
        of_list = []
        for task, _, metric in LISTS.get(name, ()):
            own = [score for key, score in scores.items() if score.kind == 'share' and (
                key == f'{task} {metric}' if metric else key.startswith(f'{task} '))]
            of_list += own[:1]
        if of_list and len(of_list) == len(LISTS[name]):
            errors = [math.nan if score.error is None else score.error for score in of_list]
            error = math.hypot(*errors) / len(of_list)
            scores[f'mean of {name}'] = Score('share', mean([s.mean for s in of_list]), error, [])
    return scores


def score_of(results, task, metric, how):
    """Return a metric as a Score. It is a share if its values for the documents are all from 0 to
    1, or, in a group, which has no documents, its one value."""
    value, error = (results['results'][task].get(f'{each},{how}')
                    for each in (metric, f'{metric}_stderr'))
    samples = sorted(results['samples'].get(task, []), key=lambda each: each['doc_id'])
    answers = [each.get(metric) for each in samples if each['filter'] == how]
    answers = answers if all(isinstance(each, (int, float)) for each in answers) else []
    is_share = (answers or task in results.get('group_subtasks', {})) and all(
        0 <= each <= 1 for each in (value, *answers))
    less = not results['higher_is_better'].get(task, {}).get(metric, True)
    return Score('less' if less else 'share' if is_share else 'score', value,
                 error if isinstance(error, float) else None, answers)
