"""A still thinner MLP: 64 hidden units instead of 96.

The toy's text asks for steps more than for width. Otherwise config/records/thin.py, for 3,800 steps.
"""
out_dir = 'out/slim'
n_layer = 4
grow = 'lidas'
grow_block = 2
grow_alpha = -1.0
key_offset = 1
n_head = 2
ffn_dim = 64
head_dim = 32
batch_size = 8
lr = 2e-3
steps = 3800
decay_steps = 1020
eval_every = 400
