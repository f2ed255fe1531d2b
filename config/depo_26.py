"""Who comes up to 16 places later in a cycle of 26 names: Depo of PhysicsLM4, for a GPU.

12 layers of width 512, 38 million parameters, 50,000 steps of 512 rows with 52 questions each.
First: python data/tasks.py depo --n=26 --p=16 --rows=1000000 --out=data/depo_26. Here
a name is a letter, so there are 26 at most; theirs have longer cycles. The width, the steps and the
optimizer are ours. Never run.
"""
out_dir = 'out/depo_26'
data = 'data/depo_26'
vocab_size = 257
n_layer = 12
n_embd = 512
n_head = 8
head_dim = 64
context = 233
batch_size = 512
steps = 50_000
warmup_steps = 1000
decay_steps = 10_000
eval_every = 1000
save_every = 5000
