"""Two numbers of three digits and their sum: the addition of Saunshi et al. (arXiv 2502.17416),
small.

6 layers of width 64, 0.3 million parameters, 1,200 steps of 150 sums: 4 minutes on one CPU core.
First: python data/tasks.py addition. Expect all of the sums, with all five digits right (three
seeds; the aim was 95%). Theirs are 16 numbers for 12 layers (addition_16.py); here it is two for 6.
The table of docs/RESULTS.md trains this and its like (nanodepth.py study 0 --job=addition).
"""
out_dir = 'out/addition'
data = 'data/addition'
n_layer = 6
n_embd = 64
n_head = 2
head_dim = 32
context = 13
batch_size = 150
steps = 1200
decay_steps = 240
eval_every = 100
