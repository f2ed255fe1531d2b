"""Gradual stacking: 2, 4, 6, then 8 layers; every growth copies the last block."""
out_dir = 'out/stack'
grow = 'stack'
grow_block = 2
