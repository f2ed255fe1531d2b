"""Fine-tune on 128 chains of depth 4, one alias more than the training mix has, from any checkpoint (--init_from).

`python data/sft/prepare.py` writes the examples. A minute on two CPU cores. Expect a training loss of 0 and an accuracy at
chance: the toy's models learn so few by heart (LOG.md).
"""
out_dir = 'out/sft'
init_from = 'out/lidas'
data = 'data/sft'
steps = 60
warmup_steps = 6
decay_steps = 30
lr = 1e-3
eval_every = 10
