"""MIDAS in the study: 2, 4, 6, 8, then 10 layers; every growth copies the middle block.

It and LIDAS differ at the growths from 4 to 6 and from 8 to 10 layers, where there is an even
number of blocks.
"""
from nanodepth.config.chains_baseline import *

out_dir = 'out/chains_midas'
grow = 'midas'
grow_block = 2
