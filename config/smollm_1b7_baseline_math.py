"""SmolLM 1.7B, baseline, with 20% Nemotron-CC-Math-4+ from the first step of the decay on.

"From Growing to Looping", section 5.2 and Table 2. Copy out/smollm_1b7_baseline at step 170,000 to out/smollm_1b7_baseline_math, and only the 30,000
steps of the decay are left; first: python data/math/prepare.py nemotron_20 --tokens=63B. For FineMath-4+ (Table 3): --cooldown_data=data/math/finemath_20.
"""
out_dir = 'out/smollm_1b7_baseline_math'
cooldown_data = 'data/math/nemotron_20'
data = 'data/smollm'
n_layer = 24                 # the shape: Table 2
n_embd = 2048
n_head = 32
n_kv_head = 32
head_dim = 64
ffn_dim = 8192
vocab_size = 49_152         # cosmo2
rope_theta = 10_000.0
tie_embeddings = True
context = 2048
batch_size = 1024            # 2^21 tokens a step
grad_accum = 32              # 4 sequences at once on each of 8 GPUs
steps = 200_000             # 170,000 with the rate constant, 30,000 of decay: appendix A
warmup_steps = 2_000
decay_steps = 30_000
optimizer = 'adamw'         # its betas are not given: ours are 0.9 and 0.95
lr = 5e-4
weight_decay = 0.01
grad_clip = 1.0
eval_every = 1_000
eval_batches = 20
save_every = 1_000
