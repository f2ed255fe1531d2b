"""The partner of retrofit.py: the ordinary baseline, trained further.

The same data and training FLOPs. 250 steps of 8 layers cost what 150 of the
recurrent model do: 3 minutes on two CPU cores. Expect a loss of 0.699, depth 4 at 77% (35 to 98 by
seed) and depth 5 at 29%, which is chance (three seeds).
"""
out_dir = 'out/retrofit_dense'
init_from = 'out/baseline'
data = 'data/toy_deep'
steps = 250
warmup_steps = 10
decay_steps = 50
lr = 2e-3
