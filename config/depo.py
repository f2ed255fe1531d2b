"""Who comes one or two places later in a cycle of six names: Depo of PhysicsLM4, small.

6 layers of width 64, 0.3 million parameters, 2,500 steps of 38 rows with 12 questions each: 9
minutes on one CPU core. First: python data/tasks.py depo --p=2 --rows=100000. Expect 98.6% of the
answers (three seeds; the aim was 95). Theirs have longer cycles and more places (see depo_26.py).
The table of docs/RESULTS.md trains this and its like (nanodepth.py study 0 --job=depo).
"""
out_dir = 'out/depo'
data = 'data/depo'
n_layer = 6
n_embd = 64
n_head = 2
head_dim = 32
context = 53
batch_size = 38
steps = 2500
decay_steps = 500
eval_every = 100
