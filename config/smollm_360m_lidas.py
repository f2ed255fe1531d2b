"""SmolLM 360M, grown by LIDAS in blocks of 4 from 4 to 32 layers: 476,147.897 petaFLOPs.

It costs 22.4% less than the baseline. The settings are those of "Do Depth-Grown Models Overcome the
Curse of Depth?", Table 7, section 3.1 and appendix A: PROP-1 over the first 170,000 steps. The
paper ends at a held-out loss of 2.16 ("From Growing to Looping", Table 1). It has not been run
here.
"""
from smollm_360m_baseline import *  # noqa: F403

out_dir = 'out/smollm_360m_lidas'
grow = 'lidas'
grow_block = 4
