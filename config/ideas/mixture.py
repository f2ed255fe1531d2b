"""A mixture of recursions: a router decides before each further iteration which tokens go on.

The idea: easy tokens leave the loop early and keep their state, hard ones run more often. The
router's probability scales what an iteration changes, and so the router learns.

Paper: "Mixture-of-Recursions: Learning Dynamic Recursive Depths for Adaptive Token-Level
Computation" (Bae et al., 2025), token choice. What differs here: every token is computed in every
iteration, and a token that has left keeps its state. So no compute is saved, but the keys of all
tokens exist, and the model generates with a cache. `iterations` says how many are used.

    python train.py config/ideas/mixture.py
"""
import torch
from torch import nn

from model import Span


class Leaves(Span):
    def make_weights(self, model):
        width = model.config.n_embd
        self.routers = nn.ModuleList(nn.Linear(width, 1) for _ in range(self.times - 1))

    def forward(self, run, x):
        x = run(x, self.items)
        goes_on = torch.ones_like(x[..., :1], dtype=torch.bool)                 # (B, T, 1)
        run.notes['shares'], run.notes['iterations'] = [], 1.0
        for router in self.routers:
            p = router(x).sigmoid()                                             # (B, T, 1)
            goes_on = goes_on & (p > 0.5)
            run.notes['shares'].append(p.mean())
            run.notes['iterations'] += goes_on.float().mean()
            x = torch.lerp(x, run(x, self.items), (p * goes_on).to(x.dtype))
        return x


def loss(model, tokens, targets):
    "The penalty keeps the mean probability to go on near one half in each iteration."
    notes = {}
    ordinary = model.mean_loss(model.hidden(tokens, notes=notes), targets)
    return ordinary + 0.1 * sum((p - 0.5) ** 2 for p in notes['shares'])


def metric(model, loader):
    "Return how many iterations change a token, on average."
    notes = {}
    tokens = loader.batch(0)[0]
    model.hidden(tokens.to(model.norm.weight.device), notes=notes)
    return dict(iterations=notes['iterations'])


out_dir = 'out/mixture'
n_layer = 4
head_dim = 64               # as config/baseline.py
order = [0, Leaves([1, 2], times=3), 3]
