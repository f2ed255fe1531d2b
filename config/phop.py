"""Four hops in 32 letters: the p-hop induction of Saunshi et al. (arXiv 2502.17416), small.

6 layers of width 64, 0.3 million parameters, 1,200 steps of 2,048 tokens: 4 minutes on one CPU
core. First: python data/phop/prepare.py. Expect 99.8% of the answers (five seeds; the aim was 99),
of which 62% can be guessed from the letter itself. Theirs are 16 and 32 hops in 256 letters, of
which only the last is asked. The table of docs/RESULTS.md trains this and its like
(nanodepth study 0 --job=hops).
"""
out_dir = 'out/phop'
data = 'data/phop'
n_layer = 6
n_embd = 64
n_head = 2
head_dim = 32
steps = 1200
decay_steps = 240
eval_every = 100
