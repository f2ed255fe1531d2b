"""Loop(1-2x3-1): 4 unique layers, 8 deep."""
out_dir = 'out/loop_1_2x3_1'
n_layer = 4
loop = '1-2x3-1'
