"Optimizers: Muon for the layers' matrices, and AdamW for the rest."
import math

import torch

from model import require
from training.machine import RANK, SIZE, from_all


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
    "All parameters, group by group, which is the order that a resumed run has, too."
    return [p for each in optimizers for group in each.param_groups for p in group['params']]


def made_anew(optimizers, model, c):
    """Optimizers of a model that has grown, with the states that `untie` gave its parameters. Their
    groups are made anew, because a config may group layers by their depth."""
    # a parameter that goes to another kind of optimizer, as a config may want, loses its state
    states = {(type(optimizer), p): state for optimizer in optimizers
              for p, state in optimizer.state.items()}
    model.requires_grad_(True)      # the config's function may freeze again
    optimizers = make_optimizers(model, c)
    for optimizer in optimizers:
        for p in parameters_of([optimizer]):
            if (type(optimizer), p) in states:
                optimizer.state[p] = states[type(optimizer), p]
    return optimizers


def load_states(optimizers, saved, same_settings):
    """The states of a checkpoint. A branch has settings of its own for the groups. (Those of a
    resumed run may hold numbers of an optimizer of your own.)"""
    sizes, own = ([[len(group['params']) for group in each['param_groups']] for each in states]
                  for states in (saved, [each.state_dict() for each in optimizers]))
    require(sizes == own, 'these settings have other optimizers than the checkpoint, or groups')
    for optimizer, old in zip(optimizers, saved):
        groups = [dict(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(old)
        for group, made in zip(optimizer.param_groups, groups):
            if not same_settings:
                group.update(made)
        for i, p in enumerate(parameters_of([optimizer])):      # torch gave them p's type
            for name, value in old['state'].get(i, {}).items():
                if torch.is_tensor(value):
                    optimizer.state[p][name] = value.to(optimizer.state[p][name].device)


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
        # Each process makes a share of them orthogonal. (Past the end that is the last, once more.)
        share = math.ceil(len(matrices) / SIZE)
        own = [min(i, len(matrices) - 1) for i in range(RANK * share, (RANK + 1) * share)]
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
