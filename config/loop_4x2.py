"""Loop(4x2): 4 unique layers, 8 deep."""
out_dir = 'out/loop_4x2'
n_layer = 4
loop = '4x2'
