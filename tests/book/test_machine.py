"""Test training/machine.py on a CPU: what would run on a GPU, what is compiled, and when DDP
searches for unused weights. (tests/by_hand/gpu.py runs on a GPU.)"""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import Times

import model as model_file
from train import train
from training import machine as machine_file
from training.machine import machine_of
from wrapper import Window


@pytest.mark.parametrize('name, capability, dtype, half, peak', [
    ('H200', (9, 0), 'auto', True, 989e12), ('H200 NVL', (9, 0), 'float32', False, 835e12),
    ('A100-SXM4-80GB', (8, 0), 'auto', True, 312e12), ('T4', (7, 5), 'auto', False, 0),
    ('T4', (7, 5), 'bfloat16', True, 0), ('RTX A1000', (8, 6), 'auto', True, 0),
    ('GeForce RTX 4090 Laptop GPU', (8, 9), 'auto', True, 0)])
def test_a_gpu_gets_its_dtype_and_peak(name, capability, dtype, half, peak, config, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *_: f'NVIDIA {name}')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: capability)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(torch, 'set_float32_matmul_precision', lambda how: None)
    for processes in (1, 2):            # each process has a GPU
        monkeypatch.setenv('WORLD_SIZE', str(processes))
        machine = machine_of(config(device='cuda', dtype=dtype))
        assert (machine.autocast.keywords['enabled'], machine.peak) == (half, processes * peak)


@pytest.mark.parametrize('asked, layers', [(True, 2 + 4), ('auto', 0)])
def test_each_layer_is_compiled_once(config, monkeypatch, asked, layers):
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
    """A search costs time, and without it NCCL waits forever for weights that got no gradient. Each
    Block is compiled by itself, and so is the loss."""
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
