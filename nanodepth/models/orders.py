"""Run another family's model with its layers in another order: left out, exchanged or repeated. Its
list of layers is exchanged for one of shallow copies, which share the weights of their layers and
have slots of their own in the KV cache. Afterwards everything is as it was.
Usage: with in_order(model, [0, 1, 2, 1, 2, 3]): model(tokens)      # as deep as the list is long
"""
import contextlib
import copy
import itertools

from nanodepth.common.errors import Refused
from nanodepth.looping.caches import Window as LoopedWindow
from nanodepth.looping.layers import check_calls, layers_of
from nanodepth.looping.patch import put_in, unpatch
from nanodepth.model import steps_in, unrolled
from nanodepth.wrapper import Window

# lists that a config has, an entry for each layer
EACH_LAYER = 'layer_types', 'layers_block_type', 'no_rope_layers', 'mlp_layer_types'
# settings by which a layer's place matters, beside its order
BY_PLACE = ('num_kv_shared_layers', 'hidden_size_per_layer_input',
            'scale_attn_by_inverse_layer_idx')


@contextlib.contextmanager
def in_order(model, order):
    """The model with its layers in another order, inside a `with`: numbers, and windows of
    wrapper.py."""
    layers = layers_of(model)
    items = list(order)
    order = unrolled(items)
    if not order or not {*order} <= {*range(len(layers))}:
        raise Refused(f'the order {order} must name layers from 0 to {len(layers) - 1}')
    starts = itertools.accumulate((len(unrolled([item])) for item in items), initial=0)
    config = model.config.get_text_config()
    for name in BY_PLACE:
        if getattr(config, name, None):
            raise Refused(f'{type(model).__name__} has {name}={getattr(config, name)}: what a '
                          'layer of it does depends on its place, so it takes no other order')
    if any('forward' in vars(module) for module in layers.modules()):
        raise Refused("the layers' forward was replaced, by the wrapper or by accelerate (leave "
                      'its with, or open the model without device_map)')
    # Asked for the streams between layers, transformers hooks each layer once and for all. Copies
    # share the hooks that are there, so it does so now: later, a layer would get one per copy.
    check_calls(model, layers, output_hidden_states=True)
    before = dict(layers._modules)
    lists = {name: list(value) for name in EACH_LAYER if (value := getattr(config, name, None))}
    try:
        layers._modules = {str(place): placed(layers[i], place) for place, i in enumerate(order)}
        config.num_hidden_layers = len(order)
        for name, value in lists.items():
            setattr(config, name, [value[i] for i in order])
        check_calls(model, layers)
        for a, item in zip(starts, items):
            if not isinstance(item, int):
                if not isinstance(item, Window) or steps_in(item.items):
                    raise Refused(f'{item} is for models of ours')
                if not isinstance(item, LoopedWindow):
                    item = LoopedWindow(item.items, item.solver, item.K, cache=item.cache,
                                        **item.options)
                put_in(model, layers, a, a + len(item.items) - 1, item)
        yield model
    finally:
        unpatch(model)
        layers._modules = before
        config.num_hidden_layers = len(before)
        for name, value in lists.items():
            setattr(config, name, value)


def placed(module, place):
    "A shallow copy of a layer: its weights are shared, its index in the cache is its place."
    new = copy.copy(module)
    new._modules = {name: child if child is None else placed(child, place)
                    for name, child in module._modules.items()}
    if hasattr(new, 'layer_idx'):
        new.layer_idx = place
    return new
