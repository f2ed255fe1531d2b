"""A layer of one's own: the norm comes after the sum, as in the first Transformers.

The idea: DeepNorm scales the stream by alpha before each sum and norms the result, so that the
stream keeps its size however deep the model is.

Paper: "DeepNet: Scaling Transformers to 1,000 Layers" (Wang et al., 2022). What differs here: the
initial weights are not scaled by the paper's beta. Because `layer` replaces the Block's own forward
pass, such layers are not compiled on a GPU, and nanodepth probe's taps do not see into them.

    python train.py config/ideas/postnorm.py
"""
from functools import partial

from model import Span


class PostNorm(Span):
    def __init__(self, items, alpha=1.5):
        super().__init__(items)
        self.alpha = alpha

    def forward(self, run, x):
        layers = run.layers
        run.layers = [partial(self.layer, block) for block in layers]
        x = run(x, self.items)
        run.layers = layers
        return x

    def layer(self, block, x, rope, scale, with_past, tap):
        x = block.attn_norm(self.alpha * x + block.attn(x, rope, with_past))
        return block.mlp_norm(self.alpha * x + block.mlp(x))


out_dir = 'out/postnorm'
n_layer = 4
head_dim = 64               # as config/baseline.py
order = [PostNorm([0, 1, 2, 3])]
