"""Loop(4x2): 4 unique layers, run twice: 8 deep.

1.1 million parameters, the baseline's FLOPs: 5 minutes on two CPU cores. Partners: standard_4.py
(equal parameters) and baseline.py (equal compute). Expect a loss of 0.707 and depth 3 at 99% (three
seeds).
"""
out_dir = 'out/loop_4x2'
n_layer = 4
loop = '4x2'
