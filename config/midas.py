"""MIDAS: 2, 4, 6, then 8 layers; every growth copies the middle one of the blocks."""
out_dir = 'out/midas'
grow = 'midas'
grow_block = 2
