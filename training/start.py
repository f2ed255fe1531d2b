"""Begin a run: resume it, branch it from another run, or start a new one.

resumed     out_dir holds a run already. The run continues, and only the settings in FREE may change
branched    branch_from names another run, the trunk, or one of the trunk's checkpoints. The branch
            continues the trunk's model, optimizers, totals and log in its own folder, and may have
            other settings
new         the run begins at step 0, with random weights or with the model of init_from, which may
            be cut
"""
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from model import LM, require, spans_in, unrolled
from retrofit import Core, core_of, surgery
from training.checkpoint import as_written, book_hash, load, same_source, written
from training.plan import (FREE, NEEDED_BY, Config, changes, first_n_layer, model_config, plan,
                           seed_for)

# The settings that say where the model comes from. If one of them is set, the model decides its
# own shape. A resume need not repeat them, because the checkpoint has the model.
MADE_THE_MODEL = 'init_from', 'cut', 'branch_from'


@dataclass
class Past:
    "What a run has done so far. A checkpoint stores it next to the model and the optimizers."
    step: int = 0
    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0
    first_n_layer: int = 0          # layers of the model that the run began with
    inherited_flops: int = 0        # the training FLOPs of the model of init_from
    published: bool = False         # True, if that model was downloaded, so its FLOPs are unknown
    data: dict = field(default_factory=dict)        # descriptions of what the model has read
    config: dict = field(default_factory=dict)      # the settings as they were typed
    book: str = ''                  # a hash of the book's files


class Beginning(NamedTuple):
    c: Config                   # the settings, with what the model decides
    model: LM
    past: Past
    states: dict                # what the optimizers remember (states_of in optimizers.py)
    is_resumed: bool
    origin: str | None          # the run that is continued: the run itself, or the trunk
    trunk: dict                 # the settings of that run
    copy_tokenizer: Callable | None     # nanodepth's function, for a published tokenizer


def start(typed, data, open_parent, size):
    """Return the Beginning of a run of `size` processes. A run that cannot begin is refused here,
    before it makes a folder."""
    is_resumed = (Path(typed.out_dir) / 'ckpt.pt').exists()
    kept = [path.name for path in Path(typed.out_dir).glob('ckpt-*.pt')]
    require(is_resumed or not kept, f'{typed.out_dir} has {", ".join(kept)}, but no ckpt.pt: '
            'choose another out_dir, or copy one of these to ckpt.pt to continue from it')
    origin = typed.out_dir if is_resumed else typed.branch_from
    read_now = {name: loader.description() for name, loader in data.items()}
    copy_tokenizer, states = None, {}
    if origin:
        model, past, states = continued(origin)
    else:
        model, past, copy_tokenizer = new(typed, data, open_parent)
    if is_resumed:
        typed = as_begun(typed, past)
        refuse_another_run(typed, past, read_now)
    elif origin:
        refuse_another_beginning(typed, past)
    c = decided(typed, model, past)
    refuse_what_does_not_fit(c, model, size)
    refuse_another_tokenizer(data, past.data, model.config.vocab_size)
    if not origin:
        set_order_of_new(c, model)
    elif not is_resumed:
        set_order_of_branch(c, model, past)
    if core := core_of(model):
        core.r, core.backprop_depth, core.recompute = c.recurrence, c.backprop_depth, c.recompute
    now = replace(past, config=as_written(typed), data=read_now, book=book_hash())
    return Beginning(c, model, now, states, is_resumed, origin, past.config, copy_tokenizer)


def continued(origin):
    "Return the model of a run or checkpoint, its Past, and what its optimizers remember."
    model, saved = load(origin)
    require(saved['optimizers'] and isinstance(saved['optimizers'], dict), f'{origin} has only '
            f'weights, or is of an earlier version: --init_from={origin} begins with its weights')
    past = Past(**{field.name: saved[field.name] for field in fields(Past)})
    return model, past, saved['optimizers']


def new(c, data, open_parent):
    "Return a new run's model, its Past, and a function that copies a published tokenizer, or None."
    torch.manual_seed(seed_for(c.seed, 'init'))
    if c.init_from:
        model, parent = open_parent(c.init_from)
    else:
        n_vocab = c.vocab_size or data['data'].datasets[0].about['n_vocab']
        model, parent = LM(model_config(c, first_n_layer(c), n_vocab)), {}
    if c.cut:
        require(not core_of(model), f'{c.init_from} has a core already: --cut=none')
        require(not (c.init_from and model.config.ln_scaling), 'LN-scaling would give layers the '
                f'scale of another depth. `nanodepth cut {c.init_from} {c.cut}` keeps the scales')
        model = surgery(model, c.cut, c.core or Core)
    past = Past(first_n_layer=len(model.layers), published=parent.get('published', False),
                inherited_flops=parent.get('flops', 0) + parent.get('inherited_flops', 0),
                data=parent.get('data', {}))
    return model, past, parent.get('copy_tokenizer')


def as_begun(typed, past):
    "Return the settings of a resume, completed by those that it need not repeat."
    begun = {name: past.config[name] for name in MADE_THE_MODEL if getattr(typed, name) is None}
    return replace(typed, **begun)


def decided(c, model, past):
    """Return the settings, completed by those that the model decides. A core decides recurrence and
    backprop_depth, if these are None. A model that these settings did not make decides its own
    shape."""
    if core := core_of(model):
        c = replace(c, recurrence=c.recurrence or core.r,
                    backprop_depth=c.backprop_depth or core.backprop_depth)
    if not any(getattr(c, name) for name in MADE_THE_MODEL):
        return c
    # The rows of a run may be shorter than the longest ones that the model can read.
    names = (vars(model.config).keys() & vars(c).keys()) - {'context'}
    if c.grow:                              # the config decides how deep the model is at the end
        names -= {'n_layer'}
        require(c.grow_from in (None, past.first_n_layer), f'grow_from={c.grow_from}, but the '
                f'run begins with {past.first_n_layer} layers: leave grow_from out')
        c = replace(c, grow_from=past.first_n_layer)
    return replace(c, **{name: getattr(model.config, name) for name in names})


def set_order_of_new(c, model):
    "Set the order of a new run's model, as the settings define it."
    plain = [*range(len(model.layers))]
    require(not c.grow or model.order == plain, 'a looped model does not grow')
    for change in changes(c):
        if change.step == 0:
            model.order = change.order
    require(c.init_from or {*unrolled(model.order)} == {*plain},
            f'the order {model.order} runs only some of n_layer={len(plain)} new layers')


def set_order_of_branch(c, model, past):
    """Set the order of a trunk's model to the one that the branch's settings would have at this
    step. A trunk is refused if these settings would have given it another number of layers."""
    n_layer, order = past.first_n_layer if c.grow else c.n_layer, None
    for change in changes(c):
        if change.step < max(1, past.step):     # a change comes at the beginning of its step
            if change.copies:
                n_layer = len(change.order)
            else:
                order = change.order
    require(n_layer == len(model.layers), f'after step {past.step} these settings need '
            f'n_layer={n_layer}, and the model has {len(model.layers)} layers')
    if order is None:       # no setting names it: it is 0 to n - 1, or the model was loaded
        is_known = c.init_from or core_of(model) or model.order == [*range(n_layer)]
        require(is_known, f'{c.branch_from} runs the order {unrolled(model.order)}: give its loop '
                'or order')
    elif written(order) != written(model.order):
        model.order = order         # (an equal order is left, so that its Spans keep their weights)


def differences(wanted, has, but=()):
    """Return in words how the settings that a run has differ from the wanted ones. Both are in the
    form in which files keep them."""
    names = [name for name in sorted(wanted.keys() | has.keys())
             if name not in but and not same_source(wanted.get(name), has.get(name))]
    return '; '.join(f'{name}={has.get(name)!r:.40} and not {wanted.get(name)!r:.40}'
                     for name in names)


# ---------------------------------------------------------------------------------- what is refused

def refuse_another_run(typed, past, read_now):
    "Refuse to resume a run with other settings, or with other data."
    differ = differences(as_written(typed), past.config, but=FREE)
    how = (f', with --branch_from={typed.out_dir} to continue it there'
           if past.step < typed.steps else '')
    require(not differ, f'{typed.out_dir} holds a run with {differ}: choose another out_dir{how}')
    others = [name for name in past.data | read_now
              if past.data.get(name) != read_now.get(name)]
    require(not others, f'{typed.out_dir} began with other data ({", ".join(others)}): the data '
            'has changed since, or other data is named')


def refuse_another_beginning(typed, past):
    "Refuse a branch that has no steps left, or that would make another model than the trunk's."
    require(past.step < typed.steps, f'{typed.branch_from} has taken {past.step} steps, and '
            f'steps={typed.steps}: give more --steps')
    for name in ('init_from', 'cut'):
        began = past.config[name]
        require(getattr(typed, name) in (None, began), f'{typed.branch_from} began with '
                f'{name}={began}: a branch keeps its model, and --init_from begins a new run')


def refuse_what_does_not_fit(c, model, size):
    "Refuse settings that are allowed alone, but not together, in a run of `size` processes."
    require(c.warmup_steps + c.decay_steps <= c.steps, f'{c.warmup_steps} steps of warm-up and '
            f'{c.decay_steps} of decay are more than steps={c.steps} (a share has a point: 0.2)')
    require(c.decay_steps or not (c.cooldown_loop or c.cooldown_data), 'a cool-down needs a decay')
    require(c.batch_size % (size * c.grad_accum) == 0, f'batch_size={c.batch_size} is not a '
            f'multiple of {size} processes x grad_accum={c.grad_accum}')
    orders = [name for name in ('grow', 'loop', 'order') if getattr(c, name)]
    require(len(orders) <= 1, f'{" and ".join(orders)} do not go together')
    require(not any(isinstance(span, Core) for span in spans_in(c.order or ())),
            'a core is made by cut (cut = "2-2-2"), and not by order')
    if core_of(model):
        require(not orders and not c.cooldown_loop,
                'grow, loop, order and cooldown_loop are not for a recurrent core')
    else:
        require(not c.recurrence and not c.backprop_depth,
                'recurrence is for a core, and cut makes one')
    # what would be refused at a later step is refused now
    changes(c)
    plan(c, 0)
    for needed, names in NEEDED_BY.items():
        is_there = c.optimizer != 'adamw' if needed == 'muon' else getattr(c, needed)
        for name in names.split():
            require(is_there or getattr(c, name) == getattr(Config, name),
                    f'{name}={getattr(c, name)} has no effect without {needed}')


def refuse_another_tokenizer(data, before, n_vocab):
    """Refuse data of another tokenizer than the model's. `before` describes what the model has read
    before."""
    abouts = [dataset.about for loader in data.values() for dataset in loader.datasets]
    abouts += before.get('data', [])
    tokenizers = {about['fingerprint']: about['tokenizer'] for about in abouts}
    require(len(tokenizers) == 1, 'a model has one tokenizer, and these data, or those that it has '
            f'read before, have {len(tokenizers)}: {", ".join(tokenizers.values())}')
    require(abouts[0]['n_vocab'] <= n_vocab, f'a model of {n_vocab} tokens has no room for those '
            f'of {abouts[0]["tokenizer"]}')
