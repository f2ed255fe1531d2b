"""Narrow heads: 32 channels each instead of 64. What they save pays for more steps.

Otherwise config/records/late.py, for 2,600 steps. The model has four layers from step 816 on, where
config/records/heads.py has them from step 1,075, and its eight layers by step 1,496.
"""
out_dir = 'out/narrow'
grow = 'lidas'
grow_block = 2
grow_alpha = -1.0
ffn_dim = 192
head_dim = 32
batch_size = 8
lr = 2e-3
steps = 2600
decay_steps = 900
lr_decay_steps = 400
eval_every = 100
