"Optimizers: Muon for the layers' matrices, and AdamW for the rest."
import math

import torch
import torch.distributed as dist

from model import require
from training.machine import RANK, SIZE


def make_optimizers(model, c):
    "The config's own, or Muon and AdamW, or AdamW. Each group's `peak` is what train.py scales."
    optimizers = c.optimizer(model, c) if callable(c.optimizer) else muon_and_adamw(model, c)
    require(isinstance(optimizers, (list, tuple)), 'an optimizer of your own gives a list of them')
    number = {p: i for i, p in enumerate(model.parameters())}
    require(sorted(number.get(p, -1) for p in parameters_of(optimizers))
            == [i for p, i in number.items() if p.requires_grad],
            'each parameter (with requires_grad) belongs in one group of one optimizer')
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        # a checkpoint finds a state by its place in here: always the model's own order
        group['params'].sort(key=number.get)
        group.setdefault('peak', group['lr'])
    return optimizers


def muon_and_adamw(model, c):
    """AdamW for everything, or Muon for all matrices but embedding and head, and AdamW for the
    rest. Vectors do not decay."""
    use_muon = c.optimizer == 'muon'
    for_muon, matrices, vectors = [], [], []
    for name, p in model.named_parameters():
        if p.dim() < 2:
            vectors.append(p)
        elif use_muon and name not in ('embed.weight', 'head.weight'):
            for_muon.append(p)
        else:
            matrices.append(p)
    lr = c.adamw_lr if use_muon and c.adamw_lr is not None else c.lr
    adamw = torch.optim.AdamW([dict(params=matrices, weight_decay=c.weight_decay),
                               dict(params=vectors, weight_decay=0.0)],
                              lr, betas=(0.9, 0.95), fused=True)
    if not use_muon:
        return [adamw]
    return [Muon(for_muon, c.lr, c.weight_decay, adjust_lr_fn=c.muon_scaling), adamw]


def parameters_of(optimizers):
    "All parameters, group by group, which is the order that a resumed run has, too."
    return [p for each in optimizers for group in each.param_groups for p in group['params']]


def made_anew(optimizers, model, c):
    """Optimizers of a model that has grown, with the states that `untie` gave its parameters. Their
    groups are made anew, because a config may group layers by their depth."""
    states = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    model.requires_grad_(True)      # what is frozen, the config's function says anew
    optimizers = make_optimizers(model, c)
    for optimizer in optimizers:
        optimizer.state.update({p: states[p] for p in parameters_of([optimizer]) if p in states})
    return optimizers


def load_states(optimizers, saved):
    "The states of a checkpoint. Peak rates stay the config's: a resume may have lowered them."
    for optimizer, state in zip(optimizers, saved, strict=True):
        for old, group in zip(state['param_groups'], optimizer.param_groups, strict=True):
            old['peak'] = group['peak']
        optimizer.load_state_dict(state)
        for i, p in enumerate(parameters_of([optimizer])):      # torch gave them p's type
            for name, value in state['state'].get(i, {}).items():
                now = optimizer.state[p][name]
                if torch.is_tensor(value) and now.dtype != value.dtype:
                    optimizer.state[p][name] = value.to(now.device)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal: a matrix's step moves every direction alike. As torch.optim.Muon,
    but in float32 on a CPU. Each process does this for its share, and sends it to the others."""

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn='match_rms_adamw'):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
        super().__init__(params, defaults | dict(adjust_lr_fn=adjust_lr_fn))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = {}           # matrices of one shape are computed together
            for p in group['params']:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for (n, m), matrices in by_shape.items():
                scale = 0.2 * math.sqrt(max(n, m))          # steps as large as AdamW's ...
                if group['adjust_lr_fn'] == 'original':
                    scale = math.sqrt(max(1, n / m))        # ... or as the first Muon's
                directions = self.next_directions(matrices, group['momentum'])
                # functions torch._foreach_... are one kernel, where a GPU would start hundreds
                torch._foreach_mul_(matrices, 1 - group['lr'] * group['weight_decay'])
                torch._foreach_sub_(matrices, directions, alpha=group['lr'] * scale)

    def next_directions(self, matrices, momentum):
        "Brings the momentum of matrices (n, m) up to date, and returns it made orthogonal."
        grads = [p.grad for p in matrices]
        for p in matrices:
            if 'momentum_buffer' not in self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
        buffers = [self.state[p]['momentum_buffer'] for p in matrices]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        # This process's share. Indices past the end repeat the last matrix.
        share = math.ceil(len(matrices) / SIZE)
        own = [min(i, len(matrices) - 1) for i in range(RANK * share, (RANK + 1) * share)]
        ahead = torch._foreach_lerp([grads[i] for i in own], [buffers[i] for i in own],
                                    momentum)                           # Nesterov's look ahead
        dtype = torch.bfloat16 if grads[0].is_cuda else torch.float32
        x = torch.stack([each.to(dtype) for each in ahead])             # (share, n, m)
        n, m = matrices[0].shape
        x = orthogonal(x.mT.contiguous() if n > m else x)       # wide: x @ x.mT is smaller
        if SIZE > 1:
            every = [torch.empty_like(x) for _ in range(SIZE)]
            dist.all_gather(every, x)
            x = torch.cat(every)[:len(matrices)]
        return list((x.mT.contiguous() if n > m else x).to(matrices[0].dtype))


def orthogonal(x):
    """Matrices (k, n, m), n <= m, with their singular values pushed to about 1: five steps of
    Newton-Schulz, each a s + b s^3 + c s^5 of every singular value s (Keller Jordan's numbers)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT                                                         # (k, n, n)
        even = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)     # b gram + c gram gram
        x = torch.baddbmm(x, even, x, beta=a)                       # a x + even x
    return x
