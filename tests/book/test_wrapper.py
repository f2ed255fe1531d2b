"Test wrapper.py: a window of the order runs as one step of a solver."
import pytest
import torch
from slow_forms import (ONE, by_stages, check_solver, half, in_pieces, moved_by_tanh, slow_steps,
                          text)

from model import Refused
from retrofit import surgery
from wrapper import SOLVERS, Window, pick_window, wrapped


@pytest.mark.parametrize('solver, K, options, expected', [
    ('naive', 3, {}, 1 / 8),
    ('naive', 1, {}, 0.5),                      # one step of length 1 is the plain window
    ('anchored', 3, {}, 0.5 * 0.5 + 0.5 * (5 / 6) ** 3),
    ('euler', 2, dict(T=2), 0.25),              # two steps of length 1 are two plain windows
    ('anchored', 2, dict(T=2), 0.5 * 0.25 + 0.5 * 0.5)])
def test_solver_on_a_linear_map(solver, K, options, expected):
    assert abs(SOLVERS[solver](half, ONE, K, **options).item() - expected) < 1e-12


def test_anchored_is_equation_16_of_the_paper():
    x, g = moved_by_tanh()
    for K, beta in ((1, 0.2), (2, 0.5), (3, 0.5), (5, 0.1), (4, 0.0)):
        result = SOLVERS['anchored'](g, x, K, beta=beta)
        assert torch.allclose(result, by_stages(g, x, K, beta), atol=1e-12)
        small_steps = SOLVERS['euler'](g, x, K)
        assert torch.allclose(result, beta * g(x) + (1 - beta) * small_steps, atol=1e-12)


@pytest.mark.parametrize('settings', [
    {}, dict(T=2), dict(alphas=(0.7, 0.5, 0.3)), dict(tol=0.2),
    dict(alphas=(0.5, 0.5, 0.5), tol=0.1)], ids=str)
def test_euler_is_its_formula(settings):
    "With tol, some tokens stop after the first step, some later, and some not at all."
    x, g = moved_by_tanh()
    for K in (3,) if 'alphas' in settings else (1, 2, 3, 5):
        result = SOLVERS['euler'](g, x, K, **settings)
        assert torch.allclose(result, slow_steps(g, x, K, **settings), atol=1e-12, rtol=1e-12)
    if 'tol' in settings:
        without = {name: value for name, value in settings.items() if name != 'tol'}
        is_stopped = (SOLVERS['euler'](g, x, K, **without) != result).any(-1)
        assert is_stopped.any() and not is_stopped.all()


def test_euler_with_a_list_of_equal_steps():
    x, g = text()[..., None].float(), lambda y: y * 0.9 + 0.1
    euler = SOLVERS['euler']
    assert torch.equal(euler(g, x, 4), euler(g, x, 4, alphas=(0.25,) * 4))
    assert torch.equal(euler(g, x, 4), SOLVERS['anchored'](g, x, 4, beta=0))
    for settings, message in ((dict(alphas=(0.6, 0.4)), 'has 2 lengths, and K=3 steps need 3'),
                              (dict(alphas=(1, 1, 1), T=2), 'leave out T')):
        with pytest.raises(Refused, match=message):
            euler(g, x, 3, **settings)


@pytest.mark.parametrize('solver', ['naive', 'anchored', 'euler'])
def test_solver_keeps_what_a_window_relies_on(solver):
    check_solver(solver)


@pytest.mark.parametrize('how, message', [
    (dict(K=0), 'K=0: a number of steps'), (dict(K=2.0), 'K=2.0: a number of steps'),
    (dict(decode='none'), 'decode=none must be full or bypass'),
    (dict(solver='naive', T=2), "solver=naive: got an unexpected keyword argument 'T'")])
def test_a_window_refuses_wrong_settings(how, message):
    with pytest.raises(Refused, match=message):
        Window([0], **how)


def test_wrapped_puts_a_window_into_the_order(six, tiny):
    "By default it has the middle four items of the order."
    loop = tiny(n_layer=3, order=[0, 1, 2] * 3)
    core = surgery(six, '2-2-2', r=4)
    for model, how, order in (
            (six, {}, [0, Window([1, 2, 3, 4]), 5]),
            (loop, dict(window=(2, 5), solver='naive', cache='last'),
             [0, 1, Window([2, 0, 1, 2], 'naive', cache='last'), 0, 1, 2]),
            (core, dict(window='1-2'), [0, Window([1, core.order[2]]), 4, 5])):
        with wrapped(model, **how):
            assert str(model.order) == str(order)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_off_values_are_the_plain_model_to_the_bit(six, dtype):
    "With K = 1, or with beta = 1, the window computes what its layers compute."
    model, tokens = six.to(dtype), text()
    plain, (cached, slots) = model(tokens), in_pieces(model, tokens, [6, 1, 1, 4])
    for K, beta in ((1, 0.3), (3, 1.0)):
        with wrapped(model, (2, 4), 'anchored', K, beta=beta):
            logits, kept = in_pieces(model, tokens, [6, 1, 1, 4])
            assert torch.equal(model(tokens), plain) and torch.equal(logits, cached)
            for place in enumerate(range(6)):
                assert torch.equal(kept[place][0], slots[place][0])


@pytest.mark.parametrize('window, depth, expected', [
    (None, 28, (12, 15)), (None, 36, (15, 18)), (None, 48, (22, 25)), ('mid6', 36, (15, 20)),
    (None, 3, (0, 2)), ('mid3', 28, (13, 15)), ((3, 5), 6, (3, 5)), ('0-0', 6, (0, 0)),
    (0.5, 8, (2, 5)), (0.0, 8, (0, 3)), (1.0, 8, (4, 7)), ('0.3', 28, (7, 10))], ids=str)
def test_pick_window_by_hand(window, depth, expected):
    assert pick_window(window, depth) == expected


@pytest.mark.parametrize('window', [
    '1.7', (3, 6), (4, 3), (-1, 2), 'mid9', 'foo', (1, 2, 3), '1-', '-3-5', (0.4, 0.6),
    1e-5 - 1, 1.5])
def test_pick_window_refuses_what_is_not_in_the_order(window):
    with pytest.raises(Refused, match='window='):
        pick_window(window, 6)


@pytest.mark.parametrize('window', ['4', '1', '0', 3, 1])
def test_a_single_number_is_not_a_window(window):
    "It could mean a layer, a size or a share, so the message names these forms."
    with pytest.raises(Refused, match="(one layer is '3-3').*'mid4'.*decimal point, such as 0.5"):
        pick_window(window, 6)
