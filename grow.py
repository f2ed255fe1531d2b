"""Train shallow, then grow deeper: new layers start as copies of middle ones (MIDAS, LIDAS, ...).

The idea: a grown model begins as an order of the small model, such as [0, 1, 2, 3, 2, 3], and then
every entry gets its own copy of the weights. So growing is untied looping, and looping is tied
growing: `untie(model, order)` computes what `order` computed, to the last bit, and from then on the
copies drift apart. (The small model has not run that order before, so the loss jumps a little.) A
step of a shallow model costs less, so growing saves compute.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", section 3.1 (the operators), appendix A
(the schedule, PROP-alpha: stage i gets a share i^alpha of the steps), Table 7 (the compute saved).
MIDAS is from Saunshi et al., 2024.
What differs here: the paper's printed slice of LIDAS has b + 1 layers, and here it has b, as in the
paper's Figure 2. The steps that rounding leaves over go to the last stage, so that Table 7 comes
out.

Usage:
    order = lidas(n_layer=8, block=2)                   # [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    deeper = untie(model, order)                        # ten layers with their own weights
    states = states_of_copies(states, order)            # what an optimizer remembers of them
    python grow.py lidas 32 4               # from which layer each layer is copied, up to 32
"""
import copy
import dataclasses
import sys

import torch

from loop import repeat_block
from model import Refused, Span, require

# ------------------------------------------------------------- growth operators: they return orders

def midas(n_layer, block):
    "Repeat the middle one of n blocks: [B0 .. Bm, Bm, ..], m = ceil(n/2) - 1 (the paper's Eq. 2)."
    require(block >= 1 and n_layer % block == 0, f'{n_layer} layers are not blocks of {block}')
    middle = (n_layer // block - 1) // 2        # of two in the middle, the earlier one
    return repeat_block(range(n_layer), middle * block, block)


def lidas(n_layer, block):
    "Repeat the layers [L/2 - b/2, L/2 + b/2), whatever the block boundaries (Figure 2)."
    return repeat_block(range(n_layer), n_layer // 2 - block // 2, block)


def stack(n_layer, block):
    "Repeat the last block: gradual stacking, an older method."
    return repeat_block(range(n_layer), n_layer - block, block)


def double(n_layer, block):
    "Repeat the whole model. (It ignores `block`, but all four operators are called the same way.)"
    return repeat_block(range(n_layer), 0, n_layer)


GROWTH = {'midas': midas, 'lidas': lidas, 'stack': stack, 'double': double}

# ------------------------------------------------------------------------------- the growing itself

def untie(model, order, init=None):
    """Return a new model whose layer i is its own copy of layer order[i]. It computes what
    model(order=order) does. untie(model, [0, 1, 0, 1]) makes four layers of two: 0 and 2 begin as
    the old layer 0, and 1 and 3 as the old layer 1.

    init(new_layer, old_layer) is called for the second and each later copy of a layer, and may
    change that copy. The first copy stays exact."""
    order = model.prepared(order)
    new_order, sources = numbered_anew(order)   # new layer i is a copy of the old layer sources[i]
    # deepcopy puts None where the layers and the order are, to save memory
    new = copy.deepcopy(model, {id(model.layers): None, id(model.order): None})
    new.layers = torch.nn.ModuleList(copy.deepcopy(model.layers[i]) for i in sources)
    new.config = dataclasses.replace(model.config, n_layer=len(sources))
    new.order = new_order
    if init is not None:
        with torch.no_grad():
            for place, i in enumerate(sources):
                if place > sources.index(i):
                    init(new.layers[place], model.layers[i])
    return new


def numbered_anew(order, first=0):
    """Return the order with its layers numbered from `first` on, and a list of their old numbers.
    [3, 3, 8] becomes [0, 1, 2] and [3, 3, 8]. A Span, such as a Core, is copied, and its items get
    the new numbers."""
    new_order, sources = [], []
    for item in order:
        if isinstance(item, Span):
            span = copy.deepcopy(item)
            span.items, inside = numbered_anew(item.items, first + len(sources))
            new_order.append(span)
            sources += inside
        else:
            new_order.append(first + len(sources))
            sources.append(item)
    return new_order, sources


def states_of_copies(states, order):
    """Return the optimizer states for the model that untie(model, order) makes. `states` is
    {parameter's name: its state}. The new layer i gets the states of the old layer order[i], and
    all other parameters keep their states."""
    copies = {name: state for name, state in states.items() if not name.startswith('layers.')}
    for i, source in enumerate(numbered_anew(order)[1]):
        for name, state in states.items():
            if name.startswith(f'layers.{source}.'):
                copies[name.replace(f'layers.{source}.', f'layers.{i}.', 1)] = state
    return copies


# ------------------------------------------------------------------------------------- the schedule

def prop_schedule(steps, n_stages, alpha=1.0):
    """Return the steps of each stage (PROP-alpha): stage i gets steps in proportion to i^alpha,
    rounded down, and the last stage also gets the steps that are left over. If alpha is below 0,
    the shallow stages are the longest."""
    weights = [i ** alpha for i in range(1, n_stages + 1)]
    lengths = [int(steps * w / sum(weights)) for w in weights]
    lengths[-1] += steps - sum(lengths)
    return lengths


def growths(grow, start, end, block):
    """Return the orders that turn `start` layers into `end` layers, one growth after another.
    `grow` is a name in GROWTH, or your own function that is called like these."""
    operator = GROWTH[grow] if isinstance(grow, str) else grow
    name = getattr(grow, '__name__', grow)
    require(1 <= start < end and block >= 1,
            f'{name} cannot grow from {start} layers to {end} in blocks of {block}')
    orders, depths = [], [start]
    while depths[-1] < end:
        try:
            order = [int(i) for i in operator(depths[-1], block)]   # your own may return numpy's
        except Refused as error:
            raise Refused(f'{name} cannot grow {depths[-1]} layers by {block}: {error}') from None
        require(len(order) > depths[-1] and {*order} <= {*range(depths[-1])},
                f'{name} must return more than {depths[-1]} layers, made of the layers 0 to '
                f'{depths[-1] - 1}, and not {order}')
        orders.append(order)
        depths.append(len(order))
    require(depths[-1] == end, f'{name} grows to {", ".join(map(str, depths))} layers, and '
            f'n_layer={end} is not one of these')
    return orders


def growth_plan(grow, start, end, block, steps, alpha=1.0):
    """Return the growths from `start` layers to `end` as [(step, order), ...]: at the beginning of
    this step the model becomes untie(model, order). `steps` are those before the decay, including
    the warm-up, and when they end the model has its full depth."""
    orders = growths(grow, start, end, block)
    lengths = prop_schedule(steps, 1 + len(orders), alpha)
    require(min(lengths) >= 1, f'{steps} steps before the decay are too few for '
            f'{len(lengths)} stages from {start} to {end} layers')
    return [(sum(lengths[:i]), order) for i, order in enumerate(orders, 1)]


if __name__ == '__main__':
    words = sys.argv[1:]
    if len(words) != 3 or words[0] not in GROWTH or not all(map(str.isdigit, words[1:])):
        raise SystemExit(__doc__)
    name, n_layer, block = words[0], int(words[1]), int(words[2])
    try:
        orders = growths(name, block, n_layer, block)
    except Refused as error:
        sys.exit(f'grow: {error}')
    print(f'{name}: for each layer of a stage, the layer that it copies from the stage before')
    for order in orders:
        print(f'  to {len(order):3} layers: {" ".join(map(str, order))}')
