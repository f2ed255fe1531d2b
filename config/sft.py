"""Fine-tune on 128 chains of depth 4, one alias more than the training mix has, from any checkpoint (--init_from)."""
out_dir = 'out/sft'
init_from = 'out/lidas'
data = 'data/sft'
steps = 60
warmup_steps = 6
decay_steps = 30
lr = 1e-3
eval_every = 10
