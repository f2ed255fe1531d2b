"""LIDAS: 2, 4, 6, then 8 layers; every growth copies the layers around the middle.

The baseline's steps and data, 1.44e13 FLOPs (a fifth less): 4 minutes on two CPU cores. Stages begin at steps 0, 48, 144 and
288. Expect a loss of 0.702, depth 0 by step 250, copying and depth 1 by 325, depth 2 by 375 and depth 3 by 500 (three seeds).
"""
out_dir = 'out/lidas'
grow = 'lidas'
grow_block = 2
