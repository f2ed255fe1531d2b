"""Narrow heads and a narrow MLP. What they save pays for more steps.

Four heads of 32 instead of 64 and an MLP of 192 instead of 352, for 2,800 steps of 8 rows. The
model has two layers for longer than any other number. Seven seeds of eight learn depth 3, and seed
0 never learns depth 1.
"""
out_dir = 'out/heads'
grow = 'lidas'
grow_block = 2
grow_alpha = -1.0
ffn_dim = 192
head_dim = 32
batch_size = 8
lr = 2e-3
steps = 2800
decay_steps = 560
eval_every = 100
