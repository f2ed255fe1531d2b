"""Loop(2x4): 2 unique layers, run four times: 8 deep.

0.6 million parameters, the baseline's FLOPs: 5 minutes on two CPU cores. Partners: standard_2.py
(equal parameters) and baseline.py (equal compute). Expect a loss of 0.732 and depth 3 at 99% (three
seeds), where two layers run once stop at depth 0.
"""
out_dir = 'out/loop_2x4'
n_layer = 2
loop = '2x4'
