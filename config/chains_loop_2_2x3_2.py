"""Loop(2-2x3-2) in the study: a loop with layers of its own before and after it, 10 deep.

Six unique layers: the papers' most robust kind of loop.
"""
from nanodepth.config.chains_baseline import *

out_dir = 'out/chains_loop_2_2x3_2'
n_layer = 6
loop = '2-2x3-2'
