"""The parts of a seed of the study (tools/study.py): how a job trains and asks, and the jobs that
stand on its models: fine-tuning, frozen models looped by the wrapper, probes, retrofits.

A job is a folder of runs and the rows that they give, a method for each of its tables. A run is a
command of this repo, so that each can be made again by hand.

Usage:
    python nanodepth.py study 3 --job=frozen    # one of them; its models must be trained
    rows = Frozen('frozen', 3, 'out/study').frozen()
"""
import inspect
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

import probe
from common.errors import Refused
from common.files import ROOT
from data.primitives import few_shot
from data.tokenizer import get_tokenizer
from data.tokens import Loader, measure
from engine.checkpoint import exists, load, load_model
from engine.measure import After, log_likelihoods
from model import KVCache
from report.runs import read_log
from variants.lens import exit_at, quality, train_lens
from wrapper import SOLVERS, looped

DATA, DEEPER = 'data/chains', 'data/chains_deep'        # depth 0 to 4; depth 0 to 6
STEPS, DECAY = 520, 104                 # as config/chains_baseline.py has them
DEPTHS, QUESTIONS, BATCHES, LENS_STEPS = (0, 1, 2, 3, 4, 5, 6), 200, 24, 250


class Job:
    "Runs and rows of one seed, in a folder of their own."
    tables = ()         # each the name of a method that gives its rows

    def __init__(self, name, seed, root):
        self.name, self.seed = name, seed
        self.root = Path(root) / f'{seed}/{name}'

    def runs(self):
        "[(name, the command's words)]"
        return []

    def file(self, table):
        "Where the rows of a table are kept."
        return self.root.with_suffix('.csv' if table == 'depth' else f'.{table}.csv')

    def finished(self):
        return all(self.file(table).exists() for table in self.tables)

    def model(self, name, run='ordinary'):
        "Where a run of another job of the seed lies."
        return self.root.parent / name / run

    def say(self, row):
        row = dict(seed=self.seed, run=self.name) | row
        print(', '.join(f'{key} {v:.3g}' if isinstance(v, float) else f'{key} {v}'
                        for key, v in row.items()), flush=True)
        return row

    def trunk(self, config, steps, *more):
        return 'trunk', ['train', config, f'--out_dir={self.root / "trunk"}', f'--steps={steps}',
                         '--decay_steps=0', f'--seed={self.seed}', *more]

    def branch(self, name, *more, parent='trunk', steps=DECAY):
        "A cool-down: a new optimizer, the same tokens for all."
        return name, ['train', f'--data={DATA}', f'--out_dir={self.root / name}',
                      f'--init_from={self.root / parent}', f'--steps={steps}', '--warmup_steps=10',
                      f'--decay_steps={steps - 10}', f'--seed={1000 + self.seed}', *more]

    def cut(self, name, parent, *more):
        return name, ['retrofit', str(parent), '3-4-3', f'--out={self.root / name}',
                      f'--seed={self.seed}', *more]

    def train(self):
        for name, argv in self.runs():
            self.run(name, argv)

    def run(self, name, argv):
        folder = self.root / name
        if exists(folder) and self.ended(folder):
            return
        folder.mkdir(parents=True, exist_ok=True)
        more = ['--eval_every=200', '--save_every=100'] * (argv[0] == 'train')
        with open(self.root / f'{name}.txt', 'w') as said:
            child = subprocess.run([sys.executable, str(ROOT / 'nanodepth.py'), *argv, *more],
                                   stdout=said, stderr=said)
        if child.returncode:
            last = (self.root / f'{name}.txt').read_text().strip().splitlines()[-1]
            raise Refused(f'{self.root / name}: {last}')

    def ended(self, folder):
        state = load(folder)
        return state.get('step', 0) >= (state.get('config') or {}).get('steps', 0)


class Questions:
    "What every model of the study is asked: validation data, and the same questions."

    def __init__(self, path, depths=DEPTHS, n=None, task='toy_chains'):
        self.val = Loader(DATA, 32, 64, split='val', seed=0)
        self.tokenizer = get_tokenizer(path)
        self.examples = {depth: few_shot(task, n or QUESTIONS, shots=0, depth=depth, seed=7)
                         for depth in depths}

    @torch.no_grad()
    def __call__(self, model):
        loss, kinds = measure(model, self.val, BATCHES)
        return dict(loss=loss, text=kinds['text']['loss'],
                    copy=kinds['copy']['accuracy']) | self.answers(model)

    def text(self, model):
        "The loss on text, on fewer batches: for what is compared many times."
        return measure(model, self.val, BATCHES // 4)[1]['text']['loss']

    def halves(self, model):
        "The answers to the first half of the questions, and, `judged`, to the second."
        half = QUESTIONS // 2
        return self.answers(model, slice(half)) | self.answers(model, slice(half, None),
                                                               'depth {} judged')

    @torch.no_grad()
    def answers(self, model, some=slice(None), name='depth {}'):
        "The mean log-probability of the right answers, and the share of them that was chosen."
        found = {}
        for depth, examples in self.examples.items():
            examples, key = examples[some], name.format(depth)
            values = log_likelihoods(model, self.tokenizer, examples)
            found[key] = sum(v[e.answer].item() for v, e in zip(values, examples)) / len(examples)
            right = sum(v.argmax().item() == e.answer for v, e in zip(values, examples))
            found[f'{key} right'] = right / len(examples)
        return found


# -------------------------------------------------------------------------------------- fine-tuning

class Taught(Job):
    "Fine-tuned on 128 examples of a form that no model has seen; asked at depths left out, too."
    tables = ('taught',)
    models = ('baseline', 'midas', 'lidas', 'loop_5x2', 'loop_2_2x3_2', 'half', 'half_longer')

    def runs(self):
        return [(name, ['train', 'config/sft.py', f'--out_dir={self.root / name}',
                        f'--data={self.root / "examples"}', f'--init_from={self.model(name)}',
                        f'--seed={self.seed}']) for name in self.models]

    def train(self):
        argv = ['--tasks=toy_chains_code', '--n=128', f'--seed={self.seed}',
                f'--out={self.root / "examples"}']
        subprocess.run([sys.executable, str(ROOT / 'data/sft/prepare.py'), *argv], check=True)
        super().train()

    def taught(self):
        ask = Questions(self.model('baseline'), (0, 1, 2, 3), task='toy_chains_code')
        return [self.say(dict(run=name, examples=n) | ask.answers(load_model(path)))
                for name in self.models for n, path in ((0, self.model(name)),
                                                        (128, self.root / name))]


# -------------------------------------------------------------------- the wrapper, without training

RECIPE = dict(window=(3, 6), method='rk', K=3, T=1, beta=0.5, mode='block')
FACTORS = dict(     # one at a time, the others as in the recipe
    window=[(1, 4), (2, 5), (4, 7), (5, 8), (4, 5), (2, 7)], K=[2, 4, 6, 12], T=[0.5, 1.5, 2, 3],
    beta=[0.0, 0.25, 0.75], mode=['layer'],
    method=['naive', 'euler', 'heun', 'midpoint', 'rk4', 'heavy_ball', 'anderson', 'aitken',
            'norm_stab'])
KEPT = ('exact', 'first', 'frozen', 'last', 'none')     # what a cache keeps of a looped layer


def by_token(model, slots):
    "The model as it generates: tokens (B, T) read one by one, logits (B, T, V). Notes slots used."
    def answer(tokens):
        cache = KVCache(len(model.order))
        out = [model(tokens[:, t:t + 1], cache=cache) for t in range(tokens.shape[1])]
        slots.append(len(cache.layers))
        return torch.cat(out, dim=1)
    return answer


class Frozen(Job):
    """Frozen models looped by the wrapper, one setting changed at a time: chosen on one half of the
    questions, judged on the other. Then what the cache keeps, with text read token by token."""
    tables = ('frozen',)
    models = ('baseline', 'midas', 'lidas')

    def frozen(self):
        self.ask, rows = Questions(self.model('baseline'), (4, 5)), []
        for name in self.models:
            model = load_model(self.model(name))
            plain = self.row(name, 'plain', '', model)
            with looped(model, **RECIPE):
                recipe = self.row(name, 'the recipe', '', model)
            rows += [plain, recipe]
            for factor, values in FACTORS.items():
                found = [recipe]
                for value in values:
                    with looped(model, **self.settings(factor, value)):
                        found.append(self.row(name, factor, str(value), model))
                best = max(found, key=lambda row: row['depth 5'])
                rows += [*found[1:], best | dict(factor=factor, value='the best of them')]
            rows += self.caches(name, model)
        return rows

    def settings(self, factor, value):
        "The recipe with one change. Another method has its own beta, and a T if it knows one."
        own = dict(RECIPE)
        if factor == 'method':
            del own['beta']
            if 'T' not in inspect.signature(SOLVERS[value]).parameters:
                del own['T']
            own['K'] = 4 if value == 'aitken' else own['K']     # it takes an even number
        return own | {factor: value}

    def row(self, name, factor, value, model):
        return self.say(dict(run=name, factor=factor, value=value, text=self.ask.text(model))
                        | self.ask.halves(model))

    def caches(self, name, model):
        rows = []
        for kept in ('plain', *KEPT):
            slots = []
            looping = looped(model, **RECIPE, cache=kept) if kept != 'plain' else nullcontext()
            with looping:
                answer = by_token(model, slots)
                rows.append(self.say(
                    dict(run=name, factor='cache, token by token', value=kept, text='')
                    | self.ask.halves(answer) | dict(slots=slots[0])))
        return rows


# ------------------------------------------------------------------------------------------- probes

class Layers(Job):
    """Which layers do they use? Depth scores on whole validation rows, what it costs to swap and to
    leave out blocks, and what is known behind each layer."""
    tables = ('layers', 'lens')
    models = ('baseline', 'midas', 'lidas', 'loop_2_2x3_2')

    def ready(self):
        "(whole validation rows, questions of a depth that the models have learned)"
        return (Loader(DATA, 20, 64, split='val', seed=0).batch(0)[0],
                Questions(self.model('baseline'), (3,), QUESTIONS // 2))

    def layers(self):
        (tokens, ask), rows = self.ready(), []

        def look(model):
            return dict(text=ask.text(model)) | ask.answers(model)
        for name in self.models:
            model = load_model(self.model(name))
            score, parts = probe.depth_score(model, tokens)
            half = len(parts) // 2
            row = dict(run=name, score=score, late=(parts[half:].sum() / parts.sum()).item())
            for what, change in (('swap', probe.swap_blocks), ('skip', probe.skip_blocks)):
                found = probe.order_sweep(model, look, change, (1, 2))
                for size in (1, 2):     # in the middle: the first and last two layers stay
                    inner = [r for r in found if r['size'] == size and r['start'] >= 2 and
                             r['start'] + size * (1 + (what == 'swap')) <= len(model.order) - 2]
                    for key in ('text', 'depth 3'):
                        row[f'{what} {size}: {key}'] = sum(
                            r[key] - found[0][key] for r in inner) / len(inner)
            rows.append(self.say(row))
        return rows

    def lens(self):
        """Of each layer: how far the output at later tokens moves without it, and, read off behind
        it by a tuned lens, the five likeliest tokens and the answers. The lens learned from other
        validation rows than those that it is judged by."""
        (tokens, ask), rows = self.ready(), []
        others = Loader(DATA, 32, 64, split='val', seed=1)
        for name in self.models:
            model = load_model(self.model(name))
            lens = train_lens(model, After(others, 8), LENS_STEPS)
            moves = probe.depth_score(model, tokens)[1]
            overlap = quality(model, lens, others.batch(0)[0])[1]
            for d in range(len(model.order)):
                rows.append(self.say(
                    dict(run=name, layer=d, moves=moves[d].item(), overlap=overlap[d].item())
                    | ask.answers(exit_at(model, d, lens))))
        return rows


# ---------------------------------------------------------------------------------------- retrofits

RATES = dict(adamw=0.002, adamw_star=0.001)      # the best on seed 100, which is not judged
RECURRENCES = (1, 2, 3, 4, 8, 16, 32)


class Retrofits(Job):
    """The baseline's trunk made recurrent in several ways, each with one change from the study's
    (mean 2, a linear curriculum, Muon, no layer dropped); and healing on the old data, before
    deeper chains."""
    tables = ('retrofits',)

    def runs(self):
        trunk, deeper = self.model('baseline', 'trunk'), f'--data={DEEPER}'
        again = lambda name, *more, parent='../baseline/cut': self.branch(
            name, '--recurrence=2', *more, parent=parent)
        return [
            self.cut('cut_add', trunk, '--inject=add', '--start=zero'),
            self.cut('cut_random', trunk, '--scratch'),
            self.branch('mean_4', '--recurrence=4', parent='../baseline/cut'),
            self.branch('mean_8', '--recurrence=8', parent='../baseline/cut'),
            again('no_curriculum', '--curriculum=0'),
            again('1-sqrt', '--curriculum_shape=1-sqrt'),
            *(again(name, f'--optimizer={name}', f'--lr={rate}') for name, rate in RATES.items()),
            again('additive', parent='cut_add'),
            again('random', parent='cut_random'),
            again('deeper', deeper),
            again('healed_deeper', deeper, '--curriculum=0', parent='../baseline/recurrent'),
            self.branch('dense_deeper', deeper, parent='../baseline/trunk'),
            self.branch('dense_healed_deeper', deeper, parent='../baseline/ordinary')]

    def retrofits(self):
        ask, rows = Questions(self.model('baseline'), (4, 5, 6)), []
        trained = [(name, self.root / name) for name, argv in self.runs() if argv[0] == 'train']
        for name, path in [('mean_2', self.model('baseline', 'recurrent')), *trained]:
            model, flops = load_model(path), read_log(path)[-1]['flops']
            ordinary, means = not model.recurs, name.startswith('mean')
            for r in (1,) if ordinary else RECURRENCES if means else (3,):
                if not ordinary:
                    model.mean = r
                rows.append(self.say(dict(run=name, r=r, flops=flops) | ask(model)))
        return rows
