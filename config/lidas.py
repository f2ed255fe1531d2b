"""LIDAS: 2, 4, 6, then 8 layers; every growth copies the layers around the middle.

The baseline's steps and data, 1.9e13 FLOPs (a fifth less): by that about 4 minutes on two CPU cores. Stages begin at steps
0, 56, 168 and 336. Expect a loss of 0.48, depth 0 by step 375 and copying by 425 (one seed).
"""
out_dir = 'out/lidas'
grow = 'lidas'
grow_block = 2
