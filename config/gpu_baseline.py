"""One GPU, a minute and a half: an ordinary model of eight layers that reads bytes for long enough.

2,340 steps of 131,072 bytes are 47 for each of its 6.6 million weights, and 1.39e16 FLOPs. Nine
tenths are text of yours, such as one file of FineWeb-Edu, and a tenth are puzzles with up to five
aliases. These make the data, in minutes and without a tokenizer (a smaller text is read several
times, and says so):

    python data/toy/prepare.py --depths=6 --text=0 --documents=480000 --out=data/gpu/puzzles
    python data/text/prepare.py FILE.parquet --tokens=220M --out=data/gpu/text --mix=puzzles:0.1
    python train.py config/gpu_baseline.py

On an H200, with two seeds, it ended at 0.928 nats a byte of text, and followed two aliases.
"""
out_dir = 'out/gpu_baseline'
data = 'data/gpu'
n_layer = 8
n_embd = 256
n_head = 4
context = 256
batch_size = 512            # 131,072 bytes a step
steps = 2340
warmup_steps = 100
decay_steps = 468
lr = 4e-3
eval_every = 120
eval_batches = 6
log_every = 60
save_every = 5000           # at the end
