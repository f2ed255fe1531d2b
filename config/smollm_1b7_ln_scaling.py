"""SmolLM 1.7B with LN-scaling: the norms of the d-th layer are scaled by 1/sqrt(d).

"Do Depth-Grown Models Overcome the Curse of Depth?", appendix E. The rest is the baseline's. Not
run here.
"""
from config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_ln_scaling'
ln_scaling = True
