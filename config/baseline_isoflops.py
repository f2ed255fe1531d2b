"""The baseline with no more FLOPs than LIDAS: its constant phase is shortened.

Warm-up and decay are as they were. LIDAS takes 48 steps with 2 layers, 96 with 4, 144 with 6 and
312 with 8, which by the ledger (3.8, 7.4, 11.0 and 14.5 million FLOPs a token) cost as much as
481.6 steps with 8. 4 minutes on two CPU cores; expect a loss of 0.726 (three seeds).
"""
out_dir = 'out/baseline_isoflops'
steps = 482
