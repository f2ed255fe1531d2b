"""Sixteen hops in 256 letters, the size of the published table: for a GPU.

6 layers of width 256, 5 million parameters, 50,000 steps of 131,072 tokens; by its plan less than
an hour on one H100. First: python data/tasks.py phop --p=16 --length=256 --rows=1000000
--out=data/phop_16 (a quarter of an hour, 9 GB of memory). Saunshi et al. (arXiv 2502.17416) have
99.9% for 6 layers, 68.8 for 2 (--n_layer=2), 99.9 for 2 run three times (--n_layer=2 --loop=2x3),
97.2 for 3. Hops, letters and layers are theirs; the width, the steps and the optimizer are ours,
and every letter is asked, not the last alone. Never run.
"""
out_dir = 'out/phop_16'
data = 'data/phop_16'
vocab_size = 257
n_layer = 6
n_embd = 256
n_head = 8
head_dim = 32
context = 512
batch_size = 256
steps = 50_000
warmup_steps = 1000
decay_steps = 10_000
eval_every = 1000
save_every = 5000
