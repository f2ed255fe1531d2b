"""SmolLM 360M, Loop(8x4): 8 unique layers, 32 deep; the baseline's FLOPs.

"From Growing to Looping", Table 1 (held-out loss 2.38). Its partner with equal parameters:
smollm_360m_standard_8.py. Not run here.
"""
from config.smollm_360m_baseline import *  # noqa: F403

out_dir = 'out/smollm_360m_loop_8x4'
loop = '8x4'
n_layer = 8
