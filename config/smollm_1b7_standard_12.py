"""SmolLM 1.7B with 12 layers: as many parameters as the loops of 12 unique layers.

"From Growing to Looping", Table 1 (held-out loss 2.01). Not run here.
"""
from config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_standard_12'
n_layer = 12
