"""lm-eval over any checkpoint: ours, in any way of running, or a Hugging Face folder.

The idea: the language model evaluation harness knows thousands of tasks, and its `hf` reads what
transformers reads. So a run of ours is exported to a temporary folder, in its way, and gets the
scores that everybody else reports. The wrapper loops the model that lm-eval has opened.

Paper: all four use the harness. LISTS holds their benchmarks by name: "From Growing to Looping",
section 3.2 (22 of them), "Retrofitted Recurrence", section 4 (GSM8K with one shot, read leniently),
the training-free wrapper's section 3.1.
Here: what the harness does not have comes from data/evals/, the primitives (as primitive_*) from
data/primitives.py. Documents begin with what a tokenizer.json puts first; an export's puts an end
of text there, as in training.

Usage:
    harness = Harness('SmolLM-360M', [['arc_easy']], asked, 'cpu')
    harness.scores(Way(window='mid4'))          # {'arc_easy acc': Score, ...}
"""
import functools
import json
import os
import tempfile
import tomllib

from nanodepth import ROOT
from nanodepth.common.errors import Refused, nearest, refusing
from nanodepth.engine.checkpoint import is_hugging_face, load_model, refuse_not_finite
from nanodepth.engine.hf import family_of, is_foreign, save_hf
from nanodepth.engine.hf_recurrent import FAMILY, save_raven
from nanodepth.engine.way import Way
from nanodepth.report.tables import Score

EVALS = ROOT / 'data/evals'
# {name of a list: [(task, shots or None for the task's own)]}
LISTS = {name: [(task, *shots, None)[:2] for task, *shots in tasks] for name, tasks in
         tomllib.loads((EVALS / 'lists.toml').read_text(encoding='utf-8')).items()}
LISTS['depth'] = [task for name in ('closed', 'open', 'language', 'math', 'primitives')
                  for task in LISTS[name]]
# metrics from 0 to 1, of which more is better
SHARES = ('acc', 'acc_norm', 'exact_match', 'em', 'f1', 'mc1', 'mc2')


@functools.cache
def lm_class():
    "lm-eval's `hf`, which takes nan for a score: one that does not. (lm-eval is no core package.)"
    with refusing(ImportError, why=lambda error: f'this needs lm-eval (pip install "lm-eval[hf]"): '
                  f'{error}'):
        from lm_eval.models.huggingface import HFLM

    class NoNaN(HFLM):
        def _model_call(self, *args, **kwargs):
            logits = super()._model_call(*args, **kwargs)
            if logits.isnan().any():
                raise Refused('the model gives logits that are not numbers: it has no score')
            return logits
    return NoNaN


@functools.cache
def manager(everything):
    "lm-eval's task manager. Reading all of its tasks takes seconds, ours take none."
    from lm_eval.tasks import TaskManager
    return TaskManager(include_path=str(EVALS), include_defaults=everything)


class Kept:
    """lm-eval's task manager for one evaluation: it gives tasks their numbers of shots ({name: n};
    the harness takes a dict of name and shots for a new task), and `keep` holds what is loaded, so
    that it is not loaded again, in any way of running."""

    def __init__(self, manager, shots, keep):
        self.manager, self.shots, self.keep = manager, shots, keep

    def __getattr__(self, name):
        return getattr(self.manager, name)

    def load(self, tasks, *args, **kwargs):
        key = json.dumps([tasks, self.shots], default=str)
        if key not in self.keep:
            loaded = self.manager.load(tasks, *args, **kwargs)
            for name, n in self.shots.items():
                group = loaded['groups'].get(name)
                for task in group.get_all_tasks() if group else [loaded['tasks'][name]]:
                    task.set_config('num_fewshot', n)
            self.keep[key] = loaded
        return self.keep[key]


def evaluate(lm, tasks, keep, **options):
    """lm-eval's results for a model that it knows: a dict. `tasks` are names of tasks and of lists;
    those that the dict `keep` holds are not loaded again."""
    from lm_eval import simple_evaluate
    wanted = dict.fromkeys(task for name in tasks for task in LISTS.get(name, [(name, None)]))
    names = [name for name, _ in wanted]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise Refused(f'{twice[0]} stands in two of {", ".join(tasks)}, with different numbers of '
                      'shots: give a command to each')
    known = manager(everything=not set(names) <= set(manager(everything=False).all_tasks))
    for name in names:
        if name not in known.all_tasks:
            near = nearest(name, [*LISTS, *known.all_tasks])
            raise Refused(f'there is no task {name!r}{near} Lists: {", ".join(LISTS)}')
    shots = {name: n for name, n in wanted if n is not None}
    return simple_evaluate(lm, tasks=names, task_manager=Kept(known, shots, keep), **options)


def scores_of(results, only=None):
    """{'arc_easy acc': Score} of lm-eval's results, in their order, of some tasks or of all. A name
    says which way is better, unless it is a share of right answers."""
    scores = {}
    is_number = lambda value: isinstance(value, (int, float))
    for task, result in results['results'].items():
        for key, value in result.items():
            metric, _, how = key.partition(',')
            if (not how or metric.endswith('_stderr') or not is_number(value)
                    or only and task not in only):
                continue
            error = result.get(f'{metric}_stderr,{how}')
            documents = [sample.get(metric) for sample in sorted(
                results.get('samples', {}).get(task, []), key=lambda sample: sample['doc_id'])
                if sample['filter'] == how]
            better = results['higher_is_better'].get(task, {}).get(metric, True)
            name = f'{task} {metric}' + ('' if how == 'none' else f' ({how})')
            is_share = metric in SHARES and not task.startswith('squad')     # of 100 there
            if not is_share:
                name += f' ({"more" if better else "less"} is better)'
            scores[name] = Score('share' if is_share else 'score', value,
                                 error if is_number(error) else None,
                                 [d if is_number(d) else None for d in documents])
    return scores


class Harness:
    """lm-eval's tasks for one checkpoint: a list of names for each part. Of two parts with equal
    tasks, each has every other document."""

    def __init__(self, path, tasks, asked, device):
        os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
        self.path, self.tasks, self.asked, self.device = path, tasks, asked, device
        self.keep = {}
        self.opened = None          # (a way, lm-eval's model in it): one at a time
        self.samples = self.apart() if len(tasks) > 1 else [None]

    def exported(self, way):
        """The way in which the checkpoint is written for lm-eval. What transformers opens as it is,
        and what the wrapper does, needs none."""
        moves = way.loop is not None or way.r is not None
        return way if moves and not is_foreign(self.path) else Way()

    def lm(self, way):
        "lm-eval's model of the checkpoint, exported in this way."
        if not self.opened or self.opened[0] != str(way):
            self.opened = None      # free the last one before the next comes
            self.opened = str(way), self.open(way)
        return self.opened[1]

    def open(self, way):
        options = dict(device=str(self.device), batch_size=self.asked.batch_size,
                       dtype=self.asked.dtype, max_length=self.asked.max_length)
        plain = str(way) == str(Way())
        if plain and is_hugging_face(self.path) and family_of(self.path) != FAMILY:
            lm = lm_class()(str(self.path), **options)
        else:
            with tempfile.TemporaryDirectory() as folder, way.apply(load_model(self.path)) as model:
                save = save_raven if model.recurs else save_hf
                save(model, f'{folder}/export', tokenizer=self.path)
                lm = lm_class()(f'{folder}/export', trust_remote_code=model.recurs, **options)
        refuse_not_finite(lm.model, self.path)
        return lm

    def scores(self, way, part=0):
        "{name: Score} of a part's tasks."
        if not self.tasks[part]:
            return {}
        written = self.exported(way)
        lm = self.lm(written)
        with (Way() if written is way else way).apply(lm.model):
            results = self.results(lm, part)
        return scores_of(results, self.samples[part])

    def results(self, lm, part):
        if self.samples and self.samples[part]:
            options = dict(samples=self.samples[part], bootstrap_iters=0)
        else:
            options = dict(limit=self.asked.limit)
        return evaluate(lm, self.tasks[part], self.keep, log_samples=True,
                        apply_chat_template=self.asked.chat, **options)

    def apart(self):
        "[{task: which documents}] of each part."
        lm = self.lm(Way())
        counts = [evaluate(lm, names, self.keep, limit=1)['n-samples'] if names else {}
                  for names in self.tasks]
        differ = not set.intersection(*map(set, counts))
        samples = []
        for i, tasks in enumerate(counts):
            samples.append({})
            for task, n in tasks.items():
                documents = range(n['original']) if differ else range(i, n['original'], len(counts))
                samples[i][task] = list(documents)[:self.asked.limit]
                if not documents:
                    raise Refused(f'{task} has {n["original"]} documents: too few for a part to '
                                  'screen by and one to judge by')
        return samples
