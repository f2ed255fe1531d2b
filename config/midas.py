"""MIDAS: 2, 4, 6, then 8 layers; every growth copies the middle one of the blocks.

Costs what lidas.py does: 1.44e13 FLOPs, 4 minutes on two CPU cores. The two differ at the growth
from 4 to 6 layers alone: with one block, or three, the middle block and the middle layers are the
same. Expect a loss of 0.702, depth 0 by step 265, copying by 300 and depth 3 by 475 (three seeds).
"""
out_dir = 'out/midas'
grow = 'midas'
grow_block = 2
