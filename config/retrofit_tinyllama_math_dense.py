"""The dense partner of retrofit_tinyllama_math.py: "Retrofitted Recurrence", Figure 7.

The same data, rate and optimizer, and no recurrence. Their GSM8K: 26.6, MATH: 24.0.
"""
from config.retrofit_tinyllama_math import *

out_dir = 'out/retrofit_tinyllama_math_dense'
init_from = 'TinyLlama-1.1B-intermediate-step-1431k-3T'
recurrence = None
backprop_depth = None
