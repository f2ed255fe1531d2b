"""Four layers from the start, so fewer steps for the same FLOPs.

Otherwise config/records/thin.py, for 2,890 steps instead of 3,700.
"""
out_dir = 'out/full'
n_layer = 4
key_offset = 1
n_head = 2
ffn_dim = 96
head_dim = 32
batch_size = 8
lr = 2e-3
steps = 2890
decay_steps = 780
eval_every = 400
