"""Fine-tune on 128 chains of depth 1 and 2 in a form that the mix does not have (w=7b=w?b1).

From any checkpoint (--init_from). `python data/sft/prepare.py` writes the examples. Half a minute
on two CPU cores. The paper's question: who learns a new form from the fewest examples (section
5.1)? Ask depth 0 and 3 too, which were left out.
"""
out_dir = 'out/sft'
init_from = 'out/lidas'
data = 'data/sft'
steps = 40
warmup_steps = 4
decay_steps = 20
lr = 1e-3
eval_every = 10
