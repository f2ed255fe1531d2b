"""Half of the heads find a token by the one before it, so one layer can look a name up.

The mechanism is nanodepth/variants/key_offset.py. Otherwise config/records/heads.py, for 2,500
steps instead of 2,800.
"""
out_dir = 'out/offset'
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
