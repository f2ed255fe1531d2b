"Optimizers: Muon for the layers' matrices, and AdamW for the rest."
import math

import torch

from model import require
from training.machine import from_all, process


def make_optimizers(model, c):
    """Return the optimizers of a config: its own, or Muon and AdamW, or AdamW. train.py scales each
    group's `peak` rate."""
    optimizers = c.optimizer(model, c) if callable(c.optimizer) else muon_and_adamw(model, c)
    require(isinstance(optimizers, (list, tuple)), 'optimizer(model, c) must return a list of them')
    number = {p: i for i, p in enumerate(model.parameters())}
    require(sorted(number.get(p, -1) for p in parameters_of(optimizers))
            == [i for p, i in number.items() if p.requires_grad],
            'each parameter (with requires_grad) belongs in one group of one optimizer')
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault('peak', group['lr'])
    return optimizers


def muon_and_adamw(model, c):
    """Return AdamW for all weights; or Muon for the matrices of the layers and for those that a
    Span names, and AdamW for the rest. AdamW decays no vectors.

    Each group is a list in the order of named_parameters, and so the same in all processes: Muon
    shares its matrices among them according to their places."""
    use_muon = c.optimizer == 'muon'
    named_by_spans = [p for span in model.spans for p in span.muon_weights()]
    matrices = {*named_by_spans, *(p for p in model.layers.parameters() if p.dim() >= 2)}
    for_muon = [p for p in model.parameters() if use_muon and p in matrices]
    rest = [p for p in model.parameters() if not use_muon or p not in matrices]
    lr = c.adamw_lr if use_muon and c.adamw_lr is not None else c.lr
    adamw = torch.optim.AdamW(
        [dict(params=[p for p in rest if p.dim() >= 2], weight_decay=c.weight_decay),
         dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0)],
        lr, betas=(0.9, 0.95), fused=True)
    if not use_muon:
        return [adamw]
    return [Muon(for_muon, c.lr, c.weight_decay, adjust_lr_fn=c.muon_scaling), adamw]


def parameters_of(optimizers):
    """Return all parameters, group by group. (Gradients are clipped in this order: another order
    would change the last bit of their norm.)"""
    return [p for optimizer in optimizers for group in optimizer.param_groups
            for p in group['params']]


def states_of(optimizers, model):
    """Return what the optimizers remember, as {kind of optimizer: {parameter's name: its state}}. A
    checkpoint stores this, and a growth renames what belongs to a layer."""
    states = {}
    for optimizer in optimizers:
        of_kind = states.setdefault(type(optimizer).__name__, {})
        for name, p in model.named_parameters():
            if p in optimizer.state:
                of_kind[name] = optimizer.state[p]
    return states


def load_states(optimizers, model, states):
    """Give the optimizers copies of what `states_of` returned. A parameter that has no state there
    begins without one. Returns how many parameters these are."""
    names = {p: name for name, p in model.named_parameters()}
    n_new = 0
    for optimizer in optimizers:
        of_kind = states.get(type(optimizer).__name__, {})
        for group in optimizer.param_groups:
            # torch counts steps on the CPU, unless one kernel updates all parameters
            counts_on_device = group.get('fused') or group.get('capturable')
            for p in group['params']:
                n_new += names[p] not in of_kind
                for key, value in of_kind.get(names[p], {}).items():
                    if torch.is_tensor(value):
                        on_cpu = key == 'step' and not counts_on_device
                        value = value.to('cpu' if on_cpu else p.device, copy=True)
                    optimizer.state[p][key] = value
    return n_new


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal: a matrix's step moves every direction alike. As torch.optim.Muon,
    but in float32 on a CPU. Matrices of one shape are computed together, and functions called
    torch._foreach_... are one kernel, where a GPU would start hundreds."""

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn='match_rms_adamw'):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum,
                                      adjust_lr_fn=adjust_lr_fn))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = {}
            for p in group['params']:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for matrices in by_shape.values():
                self.step_of(matrices, group)

    def step_of(self, matrices, group):
        grads = [p.grad for p in matrices]
        for p in matrices:
            if not self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
        momenta = [self.state[p]['momentum_buffer'] for p in matrices]
        torch._foreach_lerp_(momenta, grads, 1 - group['momentum'])
        # Each process makes a share of them orthogonal. Beyond the end it takes the last one again.
        rank, n_processes = process()
        share = math.ceil(len(matrices) / n_processes)
        own = [min(i, len(matrices) - 1) for i in range(rank * share, (rank + 1) * share)]
        ahead = torch._foreach_lerp([grads[i] for i in own], [momenta[i] for i in own],
                                    group['momentum'])                  # Nesterov's look ahead
        directions = from_all(orthogonal(torch.stack(ahead))).flatten(0, 1).to(matrices[0].dtype)
        n, m = matrices[0].shape
        if group['adjust_lr_fn'] == 'original':
            scale = math.sqrt(max(1, n / m))        # steps as large as the first Muon's
        else:
            scale = 0.2 * math.sqrt(max(n, m))      # ... or as AdamW's
        torch._foreach_mul_(matrices, 1 - group['lr'] * group['weight_decay'])
        torch._foreach_sub_(matrices, [*directions[:len(matrices)]], alpha=group['lr'] * scale)


def orthogonal(x):
    """Matrices (k, n, m) with their singular values pushed to about 1: five steps of Newton-Schulz,
    each a s + b s^3 + c s^5 of every singular value s (Keller Jordan's numbers)."""
    if x.shape[1] > x.shape[2]:                             # of wide ones x @ x.mT is smaller
        return orthogonal(x.mT.contiguous()).mT.contiguous()
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.bfloat16() if x.is_cuda else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT                                                         # (k, n, n)
        even = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)     # b gram + c gram gram
        x = torch.baddbmm(x, even, x, beta=a)                       # a x + even x
    return x
