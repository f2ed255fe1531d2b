"""Llama-3.2-1B as a recurrent model (4,6,4): "Retrofitted Recurrence", Figure 7.

As its authors' scripts have it; --recurrence=4, 16 or 32 are the others. First: python
data/math/prepare.py retrofit_math --tokens=53B --tokenizer=Llama-3.2-1B, and python retrofit.py
Llama-3.2-1B 4-6-4 --inject=authors --start=authors --fresh --untie_head --out=out/llama32_4-6-4.
Their GSM8K at r = 8, after 48,000 steps: 40.1, 44.3, 45.3, 48.1 for means of 4, 8, 16, 32; dense
37.1. Not run here.
"""
from config.retrofit_tinyllama_math import *

out_dir = 'out/retrofit_llama32_1b'
init_from = 'out/llama32_4-6-4'
recurrence = 8
