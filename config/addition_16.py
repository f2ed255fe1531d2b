"""Sixteen numbers of three digits and their sum, the size of the published table: for a GPU.

12 layers of width 256, 10 million parameters, 50,000 steps of 1,024 sums. First: python
data/tasks.py addition --n=16 --rows=2000000 --out=data/addition_16. Saunshi et al. (arXiv
2502.17416) have 100% for 12 layers and for one that runs 12 times (--n_layer=1 --loop=1x12), 71.5
for 2 layers, 99.8 for 2 run six times, 78.5 for 3, 99.1 for 3 run four times, 0.1 for one. Numbers
and layers are theirs; the width, the steps and the optimizer are ours. Never run.
"""
out_dir = 'out/addition_16'
data = 'data/addition_16'
vocab_size = 257
n_layer = 12
n_embd = 256
n_head = 8
head_dim = 32
context = 69
batch_size = 1024
steps = 50_000
warmup_steps = 1000
decay_steps = 10_000
eval_every = 1000
save_every = 5000
