"""AdamW*, an AdamW that cannot blow up: no step is larger than the gradient's direction allows,
however small the gradients before it were.
Usage: python train.py CONFIG --optimizer=adamw_star
"""
import torch

STAR_DECAY = 1e-4


class AdamWStar(torch.optim.Optimizer):
    """The optimizer of the predecessor of "Retrofitted Recurrence" ("update clipping, no epsilon,
    another decoupling"), after the authors' code. The averages begin with the first gradient, and
    atan2 takes the place of epsilon. A tensor whose gradient is large for its history takes a
    smaller step (Wortsman et al., 2023). The decay is STAR_DECAY x lr / peak lr, on norms too."""

    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None:
                    self._step(group, p)

    def _step(self, group, p):
        lr = group['lr']
        b1, b2 = group['betas']
        state = self.state[p]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=p.grad.clone(),
                         exp_avg_sq=p.grad.square())
        state['step'] += 1
        t = state['step'].item()
        m = state['exp_avg'].lerp_(p.grad, 1 - b1)
        v = state['exp_avg_sq'].lerp_(p.grad.square(), 1 - b2).clamp_(min=group['eps'] ** 2)
        # A gradient that is large for its history, root mean square over the tensor, makes the step
        # smaller.
        surprise = (p.grad.square() / v).mean().sqrt().clamp(min=1)
        # atan2(m, sqrt(v)) is m / sqrt(v) for small ratios, and bounded for large ones.
        update = torch.atan2(m, (v / (1 - b2 ** t)).sqrt()) / surprise / (1 - b1 ** t)
        p.mul_(1 - group['weight_decay'] * lr / (group.get('peak') or 1))
        p.sub_(update, alpha=lr)
