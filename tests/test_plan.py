"plan.py: every step of every config against the settings read by hand; what a resume may change."
import dataclasses
import math
import shutil

import pytest
from conftest import ROOT
from test_train import config, log_of  # noqa: F401

from nanodepth.common.errors import Refused
from nanodepth.engine import checkpoint
from nanodepth.engine.cost import stretches
from nanodepth.engine.plan import MAY_DIFFER, MAY_DIFFER_AHEAD, Plan, Start
from nanodepth.grow import GROWTH, prop_schedule
from nanodepth.loop import parse_loop
from nanodepth.retrofit import recurrence_curriculum, sample_recurrence
from nanodepth.train import Config, read_config, train

CONFIGS = sorted(path.stem for path in ROOT.glob('config/[!_]*.py'))


def by_hand(c, start, step):
    "(rate, layers, origin, order, data, batch, r, backprop depth), worked out anew for one step."
    decay = c.steps - c.decay_steps
    falls = c.decay_steps if c.lr_decay_steps is None else c.lr_decay_steps
    since = step - (c.steps - falls)
    rate = 1.0 if since <= 0 else 1 - math.sqrt(since / falls)
    if c.lr_shape == 'cosine' and since > 0:
        rate = 0.5 + math.cos(math.pi * since / falls) / 2
    rate = pytest.approx(c.lr_floor + (1 - c.lr_floor) * rate, rel=1e-12)
    rate = (step + 1) / c.warmup_steps if step < c.warmup_steps else rate
    n, origin = start.n_layer, None
    if c.grow:
        depths = [c.grow_block]
        while depths[-1] < c.n_layer:
            depths.append(len(GROWTH[c.grow](depths[-1], c.grow_block)))
        lengths, stage, left = prop_schedule(decay, len(depths), c.grow_alpha), 0, step
        while stage + 1 < len(depths) and left >= lengths[stage]:
            left, stage = left - lengths[stage], stage + 1
        n = depths[stage]
        origin = GROWTH[c.grow](depths[stage - 1], c.grow_block) if stage else None
    late = step >= decay
    order = list(start.order or range(n))
    order = parse_loop(c.loop) if c.loop else order
    order = parse_loop(c.cooldown_loop) if late and c.cooldown_loop else order
    cool = late and c.cooldown_data is not None
    r = depth = None
    if start.kind == 'recurrent':
        order = None
        mean = recurrence_curriculum(step, c.steps, c.recurrence or start.mean, c.curriculum,
                                     c.curriculum_shape)
        depth = recurrence_curriculum(step, c.steps, c.backprop_depth or start.backprop_depth,
                                      c.backprop_curriculum)
        r, depth = sample_recurrence(mean, step, c.seed), min(depth, mean)
    data = 'cooldown_data' if cool else 'data'
    return rate, n, origin, order, data, step - decay if cool else step, r, depth


@pytest.mark.parametrize('name', CONFIGS)
def test_every_step_of_every_config(name):
    c = read_config([f'config/{name}.py'])
    recurs = name.startswith('retrofit') and 'dense' not in name
    start = (Start('recurrent', 6, None, 4, 8) if recurs else
             Start('lm', 8, [0, 1, 2, 2]) if c.init_from else Start('lm', c.n_layer))
    plan, decay = Plan(c, start), c.steps - c.decay_steps
    some = {*range(0, c.steps, max(1, c.steps // 300)), c.steps - 1}
    some |= {max(0, edge + d) for d in (-1, 0, 1)
             for edge in (*dict(plan.stages), decay, c.warmup_steps)}
    for step in sorted(step for step in some if step < c.steps):
        assert tuple(plan.at(step)) == by_hand(c, start, step), step


def test_the_plan_reads_the_settings_that_it_answers_for_and_no_others():
    "But for the seed, which r is drawn by, and init_from, which says whose layers they are."
    read = set()

    class Watched:
        def __init__(self, config):
            self.config = config

        def __getattr__(self, name):
            read.add(name)
            return getattr(self.config, name)
    grown = Config(grow='lidas', cooldown_loop='3-2x2-3', cooldown_data='x')
    looped = Config(n_layer=2, loop='2x4')
    recurs = Config(init_from='x', recurrence=3)
    core = Start('recurrent', 6, None, 4, 8)
    for c, start in ((grown, None), (looped, None), (recurs, core)):
        plan = Plan(Watched(c), start)
        for step in (0, 100, 599):
            plan.at(step)
        stretches(plan)
    assert read == {*MAY_DIFFER_AHEAD, 'seed', 'init_from'}
    assert MAY_DIFFER_AHEAD | MAY_DIFFER <= {field.name for field in dataclasses.fields(Config)}


def test_stretches_cover_every_step_once():
    for fields, edges in ((dict(grow='lidas'), [0, 48, 144, 288, 480, 600]), (dict(), [0, 600]),
                          (dict(cooldown_loop='3-2x2-3'), [0, 480, 600])):
        assert stretches(Plan(Config(**fields))) == list(zip(edges, edges[1:]))


GROWN = dict(grow_block=1, steps=40, decay_steps=8)


@pytest.mark.parametrize('old, new, at, message', [
    # 1, 2, 3, 4, 5 layers from steps 0, 2, 6, 12, 21 on. To 3 layers MIDAS and LIDAS grow alike.
    (dict(grow='midas', n_layer=5), dict(grow='lidas', n_layer=5), 5, None),
    (dict(grow='midas', n_layer=5), dict(grow='lidas', n_layer=5), 8, "with grow='midas', but"),
    (dict(n_layer=3), dict(n_layer=3, decay_steps=4), 32, None),
    (dict(n_layer=3), dict(n_layer=3, decay_steps=4), 34, 'with decay_steps=8, but'),
    (dict(n_layer=3), dict(n_layer=2), 1, 'with n_layer=3, but')])
def test_a_run_goes_on_where_both_plans_agree_on_every_step_taken(config, old, new, at, message):
    "Stopped at a step, and gone on with under other settings: as if they had been there all along."
    before = config('before', **GROWN | old | dict(save_every=1))
    stop_at(before, at)
    other, whole = (config(name, **GROWN | new) for name in ('other', 'whole'))
    shutil.copytree(before.out_dir, other.out_dir)
    if message:
        with pytest.raises(Refused, match=f'holds a run {message}' if 'with' in message
                           else message):
            train(other)
        return
    train(other)
    train(whole)
    same = [{k: v for k, v in line.items() if k not in ('tokens_per_s', 'seconds')}
            for line in log_of(whole)]
    assert same == [{k: v for k, v in line.items() if k not in ('tokens_per_s', 'seconds')}
                    for line in log_of(other)]


class Stopped(Exception):
    pass


def stop_at(c, step):
    from nanodepth import train as train_file
    take, calls = train_file.backward, []

    def stopping(*args):
        if len(calls) == step:
            raise Stopped
        calls.append(1)
        return take(*args)
    train_file.backward = stopping
    try:
        with pytest.raises(Stopped):
            train(c)
    finally:
        train_file.backward = take
    assert checkpoint.load(c.out_dir)['step'] == step


def test_a_start_is_kept(config):  # noqa: F811
    parent, child = config('parent', n_layer=3, loop='1-2x2'), None
    train(parent)
    child = config('child', init_from=parent.out_dir)
    train(child)
    starts = [Start(**checkpoint.load(c.out_dir)['start']) for c in (parent, child)]
    assert starts == [Start('lm', 3), Start('lm', 3, [0, 1, 2, 1, 2])]


def test_a_cosine_begins_where_it_is_told_and_nothing_else_moves():
    "90% of 1,000 steps, to a thousandth: its mean is what the authors' schedule has."
    old = Config(steps=1000, warmup_steps=5, decay_steps=100, grow='lidas')
    new = dataclasses.replace(old, lr_shape='cosine', lr_decay_steps=900, lr_floor=0.001)
    plan, before = Plan(new), Plan(old)
    assert stretches(plan) == stretches(before) and plan.stages == before.stages
    rates = [plan.at(step).lr_fraction for step in range(1000)]
    assert rates[99] == 1 and rates[100] == 1 and rates[101] < 1
    assert rates[-1] == pytest.approx(0.001, abs=1e-4)
    assert sum(rates) / 1000 == pytest.approx(0.55, abs=0.005)
    with pytest.raises(Refused, match='a decay over 999 steps do not fit'):
        dataclasses.replace(new, lr_decay_steps=999)


@pytest.mark.parametrize('mean, drawn, traced', [(4, 5.0, 3.4), (8, 9.0, 6.6), (32, 33, 8)])
def test_gradients_go_back_as_far_as_the_authors_do(mean, drawn, traced):
    "E[r] and E[recurrences with a trace], simulated with their code."
    plan = Plan(Config(init_from='x', recurrence=mean, curriculum=0.0, steps=4000),
                Start('recurrent', 6, None, 4, 8))
    steps = [plan.at(step) for step in range(4000)]
    assert {now.backprop_depth for now in steps} == {min(8, mean)}
    assert sum(now.r for now in steps) / 4000 == pytest.approx(drawn, rel=0.03)
    assert sum(min(now.r, now.backprop_depth) for now in steps) / 4000 == pytest.approx(traced,
                                                                                        abs=0.05)
