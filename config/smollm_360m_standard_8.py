"""SmolLM 360M with 8 layers: as many parameters as the loops of 8 unique layers.

"From Growing to Looping", Table 1 (held-out loss 2.47). Not run here.
"""
from config.smollm_360m_baseline import *  # noqa: F403

out_dir = 'out/smollm_360m_standard_8'
n_layer = 8
