"""SmolLM 1.7B, Loop(12x2): 12 unique layers, 24 deep; the baseline's FLOPs.

"From Growing to Looping", Table 1 (held-out loss 2.07). Its partner with equal parameters:
smollm_1b7_standard_12.py. Not run here.
"""
from config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_loop_12x2'
loop = '12x2'
n_layer = 12
