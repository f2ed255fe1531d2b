"""Thin layers: two heads instead of four, and an MLP of 96 instead of 192.

What they save pays for more steps. Otherwise config/records/four.py, for 3,700 steps.
"""
out_dir = 'out/thin'
n_layer = 4
grow = 'lidas'
grow_block = 2
grow_alpha = -1.0
key_offset = 1
n_head = 2
ffn_dim = 96
head_dim = 32
batch_size = 8
lr = 2e-3
steps = 3700
decay_steps = 1000
eval_every = 400
