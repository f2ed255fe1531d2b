"""Test on a CPU what would run on a GPU: the type in which layers compute, what is compiled, and
the printed share of the peak. (tests/by_hand/gpu.py runs on a GPU.)"""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import Times, log_of, weights_of

import nanodepth.model as model_file
from nanodepth import train as train_file
from nanodepth.models.checkpoint import load_model
from nanodepth.train import train
from nanodepth.training import machine as machine_file
from nanodepth.training.machine import machine_of
from nanodepth.wrapper import Window


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_train_dtype_of_the_layers(dtype, config, monkeypatch):
    seen, real = [], model_file.MLP.forward

    def forward(mlp, x):
        seen.append(mlp.gate(x).dtype)
        return real(mlp, x)
    monkeypatch.setattr(model_file.MLP, 'forward', forward)
    train(config(steps=2, warmup_steps=0, decay_steps=1, dtype=dtype))
    assert {*seen} == {getattr(torch, dtype)}
    assert {t.dtype for t in weights_of(config()).values()} == {torch.float32}


@pytest.mark.parametrize('name, capability, dtype, half, peak', [
    ('H200', (9, 0), 'auto', True, 989e12), ('H200 NVL', (9, 0), 'float32', False, 835e12),
    ('A100-SXM4-80GB', (8, 0), 'auto', True, 312e12), ('T4', (7, 5), 'auto', False, 0),
    ('T4', (7, 5), 'bfloat16', True, 0), ('RTX A1000', (8, 6), 'auto', True, 0),
    ('GeForce RTX 4090 Laptop GPU', (8, 9), 'auto', True, 0)])
def test_machine_of_a_gpu(name, capability, dtype, half, peak, config, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *_: f'NVIDIA {name}')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: capability)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(torch, 'set_float32_matmul_precision', lambda how: None)
    for processes in (1, 2):            # of which each has a GPU
        monkeypatch.setenv('WORLD_SIZE', str(processes))
        machine = machine_of(config(device='cuda', dtype=dtype))
        assert (machine.autocast.keywords['enabled'], machine.peak) == (half, processes * peak)


def test_train_logs_the_share_of_the_peak(config, monkeypatch):
    monkeypatch.setattr(train_file, 'machine_of', lambda c: replace(machine_of(c), peak=1e8))
    c = config()
    train(c)
    flops, last = load_model(c.out_dir).flops_per_token(), log_of(c)[-1]
    assert last['mfu'] == pytest.approx(flops * last['tokens_per_s'] / 1e8, rel=1e-2)


@pytest.mark.parametrize('asked, layers', [(True, 2 + 4), ('auto', 0)])
def test_train_compiles_each_layer_once(config, monkeypatch, asked, layers):
    compiled = []
    monkeypatch.setattr(model_file.Block, 'compile', lambda block, **how: compiled.append(block),
                        raising=False)
    train(config(n_layer=4, grow='lidas', grow_block=2, steps=6, warmup_steps=0, decay_steps=1,
                 compile=asked))
    assert len(compiled) == len({*map(id, compiled)}) == layers


@pytest.mark.parametrize('cuda, order, loss, searches', [
    (True, [0, 1, 2, 3], None, False), (True, [0, 1, 1, 2, 3], None, False),
    (True, [0, Window([1, 2], K=2), 3], None, False), (True, [0, 1, 3], None, True),
    (True, [0, Times([1, 2]), 3], None, True), (True, [0, 1, 2, 3], abs, True),
    (False, [0, 1, 2, 3], None, True)])
def test_ddp_searches_for_unused_weights_only_if_it_must(cuda, order, loss, searches, tiny, config,
                                                         monkeypatch):
    "What it leaves out, NCCL would wait for. Each Block is compiled by itself, and the loss."
    calls, compiled = [], []
    wrapped = SimpleNamespace(register_comm_hook=lambda *_: calls.append('hook'))
    monkeypatch.setattr(machine_file, 'DistributedDataParallel',
                        lambda model, **how: calls.append(how) or wrapped)
    monkeypatch.setattr(model_file.Block, 'compile', lambda block: compiled.append(block))
    monkeypatch.setattr(torch, 'compile', lambda function, **how: compiled.append(how) or function)
    model = tiny(order=order)
    machine = replace(machine_of(config()), size=2, cuda=cuda, compiles=True)
    assert machine_file.compile_and_distribute(machine, model, config(loss=loss)) is wrapped
    assert calls == [dict(broadcast_buffers=False, gradient_as_bucket_view=True,
                          find_unused_parameters=searches)] + ['hook'] * (not cuda)
    assert compiled == [*model.layers] + [dict(dynamic=False)] * cuda
