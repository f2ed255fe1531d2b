"Test docs/depth.py, which shows the four ideas in one file with torch alone."
import re
import runpy

import torch
from helpers import ROOT

from grow import untie
from model import LM, ModelConfig, Pass
from retrofit import Core
from wrapper import Window


ONE = runpy.run_path(str(ROOT / 'docs/depth.py'))


def test_depth_py_computes_what_the_book_does():
    """The book gets the layers of depth.py, and its loop, Window, Core and untie give the same
    scores."""
    torch.manual_seed(0)
    model, (tokens, _) = ONE['LM'](4, 32), ONE['puzzles'](2, 3)
    T = tokens.shape[1]

    class Zero(Core):
        def first_state(self, run, e):
            return torch.zeros_like(e)

        def mix(self, s, e):
            return s + e
    # the layers of depth.py in an LM, which calls them with more arguments
    ours = LM(ModelConfig(vocab_size=2, n_layer=4, n_embd=32, n_head=1, context=T))
    ours.layers = torch.nn.ModuleList(Adapted(layer) for layer in model.layers)
    ours.norm, ours.head = model.norm, model.head
    for theirs, order in (
            ([0, 1, 1, 2], [0, 1, 1, 2]),
            ([0, ONE['Window']([1, 2], K=3, beta=0.3), 3], [0, Window([1, 2], K=3, beta=0.3), 3]),
            ([0, ONE['Core']([1, 2], r=3), 3], [0, Zero([1, 2], r=3), 3])):
        x = Pass(ours, T)(model.embed(tokens), order)
        assert torch.allclose(model(tokens, theirs), ours.head(ours.norm(x))[:, T // 2:], atol=1e-6)
    grown = untie(ours, [0, 1, 1, 2])
    x = Pass(grown, T)(model.embed(tokens), grown.order)
    scores = ONE['untie'](model, [0, 1, 1, 2])(tokens, [0, 1, 2, 3])
    assert torch.equal(scores, grown.head(grown.norm(x))[:, T // 2:])


class Adapted(torch.nn.Module):
    "A layer of depth.py that may be called as a Block is."

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *_):
        return self.layer(x)


def test_depth_py_trains_each_idea(capsys):
    """In a tenth of its steps no model follows an alias yet, but each training names more values
    than the first one."""
    ONE['main'](steps=60)
    said = capsys.readouterr().out
    assert said.count(': True') == 2 and 'False' not in said
    shares = re.findall(r'^.*? +(\d+)%(?: +\d+%){8}$', said, re.M)
    first, *trained = map(int, shares)
    assert len(trained) == 12 and first > 50
    assert min(trained[:3]) > first + 5 and min(trained[7:11]) > 80
