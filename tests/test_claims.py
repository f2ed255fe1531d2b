"Verdicts: Student's t against the tables, Holm by hand, each verdict from rows that deserve it."
import itertools
import math
import random

import pytest

from nanodepth.study.claims import Contrast, holm, one_more, t_quantile, verdict, verdicts


@pytest.mark.parametrize('share, df, t', [      # the tables in any textbook
    (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 4, 2.776), (0.95, 7, 2.365), (0.99, 3, 5.841),
    (0.9, 7, 1.895), (0.95, 30, 2.042)])
def test_students_t_is_the_tables(share, df, t):
    assert t_quantile(share, df) == pytest.approx(t, abs=6e-4)


def test_a_contrast_by_hand():
    found = Contrast([3.0, 5.0, 7.0, 5.0], [1.0, 4.0, 4.0, 3.0])        # 2, 1, 3, 2
    assert found.mean == 2 and found.error == pytest.approx(math.sqrt(2 / 3 / 4))
    assert found.interval(0.95) == pytest.approx((2 - 3.182 * 0.40825, 2 + 3.182 * 0.40825),
                                                 abs=1e-3)
    assert found.p_signs == 2 / 16              # only all signs up, or all down
    assert found.p == pytest.approx(0.0163, abs=2e-4)


def test_equal_sides_differ_by_nothing():
    same = Contrast([1.0, 2.0], [1.0, 2.0])
    assert same.p == 1 and same.p_signs == 1


def test_holm_by_hand():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize('changes, direction, said', [
    ([1.0, 1.1, 0.9, 1.0], 1, 'holds'), ([1.0, 1.1, 0.9, 1.0], -1, 'does not hold'),
    ([0.001, -0.002, 0.001, 0.0], 1, 'no difference'),
    ([0.001, -0.002, 0.001, 0.0], 0, 'holds'), ([1.0, 1.1, 0.9, 1.0], 0, 'does not hold'),
    ([1.0, -1.0, 2.0, 0.0], 1, 'not resolved'), ([0.3], 1, r'not resolved \(1 seed\)'),
    ([], 1, r'not resolved \(0 seeds\)')])
def test_every_verdict(changes, direction, said):
    import re
    found = Contrast(changes, [0.0] * len(changes))
    [(text, _)] = verdicts([found], [0.05], [direction])
    assert re.match(said, text)


def test_a_verdict_is_corrected_for_its_section():
    weak = Contrast([1.0, 2.0, 3.0, 1.0, 2.5], [0.0] * 5)       # p = .009 alone
    noise = [Contrast([1.0, -1.0, 0.5 * k, -0.4, 0.1], [0.0] * 5) for k in range(6)]
    assert verdict(weak, weak.p, 0.05, 1) == 'holds'
    several = verdicts([weak, *noise[:3]], [0.05] * 4, [1] * 4)
    assert several[0][1] == pytest.approx(4 * weak.p) and several[0][0] == 'holds'
    several = verdicts([weak, *noise, *noise], [0.05] * 13, [1] * 13)
    assert several[0][0].startswith('not resolved')


def test_signs_drawn_again_are_all_of_them():
    changes = [0.4, 0.1, 0.3, -0.2, 0.5]
    slow = [abs(sum(s * c for s, c in zip(signs, changes))) >= 1.1 - 1e-9
            for signs in itertools.product((1, -1), repeat=5)]
    assert Contrast(changes, [0.0] * 5).p_signs == sum(slow) / 32


def test_one_more_seed_by_hand_and_by_chance():
    middle, half = one_more([1.0, 2.0, 3.0])        # sd 1, t 4.303: 4.303 * sqrt(1 + 1/3)
    assert middle == 2 and half == pytest.approx(4.969, abs=1e-3)
    draw, inside = random.Random(0), 0
    for _ in range(2000):
        *seen, new = (draw.gauss(5, 2) for _ in range(5))
        middle, half = one_more(seen)
        inside += abs(new - middle) <= half
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)
