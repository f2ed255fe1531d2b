"""Gradual stacking: 2, 4, 6, then 8 layers; every growth copies the last block.

Costs what lidas.py does: 1.44e13 FLOPs, 4 minutes on two CPU cores. Expect a loss of 0.709, depth 0
by step 250, depth 2 by 400 and depth 3 by 500 (three seeds).
"""
out_dir = 'out/stack'
grow = 'stack'
grow_block = 2
