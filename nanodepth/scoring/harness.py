"""lm-eval's tasks. It asks a model of ours by the class Ours, and another family's by its own HFLM:
both as they run now, in any way, and with one function for how likely an answer is. Only this file
imports lm-eval, and only when one of its tasks is asked.
Usage: lm_scores(Subject('out/smollm2', Asked(tasks='piqa')))       # {'piqa acc': Score, ...}
"""
import functools
import logging
import math
import tomllib

import torch
from lm_eval import simple_evaluate
from lm_eval.api import task as lm_eval_task
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import AutoTokenizer

from nanodepth import ROOT
from nanodepth.common.errors import nearest, refusing, say
from nanodepth.common.whose import is_ours
from nanodepth.model import Refused, require
from nanodepth.models.hf import not_opened
from nanodepth.report.contrasts import mean
from nanodepth.report.tables import Score
from nanodepth.scoring.likelihoods import likelihoods
from nanodepth.text.primitives import TASKS, TOY_TASKS
from nanodepth.text.tokenizer import END_OF_TEXT, beside, generation_of, marks_of

EVALS = ROOT / 'data/evals'
# {name of a list: [(task, shots or None for the task's own, metric or None for its first)]}
LISTS = {name: [(*task, None, None)[:3] for task in tasks] for name, tasks in
         tomllib.loads((EVALS / 'lists.toml').read_text(encoding='utf-8')).items()}
LISTS['benchmarks'] = sum((LISTS[name] for name in ('closed', 'open', 'language', 'math')), [])
lm_eval_task.tqdm = functools.partial(tqdm, disable=True)       # ours says what is left
logging.getLogger('lm_eval').setLevel(logging.ERROR)
say_once = functools.cache(say)


class OptionsTogether:
    "How likely answers are: options after one prompt share what they can (likelihoods.py)."

    def loglikelihood(self, requests, disable_tqdm=True):
        return super().loglikelihood(requests, disable_tqdm=True)       # ours says what is left

    def _loglikelihood_tokens(self, requests, **_):
        asked, answers = {}, {}             # {prompt: [the numbers of its requests]}
        for i, (_, prompt, option) in enumerate(requests):
            most = self.max_length + 1 - len(option)        # of a long one the end is read
            require(most > 0, f'an answer has {len(option)} tokens, the context {self.max_length}')
            if len(prompt) > most:
                say_once(f'prompts of more than {self.max_length} tokens are read from their end')
            asked.setdefault(tuple(prompt[-most:]), []).append(i)
        found = likelihoods(self.answer, [list(prompt) for prompt in asked],
                            [[requests[i][2] for i in numbers] for numbers in asked.values()])
        for numbers, (values, greedy) in zip(asked.values(), found):
            require(not values.isnan().any(), 'the model gives logits that are not numbers')
            answers |= zip(numbers, zip(values.tolist(), greedy.tolist()))
        return [answers[i] for i in range(len(requests))]


class Theirs(OptionsTogether, HFLM):
    "Another family's model."


class Ours(OptionsTogether, TemplateLM):
    "A model of ours. (What HFLM does with a tokenizer of transformers, this does with ours.)"

    def __init__(self, subject):
        super().__init__()
        self.answer, self.path, self.words = subject.model, subject.path, subject.tokenizer
        context = self.answer.config.context
        self.max_length = min(subject.asked.max_length or context, context)
        self.begin = self.end = None        # the tokens by which a text begins and ends
        if END_OF_TEXT in self.words.special_tokens_set:
            self.begin = self.end = self.words.encode_single_token(END_OF_TEXT)
        if beside(self.path, 'tokenizer_config.json'):
            self.begin, self.end = marks_of(self.path, self.words)
        self.starts = getattr(self.words, 'starts', [self.end])
        if subject.asked.chat:
            self.tokenizer = tokenizer_of(self.path)
            require(self.tokenizer.chat_template, f'{self.path} has no chat template: leave --chat')

    eot_token_id = property(lambda self: self.end)
    prefix_token_id = property(lambda self: self.end if self.begin is None else self.begin)
    tokenizer_name = property(lambda self: str(self.path))
    apply_chat_template = HFLM.apply_chat_template
    chat_template_args = {}

    def tok_encode(self, text, add_special_tokens=None, **_):
        ids = self.words.encode(text, allowed_special='all')
        has_start = self.starts and ids[:1] == self.starts[:1]      # as a chat has
        return ids if add_special_tokens is False or has_start else self.starts + ids

    def loglikelihood_rolling(self, requests, **_):
        windows = [(i, (None, *make_disjoint_window(window)))
                   for i, request in enumerate(requests) for window in get_rolling_token_windows(
                       self.tok_encode(*request.args), self.prefix_token_id, self.max_length, 1)]
        sums = [0.0] * len(requests)
        for (i, _), (value, _) in zip(windows, self._loglikelihood_tokens(
                [window for _, window in windows])):
            sums[i] += value
        return sums

    @torch.no_grad()
    def generate_until(self, requests, **_):
        "The likeliest token each time, until a string or a token that ends the answer."
        own = generation_of(self.path).get('eos_token_id')
        ends = {self.end, *(own if isinstance(own, list) else [own])}
        marks = {*map(self.words.encode_single_token, self.words.special_tokens_set)}
        said = []
        for prompt, how in tqdm([request.args for request in requests], 'texts', leave=False):
            how = normalize_gen_kwargs(how)
            most, stops = how['max_gen_toks'], [stop for stop in how['until'] if stop]
            require(most < self.max_length, f'{most} tokens to write, context {self.max_length}')
            inputs = torch.tensor([self.tok_encode(prompt)[most - self.max_length:]],
                                  device=self.answer.norm.weight.device)
            cache, ids, text = {}, [], ''
            while len(ids) < most and not any(stop in text for stop in stops):
                x = self.answer.norm(self.answer.hidden(inputs, cache=cache)[:, -1])
                inputs = self.answer.head(x).argmax(-1, keepdim=True)
                ids.append(inputs.item())
                if ids[-1] in ends:
                    break
                text = self.words.decode([i for i in ids if i not in marks])
            said.append(functools.reduce(lambda text, stop: text.split(stop)[0], stops, text))
        return said


def tokenizer_of(path):
    with not_opened(path):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


@functools.cache
def find(names, shots=None):
    "(lm-eval's tasks and groups of some names and lists, the manager that knows them, the names)"
    wanted = {}
    for name in names:
        for task, own, _ in LISTS.get(name, [(name, None, None)]):
            n = own if shots is None else shots
            require(wanted.setdefault(task, n) == n, f'{task} stands in two of {", ".join(names)}, '
                    'with different numbers of shots: give a command to each')
    known = TaskManager(include_path=str(EVALS), include_defaults=False)
    if not wanted.keys() <= {*known.all_tasks}:         # to read all of its own takes seconds
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
    "{'arc_easy acc': Score} of a subject's model, as it runs now."
    asked, scores, (tasks, known, names) = subject.asked, {}, subject.theirs
    if is_ours(subject.model):
        lm = Ours(subject)
    else:
        words = tokenizer_of(subject.path)
        lm = Theirs(subject.model, tokenizer=words, max_length=asked.max_length)
        lm.answer = subject.answer
    with refusing(AssertionError):
        results = simple_evaluate(lm, tasks=tasks, task_manager=known, limit=asked.limit,
                                  apply_chat_template=asked.chat, log_samples=True)
    shots = ', '.join(f'{task} {n}' for task, n in results['n-shot'].items())
    say_once(f'examples before a question: {shots}')
    for task, result in results['results'].items():
        for key, value in result.items():
            metric, _, how = key.partition(',')
            if how and not metric.endswith('_stderr') and isinstance(value, (int, float)):
                scores[f'{task} {metric}' + f' ({how})' * (how != 'none')] = score_of(
                    results, task, metric, how)
    for name in names:          # of a list, the mean of its tasks, each by the metric that counts
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
    "A metric is a share if it is one of each document; of a group, which has none, by its value."
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
