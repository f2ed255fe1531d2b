"""Test train.py: a training step does what the plan computes, and costs what the plan computes. A
run does the same in pieces, in several processes, and in an empty folder."""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (ROOT, at_step, by_layer, flags, left_by, log_of, measured_slowly, ranks, same,
                     save_run, state_of, stop_at, weights_of, write_dataset)
from own_spans import GatedLoop, SlowCore, names, penalty

import model as model_file
import train as train_file
from grow import states_of_copies, untie
from model import LM, ModelConfig, Refused, Span, unrolled
from retrofit import Core, core_of, surgery
from train import train
from training import machine
from training.checkpoint import load
from training.loader import Loader
from training.machine import machine_of
from training.optimizers import load_states, make_optimizers, states_of
from training.plan import (Config, changes, first_n_layer, generator_for, model_config, plan,
                           seed_for)
from training.settings import read

pytestmark = pytest.mark.usefixtures('backward')


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_layers_compute_in_the_dtype_of_the_run(dtype, config, monkeypatch):
    seen, real = [], model_file.MLP.forward

    def forward(mlp, x):
        seen.append(mlp.gate(x).dtype)
        return real(mlp, x)
    monkeypatch.setattr(model_file.MLP, 'forward', forward)
    train(config(steps=2, warmup_steps=0, decay_steps=1, dtype=dtype))
    assert {*seen} == {getattr(torch, dtype)}
    assert {t.dtype for t in weights_of(config()).values()} == {torch.float32}


def test_mfu_is_the_share_of_the_peak(config, monkeypatch):
    monkeypatch.setattr(train_file, 'machine_of', lambda c: replace(machine_of(c), peak=1e8))
    c = config()
    train(c)
    flops, last = load(c.out_dir)[0].flops_per_token(), log_of(c)[-1]
    assert last['mfu'] == pytest.approx(flops * last['tokens_per_s'] / 1e8, rel=1e-2)


TINY = ('--n_embd=32 --n_head=2 --head_dim=16 --n_layer=8 --steps=16 --batch_size=4 --context=8 '
        '--eval_every=4 --eval_batches=1 --log_every=1 --device=cpu')


STOP = '''
import os, signal
_calls = []
def metric(model, loader):
    _calls.append(1)
    if len(_calls) == 3 and not os.path.exists('out/whole'):
        os.kill(os.getpid(), signal.SIGTERM)
    return {}
'''


# Run one line after the other, as if each were typed. A new Python for each would take seconds.
TYPED = '''
import runpy, sys, torch
for sys.argv in LINES:
    try:
        runpy.run_path(sys.argv[0], run_name='__main__')
    except SystemExit as end:
        print('status', end.code, 'at step', torch.load('out/parts/ckpt.pt')['step'])
files = [getattr(module, '__file__', None) or '' for module in sys.modules.values()]
assert not [file for file in files if file.startswith(ROOT) and 'site-packages' not in file]
assert 'nanodepth' not in sys.modules
'''


def test_book_stands_alone_in_an_empty_folder(tmp_path):
    """With the seven files, training/, config/ and the script that makes the toy data: make the
    data, train, stop, resume, cut, train again, and call each file as a script."""
    for path in ROOT.glob('*.py'):
        shutil.copy(path, tmp_path)
    for name in ('training', 'config'):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / 'data/toy').mkdir(parents=True)
    shutil.copy(ROOT / 'data/toy/prepare.py', tmp_path / 'data/toy')
    (tmp_path / 'stop.py').write_text(STOP)
    run = f'train.py config/lidas.py stop.py {TINY}'
    lines = ['data/toy/prepare.py --documents=300 --text=0', f'{run} --out_dir=out/parts',
             f'{run} --out_dir=out/parts', f'{run} --out_dir=out/whole',
             f'train.py {TINY} --steps=3 --init_from=out/parts --cut=2-2-2 --recurrence=2 '
             '--out_dir=out/core',
             'grow.py lidas 8 2', 'loop.py 4-4x4-4', 'retrofit.py 2-2-2 8', 'wrapper.py',
             'model.py', 'probe.py out/whole out/core']
    typed = f'ROOT, LINES = {str(ROOT)!r}, {[line.split() for line in lines]}\n{TYPED}'
    done = subprocess.run(
        [sys.executable, '-c', typed], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | dict(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS='1'))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('status') == 1
    assert f'status {128 + signal.SIGTERM} at step 9\n' in done.stdout
    for words in ('8 layers, 8 deep: the validation loss was', 'functions of the config: metric',
                  'Everything is in out/parts. Next: python probe.py out/parts',
                  'Run a frozen model', 'The model every other file shares',
                  'core     layers 4 5', 'out/whole: depth score', 'out/core: depth score'):
        assert words in done.stdout
    if find_spec('matplotlib'):         # without it a run draws no picture
        assert (tmp_path / 'out/parts/loss.png').stat().st_size > 10_000
    assert 'Core' in str(state_of(tmp_path / 'out/core')['order'])
    assert same(weights_of(tmp_path / 'out/whole'), weights_of(tmp_path / 'out/parts'))


def test_an_interrupt_before_the_first_step_ends_without_a_traceback(tmp_path):
    (tmp_path / 'stop.py').write_text('import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n')
    done = subprocess.run([sys.executable, str(ROOT / 'train.py'), 'stop.py'], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 130 and not done.stderr and [*tmp_path.iterdir()] == [
        tmp_path / 'stop.py']


def test_a_loss_of_nan_ends_a_run_before_its_step(config):
    "A branch with a lower rate continues from the last checkpoint, and so does the same command."
    good, c = config('good'), config()
    train(good)
    at_step(6, lambda loss: loss * math.nan)
    with pytest.raises(Refused, match=f'step 6 was not taken: loss nan.*--branch_from={c.out_dir}'):
        train(c)
    assert state_of(c)['step'] == 4
    lower = config('lower', lr=1e-3, grad_clip=0.5, branch_from=c.out_dir)
    train(lower)
    lines = {line['step']: line for line in log_of(lower)}
    assert [lines[step]['lr'] for step in (4, 5)] == [3e-3, 1e-3] and len(lines) == 13
    train(c)
    assert left_by(c) == left_by(good)


class Drops(Span):
    "A Span that draws from torch, in training only."

    def __call__(self, run, x):
        return torch.nn.functional.dropout(run(x, self.items), 0.2, run.model.training)


class Shakes(torch.optim.SGD):
    "An optimizer that draws from torch."

    def step(self):
        super().step()
        for p in self.param_groups[0]['params']:
            p.data += 1e-3 * torch.randn_like(p)


def shakes(model, c):
    return [Shakes(model.parameters(), c.lr)]


DRAWS = dict(order=[0, Drops([1])], optimizer=shakes)


def test_what_a_run_draws_depends_on_seed_and_step_alone(config):
    "Neither a stop nor frequent measuring changes it, and validation drops nothing."
    whole, stopped, often = (config(name, **DRAWS) for name in ('whole', 'stopped', 'often'))
    train(whole)
    stop_at(5)
    train(stopped)
    train(stopped)
    assert left_by(stopped) == left_by(whole)
    train(replace(often, eval_every=1, log_every=100, save_every=100))
    assert same(weights_of(often), weights_of(whole))
    loss, _ = measured_slowly(load(whole.out_dir)[0], whole)
    assert log_of(whole)[-1]['val_loss'] == pytest.approx(loss, rel=1e-6)


def note_draws():
    "Write what torch would draw after each step's gradients into a file of the process."
    real = train_file.backward

    def noted(run, now, batch):
        loss = real(run, now, batch)
        with open(Path(run.c.out_dir).with_name(f'draws-{machine.process()[0]}'), 'a') as file:
            file.write(f'{torch.rand(()).item()}\n')
        return loss
    train_file.backward = noted


def test_two_processes_draw_the_same(config, tmp_path):
    c = config(**DRAWS | dict(steps=3, warmup_steps=0, decay_steps=1))
    ended = ranks(c, before=note_draws)
    assert ended.codes == [0, 0], ended.stderr
    first, second = ((tmp_path / f'draws-{rank}').read_text().split() for rank in (0, 1))
    assert first == second and len({*first}) == 3


def test_init_from_decides_the_shape(config):
    "A resume does not need the parent."
    parent = config('parent', n_layer=3, loop='1-2x2', context=32)
    train(parent)
    child = config('child', init_from=parent.out_dir, decay_steps=0, n_layer=5)
    train(child)
    shape = state_of(child)['model_config']
    assert (shape['n_layer'], shape['head_dim'], shape['ffn_dim']) == (3, 16, 96)
    assert state_of(child)['config']['n_layer'] == 5        # as it was typed
    model, last = load(child.out_dir)[0], log_of(child)[-1]
    assert (model.order, model.config.context) == ([0, 1, 2, 1, 2], 32)
    assert last['flops'] == model.flops_per_token(context=16) * last['tokens']
    shutil.rmtree(parent.out_dir)
    assert train(child) == 0
    with pytest.raises(Refused, match='holds a run with n_layer=5 and not 8'):
        train(replace(child, n_layer=8))


def test_a_batch_without_targets_changes_no_weight(config, tmp_path):
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'd', split, [1] * 340, mask=[0] * 340,
                      marks=[129] * 340, kinds=['copy'])
    c = config(data=str(tmp_path / 'd'), optimizer='adamw', weight_decay=0.0, grad_accum=2,
               eval_batches=1)
    assert ranks(c).codes == [0, 0]
    torch.manual_seed(seed_for(0, 'init'))
    start = LM(ModelConfig(**state_of(c)['model_config']))
    assert same(weights_of(c), start.state_dict())
    last = log_of(c)[-1]
    assert (last['step'], last['val_loss'], last['kinds']) == (c.steps, 0, {})


def test_a_span_of_a_config_gets_no_weights(config):
    "So a second run in the same process begins as the first one did."
    order = [0, GatedLoop([1]), 2]
    one, two = (config(name, n_layer=3, order=order, loss=penalty) for name in ('one', 'two'))
    train(one)
    assert not order[1].state_dict()
    train(two)
    assert same(state_of(one)['model'], state_of(two)['model'])
    assert all('val_loss' in line for line in (log_of(one)[0], log_of(one)[-1]))


def test_a_branch_brings_weights_into_a_plain_trunk(config):
    "A branch of this branch drops them again."
    train(config('trunk', n_layer=3, steps=6, decay_steps=0))
    trunk = config('trunk').out_dir
    c = config('gated', n_layer=3, order=[0, GatedLoop([1]), 2], branch_from=trunk)
    assert train(c) == 0
    assert 'spans.0.vectors' in state_of(c)['model']
    states = state_of(c)['optimizers']
    assert {*states['Muon'], *states['AdamW']} == {*names(load(c.out_dir)[0])}
    back = config('back', n_layer=3, steps=16, order=[0, 1, 2], branch_from=c.out_dir)
    assert train(back) == 0
    assert not [name for name in state_of(back)['model'] if 'spans' in name]


def test_a_config_chooses_the_class_of_the_core(config):
    c = config(n_layer=4, cut='1-2-1', core=SlowCore, recurrence=3, curriculum=0.0)
    train(c)
    core = core_of(load(c.out_dir)[0])
    assert type(core) is SlowCore and core.r == 3
    assert json.loads((ROOT / c.out_dir / 'run.json').read_text())['config']['core'] == 'SlowCore'
    for wrong in (GatedLoop, penalty):
        with pytest.raises(Refused, match='must be a subclass of Core'):
            train(config('wrong', n_layer=4, cut='1-2-1', core=wrong))
    with pytest.raises(Refused, match='has no effect without cut'):
        train(config('uncut', core=SlowCore))


TWICE = '''
import os
import sys

import torch

sys.path.insert(0, {ideas!r})
from ouro import *      # noqa: E402, F403


def metric(model, loader):
    torch.save(model.state_dict(), f"weights-{{os.environ.get('RANK', 'one')}}.pt")
    return {{}}
'''


def test_two_processes_train_a_loss_of_your_own_as_one_does(data, tmp_path):
    """They log what one process does, and have equal weights after 20 steps. So DDP also averages
    the gradients of the gate, which only the loss reads."""
    (tmp_path / 'twice.py').write_text(TWICE.format(ideas=str(ROOT / 'config/ideas')))
    words = [str(ROOT / 'train.py'), 'twice.py', f'--data={data}', '--n_embd=32', '--n_head=2',
             '--context=16', '--batch_size=4', '--steps=20', '--log_every=1', '--eval_every=100',
             '--device=cpu']
    # two runs in the same two processes, one after the other
    (tmp_path / 'runs.py').write_text(f'import sys\nsys.path.insert(0, {str(ROOT)!r})\n'
                                      'import train\nfor name in ("first", "2"):\n'
                                      '    words = [*sys.argv[1:], f"--out_dir={name}"]\n'
                                      '    train.train(train.read(train.Config, words))\n')
    for n in (1, 2):
        words[0] = words[0] if n == 1 else 'runs.py'
        start = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}']
        subprocess.run([sys.executable, *start * (n > 1), *words,
                        *[f'--out_dir={n}'] * (n == 1)], check=True,
                       cwd=tmp_path, env=os.environ | dict(OMP_NUM_THREADS='1'),
                       capture_output=True)
    one, two = (log_of(Config(out_dir=str(tmp_path / str(n)))) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert {key: a[key] for key in ('loss', 'grad_norm') if key in a} == pytest.approx(
            {key: b[key] for key in ('loss', 'grad_norm') if key in b}, rel=1e-3)
    first, second, alone = (torch.load(tmp_path / f'weights-{rank}.pt') for rank in (0, 1, 'one'))
    assert same(first, second)
    gate = 'spans.0.gate.weight'
    assert torch.allclose(first[gate], alone[gate], atol=1e-4) and first[gate].abs().sum() > 0


# 1, 2, 3, 4 layers from steps 0, 2, 7, 14
GROW = dict(grow='lidas', grow_block=1, n_layer=4, steps=30, decay_steps=5)


def slowly(c, model):
    "Train step by step, written out. Return what each step logs, and the weights at the end."
    optimizers, lines, flops = make_optimizers(model, c), [], 0
    for step in range(c.steps):
        now = plan(c, step)
        for change in changes(c):
            if change.step == step and change.copies:
                states = states_of(optimizers, model)
                model = untie(model, change.order)
                optimizers = make_optimizers(model, c)
                load_states(optimizers, model, {kind: states_of_copies(of_kind, change.order)
                                                for kind, of_kind in states.items()})
            elif change.step == step:
                model.order = change.order
        if core := core_of(model):
            core.r, core.backprop_depth = now.r, now.backprop_depth
            core.generators = [generator_for(c.seed, f'state of row {n}', step)
                               for n in range(c.batch_size)]
        data = Loader(getattr(c, now.data), c.batch_size, c.context, seed=c.seed)
        x, y, _ = data.batch(now.batch)
        loss = model(x, y)
        loss.backward()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        gradients = [p.grad for group in groups for p in group['params']]
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        for g in gradients:
            g *= min(1, c.grad_clip / norm) if c.grad_clip else 1
        for group in groups:
            group['lr'] = group['peak'] * now.rate
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        flops += x.numel() * model.flops_per_token(context=c.context)
        if core:
            core.r = c.recurrence
        lines.append(dict(step=step + 1, loss=loss.item(), grad_norm=norm, lr=groups[0]['lr'],
                          flops=flops, n_layer=len(model.layers), depth=len(unrolled(model.order)),
                          tokens=x.numel() * (step + 1)))
    return lines, model.state_dict()


SLOWLY = dict(
    muon=dict(adamw_lr=1e-3, grad_clip=0.05), adamw=dict(optimizer='adamw', grad_accum=2),
    unclipped=dict(grad_clip=0.0, lr_shape='cosine'),
    grows=GROW,
    grows_a_checkpoint=dict(init_from='{data}/../four', grow='lidas', grow_from=4, n_layer=6,
                            steps=14),
    loops_and_cools=dict(n_layer=3, loop='1-1x2-1', cooldown_loop='1-1x3-1',
                         cooldown_data='{data}'),
    cut=dict(init_from='{data}/../four', cut='1-2-1', recurrence=3, backprop_depth=2),
    core=dict(init_from='{cut}', recurrence=3, backprop_depth=2, curriculum=0.5, optimizer='adamw'))


@pytest.mark.parametrize('name', SLOWLY)
def test_a_run_is_the_training_written_out(name, config, placed, tiny, tmp_path):
    """This compares batches, orders, growth, gradients and their norm, rates, FLOPs and weights."""
    save_run(tmp_path / 'four', tiny(vocab_size=257, n_layer=4, context=16))
    c = config(**placed(SLOWLY[name]))
    train(c)
    if c.init_from:
        model, _ = load(c.init_from)
        model = surgery(model, c.cut, r=c.recurrence) if c.cut else model
    else:
        torch.manual_seed(seed_for(c.seed, 'init'))
        model = LM(model_config(c, first_n_layer(c), 257))
    lines, weights = slowly(c, model)
    for line, want in zip(log_of(c)[1:], lines, strict=True):
        assert {key: line[key] for key in want} == pytest.approx(want, rel=1e-4)
    for key, got in weights_of(c).items():
        assert torch.allclose(got, weights[key], atol=1e-5), key


def test_a_run_learns_logs_and_leaves_its_files(config):
    c = config(steps=40, decay_steps=10, lr=1e-2, eval_every=20)
    train(c)
    log, model = log_of(c), load(c.out_dir)[0]
    assert [line['step'] for line in log] == list(range(41))
    losses = [line['val_loss'] for line in log if 'val_loss' in line]
    assert len(losses) == 3 and losses[-1] < losses[0] - 1
    assert abs(losses[0] - math.log(257)) < 0.1
    last = log[-1]
    assert last['tokens'] == 40 * 64 and last['flops'] == 40 * 64 * model.flops_per_token()
    loss, accuracy = measured_slowly(model, c)
    assert last['val_loss'] == pytest.approx(loss)
    assert last['kinds']['fifth']['accuracy'] == pytest.approx(accuracy) and accuracy > 0
    about = json.loads((Path(c.out_dir) / 'run.json').read_text())
    assert about['tokenizer'] == 'bytes' and about['config']['lr'] == 1e-2
    assert about['data'] == [json.loads((Path(c.data) / 'train.json').read_text())['origin']]


def test_a_run_copies_the_tokenizer_of_its_parent(config):
    "Its chat template and the way its texts end may differ from those of the data."
    first = config('first')
    train(first)
    files = 'tokenizer.json', 'generation_config.json', 'chat_template.jinja'
    for name in files:
        Path(first.out_dir, name).write_text('of the first')
    Path(first.out_dir, 'ckpt.pt').rename(Path(first.out_dir, 'ckpt-4.pt'))
    c = config('second', init_from=f'{first.out_dir}/ckpt-4.pt')
    train(c)
    assert {Path(c.out_dir, name).read_text() for name in files} == {'of the first'}
    with pytest.raises(Refused, match='has ckpt-4.pt, but no ckpt.pt'):
        train(replace(c, out_dir=first.out_dir))


def test_a_run_grows_at_the_planned_steps(config, data, capsys):
    c = config(**GROW, keep_stages=True, cooldown_data=str(data))
    train(c)
    log = log_of(c)
    grown = {line['step'] - 1: line['grown'] for line in log if 'grown' in line}
    assert [*grown] == [2, 7, 14]
    out = capsys.readouterr().out
    assert f'data is read {log[25]["passes"]:.2f} times' in out         # of its trunk
    said = re.search(r'([\d.e+]+) training FLOPs, ([\d.]+)% less', out)
    full = 30 * 64 * load(c.out_dir)[0].flops_per_token()
    assert float(said[2]) == pytest.approx(100 * (1 - log[-1]['flops'] / full), abs=0.05)
    # keep_stages stores each model as it was before it grew
    for n, (step, event) in enumerate(grown.items(), 1):
        stage, _ = load(f'{c.out_dir}/ckpt-{step}.pt')
        assert len(stage.layers) == n and event['before'] != event['after']
        assert measured_slowly(stage, c)[0] == pytest.approx(event['before'], abs=1e-6)


def test_growth_copies_the_optimizer_states(config):
    "So the state of each copied layer has counted all steps, including those of its source."
    c = config(**GROW, optimizer=by_layer)
    train(c)
    states = state_of(c)['optimizers']
    of_layers, rest = states['AdamW'], states['SGD']
    assert {state['step'].item() for state in of_layers.values()} == {30}
    assert len(of_layers) == 4 * 9 and len(rest) == 3


def by_depth(model, c):
    "Return AdamW for two layers and SGD for the rest, so a growth gives a layer another optimizer."
    first = [p for layer in model.layers[:2] for p in layer.parameters()]
    rest = [p for p in model.parameters() if not any(p is q for q in first)]
    return [torch.optim.AdamW(first, c.lr), torch.optim.SGD(rest, c.lr, momentum=0.9)]


def test_growth_frees_the_old_model(config, monkeypatch):
    "With 1.7 billion weights, an old model and its optimizer states would take 11 GB."
    update, of_layers = train_file.update, {}

    def noted(run, rate):
        now = len(run.model.layers)
        for layers, parameters in of_layers.items():
            assert layers == now or all(p() is None for p in parameters)
        of_layers[now] = [weakref.ref(p) for p in run.model.parameters()]
        return update(run, rate)
    monkeypatch.setattr(train_file, 'update', noted)
    assert train(config(**GROW | dict(grow_from=2), optimizer=by_depth)) == 0
    assert [*of_layers] == [2, 3, 4]


SMALLER = GROW | dict(batch_size=6, steps=12, decay_steps=2)
MASKED = dict(optimizer='adamw', steps=6)
RECURRENT = dict(optimizer='adamw', steps=3, warmup_steps=0, decay_steps=1, curriculum=0.5)
# {name: (settings of a run, pieces of a batch in each of two processes, the largest difference)}
ALIKE = dict(
    growing_in_pieces=(SMALLER, 3, 1e-4), masked_row_by_row=(MASKED, 2, 1e-5),
    a_core_in_pieces=(RECURRENT, 2, 3e-5),
    half=(dict(steps=4, warmup_steps=0, decay_steps=1, dtype='bfloat16'), 1, 1e-3))


@pytest.mark.parametrize('name', ALIKE)
def test_two_processes_and_pieces_train_as_one_process_does(name, config, recurrent, tmp_path):
    """Each token has the same weight in the loss, whichever process computes it, and the first
    state of a core depends on the number of the row in the batch."""
    fields, pieces, near = ALIKE[name]
    if name.startswith('masked'):       # pieces and processes have unequal numbers of targets
        rng = np.random.default_rng(0)
        for split in ('train', 'val'):
            mask = rng.random(64 * 17) < np.repeat(rng.random(64), 17)
            mask[:17] = 0
            write_dataset(tmp_path / 'sft', split, rng.integers(0, 99, 64 * 17), mask=mask)
        fields = fields | dict(data=str(tmp_path / 'sft'))
    if fields is RECURRENT:
        fields = fields | recurrent
    one, other = config('one', **fields), config('other', **fields, grad_accum=pieces)
    train(one)
    ended = ranks(other)
    assert ended.returncode == 0, ended.stderr
    for a, b in zip(log_of(one), log_of(other), strict=True):
        for key in ('step', 'n_layer', 'r'):
            assert a.get(key) == b.get(key)
        for key in {'loss', 'grad_norm', 'val_loss'} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=near)
    a, b = weights_of(one), weights_of(other)
    assert all((a[name] - b[name]).norm() <= 20 * near * a[name].norm() for name in a)


def half(model, c):
    return [torch.optim.SGD([*model.parameters()][::2], c.lr)]


def twice(model, c):
    return 2 * [torch.optim.SGD(model.parameters(), c.lr)]


REFUSED = [     # (settings that contradict each other or the model, the message)
    (dict(eval_batches=-1), 'eval_batches=-1 is below 0'),
    (dict(warmup_steps=10), '10 steps of warm-up and 4 of decay are more than steps=12'),
    (dict(decay_steps=0, cooldown_loop='1-1x2'), 'a cool-down needs a decay'),
    (dict(grad_accum=3), 'batch_size=4 is not a multiple of 1 processes x grad_accum=3'),
    (dict(grow='lidas', grow_block=1, n_layer=9),
     '8 steps before the decay are too few for 9 stages'),
    (dict(grow='lidas', n_layer=4, loop='2-1x2'), 'grow and loop do not go together'),
    (dict(grow='lidas', init_from='{looped}', n_layer=4), 'a looped model does not grow'),
    (dict(grow='lidas', init_from='{scaled}', grow_from=3, n_layer=8), 'leave grow_from out'),
    (dict(cooldown_loop='3x2'), 'the loop 3x2 has 3 unique layers, but the model has 2'),
    (dict(recurrence=3), 'recurrence is for a core, and cut makes one'),
    (dict(order=[0, Core([1])]), 'a core is made by cut'),
    (dict(init=half), 'has no effect without grow'),
    (dict(order=[0, 1], n_layer=3), 'runs only some of n_layer=3 new layers'),
    (dict(cut='1-1-0', init_from='{looped}'), 'that runs each of its layers once'),
    (dict(cut='1-1-0', init_from='{cut}'), 'has a core already: --cut=none'),
    (dict(cut='1-2-1', init_from='{scaled}'), 'LN-scaling would give layers the scale of another'),
    (dict(grow_alpha=2.0), 'grow_alpha=2.0 has no effect without grow'),
    (dict(optimizer='adamw', adamw_lr=1e-4), 'adamw_lr=0.0001 has no effect without muon'),
    (dict(curriculum=0.5), 'curriculum=0.5 has no effect without recurrence'),
    (dict(init_from='{cut}', loop='2x2'), 'are not for a recurrent core'),
    (dict(init_from='{cut}', curriculum=25.0), 'a curriculum over 25 of the steps'),
    (dict(cooldown_data='nowhere'), 'there is no data in nowhere: see its config or prepare.py'),
    (dict(cooldown_data='{other}'), 'a model has one tokenizer, and these data'),
    (dict(optimizer=half), 'belongs in one group of one optimizer'),
    (dict(optimizer=twice), 'belongs in one group of one optimizer')]


@pytest.mark.parametrize('fields, line', REFUSED, ids=[line[:40] for _, line in REFUSED])
def test_settings_that_do_not_fit_are_refused_before_the_work(fields, line, config, placed,
                                                              tmp_path):
    with pytest.raises(Refused, match=re.escape(line)) as error:
        train(config('refused', **placed(fields)))
    assert '\n' not in str(error.value) and not (tmp_path / 'refused').exists()


OWN = """
def lr_shape(c, step):
    return 0.5


def optimizer(model, c):
    import torch
    return [torch.optim.SGD(model.parameters(), c.lr)]
"""


def test_a_run_uses_the_functions_of_its_config(config, tmp_path):
    """These are a growth operator, the init of new layers, a metric, a shape of the rate and an
    optimizer. The files of a run hold their source. An edited function is refused."""
    text, file = (ROOT / 'config/own_growth.py').read_text() + OWN, tmp_path / 'own.py'

    def own(text):
        file.write_text(text)
        return read(Config, [str(file), *flags(config(n_layer=4))])
    c = own(text)
    train(c)
    [grown] = [line['grown'] for line in log_of(c) if 'grown' in line]
    # a copy begins with zeros where it writes, so that the loss stays
    assert grown['before'] == grown['after'] and grown['origin'] == [0, 1, 0, 1]
    model, saved = load(c.out_dir)                      # which opens plain values only
    with torch.no_grad():
        val = Loader(c.data, c.batch_size, c.context, 'val')
        stream = c.metric(model, val)['stream'].item()
    last = log_of(c)[-1]
    assert last['metric']['stream'] == pytest.approx(stream) and last['lr'] == 0.5 * c.lr
    in_json = json.loads((Path(c.out_dir) / 'run.json').read_text())['config']
    for name in ('grow', 'init', 'metric', 'lr_shape', 'optimizer'):
        assert saved['config'][name] == in_json[name] and f'def {name}(' in in_json[name]
    train(own(text.replace('dict(stream=', 'dict(size=')))      # another metric will do
    for before, after, name in (('old):\n', 'old):\n    pass\n', 'init'),
                                ('range(n_layer - block, n_layer)', 'range(block)', 'grow'),
                                ('return 0.5', 'return 1 / 2', 'lr_shape'),
                                ('c.lr)', 'c.lr * 2)', 'optimizer')):
        with pytest.raises(Refused, match=f'holds a run with {name}=.def {name}'):
            train(own(text.replace(before, after)))


def rows_and_rank(model, loader):
    return dict(rows=len(loader.batch(0)[0]), rank=machine.process()[0])


def test_a_metric_is_averaged_over_processes(config):
    c = config(n_layer=1, steps=2, decay_steps=0, metric=rows_and_rank)
    assert ranks(c).codes == [0, 0]
    assert tuple(log_of(c)[-1]['metric'].values()) == (c.batch_size / 2, 0.5)
