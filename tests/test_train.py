"train.py: a step of training is what the plan says, and costs what the plan says."
import dataclasses
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import typing
import weakref
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import bpe, flags, log_of, ranks, refused, ROOT, same, weights_of

from nanodepth import train as train_file
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands.train import read_config
from nanodepth.common.errors import Refused
from nanodepth.grow import GROWTH, prop_schedule, untie
from nanodepth.loop import parse_loop
from nanodepth.model import LM, ModelConfig
from nanodepth.models import checkpoint
from nanodepth.retrofit import recurrence_curriculum, sample_recurrence
from nanodepth.text.loader import Loader, write_dataset
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.train import Config, Plan, train
from nanodepth.training import processes
from nanodepth.training.adamw_star import AdamWStar, STAR_DECAY
from nanodepth.training.measure import evaluate
from nanodepth.training.optimizers import make_optimizers, Muon, orthogonal
from nanodepth.training.plan import Parent
from nanodepth.training.processes import World
from nanodepth.training.refuse import MAY_DIFFER, MAY_DIFFER_AHEAD

CONFIGS = sorted(path.stem for path in ROOT.glob('config/[!_]*.py')
                 if not path.stem.startswith('compare_'))


def by_hand(c, parent, step):
    "(rate, layers, origin, order, data, batch, r, backprop depth), worked out anew for one step."
    decay = c.steps - c.decay_steps
    since = step - decay
    rate = 1.0
    if c.lr_shape == '1-sqrt' and since > 0:
        rate = 1 - math.sqrt(since / c.decay_steps)
    if c.lr_shape == 'cosine' and since > 0:
        rate = 0.001 + 0.999 * (0.5 + math.cos(math.pi * since / c.decay_steps) / 2)
    rate = pytest.approx(rate, rel=1e-12)
    rate = (step + 1) / c.warmup_steps if step < c.warmup_steps else rate
    n, origin = parent.n_layer if parent else c.n_layer, None
    if c.grow:
        depths = [c.grow_block]
        while depths[-1] < c.n_layer:
            depths.append(len(GROWTH.get(c.grow, c.grow)(depths[-1], c.grow_block)))
        lengths, stage, left = prop_schedule(decay, len(depths), c.grow_alpha), 0, step
        while stage + 1 < len(depths) and left >= lengths[stage]:
            left, stage = left - lengths[stage], stage + 1
        n = depths[stage]
        operator = GROWTH.get(c.grow, c.grow)
        origin = operator(depths[stage - 1], c.grow_block) if stage else None
    late = step >= decay
    order = list(parent and parent.order or range(n))
    order = parse_loop(c.loop) if c.loop else order
    order = parse_loop(c.cooldown_loop) if late and c.cooldown_loop else order
    cool = late and c.cooldown_data is not None
    r = depth = None
    if parent and parent.recurrence:
        order = None
        mean = recurrence_curriculum(step, c.steps, c.recurrence or parent.recurrence, c.curriculum,
                                     c.curriculum_shape)
        depth = recurrence_curriculum(step, c.steps, c.backprop_depth or parent.backprop_depth,
                                      c.backprop_curriculum)
        r, depth = sample_recurrence(mean, step, c.seed), min(depth, mean)
    data = 'cooldown_data' if cool else 'data'
    return rate, n, origin, order, data, step - decay if cool else step, r, depth


@pytest.mark.parametrize('name', CONFIGS)
def test_every_step_of_every_config(name):
    c = read_config([f'config/{name}.py'])
    recurs = name.startswith('retrofit') and 'dense' not in name
    parent = (Parent(6, recurrence=4, backprop_depth=8) if recurs else
              Parent(8, [0, 1, 2, 2]) if c.init_from else None)
    plan, decay = Plan(c, parent), c.steps - c.decay_steps
    some = {*range(0, c.steps, max(1, c.steps // 300)), c.steps - 1}
    some |= {max(0, edge + d) for d in (-1, 0, 1)
             for edge in (*dict(plan.stages), decay, c.warmup_steps)}
    for step in sorted(step for step in some if step < c.steps):
        assert tuple(plan.at(step)) == by_hand(c, parent, step), step


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
    core = Parent(6, recurrence=4, backprop_depth=8)
    for c, parent in ((grown, None), (looped, None), (recurs, core)):
        plan = Plan(Watched(c), parent)
        for step in (0, 100, 599):
            plan.at(step)
    assert read == {*MAY_DIFFER_AHEAD, 'seed', 'init_from'}
    assert MAY_DIFFER_AHEAD | MAY_DIFFER <= {field.name for field in dataclasses.fields(Config)}


def test_a_config_names_every_operator():
    hint = typing.get_type_hints(Config)['grow']
    assert {*typing.get_args(typing.get_args(hint)[0])} == {*GROWTH}


def test_the_authors_cosine():
    "Over 90% of the steps to a thousandth: its mean is that of the authors' schedule."
    plan = Plan(Config(steps=1000, warmup_steps=5, decay_steps=900, lr_shape='cosine'))
    assert sum(plan.at(step).lr_fraction for step in range(1000)) / 1000 == pytest.approx(
        0.55, abs=0.005)


@pytest.mark.parametrize('mean, drawn, traced', [(4, 5.0, 3.4), (8, 9.0, 6.6), (32, 33, 8)])
def test_gradients_go_back_as_far_as_the_authors_do(mean, drawn, traced):
    "E[r] and E[recurrences with a trace], simulated with their code."
    plan = Plan(Config(init_from='x', recurrence=mean, curriculum=0.0, steps=4000),
                Parent(6, recurrence=4, backprop_depth=8))
    steps = [plan.at(step) for step in range(4000)]
    assert {now.backprop_depth for now in steps} == {min(8, mean)}
    assert sum(now.r for now in steps) / 4000 == pytest.approx(drawn, rel=0.03)
    assert sum(min(now.r, now.backprop_depth) for now in steps) / 4000 == pytest.approx(traced,
                                                                                        abs=0.05)


def test_a_run_learns_and_leaves_its_files(config):
    c = config(steps=40, decay_steps=10, lr=1e-2, eval_every=20)
    train(c)
    log = log_of(c)
    assert [line['step'] for line in log] == list(range(41))
    losses = [line['val_loss'] for line in log if 'val_loss' in line]
    assert len(losses) == 3 and losses[-1] < losses[0] - 1
    assert abs(losses[0] - math.log(257)) < 0.1
    last = log[-1]
    model = checkpoint.load_model(c.out_dir)
    assert (last['tokens'] == 40 * 64 and last['flops'] == 40 * 64 * model.flops_per_token()
            and last['n_layer'] == 2)
    assert {'lr', 'loss', 'tokens_per_s', 'grad_norm'} <= set(last)
    seconds = [line['seconds'] for line in log]
    assert seconds == sorted(seconds)
    x, y = Loader(c.data, c.batch_size, c.context, seed=c.seed).batch(0)    # of the first step
    train(dataclasses.replace(c, out_dir=f'{c.out_dir}-0', steps=1, warmup_steps=0, decay_steps=1,
                              lr=0.0))
    first = checkpoint.load_model(f'{c.out_dir}-0')
    assert log[1]['loss'] == pytest.approx(first(x, y).item(), rel=1e-5)
    assert 0 <= last['kinds']['fifth']['accuracy'] <= 1
    about = json.loads((Path(c.out_dir) / 'run.json').read_text())
    assert about['tokenizer'] == 'bytes' and about['config']['lr'] == 1e-2


def test_evaluating_and_logging_never_change_training(config):
    often, rarely = (config('often', eval_every=1),
                     config('rarely', eval_every=100, log_every=100, save_every=100))
    train(often)
    train(rarely)
    assert same(weights_of(often), weights_of(rarely))


def test_masked_targets_count_globally(config, tmp_path):
    """Pieces and ranks with unequal numbers of targets: their tokens weigh the same, whoever
    computes them."""
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        mask = rng.random(64 * 17) < np.repeat(rng.random(64), 17)
        mask[:17] = 0
        write_dataset(tmp_path / 'sft', split, 'bytes', rng.integers(0, 99, 64 * 17), mask=mask)
    runs = [config(f'a{n}', data=str(tmp_path / 'sft'), grad_accum=n, optimizer='adamw', steps=6)
            for n in (1, 2, 4)]
    for c in runs:
        train(c)
    runs.append(dataclasses.replace(runs[0], out_dir=str(tmp_path / 'two')))
    assert ranks(flags(runs[-1])).codes == [0, 0]
    for a, *others in zip(*map(log_of, runs)):
        assert all(a.get('loss', 0) == pytest.approx(b.get('loss', 0), rel=1e-5) for b in others)


def test_a_checkpoint_grows_once(config):
    first = config('first', n_layer=4)
    train(first)
    # 10 steps before the decay, a third of them shallow; with a rate of zero nothing else moves
    c = config('deeper', init_from=first.out_dir, grow='lidas', grow_block=2, steps=14,
               decay_steps=4, warmup_steps=0, lr=0.0, weight_decay=0.0)
    plan = Plan(c, Parent(4))
    assert plan.stages == [(0, 4), (3, 6)]
    train(c)
    expected = untie(checkpoint.load_model(first.out_dir), [0, 1, 2, 1, 2, 3]).state_dict()
    assert same(weights_of(c), expected)
    assert [line['n_layer'] for line in log_of(c) if 'grown' in line] == [6]


# 1, 2, 3, 4 layers from steps 0, 2, 7, 14
GROW = dict(grow='lidas', grow_block=1, n_layer=4, steps=30, decay_steps=5)


def test_growth_happens_when_the_plan_says_and_is_logged(config):
    c = config(**GROW, keep_stages=True)
    assert Plan(c).stages == [(0, 1), (2, 2), (7, 3), (14, 4)]
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
    assert len(checkpoint.load_model(c.out_dir).layers) == 4
    # keep_stages: each model as it was before it grew
    grown = [line['grown']['before'] for line in log if 'grown' in line]
    val = Loader(c.data, c.batch_size, c.context, split='val', seed=c.seed)
    for step, n, before in zip((2, 7, 14), (1, 2, 3), grown, strict=True):
        stage = checkpoint.load_model(f'{c.out_dir}/ckpt-{step}.pt')
        assert len(stage.layers) == n
        assert evaluate(stage, val, c.eval_batches) == pytest.approx(before, abs=1e-6)


def test_too_few_steps_shorten_what_no_command_line_names(tmp_path, config):
    "In proportion to the config's own steps, or to the defaults; a resumed run keeps what it has."
    def lengths(*words, said=None):
        told = []
        c = read_config([*words], tell=told.append)
        assert len(told) == (c.warmup_steps + c.decay_steps < 170) and said in ''.join(told)
        return c.steps, c.warmup_steps, c.decay_steps
    path = tmp_path / 'c.py'
    path.write_text('steps = 2000\nwarmup_steps = 100\ndecay_steps = 500\n')
    assert lengths(str(path), '--steps=100', said='warmup_steps=5 and') == (100, 5, 25)
    assert read_config([str(path), '--steps=600']).warmup_steps == 100
    path.write_text('steps = 100\n')       # the defaults are 600, 50, 120
    assert lengths(str(path), said='decay_steps=20') == (100, 8, 20)
    assert lengths('--steps=60', '--decay_steps=30', said='n, warmup_steps=5') == (60, 5, 30)
    with pytest.raises(Refused, match='warmup_steps=50 and decay_steps=12 do not fit into'):
        read_config(['--steps=60', '--warmup_steps=50'])
    c = config(steps=60, warmup_steps=5, decay_steps=12, eval_every=60)
    train(c)
    here = [f'--out_dir={c.out_dir}']
    assert read_config([*here, '--steps=90']).warmup_steps == 5
    with pytest.raises(Refused, match='holds a run of 60 steps'):
        read_config([*here, '--steps=30', '--warmup_steps=20', '--decay_steps=20'])


def test_functions_of_a_config(tmp_path, capsys):
    "An operator, a beginning and a metric of one's own; the files of a run hold no function."
    options = ['--n_layer=4', '--steps=12', '--warmup_steps=2', '--decay_steps=2', '--batch_size=4',
               '--context=16', '--n_embd=32', '--n_head=2', f'--out_dir={tmp_path / "run"}',
               '--eval_batches=1', '--device=cpu']
    own = tmp_path / 'own.py'
    text = (ROOT / 'config/own_growth.py').read_text()
    own.write_text('from math import pi\nimport os\n' + text)     # what it imports is its own
    c = read_config([str(own), *options])
    train(c)
    [grown] = [line['grown'] for line in log_of(c) if 'grown' in line]
    # a copy begins with zeros where it writes, so that the loss stays
    assert grown['before'] == grown['after'] and grown['origin'] == [0, 1, 0, 1]
    last = log_of(c)[-1]
    with torch.no_grad():
        by_hand = c.metric(checkpoint.load_model(c.out_dir), Loader(c.data, 4, 16, split='val'))
    assert last['stream'] == pytest.approx(by_hand['stream'].item())
    saved = checkpoint.load(c.out_dir)['config']        # which opens plain values only
    assert saved['grow'] == [[0, 1, 0, 1]]
    assert saved['init'] == grown['init'] == json.loads(
        (tmp_path / 'run/run.json').read_text())['config']['init']
    assert saved['init'].startswith('init ') and saved['metric'].startswith('metric ')
    (tmp_path / 'parent.py').write_text('import torch\n\ndef helper():\n    pass\n\n\nsteps = 7\n')
    (tmp_path / 'child.py').write_text(f'import sys\nsys.path.insert(0, {str(tmp_path)!r})\n'
                                       'from parent import *\n')
    assert read_config([str(tmp_path / 'child.py'), '--warmup_steps=0',
                        '--decay_steps=1']).steps == 7
    # a resume: another metric will do, another beginning of copies or another order will not
    for before, after, words in (
            ('dict(stream=', 'dict(size=', None),
            ('old):\n', 'old):\n    pass\n', "init='init "),
            ('range(n_layer - block, n_layer)', 'range(block)', None),     # the same order here
            ('[*range(n_layer), *range(n_layer - block, n_layer)]', '[0, 1, 1, 1]', 'grow=[[0')):
        own.write_text(text.replace(before, after))
        again = read_config([str(own), *options])
        if words is None:
            train(again)
        else:
            with pytest.raises(Refused, match=re.escape(words)):
                train(again)
    for order in ('[0, 1]', '[0, 1, 2]'):       # no longer; of a layer that is not there
        own.write_text(f'grow_block = 2\ndef grow(n, block):\n    return {order}')
        with pytest.raises(AssertionError, match='2 layers do not grow by'):
            nanodepth('train', [str(own), '--out_dir=' + str(tmp_path / 'other')])
    for line, words in (('grow = 5', "grow=5 must be"), ('def n_layer():\n    pass', 'n_layer=')):
        own.write_text(line)
        assert words in refused(capsys, 'train', own, '--out_dir=' + str(tmp_path / 'other'))
    own.write_text('def metric(model, loader):\n    return dict(loss_of_two="much")')
    words = refused(capsys, 'train', own, *options[1:], '--n_layer=2', '--resume=false')
    assert 'metric must give {name: number}' in words


def test_a_step_that_is_not_finite_leaves_the_model_before_it(config, monkeypatch):
    "Right after a growth, too: else a resume would find it where the plan has not grown it."
    settings = dict(grow='lidas', grow_block=1, n_layer=2, steps=12)
    good, backward = config('good', **settings), train_file.backward
    train(good)
    growth = next(step for step in range(12) if Plan(good).at(step).n_layer == 2)
    for at, layers, save_every in ((growth, 1, 1), (7, 2, 100)):
        c = config(f'at {at}', save_every=save_every, **settings)
        monkeypatch.setattr(train_file, 'backward', lambda *args: backward(*args) * (
            math.nan if args[5] == at else 1))
        with pytest.raises(Refused, match=f'step {at + 1} has loss nan.*lower --lr'):
            train(c)
        state = checkpoint.load(c.out_dir)
        assert (state['step'], state['model_config']['n_layer']) == (at, layers)
        monkeypatch.setattr(train_file, 'backward', backward)
        train(c)
        assert same(weights_of(c), weights_of(good))


def test_two_processes_grow_like_one(config):
    "In pieces, too."
    alone, both = (config(name, **GROW | dict(steps=12, decay_steps=2, grad_accum=pieces))
                   for name, pieces in (('alone', 1), ('both', 2)))
    train(alone)
    run = ranks(flags(both))
    assert run.returncode == 0, run.stderr
    assert log_of(alone)[-1]['n_layer'] == 4
    for a, b in zip(log_of(alone), log_of(both), strict=True):
        assert a['n_layer'] == b['n_layer']
        for key in ('loss', 'grad_norm', 'val_loss'):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=1e-4)


def test_config_files(tmp_path):
    path = tmp_path / 'c.py'
    path.write_text('"doc"\nimport math\n_half = 20\nsteps = 2 * _half\nlr = 1\ndata = ("a", '
                    '"b")\nn_kv_head = 2\n')
    c = read_config(['--steps=50', str(path), '--resume=false', '--n_kv_head=none',
                     '--out_dir=a=b', '--warmup_steps=5', '--decay_steps=5'])
    assert (c.steps, c.lr, c.data, c.n_kv_head, c.resume, c.out_dir) == (50, 1.0, ['a', 'b'], None,
            False, 'a=b')
    assert type(c.lr) is float and type(c.steps) is int
    path.write_text('step = 3\n')
    with pytest.raises(Refused, match="c.py: there is no setting step; did you mean 'steps'"):
        read_config([str(path)])
    # a config may hold what a flag beside it makes void
    path.write_text('grow_block = 3\noptimizer = "muon"\nadamw_lr = 0.1\n')
    c = read_config([str(path), '--optimizer=adamw', '--data=a,b'])
    assert (c.grow_block, c.optimizer, c.data) == (3, 'adamw', ['a', 'b'])


def test_the_script_is_the_module(tmp_path):
    "python train.py is nanodepth.train, where it reads its config, and no second copy of it."
    path = tmp_path / 'c.py'
    path.write_text("import sys\nimport nanodepth.train\nmain = sys.modules['__main__']\n"
                    "raise SystemExit(7 if nanodepth.train.Config is main.Config else 8)\n")
    ended = subprocess.run([sys.executable, 'train.py', str(path)], cwd=ROOT)
    assert ended.returncode == 7


# two of each of two shapes, lying and standing
SHAPES = [(24, 16), (16, 24), (16, 16), (24, 16), (16, 24)]


@pytest.mark.parametrize('optimizer', ['muon', 'adamw', 'adamw_star'])
@pytest.mark.parametrize('tied', [True, False])
def test_every_parameter_has_one_optimizer(optimizer, tied):
    model = LM(ModelConfig(n_layer=2, n_embd=32, n_head=2, tie_embeddings=tied))
    optimizers = make_optimizers(model, Config(optimizer=optimizer, lr=1e-3, adamw_lr=1e-4,
                                               weight_decay=0.1,
                                               muon_scaling='original'))
    groups = [(type(o).__name__, g) for o in optimizers for g in o.param_groups]
    held = [id(p) for _, g in groups for p in g['params']]
    assert sorted(held) == sorted({id(p) for p in model.parameters()})
    for name, group in groups:
        assert name != 'Muon' or group['adjust_lr_fn'] == 'original'
        assert group['weight_decay'] == (STAR_DECAY if name == 'AdamWStar' else
                                         0 if group['params'][0].dim() == 1 else 0.1)
        assert group['peak'] == (1e-4 if optimizer == 'muon' and name == 'AdamW' else 1e-3)
    assert [name for name, _ in groups].count('Muon') == (optimizer == 'muon')


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def steps(optimizer, n=3):
    "The same random gradients for every optimizer; all parameters before and after each step."
    params = optimizer.param_groups[0]['params']
    seen = [[p.detach().clone() for p in params]]
    for step in range(n):
        torch.manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()
        seen.append([p.detach().clone() for p in params])
    return seen


def assert_alike(found, wanted, most):
    "What each step changed, relative to its size."
    for before, after, old, new in zip(found, found[1:], wanted, wanted[1:]):
        for a, b, c, d in zip(before, after, old, new, strict=True):
            assert ((b - a).double() - (d - c)).norm() <= most * (d - c).norm()


def by_singular_values(params, adjust, lr, decay, momentum=0.95, n=3):
    """Muon in float64, by the definition: the polynomial five times on every singular value,
    whatever matrix it belongs to."""
    params = [p.detach().double() for p in params]
    moments, seen = [torch.zeros_like(p) for p in params], [params]
    for step in range(n):
        torch.manual_seed(step)
        for i, p in enumerate(params):
            g = torch.randn(p.shape).double()
            moments[i] = momentum * moments[i] + (1 - momentum) * g
            update = momentum * moments[i] + (1 - momentum) * g
            u, s, v = torch.linalg.svd(update / update.norm(), full_matrices=False)
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
            rows, columns = p.shape
            scale = (math.sqrt(max(1, rows / columns)) if adjust == 'original'
                     else 0.2 * math.sqrt(max(rows, columns)))
            params = params[:i] + [p * (1 - lr * decay) - lr * scale * u @ s.diag() @ v] + params[i
                    + 1:]
        seen.append(params)
    return seen


@pytest.mark.parametrize('adjust', ['match_rms_adamw', 'original'])
def test_muon_is_its_definition_in_float64(adjust):
    found = steps(Muon(parameters(), lr=0.5, weight_decay=0.1, adjust_lr_fn=adjust))
    assert_alike(found, by_singular_values(parameters(), adjust, 0.5, 0.1), 1e-5)


def test_muon_keeps_one_tensor_a_parameter_and_skips_what_has_no_gradient():
    params = parameters()
    optimizer = Muon(params, lr=0.1)
    before = params[0].detach().clone()
    for p in params[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(params[0], before) and params[0] not in optimizer.state
    assert torch.equal(orthogonal(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))
    for p in params[1:]:
        (name, moment), = optimizer.state[p].items()
        assert (name == 'momentum_buffer' and moment.shape == p.shape and moment.dtype
                == torch.float32)


def test_adamw_star_by_hand():
    """The authors' code, a number at a time; the third gradient is a spike, one entry never moves,
    and of the last one the squares are smaller than that of eps."""
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 0.3]))
    optimizer = AdamWStar([p], lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    optimizer.param_groups[0]['peak'] = 0.2
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


def test_a_step_that_no_gpu_holds_is_a_line(config, data, tmp_path, monkeypatch, capsys):
    def too_large(*args):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 6.00 GiB')
    monkeypatch.setattr(train_file, 'backward', too_large)
    said = refused(capsys, 'train', f'--data={data}', f'--out_dir={tmp_path / "run"}',
                   '--grad_accum=2', '--device=cpu')
    assert 'a higher --grad_accum' in said and 'a lower --batch_size' in said


def test_a_log_says_how_often_the_data_was_read(config, data, capsys):
    c = config(n_layer=1, steps=120, warmup_steps=2, decay_steps=4, log_every=60)
    train(c)
    rows = Loader(data, c.batch_size, c.context)
    once = c.steps * c.batch_size / len(rows.sets[0])
    assert once > 1 and f'read {once:.1f} times' in capsys.readouterr().out
    assert [line['passes'] for line in log_of(c) if 'loss' in line][-1] == round(once, 2)


@pytest.mark.parametrize('clip', [0.01, 0.0])
def test_gradients_are_cut_to_the_norm_that_is_given(config, monkeypatch, clip):
    "Those of both optimizers together; and with 0 they are left as they are."
    squares = []
    for kind in (Muon, torch.optim.AdamW):      # in this order
        def noted(optimizer, closure=None, step=kind.step):
            grads = [p.grad.flatten() for group in optimizer.param_groups for p in group['params']]
            squares.append(torch.cat(grads).square().sum().item())
            return step(optimizer)
        monkeypatch.setattr(kind, 'step', noted)
    c = config(steps=3, warmup_steps=0, decay_steps=1, log_every=1, grad_clip=clip)
    train(c)
    norms = [math.sqrt(inner + rest) for inner, rest in zip(squares[::2], squares[1::2])]
    logged = [line['grad_norm'] for line in log_of(c) if 'grad_norm' in line]
    assert min(logged) > 0.01 and norms == pytest.approx([clip] * 3 if clip else logged, rel=1e-3)


def test_what_a_growing_run_saves_is_told_at_its_end(config, capsys):
    c = config(n_layer=4, grow='lidas', grow_block=2, steps=12, decay_steps=4, warmup_steps=0)
    train(c)
    full = 12 * c.batch_size * c.context * LM(ModelConfig(
        vocab_size=257, n_layer=4, n_embd=c.n_embd, n_head=c.n_head, head_dim=c.head_dim,
        n_kv_head=c.n_kv_head)).flops_per_token(context=c.context)
    assert not [*Path(c.out_dir).glob('ckpt-*')]        # stages are kept only if it is asked for
    said = re.search(r'([\d.e+]+) training FLOPs, ([\d.]+)% less', capsys.readouterr().out)
    assert float(said[2]) == pytest.approx(100 * (1 - float(said[1]) / full), abs=0.1)


def test_a_folder_of_another_tokenizer_is_not_mixed_in(config, data, tmp_path):
    write_dataset(tmp_path / 'gpt2like', 'train', 'bytes', np.arange(500) % 90)
    write_dataset(tmp_path / 'gpt2like', 'val', 'bytes', np.arange(90))
    for split in ('train', 'val'):
        path = tmp_path / f'gpt2like/{split}.json'
        path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "other'))
    with pytest.raises(Refused, match='one model reads one tokenizer'):
        train(config(cooldown_data=str(tmp_path / 'gpt2like')))


def test_as_many_batches_as_there_are_need_no_word(config, data, capsys):
    there = len(Loader(data, 8, 16, split='val'))
    for batches, said in ((there, False), (there + 1, True)):
        train(config(out=f'run{batches}', batch_size=8, context=16, steps=2, warmup_steps=0,
                     decay_steps=1, eval_batches=batches))
        assert ('all of them are used' in capsys.readouterr().out) == said


@pytest.mark.parametrize('asked, compiler, compiles, said', [
    (True, True, True, False), (True, False, False, True), ('auto', True, False, False),
    (False, True, False, False)])
def test_what_is_compiled_is_what_was_asked_for_and_can_be(monkeypatch, capsys, asked, compiler,
                                                           compiles, said):
    monkeypatch.setattr(processes, 'has_compiler', lambda: compiler)
    assert processes.World('cpu', asked).compiles == compiles
    assert ('compile stays off' in capsys.readouterr().out) == said


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_each_step_is_taken_at_the_rate_that_the_plan_says(config, monkeypatch, optimizer):
    rates = []
    for kind in (torch.optim.AdamW, Muon):
        def noted(self, closure=None, step=kind.step):
            rates.append((type(self), self.param_groups[0]['lr']))
            return step(self)
        monkeypatch.setattr(kind, 'step', noted)
    c = config(steps=8, warmup_steps=3, decay_steps=4, optimizer=optimizer, lr=2e-3, adamw_lr=5e-4
               if optimizer == 'muon' else None)
    train(c)
    plan = Plan(c)
    for kind, peak in ((torch.optim.AdamW, c.adamw_lr or c.lr), (Muon, c.lr)):
        taken = [rate for each, rate in rates if each is kind]
        assert taken in ([], pytest.approx([peak * plan.at(i).lr_fraction for i in range(8)]))
    assert len(rates) == 8 * (1 + (optimizer == 'muon'))


def test_a_closed_terminal_does_not_stop_what_nohup_began():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with World('cpu') as world:
            world.listen()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_new_run_in_an_old_folder_has_its_own_tokenizer(config, data, tmp_path):
    name = bpe(tmp_path / 'tok')
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'bpe', split, name, np.arange(3000) % 250)
    train(config())
    train(config(data=str(tmp_path / 'bpe'), resume=False))
    assert get_tokenizer(str(tmp_path / 'run')).name == 'run'
    train(config(resume=False))
    assert get_tokenizer(str(tmp_path / 'run')).name == 'bytes'
    # data that was made with the tokenizer of a run, and then trained into that run's folder
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'own', split, str(tmp_path / 'run'), np.arange(3000) % 250)
    train(config(data=str(tmp_path / 'own'), resume=False))
    assert get_tokenizer(str(tmp_path / 'run')).name == 'bytes'
    train(config(data=str(tmp_path / 'own')))


def test_a_config_is_text_and_no_archive_is_run(tmp_path, capsys):
    "A checkpoint is a zip, and Python runs the __main__.py in one."
    with zipfile.ZipFile(tmp_path / 'ckpt.pt', 'w') as archive:
        archive.writestr('__main__.py', f'open({str(tmp_path / "ran")!r}, "w")')
    shutil.copy(tmp_path / 'ckpt.pt', tmp_path / 'config.py')
    assert 'a file that ends in .py' in refused(capsys, 'train', tmp_path / 'ckpt.pt')
    with pytest.raises((SyntaxError, ValueError)):
        nanodepth('train', [str(tmp_path / 'config.py')])
    assert not (tmp_path / 'ran').exists()


def refuse_leftovers():
    "Of the weights before a growth none is alive when the step after it has its next batch."
    old, untie, get_batch = [], train_file.untie, train_file.get_batch
    compile = torch.nn.Module.compile

    def noted(model, *more):
        old[:] = [weakref.ref(p) for p in model.parameters()]
        return untie(model, *more)

    def counted(*args):
        if any(each() is not None for each in old):
            raise ValueError('an old weight is alive')
        old.clear()
        return get_batch(*args)
    train_file.untie, train_file.get_batch = noted, counted
    torch.nn.Module.compile = lambda block: compile(block, backend='aot_eager')     # in seconds


def test_a_growth_lets_go_of_the_old_model(config):
    "Compiled, and under DDP."
    c = config(n_layer=4, grow='lidas', grow_block=2, steps=10, decay_steps=2, compile=True)
    ended = ranks(flags(c), before=refuse_leftovers)
    assert ended.codes == [0, 0], ended.stderr
