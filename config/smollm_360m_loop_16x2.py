"""SmolLM 360M, Loop(16x2): 16 unique layers, 32 deep; the baseline's FLOPs.

"From Growing to Looping", Table 1 (held-out loss 2.27). Its partner with equal parameters:
smollm_360m_standard_16.py. Not run here.
"""
from config.smollm_360m_baseline import *  # noqa: F403

out_dir = 'out/smollm_360m_loop_16x2'
loop = '16x2'
n_layer = 16
