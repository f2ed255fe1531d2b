"""Llama-3.2-1B, cut 2-4-2, with a curriculum: "Retrofitted Recurrence", Figure 3.

The settings are those of the authors' scripts, except what the last table of docs/FIGURES.md lists.
--curriculum=0, 0.0625 and 0.25 are the other runs of the figure. It has not been run here. First
type:

    nanodepth cut Llama-3.2-1B 2-4-2 --authors --layers=0,1/10,11,12,13/14,15 \\
        --out=out/llama32_2-4-2
"""
from retrofit_tinyllama import *  # noqa: F403

out_dir = 'out/retrofit_llama32_curriculum'
init_from = 'out/llama32_2-4-2'
curriculum = 0.125          # 3,125 steps
batch_size = 512
grad_accum = 8
optimizer = 'adamw'
lr = 5e-5
adamw_lr = None             # this and the next line undo settings of Muon
muon_scaling = 'match_rms_adamw'
lr_shape = 'constant'
