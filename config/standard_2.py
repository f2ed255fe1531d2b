"""An ordinary model with 2 layers."""
out_dir = 'out/standard_2'
n_layer = 2
