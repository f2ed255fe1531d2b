"""Which order of a model's layers answers best? A search, and what such a search finds by chance.

The idea: once depth is a list, one may ask for the best list. Of hundreds of orders some are better
than the model's own by chance, on the questions that chose them. So the orders are chosen on one
half of the questions and judged on the other. Beside the best one stand three comparisons: the same
search with shuffled answers, where there is nothing to find; the best order for each question by
itself, which knows the answer, and goes far even where answers are shuffled; and two recipes that
nobody searched, the middle block twice and the wrapper's anchored window.

The search: from the best few orders so far, every block of one to four positions is run twice, left
out, or swapped with the next block. The score is the mean probability of the right answer among its
options, so nothing has to be generated. (By the mean log-probability, shuffled answers are answered
better by every order that makes the model less sure. Of probabilities they all have the same mean.)
Any model of ours is searched, and any family whose layers can be put
in another order (engine/foreign.py); one with a recurrent core has no order, and is refused.

Usage:
    python nanodepth.py search out/lidas --tasks=toy_assign/3,toy_assign/4
    python nanodepth.py search HF_FOLDER --tasks=assign_math/1 --budget=60 --n=100
"""
import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from common.columns import columns
from common.errors import Refused
from common.fields import within
from common.options import read, word
from data.tokenizer import get_tokenizer
from data.tokens import draw
from engine.foreign import Hooked, answer_of, open_any
from engine.measure import log_likelihoods, parse_tasks
from engine.world import pick_device
from loop import name_of, repeat_block, running
from report.claims import Contrast
from report.tables import write_csv
from variants.hosts import pick_window
from wrapper import looped

ROUNDS, WIDTH, LONGEST = 3, 4, 2        # LONGEST: an order may have so many times the positions


@dataclass
class Options:
    run: str = word()               # a folder that train.py wrote, or a Hugging Face checkpoint
    # the questions, such as toy_assign/3,toy_copy (nanodepth.py primitives lists the tasks)
    tasks: str | None = None
    budget: int = within(0, 100_000, default=200)       # orders that a search may try
    n: int = within(8, 100_000, default=200)            # questions of each task
    shots: int = 0                  # examples with answers before each question
    seed: int = 0                   # of the questions, the halves and the search
    device: str = 'auto'            # auto: cuda, else mps, else cpu
    out: Path | None = None         # a CSV file for the table


# --------------------------------------------------------------------------------------- the search

def moves(order):
    "Every order that is one move away: a block repeated, left out, swapped with the next."
    n = len(order)
    for size in range(1, 5):
        for start in range(n - size + 1):
            before = order[:start]
            block = order[start:start + size]
            after = order[start + size:]
            yield before + block + block + after
            if size < n:
                yield before + after
            if size <= len(after):
                yield before + after[:size] + block + after[size:]


def beam_search(score, plain, budget, rng):
    """{order: its score} of all orders that were tried, `plain` first. The budget is shared out
    among the rounds; of the orders that are one move away from the best, so many are drawn."""
    tried = {plain: score(plain)}
    for i in range(1, ROUNDS + 1):
        best = sorted(tried, key=tried.get, reverse=True)[:WIDTH]
        near = dict.fromkeys(order for one in best for order in moves(one)
                             if order not in tried and len(order) <= LONGEST * len(plain))
        left = budget * i // ROUNDS + 1 - len(tried)
        for order in rng.sample(list(near), min(left, len(near))):
            tried[order] = score(order)
    return tried


class Asked:
    "The answers to all questions by each order that was tried; asked again, they are remembered."

    def __init__(self, model, tokenizer, questions, bar=None):
        self.model, self.tokenizer, self.questions = model, tokenizer, questions
        self.answers, self.bar = {}, bar

    def own(self):
        "(the order that the model has, which option of each question is right)"
        return tuple(self.model.order), [example.answer for example in self.questions]

    def now(self):
        return log_likelihoods(self.model, self.tokenizer, self.questions)

    def by(self, order):
        if order not in self.answers:
            with running(self.model, order):
                self.answers[order] = self.now()
            if self.bar is not None:
                self.bar.update()
        return self.answers[order]


def marks(answers, right):
    "Of each question: the probability of the right option, and whether it is the likeliest; in %."
    return (torch.tensor([100 * values.softmax(0)[i].item() for values, i in zip(answers, right)]),
            torch.tensor([100.0 * (values.argmax() == i) for values, i in zip(answers, right)]))


# --------------------------------------------------------------------------------------- the report

class Judge:
    "Compares answers with the plain model's, for one list of which options are right."

    def __init__(self, asked, plain, right):
        self.asked, self.plain, self.right = asked, plain, right
        self.first, self.other = slice(0, None, 2), slice(1, None, 2)

    def score(self, order):
        "What the search sees: the first half of the questions."
        score = marks(self.asked.by(order), self.right)[0][self.first].mean().item()
        return -math.inf if math.isnan(score) else score        # a model that overflows

    def row(self, what, answers, order=''):
        "The change from the plain model, on both halves; with intervals on the one without a say."
        (chance, hit), (chance_0, hit_0) = (marks(each, self.right) for each in
                                            (answers, self.asked.by(self.plain)))
        mine, other = self.first, self.other
        return dict(what=what, order=order,
                    screened=(chance - chance_0)[mine].mean().item(),
                    change=Contrast(chance[other].tolist(), chance_0[other].tolist()),
                    right=hit[other].mean().item(),
                    gain=Contrast(hit[other].tolist(), hit_0[other].tolist()))

    def best_for_each(self, orders):
        "The answers of the best of some orders for each question by itself."
        every = [self.asked.by(order) for order in orders]
        return [max((answers[i] for answers in every),
                    key=lambda values, i=i: values.softmax(0)[self.right[i]].nan_to_num(-1).item())
                for i in range(len(self.right))]


def search(asked, plain, right, budget, rng):
    "[rows]: the best order, the best for each question, and both with shuffled answers."
    rows = []
    shuffled = [rng.randrange(len(e.options)) for e in asked.questions]
    for answers, named in ((right, ''), (shuffled, ', answers shuffled')):
        judge = Judge(asked, plain, answers)
        tried = beam_search(judge.score, plain, budget, random.Random(rng.random()))
        best = max(tried, key=tried.get)
        rows += [judge.row(f'the best order{named}', asked.by(best), best),
                 judge.row(f'the best for each question{named}', judge.best_for_each(tried))]
    return rows


def recipes(asked, plain, right):
    "What nobody searched: the middle block twice, and the wrapper's anchored window."
    judge = Judge(asked, plain, right)
    size = min(4, len(plain))
    a, b = pick_window(f'mid{size}', len(plain))
    twice = tuple(repeat_block(plain, a, size, 2))
    model = asked.model.model if isinstance(asked.model, Hooked) else asked.model
    with looped(model, (a, b), 'rk', K=3):
        window = asked.now()
    return [judge.row('the middle block twice', asked.by(twice), twice),
            judge.row(f'the window {a}-{b}, rk, K = 3', window)]


def plus_minus(c):
    return f'{c.mean:+.1f}' + (f' ± {c.half(0.95):.1f}' if c.known else '')


def main(argv=None):
    options = read(Options, argv, __doc__)
    if not options.tasks:
        raise Refused('--tasks is missing: which questions are to be answered, such as '
                      '--tasks=toy_assign/3 (python nanodepth.py primitives --help lists them)')
    examples = parse_tasks(options.tasks, options.n, options.shots, options.seed)
    device = pick_device(options.device)
    _, model = open_any(options.run, device)
    model = answer_of(model)
    if model.recurs:
        raise Refused(f'{options.run} has a recurrent core, which runs by itself: it has no order '
                      'to search (probe and retrofit --eval ask it at other r)')
    questions = [example for each in examples.values() for example in each]
    with tqdm(total=2 * options.budget + 2, unit='order', delay=3) as bar:
        asked = Asked(model, get_tokenizer(options.run), questions, bar)
        rows = all_rows(asked, options.budget, options.seed)
    tell(asked, rows)
    if options.out:
        write_csv([as_numbers(row) for row in rows], options.out)


@torch.no_grad()
def all_rows(asked, budget, seed):
    "The searches and the recipes; which half a question belongs to is drawn first."
    rng = random.Random(draw(seed, 'search'))
    rng.shuffle(asked.questions)
    plain, right = asked.own()
    known = recipes(asked, plain, right)        # first: a refusal comes before an hour is spent
    return search(asked, plain, right, budget, rng) + known


def tell(asked, rows):
    plain, right = asked.own()
    chance, hit = (each[1::2] for each in marks(asked.by(plain), right))
    print(f'{len(right)} questions, {len(asked.answers)} orders tried. As it is, {name_of(plain)}: '
          f'the right answers have a probability of {chance.mean():.1f}% on the half that judges, '
          f'and {hit.mean():.1f}% are chosen. What changes, in points:\n')
    print(columns([['', 'where chosen', 'on the other half', 'chosen there', 'order'],
                   *([row['what'], f'{row["screened"]:+.1f}', plus_minus(row['change']),
                      plus_minus(row['gain']), name_of(row['order'])] for row in rows)]))


def as_numbers(row):
    return row | dict(order=name_of(row['order']), change=row['change'].mean,
                      change_half=row['change'].half(0.95), gain=row['gain'].mean,
                      gain_half=row['gain'].half(0.95))
