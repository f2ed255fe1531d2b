"""TinyLlama as a recurrent model (4,8,4): the paper's second phase.

FineWeb-Edu and two instruction sets in even shares, 26 billion tokens. First:
config/retrofit_tinyllama.py, and python data/math/prepare.py retrofit_mix --tokens=26B
--tokenizer=out/tinyllama_4-8-4. With --init_from=out/tinyllama_4-8-4 --curriculum=0.25 it is the
paper's single phase. "Retrofitted Recurrence", section 4.4. Not run here.
"""
out_dir = 'out/retrofit_tinyllama_mix'
init_from = 'out/retrofit_tinyllama'
data = 'data/math/retrofit_mix'
recurrence = 4              # the mean; the paper has 8, 16 and 32 too
backprop_depth = 8
curriculum = 0.0            # the model recurs already; the paper does not say
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
