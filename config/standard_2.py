"""An ordinary model with 2 layers: the partner of loop_2x4.py at equal parameters.

0.6 million parameters, a quarter of the baseline's FLOPs: 1.5 minutes on two CPU cores. Expect a
loss of 0.885, copying and depth 0 at 97 and 100%, and depth 1 to 3 near chance (three seeds).
"""
out_dir = 'out/standard_2'
n_layer = 2
