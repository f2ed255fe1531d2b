"""SmolLM 1.7B, lidas, with 20% Nemotron-CC-Math-4+ from the first step of the decay on.

"From Growing to Looping", section 5.2 and Table 2. Copy out/smollm_1b7_lidas at step 170,000 to
out/smollm_1b7_lidas_math, and only the 30,000 steps of the decay are left; first: python
data/math/prepare.py nemotron_20 --tokens=63B. For FineMath-4+ (Table 3):
--cooldown_data=data/math/finemath_20.
"""
from config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_lidas_math'
grow = 'lidas'
grow_block = 4
cooldown_data = 'data/math/nemotron_20'
