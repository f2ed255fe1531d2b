"""What a GPU would run, seen from a CPU: in which type layers compute, what is compiled, how DDP is
wrapped, whether gradients are cut, and which share of the peak is said. (tests/gpu.py asks a GPU.)
"""
import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from conftest import flags, log_of, ranks

import nanodepth.model as model_file
from nanodepth.__main__ import main as nanodepth
from nanodepth.commands import sample
from nanodepth.models import checkpoint
from nanodepth.report.logs import in_words
from nanodepth.training import processes
from nanodepth.training.optimizers import make_optimizers, precision_on
from nanodepth.train import autocast, train


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_layers_compute_in_the_type_that_is_asked_for(dtype, config, monkeypatch):
    seen, real = [], model_file.MLP.forward

    def forward(mlp, x):
        seen.append((x.dtype, mlp.gate(x).dtype))
        return real(mlp, x)
    monkeypatch.setattr(model_file.MLP, 'forward', forward)
    train(config(steps=2, warmup_steps=0, decay_steps=1, dtype=dtype))
    assert {products for _, products in seen} == {getattr(torch, dtype)}
    weights = checkpoint.load(config().out_dir)['model'].values()
    assert {t.dtype for t in weights} == {torch.float32}


def test_auto_is_bfloat16_where_a_gpu_is_fast_at_it():
    for dtype, fast, half in (('auto', True, True), ('auto', False, False),
                              ('bfloat16', False, True), ('float32', True, False)):
        world = SimpleNamespace(device=torch.device('cpu'), has_bfloat16=fast)
        with autocast(SimpleNamespace(dtype=dtype), world):
            assert torch.is_autocast_enabled('cpu') == half


def refuse_float32():
    real = model_file.MLP.forward

    def forward(mlp, x):
        assert mlp.gate(x).dtype == torch.bfloat16
        return real(mlp, x)
    model_file.MLP.forward = forward


def test_two_processes_in_bfloat16_take_the_steps_of_one(config):
    losses = []
    for name, n in (('one', 1), ('two', 2)):
        c = config(name, steps=4, warmup_steps=0, decay_steps=1, dtype='bfloat16', log_every=1)
        ended = ranks(flags(c), n=n, before=refuse_float32)
        assert ended.returncode == 0, ended.stderr
        losses.append([line['loss'] for line in log_of(c)[1:]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_each_layer_is_compiled_and_once_more_after_a_growth(config, monkeypatch):
    compiled = []
    monkeypatch.setattr(model_file.Block, 'compile', lambda block, **how: compiled.append(block),
                        raising=False)
    monkeypatch.setattr(processes, 'has_compiler', lambda: True)
    train(config(n_layer=4, grow='lidas', grow_block=2, steps=6, warmup_steps=0, decay_steps=1,
                 compile=True))
    assert len(compiled) == 2 + 4 and len(set(map(id, compiled))) == 6
    assert torch._dynamo.config.optimize_ddp is False


def test_how_ddp_is_wrapped(monkeypatch):
    given = {}
    monkeypatch.setattr(processes, 'DistributedDataParallel',
                        lambda model, **how: given.update(how))
    processes.World('cpu').ddp(torch.nn.Linear(1, 1))
    assert given == dict(find_unused_parameters=True, broadcast_buffers=False,
                         gradient_as_bucket_view=True)


def test_the_share_of_the_peak_by_hand(monkeypatch):
    for name, peak in (('A100-SXM4-80GB', 312e12), ('H200', 989e12), ('H200 NVL', 835e12),
                       ('H100 80GB HBM3', 989e12), ('GeForce RTX 4090 Laptop GPU', None)):
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: f'NVIDIA {name}')
        assert processes.peak_flops(torch.device('cuda')) == peak
    for peak, share in ((8 * 989e12, 2 / 8), (None, None)):
        world = SimpleNamespace(peak_flops=peak, cuda=False)
        assert processes.World.usage(world, 989e12, 0.5) == dict(mfu=share, memory_gb=None)
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda device: 3.5e9)
    world = SimpleNamespace(peak_flops=None, cuda=True, device='cuda')
    assert processes.World.usage(world, 1, 1)['memory_gb'] == 3.5
    # two processes have two GPUs
    monkeypatch.setattr(processes, 'which_process', lambda: (0, 2, 0))
    monkeypatch.setattr(processes.dist, 'init_process_group', lambda *_, **how: None)
    monkeypatch.setattr(processes, 'peak_flops', lambda device: 312e12)
    assert processes.World('cpu').peak_flops == 2 * 312e12


def test_adamw_is_fused_and_muon_iterates_in_bfloat16_on_a_gpu(config, tiny):
    with FakeTensorMode():              # a shape without numbers, on a GPU that is not there
        p = torch.nn.Parameter(torch.empty(2, 2, device='cuda'))
    on_gpu = SimpleNamespace(named_parameters=lambda: [('embed.weight', p)], num_params=p.numel)
    for model in (tiny(), on_gpu):
        assert make_optimizers(model, config(optimizer='adamw'))[-1].defaults['fused']
    assert precision_on(torch.device('cuda:1')) == torch.bfloat16
    assert precision_on(torch.device('cpu')) == torch.float32


def test_a_logged_step_is_a_line_where_nobody_watches(config, capsys):
    train(config(steps=4, warmup_steps=0, decay_steps=1, log_every=2, eval_every=4))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith('step ')]
    assert [line.partition(':')[0] for line in lines] == [
        'step 0 of 4', 'step 2 of 4', 'step 4 of 4']
    assert 'tokens/s' in lines[1] and 'validation loss' in lines[2]
    said = in_words(dict(step=5, loss=2.5, lr=1e-3, n_layer=8, tokens_per_s=1200, mfu=0.41,
                         memory_gb=36.3), 9)
    assert said == ('step 5 of 9: loss 2.5000, rate 1.00e-03, 8 layers, 1,200 tokens/s, 41.0% of '
                    'the peak, 36.3 GB')


def test_kept_checkpoints_stay_and_a_branch_may_begin_there(config, tmp_path):
    c = config(steps=6, warmup_steps=0, decay_steps=1, save_every=100, keep_every=2)
    train(c)
    kept = sorted(path.name for path in (tmp_path / 'run').glob('ckpt-*.pt'))
    assert kept == ['ckpt-2.pt', 'ckpt-4.pt', 'ckpt-6.pt']
    assert [checkpoint.load(tmp_path / 'run' / name)['step'] for name in kept] == [2, 4, 6]
    nanodepth('sample', [str(tmp_path / 'run/ckpt-2.pt'), '--prompt=a', '--tokens=2',
                         '--device=cpu'])
    # a run that goes on from there takes the same steps
    os.makedirs(tmp_path / 'again')
    os.link(tmp_path / 'run/ckpt-2.pt', tmp_path / 'again/ckpt.pt')
    train(dataclasses.replace(c, out_dir=str(tmp_path / 'again')))
    a, b = (checkpoint.load(tmp_path / name)['model'] for name in ('run', 'again'))
    assert all(torch.equal(a[name], b[name]) for name in a)
    train(dataclasses.replace(c, resume=False))
    aside = [path.parent for path in tmp_path.glob('run?*/ckpt-2.pt')]
    assert len(aside) == 1 and not (tmp_path / 'run' / 'ckpt-8.pt').exists()


def test_a_value_may_stand_behind_its_option(data, config):
    c = config()
    nanodepth('train', ['--steps', '3', '--warmup_steps', '0', '--decay_steps=1', '--data',
                        str(data), '--n_layer', '1', '--n_embd', '16', '--n_head', '2',
                        '--head_dim', '8', '--context', '16', '--batch_size', '4',
                        '--eval_batches', '1', '--out_dir', c.out_dir, '--resume'])
    assert log_of(c)[-1]['step'] == 3


def test_a_log_may_be_shown_online(config, monkeypatch):
    shown, ended = [], []

    class Online:
        def log(self, numbers, step):
            shown.append((step, numbers))

        def finish(self):
            ended.append(1)
    package = SimpleNamespace(init=lambda project, name, config: shown.append(
        (project, name, config['steps'])) or Online())
    monkeypatch.setitem(sys.modules, 'wandb', package)
    train(config(steps=2, warmup_steps=0, decay_steps=1, log_every=1, wandb=True))
    assert shown[0] == ('nanodepth', 'run', 2) and ended == [1]
    assert [step for step, _ in shown[1:]] == [0, 1, 2] and 'val_loss' in shown[-1][1]
