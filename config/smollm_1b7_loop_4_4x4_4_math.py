"""SmolLM 1.7B, loop_4_4x4_4, with 20% Nemotron-CC-Math-4+ from the first step of the decay on.

"From Growing to Looping", section 5.2 and Table 2. Copy out/smollm_1b7_loop_4_4x4_4 at step 170,000
to out/smollm_1b7_loop_4_4x4_4_math, and only the 30,000 steps of the decay are left; first: python
data/math/prepare.py nemotron_20 --tokens=63B. For FineMath-4+ (Table 3):
--cooldown_data=data/math/finemath_20.
"""
from config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_loop_4_4x4_4_math'
loop = '4-4x4-4'
cooldown_data = 'data/math/nemotron_20'
n_layer = 12
