"""Growing later: two layers for half of the steps before the last growth ends, not for a tenth.

The schedule has an alpha of -1 instead of 1. Otherwise config/records/batch.py, for 2,250 steps.
"""
out_dir = 'out/late'
grow = 'lidas'
grow_block = 2
grow_alpha = -1.0
ffn_dim = 192
batch_size = 8
lr = 2e-3
steps = 2250
decay_steps = 700
lr_decay_steps = 400
eval_every = 100
