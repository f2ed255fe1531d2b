"""Train shallow, then grow deeper: new layers start as copies of middle ones (MIDAS, LIDAS, ...).

The idea: a grown model is an order of the small one, [0, 1, 2, 3, 2, 3] say, after which every
entry gets its own copy of the weights. So growing is untied looping, and looping is tied growing:
`untie(model, order)` computes what `order` computed, to the last bit, and from then on the copies
drift apart. A step of a shallow model costs less, so growing saves compute.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", section 3.1 (the operators), appendix A
(the schedule, PROP-alpha: stage i gets a share i^alpha of the steps), Table 7 (the compute saved).
MIDAS is Saunshi et al., 2024.
Here: LIDAS copies the contiguous layers [L/2 - b/2, L/2 + b/2) right after themselves, as the
paper's Figure 2 draws it; its printed formula would take b + 1 of them. PROP-alpha rounds down and
gives the rest to the last stage: that gives Table 7 to the last digit. The paper's text gives the
rest to the stages with the largest fractions, and that does not.

Usage:
    order = lidas(n_layer=8, block=2)                   # [0, 1, 2, 3, 4, 3, 4, 5, 6, 7]
    deeper = untie(model, order, optimizer=optimizers)  # ten layers of their own, states and all
    python grow.py 32 --block=4                         # which layer came from which
"""
import copy
import dataclasses
import sys

import torch

from nanodepth.common.errors import Refused, refusals
from nanodepth.common.options import read
from nanodepth.common.steps import check_order, core_in
from nanodepth.loop import repeat_block

# -------------------------------------------------------------------------------- operators: orders

def midas(n_layer, block):
    "Repeat the middle one of n blocks: [B0 .. Bm, Bm, ..], m = ceil(n/2) - 1 (the paper's Eq. 2)."
    if n_layer % block:
        raise Refused(f'midas copies whole blocks: {n_layer} layers are not whole blocks of '
                      f'{block}')
    middle = (n_layer // block - 1) // 2        # of two, the earlier one
    return repeat_block(range(n_layer), middle * block, block)


def lidas(n_layer, block):
    "Repeat the `block` layers around the middle, whatever the block boundaries."
    return repeat_block(range(n_layer), n_layer // 2 - block // 2, block)


def stack(n_layer, block):
    "Repeat the last block: gradual stacking, an older method."
    return repeat_block(range(n_layer), n_layer - block, block)


def double(n_layer, block=None):
    "Repeat the whole model; the block is there so that all four are called alike."
    return repeat_block(range(n_layer), 0, n_layer)


GROWTH = {'midas': midas, 'lidas': lidas, 'stack': stack, 'double': double}


def grown_order(grow, n_layer, block):
    """The order by which n_layer layers grow. grow: an operator's name, or a function of your own
    like those above. (A run's files keep no function, but the list of the orders that it gave.)"""
    if isinstance(grow, str):
        order = GROWTH[grow](n_layer, block)
    elif isinstance(grow, list):
        order = min((order for order in grow if len(order) > n_layer), key=len)
    else:
        order = grow(n_layer, block)
    order = check_order(order, n_layer)
    if len(order) <= n_layer:
        raise Refused(f'grow gives {n_layer} layers the order {order}, which is no longer')
    return order


# ------------------------------------------------------------------------------- the growing itself

def untie(model, order, optimizer=None, init=None):
    """A new model whose layer i is its own copy of layer order[i]: it computes what
    model(order=order) does. untie(model, [0, 1, 0, 1]) makes four layers of two: 0 and 2 begin as
    the old layer 0, 1 and 3 as the old layer 1. `optimizer` (one or a list) is changed
    in place and becomes the new model's: each new parameter gets a copy of its source's state, so
    that training goes on smoothly. `init(new_layer, old_layer)` is called on the second and later
    copies of a layer, and may change what they begin as; None: they are exact copies."""
    order = check_order(order, len(model.layers))
    written = numbers(order)
    new = copy.deepcopy(model)
    new.layers = torch.nn.ModuleList(copy.deepcopy(model.layers[i]) for i in written)
    new.config = dataclasses.replace(model.config, n_layer=len(written), order=None)
    if hasattr(new, 'adapter') and core_in(order) is None:
        del new.adapter             # a core's, which leaves with it
    new.order_with_steps = None     # it named the old layers
    new.order = renumbered(order)
    if init is not None:
        with torch.no_grad():
            for place, i in enumerate(written):
                if i in written[:place]:
                    init(new.layers[place], model.layers[i])
    if optimizer is not None:
        old = dict(model.named_parameters())
        source = {}             # {new parameter: the old one that it is a copy of}
        for name, p in new.named_parameters():
            if name.startswith('layers.'):              # such as layers.3.attn.q.weight
                _, i, rest = name.split('.', maxsplit=2)
                name = f'layers.{written[int(i)]}.{rest}'
            if name not in old:
                raise Refused(f'{name} is new in this order, so no optimizer holds it: give none, '
                              'and make one afterwards')
            source[p] = old[name]
        for opt in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            hand_over(opt, source)
    return new


def numbers(order):
    "The layers that an order names, in a step's items once."
    layers = []
    for item in order:
        layers += [item] if isinstance(item, int) else numbers(item.items)
    return layers


def renumbered(order, first=0):
    "The same order of other layers, which are numbered `first`, first + 1, ... as they come."
    new = []
    for item in order:
        place = first + len(numbers(new))
        if isinstance(item, int):
            new.append(place)
        else:
            step = copy.copy(item)
            step.items = renumbered(item.items, place)
            new.append(step)
    return new


def hand_over(optimizer, source):
    "Make an old model's optimizer, in place, that of a new one. source: {new parameter: its old}."
    for group in optimizer.param_groups:
        old = set(group['params'])
        # in the order of new.parameters(): a checkpoint knows a parameter's state by its number
        group['params'] = [p for p, of in source.items() if of in old]
    states = dict(optimizer.state)
    optimizer.state.clear()     # a layer that the order leaves out loses its state
    for p, of in source.items():
        if of in states:
            optimizer.state[p] = copy.deepcopy(states[of])


# ------------------------------------------------------------------------------------- the schedule

def prop_schedule(steps, n_stages, alpha=1.0):
    """PROP-alpha: stage i gets steps in proportion to i^alpha, rounded down, the last one the rest.
    Below 0 the shallow stages are the longest."""
    weights = [i ** alpha for i in range(1, n_stages + 1)]
    lengths = [int(steps * w / sum(weights)) for w in weights]
    lengths[-1] += steps - sum(lengths)
    return lengths


def growths(grow, start, end, block):
    "The orders by which `start` layers become `end` layers, one after another."
    orders, depths = [], [start]
    while depths[-1] < end:
        orders.append(grown_order(grow, depths[-1], block))
        depths.append(len(orders[-1]))
    if depths[-1] != end:
        name = getattr(grow, '__name__', grow)
        raise Refused(f'{name} from {start} layers does not reach n_layer={end}, but '
                      f'{", ".join(map(str, depths))}')
    return orders


def growth_plan(grow, end, block, constant_steps, alpha=1.0, start=None):
    """[(first step, layers)] of every stage, from `start` layers (None: one block) up to `end`, by
    what grown_order takes as `grow`. The model has its full depth when the constant phase (warm-up
    included) ends and the decay begins."""
    start = start or block
    depths = [start, *map(len, growths(grow, start, end, block))]
    lengths = prop_schedule(constant_steps, len(depths), alpha)
    if min(lengths) < 1:
        raise Refused(f'{constant_steps} steps before the decay are too few for {len(depths)} '
                      f'stages of {depths} layers')
    return [(sum(lengths[:i]), depth) for i, depth in enumerate(depths)]


@dataclasses.dataclass
class Options:
    WORDS = ['n_layer']
    n_layer: int               # the final depth
    block: int = 4                      # layers of a block


def main(argv):
    o = read(Options, argv, __doc__)
    for name in ('midas', 'lidas'):
        print(f'{name}: for each layer of a stage, the layer of the stage before that it copies')
        for _, depth in growth_plan(name, o.n_layer, o.block, constant_steps=170_000)[:-1]:
            order = GROWTH[name](depth, o.block)
            print(f'  {depth:3} -> {len(order):3}: {" ".join(map(str, order))}')


if __name__ == '__main__':
    with refusals('grow'):
        main(sys.argv[1:])
