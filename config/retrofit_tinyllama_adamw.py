"""TinyLlama (4,8,4) with AdamW: "Retrofitted Recurrence", Figure 4.

As its authors' scripts have it: 30,000 steps of the horizon, though the figure ends at 25,000.
"""
from config.retrofit_tinyllama import *

out_dir = 'out/retrofit_tinyllama_adamw'
optimizer = 'adamw'
lr = 5e-5
steps = 30_000
warmup_steps = 126
lr_decay_steps = 27_000
