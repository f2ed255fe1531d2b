"""A depth-recurrent model from the toy baseline.

Trained on deeper chains (up to five aliases) than the baseline knows (up to three):

    python train.py config/baseline.py
    python data/toy/prepare.py --aliases=0-5 --out=data/toy_deep
    python train.py config/retrofit.py

Two layers, two that run about five times, two: 2 to 3 minutes on two CPU cores. Expect a loss of
0.58 and five aliases at 92% (one seed). Partner: retrofit_dense.py, the baseline going on with as
many FLOPs.
"""
out_dir = 'out/retrofit'
init_from = 'out/baseline'
cut = '2-2-2'               # of its layers: two, two that recur, two
data = 'data/toy_deep'
recurrence = 4
curriculum = 0.25
steps = 150
warmup_steps = 10
decay_steps = 0.2
lr = 2e-3
