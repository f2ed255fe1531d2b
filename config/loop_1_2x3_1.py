"""Loop(1-2x3-1): one layer, two that run three times, one layer.

8 deep, 4 unique. 1.1 million parameters, the baseline's
FLOPs: 5 minutes on two CPU cores. Partners: standard_4 (equal parameters), baseline.py (equal
compute), and loop_4x2, which loops as many unique layers whole. Expect a loss of 0.707 and depth
3 at 99% (three seeds).
"""
out_dir = 'out/loop_1_2x3_1'
n_layer = 4
loop = '1-2x3-1'
