"""An ordinary model with 4 layers: the partner of loop_4x2.py and loop_1_2x3_1.py at equal parameters.

1.1 million parameters, half of the baseline's FLOPs: 3 minutes on two CPU cores. Expect a loss of 0.730 and depth 3 at 52%, 28 to
93% by seed.
"""
out_dir = 'out/standard_4'
n_layer = 4
