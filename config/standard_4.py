"""An ordinary model with 4 layers."""
out_dir = 'out/standard_4'
n_layer = 4
