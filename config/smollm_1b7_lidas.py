"""SmolLM 1.7B, grown by LIDAS in blocks of 4 from 4 to 24 layers: 3,736,608.182 petaFLOPs.

It costs 22.4% less than the baseline. The settings are those of "Do Depth-Grown Models Overcome the
Curse of Depth?", Table 7, section 3.1 and appendix A: PROP-1 over the first 170,000 steps. The
paper ends at a held-out loss of 1.96 ("From Growing to Looping", Table 1). It has not been run
here.
"""
from smollm_1b7_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_lidas'
grow = 'lidas'
grow_block = 4
