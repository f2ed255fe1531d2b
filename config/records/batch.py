"""Batches of 4 rows instead of 8, at seven tenths of both rates.

Otherwise config/records/rate.py, for 5,700 steps.
"""
out_dir = 'out/batch'
n_layer = 4
grow = 'lidas'
grow_block = 2
grow_alpha = -1.0
key_offset = 1
n_head = 2
ffn_dim = 96
head_dim = 32
batch_size = 4
lr = 1.4e-3
adamw_lr = 5.6e-3
steps = 5700
decay_steps = 1530
eval_every = 800
