"""SmolLM 1.7B, loop_4_4x4_4, with 20% Nemotron-CC-Math-4+ in the decay.

There its block runs a fifth time. "From Growing to Looping", section 5.2 and Table 2. As for
smollm_1b7_loop_4_4x4_4_math.py, a copy of the run at step 170,000 saves these steps.
"""
from config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_loop_4_4x4_4_math_loop'
loop = '4-4x4-4'
cooldown_data = 'data/math/nemotron_20'
cooldown_loop = '4-4x5-4'
n_layer = 12
