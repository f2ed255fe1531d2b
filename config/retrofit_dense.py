"""The partner of retrofit.py: the ordinary baseline, going on with the same data for as many training FLOPs.

330 steps of 8 layers cost what 200 of the recurrent model do: 4 minutes on two CPU cores.
"""
out_dir = 'out/retrofit_dense'
init_from = 'out/baseline'
data = 'data/toy_deep'
steps = 330
warmup_steps = 10
decay_steps = 66
lr = 2e-3
