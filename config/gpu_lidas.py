"""One GPU, three minutes: the same, grown by LIDAS in blocks of 4 from 4 to 24 layers.

18% fewer FLOPs than config/gpu_baseline.py, which says how to make the text. Its rate is twice the
ordinary model's, and the only one that was tried with it. --grow=midas is the other way of growing.
"""
from nanodepth.config.gpu_baseline import *  # noqa: F403

out_dir = 'out/gpu_lidas'
grow = 'lidas'
grow_block = 4
lr = 2e-3
