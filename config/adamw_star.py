"""AdamW*, an AdamW that cannot blow up: an optimizer of your own, as a function of a config.

The idea: no step is larger than the direction of the gradient allows, however small the gradients
were before.

Paper: "Retrofitted Recurrence", section 4.3.1, which takes this AdamW from Geiping et al.: with
update clipping, without epsilon, and with another form of weight decay. Our code follows that of
the authors: its averages begin with the first gradient, and atan2 replaces epsilon. If the root
mean square of the gradient over its running size is above 1, the step of this matrix is divided by
it (Wortsman et al., 2023). Then come both corrections of Adam, and a weight decay of
_DECAY x lr / peak lr, which norms get, too.

    python train.py config/lidas.py config/adamw_star.py --out_dir=out/star
"""
import torch

_DECAY = 1e-4


def optimizer(model, c):
    "Return a list of optimizers. The `lr` of each of their groups is its peak rate."
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    return [AdamWStar([dict(params=matrices), dict(params=norms)], c.lr)]


class AdamWStar(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=_DECAY):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None:
                    self.step_of(group, p)

    def step_of(self, group, p):
        lr, (b1, b2) = group['lr'], group['betas']
        state = self.state[p]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=p.grad.clone(),
                         exp_avg_sq=p.grad.square())
        state['step'] += 1
        t = state['step'].item()
        m = state['exp_avg'].lerp_(p.grad, 1 - b1)
        v = state['exp_avg_sq'].lerp_(p.grad.square(), 1 - b2).clamp_(min=group['eps'] ** 2)
        # If the gradient is larger than its history, the step becomes smaller. (It is the root mean
        # square over the tensor.)
        surprise = (p.grad.square() / v).mean().sqrt().clamp(min=1)
        # atan2(m, sqrt(v)) is m / sqrt(v) for small ratios, and bounded for large ones.
        update = torch.atan2(m, (v / (1 - b2 ** t)).sqrt()) / surprise / (1 - b1 ** t)
        p.mul_(1 - group['weight_decay'] * lr / (group.get('peak') or 1))
        p.sub_(update, alpha=lr)
