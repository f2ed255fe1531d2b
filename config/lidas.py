"""LIDAS: 2, 4, 6, then 8 layers; every growth copies the layers around the middle."""
out_dir = 'out/lidas'
grow = 'lidas'
grow_block = 2
