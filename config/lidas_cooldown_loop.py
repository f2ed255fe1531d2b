"""LIDAS, with its two middle layers run twice in the decay.

This is the paper's retrofitted recurrence. 5 minutes on two CPU cores. Expect a loss of 0.702
(three seeds), as without the loop.
"""
out_dir = 'out/lidas_cooldown_loop'
grow = 'lidas'
grow_block = 2
cooldown_loop = '3-2x2-3'
