"""SmolLM 1.7B, Loop(4-4x4-4): 12 unique layers, 24 deep; the baseline's FLOPs.

"From Growing to Looping", Table 1 (held-out loss 2.05). Its partner with equal parameters:
smollm_1b7_standard_12 (docs/FIGURES.md). Not run here.
"""
from nanodepth.config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_loop_4_4x4_4'
loop = '4-4x4-4'
n_layer = 12
