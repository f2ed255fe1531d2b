"""LIDAS in the study: 2, 4, 6, 8, then 10 layers; every growth copies the layers in the middle."""
from nanodepth.config.chains_baseline import *

out_dir = 'out/chains_lidas'
grow = 'lidas'
grow_block = 2
