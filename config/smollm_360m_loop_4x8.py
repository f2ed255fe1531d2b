"""SmolLM 360M, Loop(4x8): 4 unique layers, 32 deep; the baseline's FLOPs.

"From Growing to Looping", Table 1 (held-out loss 2.50). Its partner with equal parameters:
smollm_360m_standard_4.py. Not run here.
"""
from config.smollm_360m_baseline import *  # noqa: F403

out_dir = 'out/smollm_360m_loop_4x8'
loop = '4x8'
n_layer = 4
