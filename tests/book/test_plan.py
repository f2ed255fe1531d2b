"Test training/plan.py: what each step of a run does, computed from its settings."
import pytest

from retrofit import sample_recurrence
from training.plan import Config, changes, generator_for, plan
from training.settings import read


COOLS = '--cooldown_data=x --cooldown_loop=3-2x2-3'
CORE = '--recurrence=4 --backprop_depth=8 --curriculum=0.5'


def drawn_r(mean, step):
    "Return the r that a run with seed 0 draws in a step."
    return sample_recurrence(mean, generator_for(0, 'recurrence', step))


@pytest.mark.parametrize('words, step, expected', [
    ('baseline', 0, dict(rate=1 / 50, data='data', batch=0, r=None)),
    ('baseline', 49, dict(rate=1.0)), ('baseline', 480, dict(rate=1.0)),
    ('baseline', 510, dict(rate=0.5, batch=510)),
    ('baseline', 599, dict(rate=1 - (119 / 120) ** 0.5)),
    ('baseline --lr_shape=cosine', 540, dict(rate=0.001 + 0.999 / 2)),
    ('baseline --lr_shape=constant', 599, dict(rate=1.0)),
    (f'baseline {COOLS}', 479, dict(data='data', batch=479)),
    (f'baseline {COOLS}', 480, dict(data='cooldown_data', batch=0)),
    (f'baseline {CORE}', 0, dict(r=drawn_r(1, 0), backprop_depth=1)),
    (f'baseline {CORE}', 599, dict(r=drawn_r(4, 599), backprop_depth=4))])
def test_plan_of_a_step_by_hand(words, step, expected):
    name, *settings = words.split()
    found = plan(read(Config, [f'config/{name}.py', *settings]), step)._asdict()
    if 'rate' in expected:
        expected['rate'] = pytest.approx(expected['rate'], rel=1e-12)
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize('words, wanted', [
    ('baseline', []), ('loop_1_2x3_1', [(0, [0, 1, 2, 1, 2, 1, 2, 3], False)]),
    ('lidas --cooldown_loop=3-2x2-3', [
        (48, [0, 1, 0, 1], True), (144, [0, 1, 2, 1, 2, 3], True),
        (288, [0, 1, 2, 3, 2, 3, 4, 5], True), (480, [0, 1, 2, 3, 4, 3, 4, 5, 6, 7], False)]),
    ('lidas --grow=stack --grow_alpha=0', [
        (120, [0, 1, 0, 1], True), (240, [0, 1, 2, 3, 2, 3], True),
        (360, [0, 1, 2, 3, 4, 5, 4, 5], True)])])
def test_changes_of_a_run_by_hand(words, wanted):
    name, *settings = words.split()
    assert changes(read(Config, [f'config/{name}.py', *settings])) == wanted
