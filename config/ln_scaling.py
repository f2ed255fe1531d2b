"""LN-scaling: the norms of the d-th layer are scaled by 1/sqrt(d), at full depth from the first step on."""
out_dir = 'out/ln_scaling'
ln_scaling = True
