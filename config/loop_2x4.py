"""Loop(2x4): 2 unique layers, 8 deep."""
out_dir = 'out/loop_2x4'
n_layer = 2
loop = '2x4'
