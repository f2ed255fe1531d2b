"""How else a recurrent model may begin: the adapter's first weights, and the first state. By
default the adapter passes on the prelude's output alone, so that the model begins as its parent.
The first state is noise, so that the core does not come to rely on one state to start from.
Usage: adapter = new_adapter('identity', width)
"""
import math

import torch
import torch.nn as nn

from nanodepth.common.errors import check_choice
from nanodepth.common.seeds import seed_for

AUTHORS_STD = 0.0087039     # sqrt(2 / (5 * 5280)): their first model's width, kept at any other


def std_of(start, width):
    "The first state's, if none is given."
    check_choice('start', start, ('normal', 'authors', 'zero'))
    return AUTHORS_STD if start == 'authors' else math.sqrt(2 / (5 * width))


def new_adapter(inject, width):
    """From (s, e) to the core's input; None: s + e. How it and the first state may begin is in
    "Retrofitted Recurrence", section 3 and appendix C.1, and the numbers are in its code."""
    check_choice('inject', inject, ('identity', 'linear', 'authors', 'add'))
    if inject == 'add':
        return None
    adapter = nn.Linear(2 * width, width, bias=False)       # `authors`: as torch begins it
    # (s, e) to e: with no layer dropped, it is its parent (but LN-scaling sees the position)
    if inject == 'identity':
        adapter.weight.data.copy_(torch.cat((torch.zeros(width, width), torch.eye(width)), dim=1))
    if inject == 'linear':
        nn.init.normal_(adapter.weight, std=std_of('normal', width))
    return adapter


def noise(start, shape, generator):
    "A first state whose std is 1; if it shall be zero, it is 0."
    if start == 'zero':
        return torch.zeros(shape, device=generator.device)
    if start == 'authors':
        x = torch.empty(shape, device=generator.device)
        return nn.init.trunc_normal_(x, a=-3, b=3, generator=generator)
    return torch.randn(shape, generator=generator, device=generator.device)


def next_generator(core):
    "With `fresh`: another one in each forward."
    core.forwards = getattr(core, 'forwards', 0) + 1
    return torch.Generator().manual_seed(seed_for(0, 'first state', core.forwards))


def states_until(core, end, device):
    """A core's table of the first states of the positions before `end`, and some more. It grows
    when it is read: that of a whole context would be too much."""
    if core.table is None or len(core.table) < end:
        n = min(core.context, max(64, 2 ** math.ceil(math.log2(end))))
        seeded = torch.Generator().manual_seed(0)
        # 64 at a time, because randn of another size may begin otherwise
        sizes = [min(64, n - first) for first in range(0, n, 64)]
        with torch.inference_mode(False):       # else nothing could be trained with it later
            core.table = torch.cat([noise(core.start, (size, core.width), seeded)
                                     for size in sizes])
    if core.table.device != device:            # once, and not in every forward
        core.table = core.table.to(device)
    return core.table
