"""TinyLlama, cut 4-8-4, on mathematics: "Retrofitted Recurrence", Figure 5.

The settings are those of the authors' scripts, except what the last table of docs/FIGURES.md lists.
--recurrence=8, 16 and 32 are the other runs. First type:

    python data/math/prepare.py retrofit_math --tokens=53B --tokenizer=out/tinyllama_4-8-4

The authors' GSM8K at r = 1, 2, 4, 8, 16 and 32 is 17.6, 32.4, 38.0, 37.7, 37.7 and 37.9 (mean 4),
and 5.6, 24.2, 39.7, 45.3, 44.7 and 45.0 (mean 32). The ordinary model that they are compared with
has 26.6 (docs/FIGURES.md has its command).
"""
from retrofit_tinyllama import *  # noqa: F403

out_dir = 'out/retrofit_tinyllama_math'
data = 'data/math/retrofit_math/nemotron_cc_math'
recurrence = 4
curriculum = 0.75
curriculum_shape = '1-sqrt'
steps = 50_000
decay_steps = 0.6
