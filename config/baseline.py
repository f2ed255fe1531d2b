"""An ordinary model at toy size: the yardstick of everything else.

8 layers of width 128, 2.2 million parameters, 600 steps of 2,048 tokens, 1.79e13 FLOPs: 5 minutes on two CPU cores.
Expect a validation loss of 0.694 (on text alone 2.15; text of Python 3.11.7), depth 0 by step 225, copying and depth 1 by 275,
depth 2 by 335 and depth 3 by 465, all near 100% at the end (three seeds).
"""
out_dir = 'out/baseline'
