"""SmolLM 1.7B, lidas, with 20% Nemotron-CC-Math-4+ in the decay, in which the layers 8 to 11 run twice.

"From Growing to Looping", section 5.2 and Table 2. The layers 12 to 15 in their place: --cooldown_loop=12-4x2-8. As for smollm_1b7_lidas_math.py, a copy of the
run at step 170,000 saves the way there.
"""
out_dir = 'out/smollm_1b7_lidas_math_loop'
grow = 'lidas'
grow_block = 4
cooldown_data = 'data/math/nemotron_20'
cooldown_loop = '8-4x2-12'
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
