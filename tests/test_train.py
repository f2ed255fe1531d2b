"train.py: a step of training is what the plan says, and costs what the plan says."
import contextlib
import dataclasses
import json
import math
import re
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import at_step, flags, log_of, ranks, refused, ROOT, same, stop_at, weights_of

from nanodepth.grow import GROWTH, prop_schedule, untie
from nanodepth.loop import parse_loop
from nanodepth.model import LM, ModelConfig, Refused
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import recurrence_curriculum, sample_recurrence
from nanodepth.text.loader import Rows
from nanodepth.text.tokens import write_dataset
from nanodepth.train import (AHEAD, FREE, Config, Loader, Muon, load, make_optimizers, plan, read,
                             stages, train, validate)

CONFIGS = sorted(path.stem for path in ROOT.glob('config/*.py')
                 if not path.stem.startswith('compare_'))

# ------------------------------------------------------------------------------------------ plan


def by_hand(c, start, step):
    "(rate, layers, origin, order, data, batch, r, backprop depth), worked out anew for one step."
    warmup, decay = (n if n >= 1 else round(n * c.steps) for n in (c.warmup_steps, c.decay_steps))
    since = step - (c.steps - decay)
    rate = 1.0
    if c.lr_shape == '1-sqrt' and since > 0:
        rate = 1 - math.sqrt(since / decay)
    if c.lr_shape == 'cosine' and since > 0:
        rate = 0.001 + 0.999 * (0.5 + math.cos(math.pi * since / decay) / 2)
    rate = (step + 1) / warmup if step < warmup else pytest.approx(rate, rel=1e-12)
    n, origin = start or c.n_layer, None
    if c.grow:
        operator, depths = GROWTH.get(c.grow, c.grow), [c.grow_block]
        while depths[-1] < c.n_layer:
            depths.append(len(operator(depths[-1], c.grow_block)))
        lengths, stage, left = prop_schedule(c.steps - decay, len(depths), c.grow_alpha), 0, step
        while stage + 1 < len(depths) and left >= lengths[stage]:
            left, stage = left - lengths[stage], stage + 1
        n = depths[stage]
        origin = operator(depths[stage - 1], c.grow_block) if stage else None
    loop = c.cooldown_loop if since >= 0 and c.cooldown_loop else c.loop
    cool = since >= 0 and c.cooldown_data is not None
    r = depth = None
    if c.recurrence:
        mean = recurrence_curriculum(step, c.steps, c.recurrence, c.curriculum, c.curriculum_shape)
        depth = recurrence_curriculum(step, c.steps, c.backprop_depth, c.backprop_curriculum)
        r, depth = sample_recurrence(mean, step, c.seed), min(depth, mean)
    return (rate, n, origin, parse_loop(loop) if loop else None,
            'cooldown_data' if cool else 'data', since if cool else step, r, depth)


@pytest.mark.parametrize('name', CONFIGS)
def test_every_step_of_every_config(name):
    c = read(Config, [f'config/{name}.py'])
    start = 6 if c.recurrence else 8 if c.init_from else None
    if c.recurrence:        # the rest is the core's
        c.backprop_depth = c.backprop_depth or 8
    edges = [first for first, *_ in stages(c, start)]
    edges += [step for step in range(1, c.steps) if plan(c, step, start).rate < 1][:1]
    some = {*range(0, c.steps, max(1, c.steps // 100)), c.steps - 1}
    some |= {max(0, edge + d) for d in (-1, 0, 1) for edge in edges}
    for step in sorted(some):
        assert tuple(plan(c, step, start)) == by_hand(c, start, step), step


def test_the_plan_reads_the_settings_that_it_answers_for_and_no_others():
    "But for the seed, which r is drawn by, and init_from, whose model grows once."
    names = set()

    class Watched:
        def __init__(self, config):
            self.config = config

        def __getattr__(self, name):
            names.add(name)
            return getattr(self.config, name)
    for c, start in ((Config(grow='lidas', cooldown_loop='3-2x2-3', cooldown_data='x'), None),
                     (Config(n_layer=2, loop='2x4'), None),
                     (Config(init_from='x', recurrence=3, backprop_depth=8), 6)):
        for step in (0, 100, 599):
            plan(Watched(c), step, start)
    assert names == {*AHEAD, 'seed', 'init_from'}
    assert AHEAD | FREE <= {field.name for field in dataclasses.fields(Config)}


def test_a_config_names_every_operator():
    hint = typing.get_type_hints(Config)['grow']
    assert {*typing.get_args(typing.get_args(hint)[0])} == {*GROWTH}

# ------------------------------------------------------------------------------------------ loop


def test_a_run_learns_and_leaves_its_files(config):
    c = config(steps=40, decay_steps=10, lr=1e-2, eval_every=20)
    train(c)
    log = log_of(c)
    assert [line['step'] for line in log] == list(range(41))
    losses = [line['val_loss'] for line in log if 'val_loss' in line]
    assert len(losses) == 3 and losses[-1] < losses[0] - 1
    assert abs(losses[0] - math.log(257)) < 0.1
    last = log[-1]
    model = load_model(c.out_dir)
    assert (last['tokens'] == 40 * 64 and last['flops'] == 40 * 64 * model.flops_per_token()
            and last['n_layer'] == 2)
    assert {'lr', 'loss', 'tokens_per_s', 'grad_norm'} <= set(last)
    seconds = [line['seconds'] for line in log]
    assert seconds == sorted(seconds)
    x, y, _ = Loader(c, c.data, seed=c.seed).batch(0)       # of the first step
    train(dataclasses.replace(c, out_dir=f'{c.out_dir}-0', steps=1, warmup_steps=0, decay_steps=1,
                              lr=0.0))
    first = load_model(f'{c.out_dir}-0')
    assert log[1]['loss'] == pytest.approx(first(x, y).item(), rel=1e-5)
    assert 0 <= last['kinds']['fifth']['accuracy'] <= 1
    about = json.loads((Path(c.out_dir) / 'run.json').read_text())
    assert about['tokenizer'] == 'bytes' and about['config']['lr'] == 1e-2


def test_a_checkpoint_grows_once(config):
    "Also where it is stopped after that, and goes on."
    first = config('first', n_layer=4)
    train(first)
    # 10 steps before the decay, a third of them shallow; with a rate of zero nothing else moves
    c = config('deeper', init_from=first.out_dir, grow='lidas', grow_block=2, steps=14,
               decay_steps=4, warmup_steps=0, lr=0.0, weight_decay=0.0)
    assert [(step, n) for step, _, n in stages(c, 4)] == [(0, 4), (3, 6)]
    stop_at(5)
    train(c)
    train(c)
    expected = untie(load_model(first.out_dir), [0, 1, 2, 1, 2, 3]).state_dict()
    assert same(weights_of(c), expected)
    assert [line['n_layer'] for line in log_of(c) if 'grown' in line] == [6]


# 1, 2, 3, 4 layers from steps 0, 2, 7, 14
GROW = dict(grow='lidas', grow_block=1, n_layer=4, steps=30, decay_steps=5)


def test_growth_happens_when_the_plan_says_and_is_logged(config, capsys):
    c = config(**GROW, keep_stages=True)
    assert [(step, n) for step, _, n in stages(c)] == [(0, 1), (2, 2), (7, 3), (14, 4)]
    train(c)
    log = log_of(c)
    assert [line['n_layer'] for line in log] == [1] * 3 + [2] * 5 + [3] * 7 + [4] * 16
    assert [line['step'] for line in log if 'grown' in line] == [3, 8, 15]
    for line in log:
        if 'grown' in line:
            assert line['grown']['before'] != line['grown']['after']
    costs = [LM(ModelConfig(n_layer=n, n_embd=32, n_head=2, context=16)).flops_per_token()
             for n in (1, 2, 3, 4)]
    assert log[-1]['flops'] == 64 * (2 * costs[0] + 5 * costs[1] + 7 * costs[2] + 16 * costs[3])
    said = re.search(r'([\d.e+]+) training FLOPs, ([\d.]+)% less', capsys.readouterr().out)
    saved = 100 * (1 - log[-1]['flops'] / (30 * 64 * costs[3]))
    assert float(said[2]) == pytest.approx(saved, abs=0.05)
    assert len(load_model(c.out_dir).layers) == 4
    # keep_stages: each model as it was before it grew
    grown = [line['grown']['before'] for line in log if 'grown' in line]
    val = Rows(c.data, c.batch_size, c.context)
    for step, n, before in zip((2, 7, 14), (1, 2, 3), grown, strict=True):
        stage = load_model(f'{c.out_dir}/ckpt-{step}.pt')
        assert len(stage.layers) == n
        assert validate(stage, val, c.eval_batches)['val_loss'] == pytest.approx(before, abs=1e-6)


SMALLER = GROW | dict(batch_size=6, steps=12, decay_steps=2)
MASKED = dict(optimizer='adamw', steps=6)
CORE = dict(optimizer='adamw', steps=3, warmup_steps=0, decay_steps=1, curriculum=0.5)
ALIKE = dict(       # a run's settings, what a second run has otherwise, its processes, how near
    growing_in_pieces=(SMALLER, dict(grad_accum=3), 2, 1e-4),
    growing_in_three=(SMALLER, {}, 3, 1e-4),
    masked_in_pieces=(MASKED, dict(grad_accum=2), 1, 1e-5),
    masked_row_by_row=(MASKED, dict(grad_accum=4), 1, 1e-5),
    masked_in_two=(MASKED, {}, 2, 1e-5),
    a_core_in_pieces=(CORE, dict(grad_accum=2), 1, 1e-5),
    a_core_in_two=(CORE, {}, 2, 1e-5),
    half=(dict(steps=4, warmup_steps=0, decay_steps=1, dtype='bfloat16'), {}, 2, 1e-3),
    measured_and_logged=(dict(eval_every=1), dict(eval_every=100, log_every=100, save_every=100),
                         1, 0))


@pytest.mark.parametrize('name', ALIKE)
def test_pieces_ranks_and_looks_change_no_step(name, config, recurrent, tmp_path):
    """The same tokens weigh the same, whoever computes them, and a first state is a function of a
    row's place in the batch."""
    fields, changes, processes, near = ALIKE[name]
    if name.startswith('masked'):           # pieces and ranks have unequal numbers of targets
        rng = np.random.default_rng(0)
        for split in ('train', 'val'):
            mask = rng.random(64 * 17) < np.repeat(rng.random(64), 17)
            mask[:17] = 0
            write_dataset(tmp_path / 'sft', split, 'bytes', rng.integers(0, 99, 64 * 17), mask=mask)
        fields = fields | dict(data=str(tmp_path / 'sft'))
    if fields is CORE:
        fields = fields | recurrent
    one, other = config('one', **fields), config('other', **fields | changes)
    train(one)
    ended = ranks(flags(other), processes)
    assert ended.returncode == 0, ended.stderr
    logs = [{line['step']: line for line in log_of(c)} for c in (one, other)]
    for step in logs[1]:
        a, b = (log[step] for log in logs)
        assert [a.get(key) for key in ('n_layer', 'r')] == [b.get(key) for key in ('n_layer', 'r')]
        for key in {'loss', 'grad_norm', 'val_loss'} & a.keys() & b.keys():
            assert a[key] == pytest.approx(b[key], rel=near)
    assert logs[0].keys() == logs[1].keys() or name == 'measured_and_logged'
    a, b = weights_of(one), weights_of(other)
    assert all((a[name] - b[name]).norm() <= 20 * near * a[name].norm() for name in a)


@pytest.mark.parametrize('at, save_every', [(4, 1), (8, 100)])
def test_a_step_that_is_not_finite_leaves_the_weights_before_it(config, at, save_every):
    "Step 4 is the one that grows: there the last checkpoint counts, as a resume would not grow."
    settings = dict(grow='lidas', grow_block=1, n_layer=2, decay_steps=3, save_every=save_every)
    good, c = config('good', **settings), config(**settings)
    train(good)
    assert [line['step'] for line in log_of(good) if 'grown' in line] == [4]
    at_step(at, lambda loss: loss * math.nan)
    with pytest.raises(Refused, match=f'step {at} has loss nan.*lower --lr'):
        train(c)
    model, saved = load(c.out_dir)
    assert (saved['step'], len(model.layers)) == (at - 1, 1 if at == 4 else 2)
    # they may be bad already: the checkpoint before them stays beside
    assert (Path(c.out_dir) / f'ckpt-{at - 1}.pt').exists() == (save_every == 1)
    train(c)
    assert same(weights_of(good), weights_of(c))


def test_a_step_that_no_gpu_holds_is_a_line(config, capsys):
    def too_large(loss):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 6.00 GiB')
    at_step(1, too_large)
    said = refused(capsys, 'train', *flags(config()))
    assert 'a higher --grad_accum' in said and 'a lower --batch_size' in said

# ---------------------------------------------------------------------- functions of a config


@pytest.fixture
def own(config, tmp_path):
    "own(text of a config, name of the run): a small run with its settings and functions."
    def make(text, out='run', **more):
        (tmp_path / 'own.py').write_text(text)
        values = vars(read(Config, [str(tmp_path / 'own.py'), '--out_dir=out/run']))
        return config(out, **{name: value for name, value in values.items()
                              if value != getattr(Config, name)}, **more)
    return make


def test_a_growth_of_ones_own(own):
    "An operator, a beginning and a metric; the files of a run hold no function."
    text = (ROOT / 'config/own_growth.py').read_text()
    c = own(text, n_layer=4)
    train(c)
    [grown] = [line['grown'] for line in log_of(c) if 'grown' in line]
    # a copy begins with zeros where it writes, so that the loss stays
    assert grown['before'] == grown['after'] and grown['origin'] == [0, 1, 0, 1]
    model, saved = load(c.out_dir)                      # which opens plain values only
    with torch.no_grad():
        stream = c.metric(model.eval(), Loader(c, c.data, 'val'))['stream'].item()
    assert log_of(c)[-1]['stream'] == pytest.approx(stream)
    in_json = json.loads((Path(c.out_dir) / 'run.json').read_text())['config']
    assert saved['config']['init'] == grown['init'] == in_json['init']
    for name in ('grow', 'init', 'metric'):
        assert re.fullmatch(name + ' [0-9a-f]{12}', in_json[name])
    with pytest.raises(Refused, match='the log has a passes already'):
        train(own(text.replace('dict(stream=', 'dict(passes='), 'new', n_layer=4))
    # a resume: another metric will do, another beginning of copies or another order will not
    for before, after, words in (
            ('dict(stream=', 'dict(size=', None),
            ('old):\n', 'old):\n    pass\n', 'holds a run with init=init '),
            ('range(n_layer - block, n_layer)', 'range(block)', None),     # the same order here
            ('[*range(n_layer), *range(n_layer - block, n_layer)]', '[0, 1, 1, 1]', 'grow=grow ')):
        assert before in text
        with pytest.raises(Refused, match=words) if words else contextlib.nullcontext():
            train(own(text.replace(before, after), n_layer=4))


def test_a_metric_sees_the_rows_of_all_processes(config, tmp_path):
    path, c = tmp_path / 'own.py', config(n_layer=1, steps=2, decay_steps=0)
    path.write_text('def metric(model, loader):\n    return dict(rows=len(loader.batch(0)[0]))\n')
    assert ranks([str(path), *flags(c)]).codes == [0, 0]
    assert log_of(c)[-1]['rows'] == c.batch_size


OWN = '''
from model import Step


class Again(Step):
    part = 1

    def __init__(self, items, times=2):
        super().__init__(items)
        self.times = times

    def settings(self):
        return dict(times=self.times)

    @property
    def repeated(self):
        return self.items * self.times

    def __call__(self, model, x, depth, **how):
        return model.run(x, self.repeated, depth, **how)

    def unrolled(self, r=None):
        return super().unrolled(r) * self.times


n_layer = 4
order = [0, Again([1, Again([2], 3)]), 3]


def lr_shape(c, step):
    return 0.5


def optimizer(model, c):
    import torch
    return [torch.optim.SGD(model.parameters(), c.lr)]
'''


def test_a_config_may_hold_steps_a_rate_and_an_optimizer(own, capsys):
    whole, c = own(OWN, 'whole'), own(OWN)
    train(whole)
    assert 'functions of the config: lr_shape, optimizer' in capsys.readouterr().out
    stop_at(5)
    train(c)
    train(own(OWN))
    assert same(weights_of(whole), weights_of(c))
    log = log_of(c)
    assert log[-1]['depth'] == 10 and not any('looped' in line for line in log)
    assert log[-1]['lr'] == 0.5 * c.lr
    model, saved = load(c.out_dir, classes=(type(c.order[1]),))
    assert model.unrolled() == [0, 1, 2, 2, 2, 1, 2, 2, 2, 3] and saved['step'] == 12
    for old, new, words in (('[2], 3)', '[2], 4)', 'holds a run with order='),
                            ('items * self', 'items[:1] * self', 'the Steps of the run in'),
                            ('x, self.rep', 'x + 0, self.rep', 'the Steps of the run in'),
                            ('part = 1', 'part = 2', 'the Steps of the run in'),
                            ('c.lr)', 'c.lr * 2)', 'holds a run with optimizer=')):
        with pytest.raises(Refused, match=words):
            train(own(OWN.replace(old, new)))
    train(own(OWN.replace('return 0.5', 'return 1 / 2')))       # the same rates

# ------------------------------------------------------------------------------------ optimizers


@pytest.mark.parametrize('optimizer', ['muon', 'adamw'])
@pytest.mark.parametrize('tied', [True, False])
def test_every_parameter_has_one_optimizer(optimizer, tied):
    model = LM(ModelConfig(n_layer=2, n_embd=32, n_head=2, tie_embeddings=tied))
    optimizers = make_optimizers(model, Config(optimizer=optimizer, lr=1e-3, adamw_lr=1e-4,
                                               weight_decay=0.1, muon_scaling='original'))
    groups = [(type(o).__name__, g) for o in optimizers for g in o.param_groups]
    held = [id(p) for _, g in groups for p in g['params']]
    assert sorted(held) == sorted({id(p) for p in model.parameters()})
    for name, group in groups:
        assert name != 'Muon' or group['adjust_lr_fn'] == 'original'
        assert group['weight_decay'] == (0 if group['params'][0].dim() == 1 else 0.1)
        assert group['peak'] == (1e-4 if optimizer == 'muon' and name == 'AdamW' else 1e-3)
    assert [name for name, _ in groups].count('Muon') == (optimizer == 'muon')


@pytest.mark.parametrize('optimizer, clip', [('muon', 0.01), ('muon', 0.0), ('adamw', 0.01)])
def test_a_step_has_the_rate_of_the_plan_and_the_norm_that_is_given(config, monkeypatch, optimizer,
                                                                    clip):
    "The norm is that of both optimizers' gradients together; with 0 they are left as they are."
    taken = {Muon: [], torch.optim.AdamW: []}       # of each step: (the rate, the squares' sum)
    for kind in taken:
        def noted(self, closure=None, step=kind.step):
            grads = [p.grad.flatten() for group in self.param_groups for p in group['params']]
            taken[type(self)].append((self.param_groups[0]['lr'],
                                      torch.cat(grads).square().sum().item()))
            return step(self)
        monkeypatch.setattr(kind, 'step', noted)
    c = config(steps=8, warmup_steps=3, optimizer=optimizer, lr=2e-3, grad_clip=clip,
               adamw_lr=5e-4 if optimizer == 'muon' else None)
    train(c)
    assert len(taken[Muon]) == (8 if optimizer == 'muon' else 0)
    for kind, peak in ((torch.optim.AdamW, c.adamw_lr or c.lr), (Muon, c.lr)):
        rates = [rate for rate, _ in taken[kind]]
        assert rates in ([], pytest.approx([peak * plan(c, step).rate for step in range(8)]))
    squares = zip(*([square for _, square in steps] for steps in taken.values() if steps))
    norms = [math.sqrt(sum(both)) for both in squares]
    logged = [line['grad_norm'] for line in log_of(c) if 'grad_norm' in line]
    assert min(logged) > 0.01 and norms == pytest.approx([clip] * 8 if clip else logged, rel=1e-3)


@pytest.mark.parametrize('adjust', ['match_rms_adamw', 'original'])
def test_muon_is_torchs(adjust, monkeypatch):
    """What each step changes and keeps, with the same random gradients, of which one is zero, and
    one parameter has none. For once torch iterates in float64."""
    monkeypatch.setattr(torch.Tensor, 'bfloat16', torch.Tensor.double)
    shapes = [(24, 16), (16, 24), (16, 16), (24, 16), (16, 24)]
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = [kind(params, lr=0.5, weight_decay=0.1, adjust_lr_fn=adjust)
                  for kind, params in ((Muon, ours), (torch.optim.Muon, theirs))]
    for step in range(3):
        before = [p.detach().clone() for p in (*ours, *theirs)]
        for p, q in zip(ours[1:], theirs[1:]):
            p.grad = torch.randn(p.shape) * (step > 0 or p is not ours[1])
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        moved = [(p - old).detach() for p, old in zip((*ours, *theirs), before)]
        for a, b in zip(moved[:5], moved[5:]):
            assert (a - b).norm() <= 1e-5 * b.norm()
    kept = [optimizer.state_dict()['state'] for optimizer in optimizers]
    assert kept[0].keys() == kept[1].keys() == {1, 2, 3, 4}
    assert all(same(kept[0][i], kept[1][i]) for i in kept[0])


def test_adamw_star_by_hand():
    """The authors' code, a number at a time; the third gradient is a spike, one entry never moves,
    and of the last one the squares are smaller than that of eps."""
    values = read(Config, ['config/adamw_star.py'])
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 0.3]))
    [optimizer] = values.optimizer(SimpleNamespace(parameters=lambda: [p]), values)
    for group in optimizer.param_groups:
        group.update(lr=0.1, peak=0.2, weight_decay=0.01)
    w, m, v = [1.0, -2.0, 0.5, 0.3], None, None
    for t, gradient in enumerate(([0.1, 0.2, 0.0, 5e-7], [0.1, -0.1, 0.0, 5e-7],
                                  [5.0, 0.1, 0.0, 5e-7], [0.1, 0.1, 0.0, 5e-7]), 1):
        p.grad = torch.tensor(gradient)
        optimizer.step()
        if t == 1:
            m, v = list(gradient), [g * g for g in gradient]
        m = [0.9 * a + 0.1 * g for a, g in zip(m, gradient)]
        v = [max(0.95 * a + 0.05 * g * g, 1e-12) for a, g in zip(v, gradient)]
        rms = math.sqrt(sum(g * g / a for g, a in zip(gradient, v)) / 4)
        steps = [math.atan2(a, math.sqrt(b) / math.sqrt(1 - 0.95 ** t))
                 / (max(1.0, rms) * (1 - 0.9 ** t)) for a, b in zip(m, v)]
        if t == 1:
            assert steps[0] == pytest.approx(2.2, abs=0.01)
        w = [x * (1 - 0.01 * 0.1 / 0.2) - 0.1 * step for x, step in zip(w, steps)]
        assert p.tolist() == pytest.approx(w, rel=1e-5) and (rms > 1.1) == (t == 3)
