"""LN-scaling: the norms of the d-th layer are scaled by 1/sqrt(d).

At full depth from the first step on. Costs what baseline.py does: 1.79e13 FLOPs, 5 minutes on two
CPU cores. Here it learns more slowly: expect a loss of 0.747, depth 0 by step 335, copying and
depth 1 by 415, depth 2 by 510, and depth 3 not within the run (three seeds). With growing: python
train.py config/lidas.py --ln_scaling=true --out_dir=out/lidas_ln
"""
out_dir = 'out/ln_scaling'
ln_scaling = True
