"""Six layers instead of eight. They are there for the last half of the steps, not the last third.

Otherwise config/records/heads.py. Growing ends when the cool-down begins or sooner, so decay_steps
is long here; the rate itself falls only over the last 400 steps. Three of eight seeds do not come
to depth 3, and two more stay below 95%.
"""
out_dir = 'out/six'
n_layer = 6
grow = 'lidas'
grow_block = 2
grow_alpha = -1.0
ffn_dim = 192
head_dim = 32
batch_size = 8
lr = 2e-3
steps = 2600
decay_steps = 1100
lr_decay_steps = 400
eval_every = 100
