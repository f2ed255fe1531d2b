"""SmolLM 1.7B, lidas, with 20% Nemotron-CC-Math-4+ in the decay.

Layers 8 to 11 run twice there. "From Growing to Looping", section 5.2 and Table 2. The layers
12 to 15 in their place: --cooldown_loop=12-4x2-8. As for smollm_1b7_lidas_math.py, a copy of the
run at step 170,000 saves these steps.
"""
from config.smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_lidas_math_loop'
grow = 'lidas'
grow_block = 4
cooldown_data = 'data/math/nemotron_20'
cooldown_loop = '8-4x2-12'
