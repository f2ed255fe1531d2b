"""One loop for evaluate, sweep, probe and compare: a model is opened, runs in some ways, and each
measure is called in each way. What a measure gives is noted in a file at once, so that a command
that was stopped goes on. Then it becomes rows, which say how each way differs from the first one.
Usage: Subject('out/retrofit', Asked()).rows([Way(), Way(r=8)], Path('notes.jsonl'))
"""
import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

import nanodepth
from nanodepth import BOOK
from nanodepth.common.errors import Refused, check_choice, say
from nanodepth.common.files import checkpoint_file
from nanodepth.common.options import own_file
from nanodepth.common.whose import is_ours, local_folder, on_hub
from nanodepth.model import unrolled
from nanodepth.models.checkpoint import cost_of, open_any, pick_device
from nanodepth.models.hf import answer_of
from nanodepth.report.tables import Score, beside, of_one_kind
from nanodepth.retrofit import Core, core_of
from nanodepth.scoring.lm_eval_scores import EVALS, Harness, check_tasks
from nanodepth.scoring.scores import (compared, data_scores, half, is_there, open_data,
                                      parse_tasks, questions_of, right_and_log_prob)
from nanodepth.scoring.way import Way, notation
from nanodepth.text.tokenizer import get_tokenizer, tokenizer_file
from nanodepth.wrapping.others import layers_of


@dataclass(kw_only=True)
class Asked:
    "What is measured."
    # primitives with their depths (toy_assign/3, assign_math/0-5, toy, papers); any other name is
    # a task or a list of lm-eval's (scoring/lm_eval_scores.py)
    tasks: str = ''
    # loss: on data, with the kinds of answers that they mark; text: the loss on text alone, too;
    # log_prob: of the right answer to each task, beside the right answers; or a measure of one's
    # own (docs/EXTEND.md). --measures= leaves the data out
    measures: tuple[str, ...] = ('loss',)
    data: str | None = None     # a dataset; None: what the run was trained on
    batches: int = 8            # batches of validation data for each measurement
    n: int = 200                # examples of each primitive
    # answered examples before each; several are several scores. None: none, but as many as a task
    # of lm-eval's says itself
    shots: tuple[int, ...] | None = None
    seed: int = 0               # of their draws
    limit: int | None = None    # documents of each task of lm-eval: to try, not to report
    chat: bool = False          # lm-eval with the chat template of the checkpoint
    # in a file of arms: (model, validation data) gives {name: number} more of each model as it is
    metric: Callable | None = None
    max_length: int | None = None       # lm-eval: tokens of a prompt and its answer at most
    device: str = 'auto'        # auto: cuda, else mps, else cpu
    # auto: bfloat16 for what was published in 16 bits, where the device is fast at it
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'


# ------------------------------------------------------------------------------------- the measures

class NotHere(ValueError):
    "A measure that makes no sense for this model."


def on_data(subject):
    "The loss, and the right answers of each kind that the data mark."
    if not subject.val:
        return []
    pieces = (subject.state.get('config') or {}).get('grad_accum', 1)
    return [({}, data_scores(subject.answer, subject.val, subject.asked.batches, pieces,
                             text='text' in subject.asked.measures))]


def on_tasks(subject):
    scores = {}
    for name, examples in subject.questions.items():
        right, log_prob = right_and_log_prob(subject.answer, subject.tokenizer, examples)
        scores[name] = right
        if 'log_prob' in subject.asked.measures:
            scores[f'{name} log_prob'] = log_prob
    return [({}, scores)]


def by_lm_eval(subject):
    return [({}, subject.harness.scores())] if subject.harness else []


def by_metric(subject):
    if not subject.asked.metric or str(subject.way) != str(Way()):
        return []
    with torch.no_grad():
        numbers = subject.asked.metric(subject.model, subject.val)
    return [({}, {name: float(number) for name, number in numbers.items()})]


READ = set()            # files of arms, and what these import of yours
BEGAN = time.time_ns()      # of this process: code that was edited since may not be what runs here
# {name: function}. It takes a Subject, whose model runs in one of its ways, and gives a list of
# (place, {name: Score or number}). The place is {} or, for example, {'depth': 3}.
MEASURES = dict(loss=on_data, text=on_data, log_prob=on_tasks, tasks=on_tasks, lm_eval=by_lm_eval,
                metric=by_metric)
ALWAYS = 'tasks', 'lm_eval', 'metric'       # they need no word in --measures
OF_TASKS = {'log_prob', 'tasks', 'lm_eval'}         # they look at no data


def measures_of(asked):
    "{its name: the function} of what is asked, which must be there."
    for name in asked.measures:
        check_choice('--measures', name, MEASURES)
    _, theirs = parse_tasks(asked.tasks)
    if theirs and len(asked.shots or ()) > 1:
        raise Refused(f"--shots={','.join(map(str, asked.shots))}: lm-eval's tasks take one")
    for name in ('max_length', 'limit', 'chat'):
        if getattr(asked, name) and not theirs:
            raise Refused(f"--{name} is for lm-eval's tasks, and no other reads it")
    if theirs:
        check_tasks(theirs, *(asked.shots or ())[:1])
    if not asked.tasks and not {*asked.measures} - OF_TASKS and not asked.metric:
        raise Refused('nothing is asked: give --tasks, such as toy_assign/3, or --measures')
    measures = {}
    for name, function in MEASURES.items():
        if name in (*asked.measures, *ALWAYS) and function not in measures.values():
            measures[name] = function
    return measures


# ------------------------------------------------------------------------------------ a checkpoint

class Subject:
    """A checkpoint, and all that it is asked. The rows of data are as many as those of `like`,
    another Subject. With --data they are as long, too, and begin as they do."""
    asks = Asked        # the options on which a note depends

    def __init__(self, path, asked=None, like=None):
        asked = self.asked = asked or Asked()
        self.path = path
        self.measures, self.way, self.left_out = measures_of(asked), Way(), {}
        ours, theirs = parse_tasks(asked.tasks)
        self.files = files_of(path)     # before it is opened: a run may go on and write others
        self.state, self.model = open_any(path, pick_device(asked.device), asked.dtype)
        self.answer = answer_of(self.model)
        if core := core_of(self.model):
            core.fresh = False              # else an AuthorsCore begins with other noise each time
        self.tokenizer = get_tokenizer(path)
        self.harness = Harness(self, theirs) if theirs else None
        self.questions = questions_of(ours, asked.n, asked.shots or (0,), asked.seed)
        self.val = self.open_val(like)

    def open_val(self, like):
        "The validation data, or None."
        asked, config = self.asked, self.state.get('config') or {}
        data = asked.data or config.get('data')
        if not {*asked.measures} - OF_TASKS and not asked.metric:
            return None
        if not asked.data and (self.harness or self.questions) and not is_there(data):
            if data:
                say(f'{self.path}: what it was trained on ({data}) is not here, so its loss is '
                    'left out')
            return None
        starts = []
        if like and like.val:
            config = config | dict(batch_size=like.val.batch_size)
        if like and asked.data:
            config['context'], starts = like.val.context, like.val.starts
        val = open_data(self.path, self.state | dict(config=config), self.answer, asked.data,
                        starts=starts)
        row = len(val.starts) + val.context
        if row > self.answer.config.context:
            raise Refused(f'{self.path} reads {self.answer.config.context} tokens, but a row, with '
                          f'what begins a text, has {row}: name this one first')
        return val

    def data(self):
        "What the loss is measured on, in words."
        val = self.val
        if not val:
            return 'no data'
        folders = ', '.join(f'{100 * share / sum(val.quota):g}% {shortest(each.folder)}'
                            for each, share in zip(val.datasets, val.quota))
        return f'{val.batch_size} rows of {val.context} tokens a batch, {folders}'

    def measure(self, name, way):
        "What one of the measures gives of the model, run in a way."
        with way.apply(self.model):
            self.way = way
            return self.measures[name](self)

    def noted(self, ways, path):
        """{way: {name of a measure: what it gives}} of the model. Each is a line of a file as soon
        as it is measured, and what stands there is not measured again. What makes no sense for this
        model stands in `left_out`."""
        mark, notes = self.mark(), {}
        measured = {str(way): {} for way in ways}
        for way in ways:        # what this model cannot do is refused before an hour is spent
            with way.apply(self.model):
                if self.harness:
                    self.harness.refuse_spans()
        with path.open('a+', encoding='utf-8', errors='replace') as file:
            file.seek(0)
            for line in file.read().splitlines():
                if mark in line:
                    with contextlib.suppress(ValueError):       # half a line: it was killed there
                        note = json.loads(line)
                        notes[note['way'], note['measure']] = note['places']
            jobs = [(way, name) for way in ways for name in self.measures]
            for way, name in tqdm(jobs, f'{self.path}', unit='measure', leave=False):
                if (str(way), name) not in notes:
                    try:
                        places = self.measure(name, way)
                    except NotHere as why:
                        self.left_out[name] = str(why)
                        continue
                    note = json.dumps(dict(mark=mark, way=str(way), measure=name, places=places))
                    file.write(f'\n{note}\n')
                    file.flush()
                    notes[str(way), name] = json.loads(note)['places']      # as a later call's
                measured[str(way)][name] = notes[str(way), name]
        return measured

    def rows(self, ways, path, offset=None, **columns):
        """[a row for each way and score, which says how it differs from that of the first way].
        `columns` are what else each row says. With an offset, 0 or 1, a row is of every other
        answer from there on. What is noted in the file `path` is not measured again."""
        measured, rows, first = self.noted(ways, path), [], {}
        for name, why in self.left_out.items():
            say(f'{self.path} is not in {name}: {why}')
        seed = (self.state.get('config') or {}).get('seed', 0)
        row = len(self.val.starts) + self.val.context if self.val else None
        data = self.data() + ', each behind what begins a text' * bool(self.val and self.val.starts)
        for way in ways:
            layers = way.cost(self.model)
            of_model = facts(self.state, self.model, way, layers, row)
            for label, (score, name) in labelled(measured[str(way)]).items():
                score = score if offset is None else half(score, offset)
                if score is None:
                    continue
                if way is ways[0]:
                    first[label] = score
                change = compared(first.get(label), score)
                rows.append(columns | dict(
                    seed=seed, way=str(way), layers=layers, measure=label, kind=score.kind,
                    mean=score.mean, error=score.error, n=len(score.answers) or None,
                    chance=score.chance, change=change.mean, change_error=change.error, p=change.p,
                    changes=change.changes,
                    data='' if name in OF_TASKS else data) | of_model)
        return of_one_kind(rows)

    def mark(self):
        """What a note counts for: these files of a checkpoint, all that is asked, and the code that
        measures: the package, the book, all modules of yours that are loaded now (so a measure's
        own are, too), a file of arms, and the libraries' versions."""
        val = self.val
        rows = val and (val.description(), val.batch_size, val.context, [*val.starts])
        asked = [getattr(self.asked, each.name) for each in fields(self.asks)
                 if each.name != 'metric']
        yours = filter(None, map(own_file, [*sys.modules.values()]))
        code = [*Path(nanodepth.__file__).parent.rglob('*.py'), *map(nanodepth.file_of, BOOK),
                *yours, *EVALS.rglob('*'), *READ]
        packages = [f'{each.name} {each.version}' for each in distributions()
                    if each.name in ('torch', 'transformers', 'tokenizers', 'lm_eval')]
        code = stamps(code)
        edited = any(changed > BEGAN for *_, changed in code) and BEGAN
        said = [str(checkpoint_file(self.path).resolve()), self.files, rows, asked, code, edited,
                str(next(self.model.parameters()).dtype), sorted(packages)]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]


def shortest(folder):
    "A folder by one name, however it was given: as it is seen from the current one, or whole."
    folder, here = folder.resolve(), Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def labelled(measured):
    "{a score's name and place: (Score, its measure)} of {measure: [(place, {name: value})]}."
    scores = {}
    for measure, places in measured.items():
        for place, values in places:
            for name, value in values.items():
                label = name + ''.join(f', {column} {at}' for column, at in place.items())
                if label in scores:
                    raise Refused(f'{measure} gives {label!r}, which is measured already: choose '
                                  'another name')
                is_score = isinstance(value, (list, tuple))
                score = Score(*value) if is_score else Score('score', value, None, [])
                scores[label] = score, measure
    return scores


def facts(state, model, way=Way(), runs=None, row=None):
    """What a checkpoint is, in a way that runs so many layers, and what it cost. A forward pass, of
    a row of so many tokens (None: as many as the model reads), costs a third of a training step."""
    flops = math.nan
    with way.apply(model):
        order = unrolled(getattr(model, 'order', range(len(layers_of(model)))))
        if is_ours(model):
            core = core_of(model) or Core([])       # all its runs count alike
            own, core.backprop_depth = core.backprop_depth, core.r
            flops = model.flops_per_token(context=row) // 3
            core.backprop_depth = own
    config = state.get('config') or {}          # of what a run begins from, tokens are not kept
    tokens = math.nan if config.get('init_from') else state.get('tokens', math.nan)
    return dict(loop=notation(order), unique=len(layers_of(model)), depth=runs or len(order),
                params=sum(p.numel() for p in model.parameters()), inference_flops=flops,
                training_flops=cost_of(state), tokens=tokens)


# ------------------------------------------------------------------------------------ what is noted

def files_of(path):
    "The files of a checkpoint, and of its tokenizer, which may stand elsewhere, as they are now."
    path = local_folder(path) if on_hub(path) else Path(path)
    file = checkpoint_file(path)
    beside = [each.parent for each in (file, tokenizer_file(path)) if each]
    return stamps([file, *(each for folder in beside for ending in ('safetensors', 'json', 'jinja')
                           for each in folder.glob(f'*.{ending}'))])


def stamps(files):
    "The name, the size and the last change of each file."
    return sorted([str(file), file.stat().st_size, file.stat().st_mtime_ns]
                  for file in {*files} if file.is_file())


def notes_beside(out):
    "The file of notes beside a file of rows, to which ours are added."
    path, rows = beside(out, '.jsonl'), beside(out, '.csv')
    out.parent.mkdir(parents=True, exist_ok=True)
    if rows.exists() and not path.exists():
        raise Refused(f'{rows} is there, and no notes of ours beside it: choose another --out')
    if path.exists() and path.stat().st_size:
        with path.open('rb') as file:       # a note begins with its mark
            begins = file.read(100).lstrip()[:10]       # of one that was killed there, less
            if begins != b'{"mark": "'[:len(begins)]:
                raise Refused(f'{path} holds no notes of ours: choose another --out')
    return path
