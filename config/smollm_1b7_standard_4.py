"""SmolLM 1.7B with 4 layers: as many parameters as the loops of 4 unique layers.

"From Growing to Looping", Table 1 (held-out loss 2.29). Not run here.
"""
from config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_standard_4'
n_layer = 4
