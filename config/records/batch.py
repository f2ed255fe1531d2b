"""Batches of 8 rows instead of 32: more steps, each of them cheaper, at half the learning rate.

Otherwise config/records/mlp.py, for 2,100 steps instead of 600.
"""
out_dir = 'out/batch'
grow = 'lidas'
grow_block = 2
ffn_dim = 192
batch_size = 8
lr = 2e-3
steps = 2100
decay_steps = 420
eval_every = 100
