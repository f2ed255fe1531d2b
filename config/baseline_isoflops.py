"""The baseline with no more FLOPs than LIDAS: its constant phase is shortened, warm-up and decay are as they were.

LIDAS takes 56 steps with 2 layers, 112 with 4, 168 with 6 and 364 with 8, which by the ledger (4.2, 8.2, 12.1 and 16.1
million FLOPs a token) cost as much as 561.7 steps with 8.
"""
out_dir = 'out/baseline_isoflops'
steps = 562
