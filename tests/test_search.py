"The search over orders: its moves by hand, a planted order, and nothing where nothing is."
import csv
import random

import pytest
import torch
from test_trust import run  # noqa: F401

import nanodepth
from data.primitives import Example
from data.tokenizer import get_tokenizer
from engine import checkpoint
from engine.measure import log_likelihoods
from loop import running
from retrofit import surgery
from tools.search import Asked, Judge, beam_search, marks, moves, recipes, search

BYTES = get_tokenizer('bytes')


def questions(n, seed=0):
    rng = random.Random(seed)
    word = lambda k: ''.join(rng.choices('abcdefgh', k=k))
    return [Example(word(10), [word(1) for _ in range(4)], 0) for _ in range(n)]


@pytest.fixture
def asked(tiny):
    return Asked(tiny(vocab_size=257, n_layer=5), BYTES, questions(60))


def test_moves_by_hand():
    assert set(moves((0, 1, 2))) == {
        (0, 0, 1, 2), (0, 1, 1, 2), (0, 1, 2, 2), (1, 2), (0, 2), (0, 1), (1, 0, 2), (0, 2, 1),
        (0, 1, 0, 1, 2), (0, 1, 2, 1, 2), (2,), (0,), (0, 1, 2, 0, 1, 2)}
    assert (2, 3, 0, 1) in set(moves((0, 1, 2, 3))) and () not in set(moves((0,)))


@torch.no_grad()
def test_a_budget_of_nothing_is_the_model_as_it_is(asked):
    plain, right = (0, 1, 2, 3, 4), [0] * 60
    rows = search(asked, plain, right, 0, random.Random(0))
    assert [row['order'] for row in rows[::2]] == [plain, plain]
    assert all(row['change'].mean == row['gain'].mean == row['screened'] == 0 for row in rows)
    wanted = log_likelihoods(asked.model, BYTES, asked.questions)
    assert all(torch.equal(a, b) for a, b in zip(asked.by(plain), wanted))


@torch.no_grad()
@pytest.mark.parametrize('planted', [(2, 3, 0, 1, 4), (1, 0, 2, 4, 3)])
def test_a_planted_order_is_found(asked, planted):
    "The right answers are those of the model, whose layers were then put in another order."
    right = [values.argmax().item() for values in asked.by((0, 1, 2, 3, 4))]
    rows = search(asked, planted, right, 400, random.Random(0))
    assert rows[0]['order'] == (0, 1, 2, 3, 4) and rows[0]['right'] == 100
    assert rows[0]['gain'].interval()[0] > 0 and rows[2]['gain'].mean < 20
    assert asked.model.config.order is None         # the model is as it was


@torch.no_grad()
def test_nothing_is_found_where_there_is_nothing_to_find(asked):
    "Answers by chance, ten times: chosen by them an order looks better, and is not on the others."
    holds = 0
    for seed in range(10):
        rng = random.Random(seed)
        row = search(asked, (0, 1, 2, 3, 4), [rng.randrange(4) for _ in range(60)], 60, rng)[0]
        low, high = row['change'].interval()
        holds += low <= 0 <= high
        assert row['screened'] > 0
    assert holds >= 9


@torch.no_grad()
def test_the_score_and_the_best_for_each_question_by_hand(asked):
    right = [random.Random(1).randrange(4) for _ in range(60)]
    tried = beam_search(lambda order: -len(order), (0, 1, 2, 3, 4), 30, random.Random(0))
    assert len(tried) == 31 and min(map(len, tried)) <= 2 and max(map(len, tried)) <= 10
    rows = search(asked, (0, 1, 2, 3, 4), right, 20, random.Random(3))
    orders = list(asked.answers)
    any_right = [any(asked.by(order)[i].argmax() == right[i] for order in orders)
                 for i in range(1, 60, 2)]
    assert rows[1]['right'] >= rows[0]['right']
    assert rows[1]['right'] <= 100 * sum(any_right) / 30
    values = asked.by((0, 1, 2, 3, 4))
    with running(asked.model, [0, 1]):
        two = asked.now()
    chance, hit = marks(two, right)
    p = two[7].exp() / two[7].exp().sum()
    assert chance[7] == pytest.approx(100 * p[right[7]].item(), rel=1e-4)
    assert hit[7] == 100 * (two[7].argmax() == right[7]) and values[7].shape == (4,)


@torch.no_grad()
def test_another_family_is_searched_through_its_own_layers(planted=(1, 0, 2)):
    pytest.importorskip('transformers')
    from families import tiny as family

    from engine.foreign import answer_of
    asked = Asked(answer_of(family('gpt_neox', vocab_size=257, num_hidden_layers=3)), BYTES,
                  questions(60))
    right = [values.argmax().item() for values in asked.by((0, 1, 2))]
    rows = [*search(asked, planted, right, 40, random.Random(0)),
            *recipes(asked, planted, right)]
    assert rows[0]['change'].interval()[0] > 0 and (0, 1, 2) in asked.answers
    assert rows[4]['order'] == (1, 0, 2) * 2 and 'the window 0-2' in rows[5]['what']


def test_numbers_that_overflow_win_nothing(asked):
    nan = torch.full((4,), torch.nan)
    asked.answers = {(0,): [nan] * 60, (1,): asked.by((0, 1, 2, 3, 4))}
    judge = Judge(asked, (1,), [0] * 60)
    assert judge.score((0,)) == -torch.inf < judge.score((1,))
    best = judge.best_for_each([(0,), (1,)])
    assert all(torch.equal(a, b) for a, b in zip(best, asked.by((1,))))


def test_the_command(run, capsys, tmp_path):      # noqa: F811
    argv = [str(run[0]), '--tasks=toy_assign/1', '--n=12', '--budget=6']
    nanodepth.main('search', [*argv, f'--out={tmp_path / "s.csv"}'])
    said = capsys.readouterr().out
    assert '12 questions' in said and 'the middle block twice' in said
    rows = list(csv.DictReader((tmp_path / 's.csv').open()))
    assert len(rows) == 6 and {'screened', 'change', 'change_half', 'gain', 'order'} <= {*rows[0]}
    nanodepth.main('search', argv)
    assert said.split('numbers:')[0] == capsys.readouterr().out         # the same again


def test_what_cannot_be_searched(run, tiny, tmp_path, capsys):      # noqa: F811
    with pytest.raises(SystemExit):
        nanodepth.main('search', [str(run[0])])
    assert '--tasks is missing' in capsys.readouterr().err
    core = surgery(tiny(vocab_size=257), '1-2-1', mean=2)
    checkpoint.save(tmp_path / 'cut', **checkpoint.describe(core))
    with pytest.raises(SystemExit):
        nanodepth.main('search', [str(tmp_path / 'cut'), '--tasks=toy_assign/1'])
    assert 'has a recurrent core' in capsys.readouterr().err
