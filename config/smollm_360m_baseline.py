"""SmolLM 360M: the ordinary model, with which the papers compare theirs.

It costs 613,527.488 petaFLOPs (Table 7 of "Do Depth-Grown Models Overcome the Curse of Depth?").
The paper ends at a held-out loss of 2.18 ("From Growing to Looping", Table 1). It has not been run
here. --dry_run prints what it costs.

    python data/smollm/prepare.py --tokens=210B
    torchrun --standalone --nproc_per_node=8 train.py config/smollm_360m_baseline.py
"""
out_dir = 'out/smollm_360m_baseline'
data = ('data/smollm/fineweb_edu@0.7,data/smollm/cosmopedia@0.15,data/smollm/python_edu@0.09,'
        'data/smollm/open_web_math@0.06')
vocab_size = 49_152         # cosmo2
n_layer = 32                 # the shape: Table 2 of the first paper
n_embd = 960
n_head = 15
n_kv_head = 5
head_dim = 64
ffn_dim = 2560
tie_embeddings = True
context = 2048
batch_size = 512            # 2^20 tokens a step
grad_accum = 4              # 16 sequences at once on each of 8 GPUs
steps = 200_000             # 170,000 at a constant rate and 30,000 of decay: appendix A
warmup_steps = 0.01
decay_steps = 0.15
optimizer = 'adamw'         # the papers do not name its betas; ours are 0.9 and 0.95
lr = 3e-3
weight_decay = 0.01
grad_clip = 1.0
eval_every = 1_000
eval_batches = 20
save_every = 1_000
