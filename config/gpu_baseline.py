"""One GPU, three minutes: an ordinary model of 24 layers and 102 million weights.

960 steps of 65,536 tokens, 4.8e16 FLOPs. Its text is yours: 63 million tokens or more, such as the
first 70 million of one file of FineWeb-Edu (a smaller text is read several times, and says so):
python data/text/prepare.py FILE.parquet --tokens=70M --tokenizer=HuggingFaceTB/SmolLM2-135M
--out=data/gpu. What an H200 made of it is in docs/RESULTS.md. A card of 24 GB needs --grad_accum=2,
which divides the memory of a step and not its result.
"""
out_dir = 'out/gpu_baseline'
data = 'data/gpu'
n_layer = 24
n_embd = 512
n_head = 8
head_dim = 64
ffn_dim = 1408
vocab_size = 49_152         # SmolLM2's
tie_embeddings = True
context = 1024
batch_size = 64             # 65,536 tokens a step
steps = 960
warmup_steps = 60
decay_steps = 160
optimizer = 'adamw'
lr = 1e-3
eval_every = 120
eval_batches = 9
save_every = 2000           # at the end
