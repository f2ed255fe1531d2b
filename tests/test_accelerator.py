"""What a GPU would run, seen from a CPU: in which type layers compute, what is compiled, how DDP is
wrapped, and which share of the peak is said; and what a log shows. (tests/gpu.py asks a GPU.)
"""
import contextlib
from types import SimpleNamespace

import pytest
import torch
from conftest import log_of, weights_of
from torch._subclasses.fake_tensor import FakeTensorMode

import nanodepth.model as model_file
from nanodepth import train as train_file
from nanodepth.models.checkpoint import load_model
from nanodepth.train import Muon, machine, make_optimizers, train, wrap


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_layers_compute_in_the_type_that_is_asked_for(dtype, config, monkeypatch):
    seen, real = [], model_file.MLP.forward

    def forward(mlp, x):
        seen.append(mlp.gate(x).dtype)
        return real(mlp, x)
    monkeypatch.setattr(model_file.MLP, 'forward', forward)
    train(config(steps=2, warmup_steps=0, decay_steps=1, dtype=dtype))
    assert {*seen} == {getattr(torch, dtype)}
    assert {t.dtype for t in weights_of(config()).values()} == {torch.float32}


@pytest.fixture
def gpu(config, monkeypatch):
    "gpu(name, **settings) -> what `machine` says where there is such a GPU."
    def pretend(name='H100', capability=(9, 0), **settings):
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *_: f'NVIDIA {name}')
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: capability)
        with machine(config(device='cuda', **settings)) as here:
            return here
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(torch, 'set_float32_matmul_precision', lambda how: None)
    return pretend


def test_auto_is_bfloat16_where_a_gpu_is_fast_at_it(gpu, config):
    for dtype, capability, half in (('auto', (9, 0), True), ('auto', (7, 5), False),
                                    ('bfloat16', (7, 5), True), ('float32', (9, 0), False)):
        assert gpu(capability=capability, dtype=dtype).autocast.keywords['enabled'] == half
    with machine(config()) as here:         # a CPU
        assert not here.autocast.keywords['enabled']


def test_the_share_of_the_peak(gpu, config, monkeypatch):
    for name, peak in (('A100-SXM4-80GB', 312e12), ('H200', 989e12), ('H200 NVL', 835e12),
                       ('H100 80GB HBM3', 989e12), ('GeForce RTX 4090 Laptop GPU', None)):
        assert gpu(name).peak == peak
    with monkeypatch.context() as two:      # processes, so two GPUs
        two.setattr(train_file, 'which_process', lambda: (0, 2, 0))
        for name in ('init_process_group', 'destroy_process_group'):
            two.setattr(train_file.dist, name, lambda *_, **how: None)
        assert gpu('A100').peak == 2 * 312e12

    @contextlib.contextmanager
    def slow(c):
        with machine(c) as here:
            here.peak = 1e8
            yield here
    monkeypatch.setattr(train_file, 'machine', slow)
    c = config()
    train(c)
    flops, last = load_model(c.out_dir).flops_per_token(), log_of(c)[-1]
    assert last['mfu'] == pytest.approx(flops * last['tokens_per_s'] / 1e8, rel=1e-2)


@pytest.mark.parametrize('asked, layers', [(True, 2 + 4), (False, 0), ('auto', 0)])
def test_each_layer_is_compiled_and_once_more_after_a_growth(config, monkeypatch, asked, layers):
    compiled = []
    monkeypatch.setattr(model_file.Block, 'compile', lambda block, **how: compiled.append(block),
                        raising=False)
    train(config(n_layer=4, grow='lidas', grow_block=2, steps=6, warmup_steps=0, decay_steps=1,
                 compile=asked))
    assert len(compiled) == len({*map(id, compiled)}) == layers
    assert not layers or torch._dynamo.config.optimize_ddp is False


def test_how_ddp_is_wrapped(monkeypatch):
    given = {}
    monkeypatch.setattr(train_file, 'DistributedDataParallel',
                        lambda model, **how: given.update(how))
    wrap(SimpleNamespace(compiles=False, size=2), torch.nn.Linear(1, 1))
    assert given == dict(find_unused_parameters=True, broadcast_buffers=False,
                         gradient_as_bucket_view=True)


def test_adamw_is_fused_and_muon_iterates_in_bfloat16_on_a_gpu(config, tiny, monkeypatch):
    assert make_optimizers(tiny(), config())[-1].defaults['fused']
    seen = []
    monkeypatch.setattr(train_file, 'orthogonal', lambda x: seen.append(x.dtype) or x)
    for device in ('cuda', 'cpu'):
        with FakeTensorMode():          # a shape without numbers, on a GPU that is not there
            p = torch.nn.Parameter(torch.empty(2, 4, device=device))
            p.grad = torch.empty_like(p)
            Muon([p], 0.1).step()
    assert seen == [torch.bfloat16, torch.float32]
