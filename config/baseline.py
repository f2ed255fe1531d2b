"""An ordinary model at toy size: the yardstick of everything else.

8 layers of width 128, 2.2 million parameters, 700 steps of 2,048 tokens, 2.3e13 FLOPs: 5 minutes on two CPU cores.
Expect a validation loss of 0.45 (on text alone 1.94; text of Python 3.11.7), depth 0 by step 300 and copying by 350, both
near 100% at the end, and depth 1 still at 30%.
"""
out_dir = 'out/baseline'
