"""Four layers instead of eight: two, and after half of the steps four.

Otherwise config/records/offset.py, step for step. With its heads, two layers learn alias depth 2,
and four learn depth 3.
"""
out_dir = 'out/four'
n_layer = 4
grow = 'lidas'
grow_block = 2
grow_alpha = -1.0
key_offset = 2
ffn_dim = 192
head_dim = 32
batch_size = 8
lr = 2e-3
steps = 2500
decay_steps = 600
eval_every = 200
