"""SmolLM 360M with 4 layers: as many parameters as the loops of 4 unique layers.

"From Growing to Looping", Table 1 (held-out loss 2.67). Not run here.
"""
from config.smollm_360m_baseline import *  # noqa: F403

out_dir = 'out/smollm_360m_standard_4'
n_layer = 4
