"""A core that stops: in evaluation a token's state stays as soon as it stops moving.

The idea: a recurrent core is trained with a random number of runs. Asked with a large r, it need
not use all of them: if a run moves a token's state by less than a share eps of its length, the
token has arrived, and keeps its state from then on. So hard tokens run longer than easy ones.

Paper: "Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth Approach" (Geiping et
al., 2025), section 6, which compares predictions instead of states. All r runs are computed,
because later tokens need their keys: `runs` says how many change a token.

    python train.py config/ideas/halt.py
    nanodepth config/ideas/halt.py evaluate out/halt --r=8 --measures=loss,metric \\
        --span=eps:0.0,eps:0.05,eps:0.2
"""
import torch

from retrofit import Core


class Halting(Core):
    def __init__(self, items, r=4, backprop_depth=8, eps=0.05):
        super().__init__(items, r, backprop_depth)
        self.eps = eps

    def step(self, run, s, e, depth):
        new = super().step(run, s, e, depth)
        if self.training:
            return new
        moves = (new - s).norm(dim=-1, keepdim=True) > self.eps * s.norm(dim=-1, keepdim=True)
        goes_on = run.notes.get('goes_on', torch.ones_like(moves))              # (B, T, 1)
        run.notes['runs'] = run.notes.get('runs', 0.0) + goes_on.float().mean()
        run.notes['goes_on'] = goes_on & moves
        return torch.where(goes_on, new, s)


def metric(model, loader):
    "Return how many runs change a token's state, on average."
    notes = {}
    tokens = loader.batch(0)[0]
    model.hidden(tokens.to(model.norm.weight.device), notes=notes)
    return dict(runs=notes['runs'])


out_dir = 'out/halt'
n_layer = 6
head_dim = 64               # as config/baseline.py
cut = '2-2-2'
core = Halting
recurrence = 4
