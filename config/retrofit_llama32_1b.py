"""Llama-3.2-1B as a recurrent model (4,6,4).

Trained on Nemotron-CC-Math: "Retrofitted Recurrence", section 4.3.2, 50 billion tokens. First:
python data/math/prepare.py retrofit_math --tokens=50B --tokenizer=Llama-3.2-1B, and python
retrofit.py Llama-3.2-1B 4-6-4 --inject=linear --out=out/llama32_4-6-4 (the paper unties its
embedding; here it stays tied). Its dense partner is the checkpoint itself, going on with the same
data. 20 GFLOPs a token by the paper's count with a mean of 8: 1.0e21 in all. Written for 8 GPUs
(torchrun --standalone --nproc_per_node=8), not run here.
"""
out_dir = 'out/retrofit_llama32_1b'
init_from = 'out/llama32_4-6-4'
data = 'data/math/retrofit_math'
recurrence = 8              # the mean; 16 was best for Llama, 4 for TinyLlama
backprop_depth = 8
curriculum = 0.25
context = 1024
batch_size = 1024
grad_accum = 16             # 8 sequences at once on each of 8 GPUs
steps = 47_684              # of 1,048,576 tokens
warmup_steps = 500          # warm-up and decay are not given
decay_steps = 5_000
optimizer = 'muon'
lr = 1.1e-4                 # the paper's 1e-3 in torch's scale: config/retrofit_tinyllama.py
adamw_lr = 5e-5
weight_decay = 1e-4
grad_clip = 1.0
eval_every = 500
save_every = 500
