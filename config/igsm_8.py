"""Symbolic i-GSM modulo 7 with 8 layers, the depth of the published table: for a GPU.

8 layers of width 512, 26 million parameters, 50,000 steps of 512 rows with 12 definitions and one
question each. First: python data/tasks.py igsm --n=12 --rows=2000000 --out=data/igsm_8. Saunshi et
al. (arXiv 2502.17416) have 73.2% for 8 layers and for one that runs 8 times (--n_layer=1
--loop=1x8), 24.5 for one, 54.0 for 2, 73.6 for 2 run four times, 71.3 for 4. The number of layers
is theirs; the number of definitions, the width, the steps and the optimizer are ours. No size for a
laptop was looked for. Never run.
"""
out_dir = 'out/igsm_8'
data = 'data/igsm_8'
vocab_size = 257
n_layer = 8
n_embd = 512
n_head = 8
head_dim = 64
context = 184
batch_size = 512
steps = 50_000
warmup_steps = 1000
decay_steps = 10_000
eval_every = 1000
save_every = 5000
