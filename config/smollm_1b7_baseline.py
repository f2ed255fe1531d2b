"""SmolLM 1.7B: the ordinary model, with which the papers compare theirs.

It costs 4,813,222.102 petaFLOPs (Table 7 of "Do Depth-Grown Models Overcome the Curse of Depth?").
The paper ends at a held-out loss of 1.96 ("From Growing to Looping", Table 1). It has not been run
here. --dry_run prints what it costs.

    python data/smollm/prepare.py --tokens=419B
    torchrun --standalone --nproc_per_node=8 train.py config/smollm_1b7_baseline.py
"""
from smollm_360m_baseline import *  # noqa: F403

out_dir = 'out/smollm_1b7_baseline'
n_layer = 24                # the shape: Table 2 of the first paper
n_embd = 2048
n_head = 32
n_kv_head = 32
ffn_dim = 8192
batch_size = 1024           # 2^21 tokens a step
grad_accum = 32             # 4 sequences at once on each of 8 GPUs
lr = 5e-4
