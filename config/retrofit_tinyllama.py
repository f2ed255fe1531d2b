"""TinyLlama as a recurrent model (4,8,4): the paper's first phase, "healing" on FineWeb-Edu.

26 billion tokens. First: python retrofit.py TinyLlama-1.1B-intermediate-step-1431k-3T 4-8-4
--inject=linear --out=out/tinyllama_4-8-4, and python data/math/prepare.py retrofit_heal
--tokens=26B --tokenizer=out/tinyllama_4-8-4. The second phase is retrofit_tinyllama_mix.py.
"Retrofitted Recurrence", sections 4.3 and 4.4, appendix D. 10.6 GFLOPs a token by its count: 2.8e20
in all, some 190 hours of a GPU at 400 TFLOP/s a second; written for 8 GPUs (torchrun --standalone
--nproc_per_node=8), not run here.
"""
out_dir = 'out/retrofit_tinyllama'
init_from = 'out/tinyllama_4-8-4'
data = 'data/math/retrofit_heal'
recurrence = 4              # the mean; the paper has 8, 16 and 32 too
backprop_depth = 8
curriculum = 0.25           # "a conservative 25% of total steps"
context = 1024
batch_size = 1024
grad_accum = 16             # 8 sequences at once on each of 8 GPUs
steps = 24_795              # of 1,048,576 tokens
warmup_steps = 500          # warm-up and decay are not given
decay_steps = 2_500
optimizer = 'muon'
# The paper's rate is 1e-3 for the official Muon. Ours, scaled to AdamW's size, multiplies a step
# by 0.2 sqrt(2048) = 9.05 more.
lr = 1.1e-4
adamw_lr = 5e-5
weight_decay = 1e-4
grad_clip = 1.0
eval_every = 500
save_every = 500
