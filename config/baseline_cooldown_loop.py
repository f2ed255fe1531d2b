"""The baseline, with its two middle layers run twice in the decay.

Partner of lidas_cooldown_loop.py. 6 minutes on two CPU cores. Expect a loss of 0.699 (three seeds);
without the loop it is 0.694.
"""
out_dir = 'out/baseline_cooldown_loop'
cooldown_loop = '3-2x2-3'
