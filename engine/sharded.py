"""For models too large for one GPU: weights, gradients and optimizer state in parts over all
processes, and checkpoints in parts too.

The idea: torch's FSDP2 keeps a 1/N of every Block on each of N processes and fetches the rest when
the Block runs. Growing sends nothing: a new layer is split like the one it copies, so each process
copies its own part. All processes write a checkpoint at once, and any number of them reads it;
`ckpt.pt` says which folder holds the tensors, and is replaced last.

Here: float32 parts under autocast, as without sharding, so that the numbers agree; AdamW alone
(Muon needs whole matrices).

Usage:
    torchrun --nproc_per_node=8 train.py config/smollm_1b7_lidas.py --shard=true
    model = load_model('out/smollm_1b7_lidas')          # one process opens what eight have written
"""
import contextlib
import dataclasses
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from common.errors import Refused
from grow import hand_over
from model import LM


def shard(model):
    """Cut a model in place, Block by Block; what is left (embedding, norm, head, adapter) is a
    group of its own."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    # else it would stay whole after an evaluation
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def untie(model, order, optimizers):
    "grow.untie for a model in parts."
    device = next(model.parameters()).device
    new = LM(dataclasses.replace(model.config, n_layer=len(order), order=None)).to(device)
    shard(new).train(model.training)
    copies, pairs = {}, [(model.layers[i], layer) for i, layer in zip(order, new.layers)]
    pairs += [(getattr(model, name), getattr(new, name)) for name, _ in model.named_children()
              if name != 'layers']
    with torch.no_grad():
        for old, fresh in pairs:
            for a, b in zip(old.parameters(), fresh.parameters()):
                b.to_local().copy_(a.to_local())
                # a tied head is the embedding
                if not any(b is c for c in copies.setdefault(a, [])):
                    copies[a].append(b)
    hand_over(optimizers, copies, new)
    return new


def part_of(value, like):
    "This process's part of a whole tensor, cut as the parameter it belongs to."
    if torch.is_tensor(value) and value.shape == like.shape and value.dim():
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


def cut_optimizer(saved, optimizer):
    "A whole optimizer state, as `ckpt.pt` has it, in parts."
    params = [p for group in optimizer.param_groups for p in group['params']]
    return saved | dict(state={i: {name: part_of(value, params[i]) for name, value in state.items()}
                               for i, state in saved['state'].items()})


def begin(model, make_optimizers, state, folder):
    "Cut a model and fill it with what a run's `ckpt.pt` has or points to. Returns its optimizers."
    shard(model)
    optimizers = make_optimizers()
    for optimizer, saved in zip(optimizers, state.get('optimizers', [])):
        optimizer.load_state_dict(cut_optimizer(saved, optimizer))
    if 'parts' in state:
        load_parts(Path(folder) / state['parts'], model, optimizers)
    return optimizers


# ----------------------------------------------------------------------------- checkpoints in parts

def write_parts(path, model, optimizers):
    tensors = dict(model=model.state_dict(),
                   optimizers=[o.state_dict()['state'] for o in optimizers])
    with warnings.catch_warnings(action='ignore'):
        dcp.save(tensors, checkpoint_id=str(path))


@contextlib.contextmanager
def readable(path):
    try:
        with warnings.catch_warnings(action='ignore'):
            yield
    # torch.distributed.checkpoint raises what the disk or its own format gives it
    except Exception as error:
        why = (str(error).splitlines() or [''])[0][:200]
        raise Refused(f'{path.parent} points to {path.name}, which cannot be read: '
                      f'{type(error).__name__}: {why}') from None


def read_parts(path, make, no_dist=True):
    "The stored tensors, read into those that make({name: metadata}) gives."
    with readable(path):
        stored = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    tensors = make(stored)
    with readable(path):
        dcp.load(tensors, checkpoint_id=str(path), no_dist=no_dist)
    return tensors


def load_parts(path, model, optimizers):
    "Load a model and its optimizers, in parts or whole, however many processes wrote them."
    def empty(stored):
        states = []
        for n, optimizer in enumerate(optimizers):
            params = [p for group in optimizer.param_groups for p in group['params']]
            states.append({i: {} for i in range(len(params))})
            for key, meta in stored.items():
                if key.startswith(f'optimizers.{n}.'):
                    _, _, i, name = key.split('.')
                    # A step's number has no dimensions, all else is shaped like the parameter.
                    like = params[int(i)].detach()
                    states[n][int(i)][name] = (
                        torch.zeros_like(like, memory_format=torch.contiguous_format) if meta.size
                        else torch.zeros(()))
        return dict(model=model.state_dict(), optimizers=states)
    found = read_parts(path, empty, no_dist=not dist.is_initialized())
    model.load_state_dict(found['model'])
    for optimizer, state in zip(optimizers, found['optimizers']):
        optimizer.load_state_dict(optimizer.state_dict() | dict(state=state))


def load_whole(path, optimizers):
    "The model's tensors, whole, in this one process; the optimizers' go into their states."
    flat = read_parts(path, lambda stored: {
        key: torch.empty(meta.size, dtype=meta.properties.dtype) for key, meta in stored.items()})
    for key, t in flat.items():
        if key.startswith('optimizers.'):
            _, n, i, name = key.split('.')
            optimizers[int(n)]['state'].setdefault(int(i), {})[name] = t
    return {key.removeprefix('model.'): t for key, t in flat.items() if key.startswith('model.')}
