"""Llama-3.2-1B (2,4,2) with a curriculum: "Retrofitted Recurrence", Figure 3.

As its authors' scripts have it, but for docs/FIGURES.md's last table; --curriculum=0, 0.0625 and
0.25 are the others. First: nanodepth cut Llama-3.2-1B 2-4-2 --authors
--layers=0,1/10,11,12,13/14,15 --out=out/llama32_2-4-2. Not run here.
"""
from retrofit_tinyllama import *  # noqa: F403

out_dir = 'out/retrofit_llama32_curriculum'
init_from = 'out/llama32_2-4-2'
curriculum = 0.125          # 3,125 steps
batch_size = 512
grad_accum = 8
optimizer = 'adamw'
lr = 5e-5
adamw_lr = None             # these two were Muon's
muon_scaling = 'match_rms_adamw'
lr_shape = 'constant'
