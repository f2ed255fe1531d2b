"""Where a run begins, in one of three ways. Each gives a model and its Past.

resumed     out_dir holds a run. It goes on under the same settings, but for FREE ones
branched    branch_from is another run, the trunk. Its model, optimizers, totals and log go on in a
            folder of its own, under settings of its own
new         from step 0 on, with the model of init_from, which may be cut, or with random weights
"""
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch

from loop import fit_loop
from model import LM, require, spans_in, unrolled
from retrofit import Core, core_of, surgery
from training.checkpoint import as_written, load
from training.machine import SIZE
from training.plan import FREE, NEEDED_BY, Config, model_config, plan, seed_for, stages


@dataclass
class Past:
    "What a run has behind it: what a checkpoint says beside the model and its order."
    step: int = 0
    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0
    first_n_layer: int = 0          # how many layers its first model had
    inherited_flops: int = 0        # what the model of init_from had cost before
    published: bool = False         # was that downloaded, so that nobody knows what it had cost?
    data: dict = field(default_factory=dict)        # descriptions of what its model has read
    config: dict = field(default_factory=dict)      # the settings, as files keep them
    optimizers: list = field(default_factory=list)  # their states
    origin: str | None = None       # the run that it goes on from: itself, or the trunk
    copy_words: Callable | None = None      # nanodepth's, for a tokenizer of a published model


def start(c, data, open_parent):
    """(the settings, with what the model decides filled in; the model; its Past). Whatever cannot
    begin is refused here, and leaves no folder."""
    if (Path(c.out_dir) / 'ckpt.pt').exists():
        c, model, past = resumed(c, data)
    elif c.branch_from:
        c, model, past = branched(c, data)
    else:
        c, model, past = new(c, data, open_parent)
    if core := core_of(model):
        core.r, core.backprop_depth, core.recompute = c.recurrence, c.backprop_depth, c.recompute
    return c, model, past


def resumed(c, data):
    model, past = load_past(c.out_dir)
    c = filled_in(c, model, past)
    differ = differences(as_written(c), past.config, but=FREE)
    require(not differ, f'{c.out_dir} holds a run with {differ}: choose another out_dir, with '
            f'--branch_from={c.out_dir} to go on from it there')
    refuse_what_does_not_fit(c, model, SIZE)
    require(past.data == descriptions(data), 'the data of this run has changed since it began')
    return c, model, past


def branched(c, data):
    model, past = load_past(c.branch_from)
    c = filled_in(c, model, past)
    refuse_what_does_not_fit(c, model, SIZE)
    refuse_another_model(c, model, past)
    refuse_another_tokenizer(data, past.data, model.config.vocab_size)
    return c, model, past


def new(c, data, open_parent):
    torch.manual_seed(seed_for(c.seed, 'init'))
    if c.init_from:
        model, parent = open_parent(c.init_from)
    else:
        n_vocab = c.vocab_size or data['data'].datasets[0].about['n_vocab']
        model, parent = LM(model_config(c, stages(c)[0].n_layer, n_vocab)), {}
    if c.cut:
        require(not core_of(model), f'{c.init_from} has a core already: --cut=none')
        require(not (c.init_from and model.config.ln_scaling), 'LN-scaling would give layers the '
                f'scale of another depth: nanodepth cut {c.init_from} {c.cut} keeps it')
        model = surgery(model, c.cut, c.core or Core)
    past = Past(first_n_layer=len(model.layers), published=parent.get('published', False),
                inherited_flops=parent.get('flops', 0) + parent.get('inherited_flops', 0),
                data=parent.get('data', {}), copy_words=parent.get('copy_words'))
    c = filled_in(c, model, past)
    refuse_what_does_not_fit(c, model, SIZE)
    require(not c.grow or model.order == [*range(len(model.layers))],
            'a looped model does not grow')
    refuse_another_tokenizer(data, past.data, model.config.vocab_size)
    model.order = plan(c, 0).order or model.order
    require(c.init_from or {*unrolled(model.order)} == {*range(len(model.layers))},
            f'the order {model.order} runs only some of n_layer={len(model.layers)} new layers')
    return c, model, past


def load_past(run):
    "(the model of a run, or of a checkpoint file, and its Past)."
    model, saved = load(run)
    require(saved['optimizers'] and 'first_n_layer' in saved, f'{run} has weights alone, or is of '
            f'an earlier version: --init_from={run} begins with them')
    names = [each.name for each in fields(Past) if each.name in saved]
    return model, Past(**{name: saved[name] for name in names} | dict(origin=str(run)))


def kept_of(past, c, data):
    "What each checkpoint of the run says beside the totals, the model and the optimizers."
    return dict(first_n_layer=past.first_n_layer, inherited_flops=past.inherited_flops,
                published=past.published, config=as_written(c), data=descriptions(data))


def descriptions(data):
    return {name: loader.description() for name, loader in data.items()}


def filled_in(c, model, past):
    """The settings, with what the model decides: of a core its r and backprop_depth, where they are
    None, and with init_from or a cut the shape."""
    if core := core_of(model):
        c = replace(c, recurrence=c.recurrence or core.r,
                    backprop_depth=c.backprop_depth or core.backprop_depth)
    if not (c.init_from or c.cut):
        return c
    # (a row may be shorter than the model's longest one)
    names = (vars(model.config).keys() & vars(c).keys()) - {'context'}
    if c.grow:                              # the config says how deep it is at the end
        names -= {'n_layer'}
        c = replace(c, grow_from=past.first_n_layer)
    return replace(c, **{name: getattr(model.config, name) for name in names})


def differences(config, other, but=()):
    "In which settings, as files keep them, a run differs from another one, in words."
    names = [name for name in sorted(config) if name not in but and config[name] != other.get(name)]
    return '; '.join(f'{name}={other.get(name)!r:.40} and not {config[name]!r:.40}'
                     for name in names)


# ---------------------------------------------------------------------------------- what is refused

def refuse_what_does_not_fit(c, model, size):
    "Settings that are allowed alone, and not together. size: how many processes there are."
    require(c.warmup_steps + c.decay_steps <= c.steps, f'{c.warmup_steps} steps of warm-up and '
            f'{c.decay_steps} of decay are more than steps={c.steps} (a share has a point: 0.2)')
    require(c.decay_steps or not (c.cooldown_loop or c.cooldown_data), 'a cool-down needs a decay')
    require(c.batch_size % (size * c.grad_accum) == 0, f'batch_size={c.batch_size} is no multiple '
            f'of {size} processes x grad_accum={c.grad_accum}')
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
    if c.cooldown_loop:
        fit_loop(c.cooldown_loop, c.n_layer)        # refuses now, and not at the decay
    for needed, names in NEEDED_BY.items():
        is_there = c.optimizer != 'adamw' if needed == 'muon' else getattr(c, needed)
        for name in names.split():
            require(is_there or getattr(c, name) == getattr(Config, name),
                    f'{name}={getattr(c, name)} has no effect without {needed}')


def refuse_another_model(c, model, past):
    "A branch goes on from the model that its own settings would have after so many steps."
    step = past.step
    require(step < c.steps, f'{c.branch_from} has taken {step} steps, and steps={c.steps}')
    for name in ('init_from', 'cut'):       # they made the trunk's model, and make none here
        began = past.config[name]
        require(getattr(c, name) in (None, began), f'{c.branch_from} began with {name}={began}')
    n_layer = plan(c, max(0, step - 1)).n_layer         # (it grows at the beginning of a step)
    need = asdict(model_config(c, n_layer, c.vocab_size or model.config.vocab_size))
    has = vars(model.config)
    wrong = [f'{name}={need[name]} and not {has[name]}' for name in sorted(need)
             if need[name] != has[name] and name != 'context' and name in vars(c)]
    require(not wrong, f'after step {step} these settings need {"; ".join(wrong)}')
    is_its_own = c.init_from or core_of(model)      # else the settings say the order
    require(plan(c, step).order or is_its_own or model.order == [*range(len(model.layers))],
            f'{c.branch_from} runs the order {unrolled(model.order)}: give its loop or order')
    model.check(plan(c, step).order or model.order)


def refuse_another_tokenizer(data, before, n_vocab):
    "Data of another tokenizer than the model's. before: what it has read, as descriptions."
    abouts = [each.about for loader in data.values() for each in loader.datasets]
    abouts += before.get('data', [])
    tokenizers = {about['fingerprint']: about['tokenizer'] for about in abouts}
    require(len(tokenizers) == 1, 'a model has one tokenizer, and these data, or those that it has '
            f'read before, have {len(tokenizers)}: {", ".join(tokenizers.values())}')
    require(abouts[0]['n_vocab'] <= n_vocab, f'a model of {n_vocab} tokens has no room for those '
            f'of {abouts[0]["tokenizer"]}')
