"""Embedding, head and norms learn at four times the rate of the matrices.

They are AdamW's; the matrices are Muon's. Otherwise config/records/thin.py, for 3,050 steps.
"""
out_dir = 'out/rate'
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
adamw_lr = 8e-3
steps = 3050
decay_steps = 820
eval_every = 400
