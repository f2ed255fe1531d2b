"""SmolLM 360M with 16 layers: as many parameters as the loops of 16 unique layers.

"From Growing to Looping", Table 1 (held-out loss 2.31). Not run here.
"""
from config.smollm_360m_baseline import *  # noqa: F403

out_dir = 'out/smollm_360m_standard_16'
n_layer = 16
