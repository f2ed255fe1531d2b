"""TinyLlama (4,8,4), the second of two phases: "Retrofitted Recurrence", section 4.4 (Figure 8).

FineWeb-Edu and two instruction sets in even shares. First: config/retrofit_tinyllama.py, and python
data/math/prepare.py retrofit_mix --tokens=26B --tokenizer=out/tinyllama_4-8-4. As scripted, the
curriculum begins again from 1. With --init_from=out/tinyllama_4-8-4 it is the single phase. Their
GSM8K at r = 32, scored anew: 51.2 in two phases, 52.0 in one, dense 45.2 and 46.2.
"""
from config.retrofit_tinyllama import *

out_dir = 'out/retrofit_tinyllama_mix'
init_from = 'out/retrofit_tinyllama'
data = 'data/math/retrofit_mix'
recurrence = 4
