"""TinyLlama (4,8,4) with AdamW*: "Retrofitted Recurrence", Figure 4.

Its decay is 1e-4 a step at the peak, 20,000 times AdamW's: over the run the weights would shrink to
a quarter without gradients, so the figure compares decays too.
"""
from config.retrofit_tinyllama import *

out_dir = 'out/retrofit_tinyllama_adamw_star'
optimizer = 'adamw_star'
lr = 5e-5
star_decay = 1e-4
