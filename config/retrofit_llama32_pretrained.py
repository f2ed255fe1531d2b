"""Llama-3.2-1B (2,4,2) against recurrence from scratch: "Retrofitted Recurrence", Figure 2.

As its authors' scripts have it: some 28,000 steps of 4,096 sequences, a constant rate, a mean of 32
from the first step on. First: as for retrofit_llama32_curriculum.py; for the other line with
--scratch. Their HellaSwag at r = 1, 2, 4, 8, 16, 32: 34.8, 41.2, 49.4, 54.9, 55.4, 55.6; from
scratch 28.6, 31.6, 37.8, 45.4, 47.8, 48.3. Not run here.
"""
from config.retrofit_llama32_curriculum import *

out_dir = 'out/retrofit_llama32_pretrained'
curriculum = 0.0
batch_size = 4096
grad_accum = 64
steps = 28_000
warmup_steps = 77
