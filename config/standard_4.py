"""An ordinary model of 4 layers: at equal parameters the partner of loop_4x2 and loop_1_2x3_1.

1.1 million parameters, half of the baseline's FLOPs: 3 minutes on two CPU cores. Expect a loss of
0.730 and depth 3 at 52%, 28 to 93% by seed.
"""
out_dir = 'out/standard_4'
n_layer = 4
