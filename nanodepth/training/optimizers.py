"""The optimizers by name: AdamW for everything, or Muon for the matrices and AdamW for the rest.
Muon makes a matrix's step orthogonal, so that every direction moves alike. Embeddings and the head
stay with AdamW, because their rows are looked up one by one, and so do the norms.
Usage: optimizers = make_optimizers(model, config)
"""
import math

import torch
import torch.distributed as dist

from nanodepth.common.errors import Refused
from nanodepth.common.files import reading

BETAS = 0.9, 0.95


def make_optimizers(model, config):
    """A list of optimizers, each group with its own peak rate in 'peak'. Norms are not decayed, but
    by AdamW*. Muon's step is scaled to the size of AdamW's, so that one lr can serve both, unless
    muon_scaling is 'original'."""
    lr, wd = config.lr, config.weight_decay
    named = dict(model.named_parameters())
    looked_up = {name for name in named if name.split('.')[-2] in ('embed', 'head')}
    norms = [p for p in named.values() if p.dim() < 2]
    matrices = [p for p in named.values() if p.dim() >= 2]
    optimizers = []
    if config.optimizer == 'muon':
        inner = [p for name, p in named.items() if p.dim() >= 2 and name not in looked_up]
        matrices = [p for name, p in named.items() if name in looked_up]
        optimizers = [Muon(inner, lr=lr, weight_decay=wd, adjust_lr_fn=config.muon_scaling)]
        lr = lr if config.adamw_lr is None else config.adamw_lr
    groups = [dict(params=matrices, weight_decay=wd), dict(params=norms, weight_decay=0.0)]
    if config.optimizer == 'adamw_star':
        from nanodepth.training.adamw_star import STAR_DECAY, AdamWStar
        groups = [group | dict(weight_decay=STAR_DECAY) for group in groups]
        optimizers.append(AdamWStar(groups, lr=lr, betas=BETAS))
    else:
        optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True))
    counted = sum(p.numel() for o in optimizers for g in o.param_groups for p in g['params'])
    assert counted == model.num_params(), f'{counted} parameters of {model.num_params()}'
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['peak'] = group['lr']
    return optimizers


def load_optimizers(optimizers, states, path):
    "Put what a checkpoint has into them: each parameter's state, numbers and tensors of its shape."
    move = f': its optimizers cannot be loaded: start another run, with --init_from={path}'
    with reading(path, then=move):
        for optimizer, saved in zip(optimizers, states):
            params = [p for group in optimizer.param_groups for p in group['params']]
            for i, values in saved['state'].items():
                for name, value in values.items():
                    if getattr(value, 'shape', ()) not in ((), params[i].shape):
                        raise Refused(f'{path}: {name} of parameter {i} has the shape '
                                      f'{tuple(value.shape)}')
            optimizer.load_state_dict(saved)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal. Groups and states are named as in torch.optim.Muon, so that its
    checkpoints open. adjust_lr_fn: how a matrix (n, m) scales the rate. 'match_rms_adamw' makes
    steps as large as AdamW's, 0.2 sqrt(max(n, m)); 'original' is the first Muon's sqrt(max(1, n /
    m)). Of several processes each makes its share of the matrices orthogonal, and sends it to the
    others. In "Retrofitted Recurrence", section 4.3.1, Muon has the lowest loss and no spikes."""

    # numbers in one batch of matrices: at the papers' sizes all at once would fill a GPU
    AT_ONCE = 2 ** 25

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn='match_rms_adamw',
                 precision=None):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum,
                                      adjust_lr_fn=adjust_lr_fn))
        self.precision = precision      # of the iteration; None: the device's fast one

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            alike = {}        # matrices of one shape, or its transpose, go in one batch
            for p in group['params']:
                if p.grad is not None:
                    alike.setdefault(tuple(sorted(p.shape)), []).append(p)
            for (n, m), matrices in alike.items():
                some = max(1, self.AT_ONCE // (n * m)) * rank_and_size()[1]
                for i in range(0, len(matrices), some):
                    self._step(group, matrices[i:i + some])

    def _step(self, group, matrices):
        # torch._foreach_...: one kernel for all matrices, where a GPU would start hundreds
        for p in matrices:
            if 'momentum_buffer' not in self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
        grads = [p.grad for p in matrices]
        buffers = [self.state[p]['momentum_buffer'] for p in matrices]
        torch._foreach_lerp_(buffers, grads, 1 - group['momentum'])
        rank, size = rank_and_size()
        share = math.ceil(len(matrices) / size)
        # where there are fewer for the last processes, they compute the last matrix again
        mine = [min(i, len(matrices) - 1) for i in range(rank * share, (rank + 1) * share)]
        # Nesterov's look ahead
        updates = torch._foreach_lerp([grads[i] for i in mine], [buffers[i] for i in mine],
                                      group['momentum'])
        # wide: the products are smaller
        updates = [update.mT if update.shape[0] > update.shape[1] else update
                   for update in updates]
        precision = self.precision or precision_on(updates[0].device)
        directions = of_all(orthogonal(torch.stack(updates).to(precision)))     # (matrices, n, m)
        directions = directions.to(matrices[0].dtype)
        torch._foreach_mul_(matrices, 1 - group['lr'] * group['weight_decay'])
        for n, m in {tuple(p.shape) for p in matrices}:
            scale = (math.sqrt(max(1, n / m)) if group['adjust_lr_fn'] == 'original'
                     else 0.2 * math.sqrt(max(n, m)))
            its = [(p, direction.mT if n > m else direction)
                   for p, direction in zip(matrices, directions) if p.shape == (n, m)]
            torch._foreach_sub_(*map(list, zip(*its)), alpha=group['lr'] * scale)


def rank_and_size():
    "(the number of this process, how many there are)."
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def of_all(mine):
    "The tensors (n, ...) of all processes as one, (processes * n, ...)."
    size = rank_and_size()[1]
    if size == 1:
        return mine
    every = mine.new_empty(size * len(mine), *mine.shape[1:])
    dist.all_gather_into_tensor(every, mine.contiguous())
    return every


def precision_on(device):
    """In which type Muon iterates there. torch's own Muon takes bfloat16 everywhere, which a CPU
    without AMX or AVX-512 emulates at a fiftieth of its speed (docs/LOG.md)."""
    return torch.bfloat16 if device.type == 'cuda' else torch.float32


def orthogonal(x):
    """Matrices (..., n, m), n <= m, with their singular values pushed towards 1: five steps of
    Newton-Schulz, each the odd polynomial a s + b s^3 + c s^5 of every singular value s. The
    coefficients are Keller Jordan's: steepest at 0, and from there on within 0.7 to 1.2, which is
    all that Muon needs."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT                                                         # (..., n, n)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
