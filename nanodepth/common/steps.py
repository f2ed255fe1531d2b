"""Behind a model's order: the check of such a list, the steps in it, and a core's settings.
A first reading of model.py needs none of this. A function takes an order, or the model whose order
it is.
Usage: order = check_order([0, 1, 2, 1, 2], n_layer=3)
"""
from nanodepth.common.errors import Refused


def check_order(order, n_layer):
    "The order as a plain list, or an error that names the first index that is no layer."
    order = list(order)
    if not order:
        raise Refused('the order is empty: it must name at least one layer')
    for i in order:
        if hasattr(i, 'items'):
            check_order(i.items, n_layer)
        elif not (isinstance(i, int) and 0 <= i < n_layer):
            raise Refused(f'the order names layer {i!r}, but the layers are 0 to {n_layer - 1}')
    return order


def steps_of(order):
    "The steps of an order, with those within others."
    steps = []
    for item in order:
        if not isinstance(item, int):
            steps += [item, *steps_of(item.items)]
    return steps


def core_in(order):
    "The retrofit's Core among the steps of an order, or None."
    return next((step for step in steps_of(order) if hasattr(step, 'recurrence')), None)


def check_kinds(own, given):
    "An order in place of the model's own: no step of that may be lost without a word."
    kinds = {type(step) for step in steps_of(given)}
    for step in steps_of(own):
        if type(step) not in kinds:
            raise Refused(f"the model's own order has a {type(step).__name__} in it, which {given} "
                          'has not: it takes no other order')


class CoreSettings:
    """For a model: model.recurrence is that of its order's core, and so on, to read and to set. (A
    module takes any attribute, and one of the model's own would change nothing.)"""
    PARTS = ('prelude', 'core', 'coda')
    SETTINGS = {'recurrence', 'backprop_depth', 'fresh', 'state_std', 'recompute', 'table'}
    NAMES = {*SETTINGS, *PARTS, 'inject', 'start', 'first_state'}

    def __getattr__(self, name):
        core = core_in(vars(self).get('order_with_steps') or ()) if name in self.NAMES else None
        if core is None:
            return super().__getattr__(name)
        if name in self.PARTS:
            return core.parts(self.order)[self.PARTS.index(name)]
        return getattr(core, name)

    def __setattr__(self, name, value):
        if name not in self.NAMES:
            return super().__setattr__(name, value)
        if name not in self.SETTINGS:
            raise Refused(f'{name} belongs to the order and its steps: set model.order')
        core = core_in(self.order)
        if core is None:
            raise Refused(f'{name} is a setting of a recurrent core, and the order '
                          f'{self.order} has none')
        setattr(core, name, value)
