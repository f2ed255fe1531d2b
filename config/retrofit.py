"""A recurrent model that is made from the toy baseline.

It is trained with puzzles of up to five aliases, and the baseline knows up to three:

    python train.py config/baseline.py
    python data/toy/prepare.py --aliases=0-5 --out=data/toy_deep
    python train.py config/retrofit.py

Two layers are the prelude, two are the core, which runs about five times, and two are the coda: 2
to 3 minutes on two CPU cores. Expect a loss of 0.58, and 92% of the puzzles with five aliases (one
seed). Compare it with retrofit_dense.py, the baseline trained further with equal FLOPs.
"""
out_dir = 'out/retrofit'
init_from = 'out/baseline'
cut = '2-2-2'               # layers of the prelude, the core and the coda
data = 'data/toy_deep'
recurrence = 4
curriculum = 0.25
steps = 150
warmup_steps = 10
decay_steps = 0.2
lr = 2e-3
