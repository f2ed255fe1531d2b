import math
import re
import runpy

import pytest
import torch
from conftest import ROOT

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused
from nanodepth.data.primitives import TASKS, TOY_TASKS, Example, few_shot, write_examples
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.data.tokens import Dataset, Loader, measure
from nanodepth.engine.measure import Answers, ask, interval, log_likelihoods, score
from nanodepth.report.tables import read_csv
from nanodepth.wrapper import looped

BYTES = get_tokenizer('bytes')
EVERY = [*TASKS, *TOY_TASKS]
ASSIGN = [task for task in EVERY if 'copy' not in task]


def statements(task, example):
    """The last question's statements as a dict, and the name asked for: read off the prompt, not
    off the generator."""
    text = example.prompt.split('\n\n')[-1] if task in TASKS else example.prompt
    if task in TOY_TASKS:
        return dict(re.findall(r'(\w)=?(\w)', text.split('?')[0])), text[-1]
    found = dict(re.findall(r'^(\w+) ?= ?(\w+)$', text, flags=re.M))
    return found, re.findall({'assign_basic': r'(\w+)=____', 'assign_math': r'value of (\w+)\?',
                              'assign_code': r'print\((\w+)\)'}[task], text)[-1]


def follow(task, example, looks):
    "Look the name up, and what that gives again, `looks` times in all."
    given, name = statements(task, example)
    for _ in range(looks):
        name = given.get(name, name)
    return name


# ------------------------------------------------------------------ the examples

def test_the_papers_form_by_hand():
    e = few_shot('copy_random', 1, shots=0)[0]
    assert re.fullmatch(r'Fill in the blank:\n\n([a-z]{3} ){15}____ \. ->', e.prompt)
    e = few_shot('assign_basic', 1, shots=0, depth=1)[0]
    assert re.fullmatch(r'Fill in blank:\n\n([a-z]=\d+\n){5}([a-z]=[a-z]\n){5}[a-z]=____ \. ->',
                        e.prompt)
    e = few_shot('assign_basic', 1, shots=5)[0]
    assert (e.prompt.count('Fill in blank:\n\n') == 6 and len(re.findall(r'-> \d+\n\n', e.prompt))
            == 5 and e.prompt.endswith('->'))


@pytest.mark.parametrize('task', EVERY)
@pytest.mark.parametrize('depth', [0, 2])
def test_the_answer_is_among_the_options_once(task, depth):
    for e in few_shot(task, 50, shots=1, depth=depth):
        assert (len(set(e.options)) == len(e.options) == {'toy_copy': 8, 'toy_assign': 4,
                                                          'toy_code': 4, 'toy_chains': 3,
                                                          'toy_chains_code': 3,
                                                          'copy_random': 10,
                                                          'copy_words': 10}.get(task, 5))
        assert 0 <= e.answer < len(e.options)


@pytest.mark.parametrize('task', ASSIGN)
@pytest.mark.parametrize('depth', [0, 1, 2, 4, 5, 6])
def test_depth_d_takes_d_plus_1_looks_and_no_fewer(task, depth):
    if task in ('toy_assign', 'toy_code') and depth == 6:
        with pytest.raises(ValueError, match='letters for depth 5 at most'):
            few_shot(task, 1, shots=0, depth=6)
        return
    examples = few_shot(task, 40, shots=0, depth=depth)
    assert all(follow(task, e, depth + 1) == e.options[e.answer].strip() for e in examples)
    # a name: only a guess is left
    assert all(follow(task, e, depth) not in [o.strip() for o in e.options] for e in examples)


@pytest.mark.parametrize('task', ['copy_random', 'copy_words', 'toy_copy'])
def test_copying_asks_for_what_came_next(task):
    for e in few_shot(task, 50, shots=0):
        words = (re.findall('[A-Z][a-z]{2}', e.prompt) if task == 'toy_copy'
                 else e.prompt.split('\n\n')[1].split(' ____')[0].split())
        assert words[words.index(words[-1]) + 1] == e.options[e.answer].strip()


def test_no_place_gives_the_value_away():
    """Neither the place of the answer's statement, nor of the question's, nor the order of the
    options."""
    for depth in (0, 1):
        examples = few_shot('assign_basic', 2000, shots=0, depth=depth)
        places = [[], [], []]
        for e in examples:
            given, name = statements('assign_basic', e)
            places[0].append(list(given.values()).index(e.options[e.answer].strip()))
            places[1].append(list(given).index(name) % 5)
            places[2].append(e.answer)
        for found in places:
            counts = [found.count(i) for i in range(5)]
            # 5 standard deviations
            assert sum(counts) == 2000 and max(abs(c - 400) for c in counts) < 90


def test_shots_are_fresh_and_the_question_stays():
    for task in EVERY:
        none, one, two = (few_shot(task, 5, shots=k, seed=3) for k in (0, 1, 2))
        for a, b, c in zip(none, one, two):
            assert b.prompt.endswith(a.prompt) and c.prompt.endswith(b.prompt)
            first, second = c.prompt[:-len(b.prompt)], b.prompt[:-len(a.prompt)]
            assert first and second and first != second and a.prompt not in (first, second)
            assert (sorted(a.options) == sorted(c.options) and a.options[a.answer]
                    == c.options[c.answer])
        assert len({e.prompt for e in few_shot(task, 50, shots=1)}) == 50


def test_a_seed_is_an_example_on_every_platform():
    e = few_shot('assign_math', 1, shots=0, depth=1, seed=7)[0]
    assert few_shot('assign_math', 3, shots=0, depth=1, seed=7)[0] == e != few_shot('assign_math',
            1, shots=0, depth=1, seed=8)[0]
    assert few_shot('toy_assign', 1, shots=1, depth=1)[0] == GOLD
    assert few_shot('copy_words', 1, shots=0)[0] == GOLD_WORDS


GOLD = Example('e5v7f1i3wiofyvpe?w3h7g2b5j4whqbsjmg?m', ['4', '5', '2', '7'], 2)
GOLD_WORDS = Example('Fill in the blank:\n\nroom party bread fire song ring book wind boy baby '
                     'bread fire song ring book ____ . ->',
                     [' song', ' baby', ' bread', ' room', ' party', ' boy', ' wind', ' book',
                      ' ring', ' fire'], 6)


@pytest.mark.parametrize('arguments, message', [
    (dict(task='assign'), "task='assign' is not one of copy_random, .*; did you mean 'toy_assign'"),
    (dict(task='toy_copy', depth=-1), 'depth=-1 0 to 99'),
    (dict(task='toy_copy', shots=-1), 'shots=-1 must not be negative'),
    (dict(task='toy_copy', n=0), 'n=0 at least 1')])
def test_what_cannot_be_asked(arguments, message):
    with pytest.raises(ValueError, match=message):
        few_shot(**dict(n=1, shots=0) | arguments)


# ------------------------------------------------------------------ scoring

@pytest.mark.parametrize('task', EVERY)
def test_a_random_scorer_is_at_chance(task):
    examples = few_shot(task, 3000, shots=0, depth=1)
    rng = torch.Generator().manual_seed(0)

    def guess(tokens):
        return torch.randn(*tokens.shape, 257, generator=rng)
    accuracy, _ = score(guess, BYTES, [Example('x', e.options, e.answer) for e in examples],
                        batch=1000)
    chance = 1 / len(examples[0].options)
    assert abs(accuracy - chance) < 5 * math.sqrt(chance * (1 - chance) / 3000)


@pytest.mark.parametrize('task', EVERY)
def test_a_model_that_knows_is_right(task):
    "Also where a value could begin another: what is sure of 13 gives 1 as much."
    examples = few_shot(task, 100, shots=0)
    known = {tuple(BYTES.encode(e.prompt)): BYTES.encode(e.options[e.answer]) for e in examples}

    def oracle(tokens):
        logits = torch.zeros(*tokens.shape, 257)
        for row, out in zip(tokens.tolist(), logits):
            n, answer = next((n, known[tuple(row[1:n + 1])]) for n in range(len(row))
                             if tuple(row[1:n + 1]) in known)
            for i, token in enumerate(answer):
                out[n + i, token] = 20
        return logits
    accuracy, (low, high) = score(oracle, BYTES, examples)
    assert accuracy == 1 and 0.9 < low < 1 and high == pytest.approx(1)
    # one answer of a thousand that would be right is not known to be
    answers = ask(lambda tokens: oracle(tokens).fill_(math.nan), BYTES, examples[:2])
    assert math.isnan(answers.accuracy) and answers.n == 2


def test_answers_by_hand(monkeypatch):
    values = [torch.tensor([-1.0, -2.0]).double(), torch.tensor([-3.0, -5.0]).double()]
    monkeypatch.setattr('nanodepth.engine.measure.log_likelihoods', lambda *_: values)
    first, second = Example('', ('a', 'b'), 0), Example('', ('a', 'b'), 1)
    assert ask(None, None, [first, second]) == Answers(1, 2, -3.0, [True, False])


@pytest.mark.parametrize('fields',
                         [{}, dict(order=[0, 1, 1, 2, 3, 2], n_kv_head=2, ln_scaling=True)],
                         ids=['plain', 'looped'])
@pytest.mark.parametrize('task, shots', [('assign_basic', 2), ('copy_words', 1), ('toy_assign', 0)])
def test_the_shared_cache_changes_nothing(tiny, fields, task, shots):
    model = tiny(vocab_size=257, context=512, std=0.3, **fields).double()
    examples = few_shot(task, 12, shots=shots, depth=1 if 'assign' in task else 0)
    one, two, slow = (log_likelihoods(model, BYTES, examples, **o)
                      for o in ({}, dict(share=False, batch=3), {}))
    for e, a, b, c in zip(examples, one, two, slow):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert len(a) == len(e.options)
    with torch.no_grad():       # the slow second form: one option at a time
        for e, a in zip(examples[:3], one):
            for option, value in zip(e.options, a):
                prompt, answer = [256, *BYTES.encode(e.prompt)], BYTES.encode(option)
                logp = model(torch.tensor([prompt + answer])).float().log_softmax(-1)[0]
                assert (value.item()
                        == pytest.approx(sum(logp[len(prompt) + i - 1, t].item()
                                             for i, t in enumerate(answer)), abs=1e-5))


def test_the_shared_cache_of_a_looped_model_that_keeps_all(tiny):
    model = tiny(vocab_size=257, context=512, std=0.3)
    examples = few_shot('copy_words', 4, shots=1)
    with looped(model, (1, 2), 'rk', 2, cache='exact'):
        one, two = (log_likelihoods(model, BYTES, examples, share=share) for share in (True, False))
    for a, b in zip(one, two):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_an_interval_by_hand():
    low, high = interval(5, 10)
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-4)      # Wilson's, from a table
    assert interval(0, 10)[0] == pytest.approx(0) and interval(10, 10)[1] == pytest.approx(1)


def test_too_long_is_said(tiny):
    with pytest.raises(ValueError, match='has 90 tokens, but the context is 32'):
        score(tiny(vocab_size=257), BYTES, [Example('x' * 87, ['12', '13'], 0)])


# ------------------------------------------------------------------ examples to train on

def test_written_examples_have_their_loss_on_the_answer_alone(tmp_path, tiny):
    write_examples(tmp_path, 'bytes', ['assign_code', 'toy_assign'], [1, 2], 10, n_val=8)
    data = Dataset(tmp_path, 'train', None)
    assert len(data) == 10
    seen = []
    for i in range(10):
        tokens, targets, _ = data.window(i)
        answer = BYTES.decode([t for t in targets if t >= 0])
        prompt = BYTES.decode([t for t in tokens.tolist() if t not in (0, 256)])
        assert re.fullmatch(r' ?\d+', answer) and answer.strip() in prompt and tokens[0] == 256
        seen.append(prompt)
    assert len(set(seen)) == 10 and sum(s.startswith('The following') for s in seen) == 5
    val = Dataset(tmp_path, 'val', None)
    assert val.kinds == ['assign_code/1', 'assign_code/2', 'toy_assign/1', 'toy_assign/2']
    assert not {tuple(val.window(i)[0]) for i in range(8)} & {tuple(data.window(i)[0])
            for i in range(10)}
    _, kinds = measure(tiny(vocab_size=257, context=256),
                       Loader(str(tmp_path), 2, 256, split='val'), 4)
    assert set(kinds) == set(val.kinds)


def test_the_examples_command(tmp_path, capsys):
    prepare = runpy.run_path(str(ROOT / 'data/sft/prepare.py'))['main']
    prepare([f'--out={tmp_path / "sft"}', '--tasks=assign_code', '--depths=1,2', '--n=64'])
    assert (len(Dataset(tmp_path / 'sft', 'train', None)) == 64
            and '64 examples of assign_code at depth 1, 2' in capsys.readouterr().out)
    for args in (['--n=0'], ['--tasks=x'], ['--depths=a'], ['--tokenizer=nothing']):
        with pytest.raises(Refused):
            prepare([f'--out={tmp_path / "no"}', *args])
