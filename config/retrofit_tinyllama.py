"""TinyLlama as a recurrent model (4,8,4): "Retrofitted Recurrence", Figure 4, Muon's run.

As its authors' scripts have it. First: nanodepth cut TinyLlama-1.1B-intermediate-step-1431k-3T
4-8-4 --inject=authors --start=authors --fresh --recurrence=32 --out=out/tinyllama_4-8-4, and python
data/math/prepare.py retrofit_heal --tokens=26B --tokenizer=out/tinyllama_4-8-4. It is also the
first phase, "healing", of section 4.4 (mean 32 there too, as scripted). Written for 8 GPUs
(torchrun --standalone --nproc_per_node=8), not run here.
Their arc_easy and HellaSwag at r = 32: 63.1 and 62.6, of the dense partner 64.5 and 61.4.
"""
out_dir = 'out/retrofit_tinyllama'
init_from = 'out/tinyllama_4-8-4'
data = 'data/math/retrofit_heal'
recurrence = 32
backprop_depth = 8          # min(8, the step's mean), in the curriculum too
curriculum = 0.25
context = 1024
batch_size = 1024
grad_accum = 16             # 8 sequences at once on each of 8 GPUs
steps = 25_000              # of 1,048,576 tokens
warmup_steps = 125
decay_steps = 22_500        # 90% of the steps
lr_shape = 'cosine'
optimizer = 'muon'
muon_scaling = 'original'
lr = 1e-3
adamw_lr = 5e-5
weight_decay = 1e-4
grad_clip = 1.0
eval_every = 500
save_every = 500
