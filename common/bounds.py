"""What numbers may be: one table for settings, options and what a file says.

Usage:
    check_bounds(dict(n_layer=0))               # Refused: n_layer=0 must be at least 1
    check_bounds(vars(args), '--')              # Refused: --n=0 must be at least 1
"""
import math

from common.errors import Refused

ANY, ONE, SOME = (-2 ** 63, 2 ** 63 - 1), (1, 10 ** 9), (0, 10 ** 9)
SHARE, RATE = (0.0, 1.0), (0.0, 1e6)
BOUNDS = dict(
    # a model's shape
    n_layer=(1, 10_000), n_embd=(1, 2 ** 20), n_head=(1, 2 ** 16), n_kv_head=(1, 2 ** 16),
    head_dim=(2, 2 ** 16), ffn_dim=(1, 2 ** 24), vocab_size=(2, 2 ** 24), context=(2, 2 ** 24),
    rope_theta=(1.0, 1e15), norm_eps=(0.0, 1.0),
    # a run
    batch_size=(1, 2 ** 22), grad_accum=(1, 2 ** 22), steps=ONE, warmup_steps=SOME,
    decay_steps=SOME, lr_decay_steps=SOME, lr=RATE, adamw_lr=RATE, lr_floor=SHARE, grad_clip=RATE,
    weight_decay=RATE, star_decay=RATE, beta2=(0.0, 0.9999999), eval_every=ONE, eval_batches=ONE,
    log_every=ONE, save_every=ONE, patience=(1, 10 ** 6), seed=ANY, step=SOME,
    # depth
    grow_block=(1, 10_000), grow_alpha=(0.0, 100.0), block=(1, 10_000), alpha=(0.0, 100.0),
    recurrence=(1, 10_000), mean=(1, 10_000), backprop_depth=(1, 10_000), r=(1, 10_000),
    curriculum=SHARE, backprop_curriculum=SHARE, state_std=RATE, K=(1, 10_000), beta=SHARE,
    T=(1e-6, 1e3),
    # what is measured, and on how much
    n=(1, 10 ** 7), batches=(1, 10 ** 6), limit=ONE, shots=(0, 1000), best=(1, 10 ** 6),
    count=(1, 10 ** 6), length=(2, 2 ** 24), max_length=(2, 2 ** 24), lens_steps=ONE,
    documents=ONE, text=(0.0, 0.99), tokens=(1, 10 ** 10),
    port=(0, 65535), jobs=(1, 1000), chars=(1, 10 ** 6), temperature=(0.0, 1e6), top_k=(1, 2 ** 24))


def check_bounds(values, before=''):
    "Every number in `values` that has a name in the table must lie between its bounds."
    for name, value in values.items():
        if name not in BOUNDS or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        least, most = BOUNDS[name]
        if not value >= least:
            raise Refused(f'{before}{name}={value} must be at least {least:g}')
        if value > most or not math.isfinite(value):
            raise Refused(f'{before}{name}={value} must be at most {most:,}')
