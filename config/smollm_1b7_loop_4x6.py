"""SmolLM 1.7B, Loop(4x6): 4 unique layers, 24 deep; the baseline's FLOPs.

"From Growing to Looping", Table 1 (held-out loss 2.12). Its partner with equal parameters:
smollm_1b7_standard_4.py. Not run here.
"""
from config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_loop_4x6'
loop = '4x6'
n_layer = 4
