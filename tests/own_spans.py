"Spans, a core and losses as a reader may write them, for several files of tests."
import torch
from torch import nn

from model import Span
from retrofit import Core


class GatedLoop(Span):
    "A Span with a vector for each iteration, a matrix, and a note for the loss."

    def __init__(self, items, times=2, strength=0.5):
        super().__init__(items, times)
        self.strength = strength

    def make_weights(self, model):
        self.vectors = nn.Parameter(torch.randn(self.times, model.config.n_embd))
        self.gate = nn.Linear(model.config.n_embd, 1)

    def forward(self, run, x):
        for vector in self.vectors:
            new = run(x + vector, self.items)
            x = torch.lerp(x, new, self.strength * self.gate(new).sigmoid())
            run.notes['last'] = x
        return x


class SlowCore(Core):
    "A core that moves its state by a share of each step."

    def __init__(self, items, r=4, backprop_depth=8, share=0.5):
        super().__init__(items, r, backprop_depth)
        self.share = share

    def step(self, run, s, e, depth):
        return torch.lerp(s, super().step(run, s, e, depth), self.share)


def penalty(model, tokens, targets):
    "Return the ordinary loss, and a penalty on what GatedLoop notes."
    notes = {}
    ordinary = model.mean_loss(model.hidden(tokens, notes=notes), targets)
    return ordinary + 0.1 * notes['last'].square().mean()


def two_heads(model, tokens, targets):
    "Return a loss that runs the head twice."
    x = model.hidden(tokens)
    return model.mean_loss(x, targets) + model.mean_loss(2 * x, targets)


def names(model):
    "Return the names of a model's parameters."
    return [name for name, _ in model.named_parameters()]
