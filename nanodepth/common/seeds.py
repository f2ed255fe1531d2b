"""Every random draw of this repo is a function of (seed, purpose, step), so that no generator's
state is ever saved."""
import functools
import hashlib

import torch


@functools.lru_cache
def seed_for(seed, purpose, step=0):
    "63 random bits."
    return int.from_bytes(hashlib.blake2b(f'{seed} {purpose} {step}'.encode(),
                                          digest_size=8).digest(), 'big') >> 1


def row_generators(seed, step, first, n, device):
    """A generator for each of n rows of a step's batch, from the `first` on: what it draws for a
    row is the same, however the rows are shared out to processes."""
    return [torch.Generator(device).manual_seed(seed_for(seed, f'state of row {row}', step))
            for row in range(first, first + n)]
