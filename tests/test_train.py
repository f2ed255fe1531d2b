"train.py: a step of training is what the plan says, and costs what the plan says."
import contextlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import at_step, flags, log_of, ranks, ROOT, same, stop_at, weights_of
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nanodepth.grow import GROWTH, prop_schedule, untie
from nanodepth.loop import parse_loop
from nanodepth.model import LM, ModelConfig, Refused
from nanodepth.models.checkpoint import load_model
from nanodepth.retrofit import recurrence_curriculum, sample_recurrence
from nanodepth.text.loader import Rows
from nanodepth.text.tokens import write_dataset
from nanodepth.train import (Config, Loader, Muon, load, make_optimizers, plan, read,
                             stages, train, validate)

CONFIGS = sorted(path.stem for path in ROOT.glob('config/*.py')
                 if not path.stem.startswith('compare_'))


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


@pytest.mark.parametrize('name', [*CONFIGS, 'a loop and other data in the cool-down'])
def test_every_step_of_every_config(name):
    if name in CONFIGS:
        c = read(Config, [f'config/{name}.py'])
    else:
        c = Config(grow='midas', cooldown_loop='3-2x2-3', cooldown_data='x')
    start = 6 if c.recurrence else 8 if c.init_from else None
    if c.recurrence:        # the rest is the core's
        c.backprop_depth = c.backprop_depth or 8
    edges = [first for first, *_ in stages(c, start)]
    edges += [step for step in range(1, c.steps) if plan(c, step, start).rate < 1][:1]
    some = {*range(0, c.steps, max(1, c.steps // 100)), c.steps - 1}
    some |= {max(0, edge + d) for d in (-1, 0, 1) for edge in edges}
    for step in sorted(some):
        assert tuple(plan(c, step, start)) == by_hand(c, start, step), step


def test_a_run_learns_and_leaves_its_files(config):
    c = config(steps=40, decay_steps=10, lr=1e-2, eval_every=20)
    train(c)
    log, model = log_of(c), load_model(c.out_dir)
    assert [line['step'] for line in log] == list(range(41))
    losses = [line['val_loss'] for line in log if 'val_loss' in line]
    assert len(losses) == 3 and losses[-1] < losses[0] - 1
    assert abs(losses[0] - math.log(257)) < 0.1
    last = log[-1]
    assert last['tokens'] == 40 * 64 and last['flops'] == 40 * 64 * model.flops_per_token()
    assert {'lr', 'tokens_per_s', 'grad_norm', 'seconds'} <= set(last)
    assert 0 <= last['kinds']['fifth']['accuracy'] <= 1
    about = json.loads((Path(c.out_dir) / 'run.json').read_text())
    assert about['tokenizer'] == 'bytes' and about['config']['lr'] == 1e-2
    # the loss of the first step is that of its batch, before any update
    train(config('first', steps=1, warmup_steps=0, decay_steps=1, lr=0.0))
    x, y, _ = Loader(c, c.data, seed=c.seed).batch(0)
    first = load_model(config('first').out_dir)
    assert log[1]['loss'] == pytest.approx(first(x, y).item(), rel=1e-5)


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
    train(c)
    log = log_of(c)
    assert [line['n_layer'] for line in log] == [1] * 3 + [2] * 5 + [3] * 7 + [4] * 16
    grown = {line['step'] - 1: line['grown'] for line in log if 'grown' in line}
    assert [*grown] == [2, 7, 14]
    costs = [LM(ModelConfig(n_layer=n, n_embd=32, n_head=2, context=16)).flops_per_token()
             for n in (1, 2, 3, 4)]
    assert log[-1]['flops'] == 64 * (2 * costs[0] + 5 * costs[1] + 7 * costs[2] + 16 * costs[3])
    said = re.search(r'([\d.e+]+) training FLOPs, ([\d.]+)% less', capsys.readouterr().out)
    saved = 100 * (1 - log[-1]['flops'] / (30 * 64 * costs[3]))
    assert float(said[2]) == pytest.approx(saved, abs=0.05)
    # keep_stages: each model as it was before it grew
    val = Rows(c.data, c.batch_size, c.context)
    for n, (step, event) in enumerate(grown.items(), 1):
        stage = load_model(f'{c.out_dir}/ckpt-{step}.pt')
        assert len(stage.layers) == n and event['before'] != event['after']
        loss = validate(stage, val, c.eval_batches)['val_loss']
        assert loss == pytest.approx(event['before'], abs=1e-6)


SMALLER = GROW | dict(batch_size=6, steps=12, decay_steps=2)
MASKED = dict(optimizer='adamw', steps=6)
CORE = dict(optimizer='adamw', steps=3, warmup_steps=0, decay_steps=1, curriculum=0.5)
ALIKE = dict(       # a run's settings, what a second run has otherwise, its processes, how near
    growing_in_pieces=(SMALLER, dict(grad_accum=3), 2, 1e-4),
    growing_in_three=(SMALLER, {}, 3, 1e-4),
    masked_row_by_row=(MASKED, dict(grad_accum=4), 1, 1e-5),
    masked_in_two=(MASKED, {}, 2, 1e-5),
    a_core_in_two_with_pieces=(CORE, dict(grad_accum=2), 2, 1e-5),
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
    for name in ('grow', 'init', 'metric'):
        assert re.fullmatch(name + ' [0-9a-f]{12}', in_json[name])
        assert saved['config'][name] == in_json[name]
    with pytest.raises(Refused, match='the log has a passes already'):
        train(own(text.replace('dict(stream=', 'dict(passes='), 'new', n_layer=4))
    # a resume: another metric will do, and an operator that gives the same order
    for before, after, words in (
            ('dict(stream=', 'dict(size=', None),
            ('range(n_layer - block, n_layer)', 'range(block)', None),
            ('old):\n', 'old):\n    pass\n', 'holds a run with init=init '),
            ('[*range(n_layer), *range(n_layer - block, n_layer)]', '[0, 1, 1, 1]', 'grow=grow ')):
        with pytest.raises(Refused, match=words) if words else contextlib.nullcontext():
            train(own(text.replace(before, after), n_layer=4))


def test_a_metric_sees_the_rows_of_all_processes(config, tmp_path):
    path, c = tmp_path / 'own.py', config(n_layer=1, steps=2, decay_steps=0)
    path.write_text('def metric(model, loader):\n    return dict(rows=len(loader.batch(0)[0]))\n')
    assert ranks([str(path), *flags(c)]).codes == [0, 0]
    assert log_of(c)[-1]['rows'] == c.batch_size


OWN = '''

n_layer = 4
order = [0, Again([1, Again([2], 0.3)]), 3]


def lr_shape(c, step):
    return 0.5


def optimizer(model, c):
    import torch
    return [torch.optim.SGD(model.parameters(), c.lr)]
'''


def test_a_config_may_hold_steps_a_rate_and_an_optimizer(own, capsys):
    "The Step is the one that docs/EXTEND.md writes."
    docs = (ROOT / 'docs/EXTEND.md').read_text()
    text = re.search(r'```python\n(# again\.py\n.*?)```', docs, flags=re.S)[1] + OWN
    whole, c = own(text, 'whole'), own(text)
    train(whole)
    assert 'functions of the config: lr_shape, optimizer' in capsys.readouterr().out
    stop_at(5)
    train(c)
    train(own(text))
    assert same(weights_of(whole), weights_of(c))
    last = log_of(c)[-1]
    assert (last['step'], last['depth'], last['lr']) == (12, 8, 0.5 * c.lr)
    Again = type(c.order[1])
    with pytest.raises(ValueError, match=r'a Step Again: --classes=FILE.py, where its class'):
        load_model(c.out_dir)
    model = load_model(c.out_dir, classes=Path(c.out_dir).with_name('own.py'))
    assert model.unrolled() == load(c.out_dir, classes=(Again,))[0].unrolled()
    assert model.unrolled() == [0, 1, 2, 2, 1, 2, 2, 3]
    tokens = torch.arange(9)[None]
    assert torch.equal(untie(model, model.order)(tokens), model(tokens))
    for old, new, words in (('0.3', '0.4', 'holds a run with order='),
                            ('share * (', 'share * 2 * (', 'the Steps of the run in'),
                            ('2 * unrolled', '3 * unrolled', 'the Steps of the run in'),
                            ('c.lr)', 'c.lr * 2)', 'holds a run with optimizer=')):
        assert old in text
        with pytest.raises(Refused, match=words):
            train(own(text.replace(old, new)))
    train(own(text.replace('return 0.5', 'return 1 / 2')))       # the same rates


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
def test_a_step_has_the_rate_of_the_plan_and_the_norm_that_is_given(config, optimizer, clip):
    "The norm is that of both optimizers' gradients together; with 0 they are left as they are."
    rates, squares = {Muon: [], torch.optim.AdamW: []}, [0] * 8

    def note(optimizer, *_):
        its = rates[type(optimizer)]
        for group in optimizer.param_groups:
            squares[len(its)] += sum(p.grad.square().sum().item() for p in group['params'])
        its.append(group['lr'])
    hook = register_optimizer_step_pre_hook(note)
    c = config(steps=8, warmup_steps=3, optimizer=optimizer, lr=2e-3, grad_clip=clip,
               adamw_lr=5e-4 if optimizer == 'muon' else None)
    train(c)
    hook.remove()
    shares = [plan(c, step).rate for step in range(8)]
    assert rates[torch.optim.AdamW] == pytest.approx([(c.adamw_lr or c.lr) * x for x in shares])
    assert rates[Muon] == pytest.approx([c.lr * x for x in shares] if optimizer == 'muon' else [])
    logged = [line['grad_norm'] for line in log_of(c) if 'grad_norm' in line]
    norms = [math.sqrt(square) for square in squares]
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
    """The authors' code; the third gradient is a spike, one entry never moves, and of the last one
    the squares are smaller than that of eps."""
    values = read(Config, ['config/adamw_star.py'])
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 0.3]))
    [optimizer] = values.optimizer(SimpleNamespace(parameters=lambda: [p]), values)
    for group in optimizer.param_groups:
        group.update(lr=0.1, peak=0.2, weight_decay=0.01)
    w, m, v = p.detach().double(), None, None
    for t, first in enumerate((0.1, 0.1, 5.0, 0.1), 1):
        p.grad = torch.tensor([first, 0.2 - 0.1 * t, 0.0, 5e-7])
        optimizer.step()
        g = p.grad.double()
        m = g if t == 1 else 0.9 * m + 0.1 * g
        v = g * g if t == 1 else 0.95 * v + 0.05 * g * g
        v = v.clamp(min=1e-12)
        rms = (g * g / v).mean().sqrt().item()
        steps = torch.atan2(m, v.sqrt() / math.sqrt(1 - 0.95 ** t))
        steps /= max(1.0, rms) * (1 - 0.9 ** t)
        w = w * (1 - 0.01 * 0.1 / 0.2) - 0.1 * steps
        assert p.tolist() == pytest.approx(w.tolist(), rel=1e-5) and (rms > 1.1) == (t == 3)
