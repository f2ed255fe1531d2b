"""Loop(5x2) in the study: half the layers, run twice, as deep as the baseline."""
from nanodepth.config.chains_baseline import *

out_dir = 'out/chains_loop_5x2'
n_layer = 5
loop = '5x2'
