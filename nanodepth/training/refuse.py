"""What a run may not do: its settings may exclude each other, or a folder, a parent or a step
may not fit.
Usage: refuse.what_excludes(config, parent=None)        # raises Refused, or returns
"""
from pathlib import Path

import torch

from nanodepth.common.errors import Refused, refusing
from nanodepth.common.files import read_run
from nanodepth.common.options import only_fields
from nanodepth.models import checkpoint
from nanodepth.text.tokenizer import TOKENIZER_FILES, refuse_another_tokenizer
from nanodepth.training.plan import MODEL_SETTINGS, settings_of


def what_excludes(c, parent):
    "Settings that each may be, and not together."
    recurs = parent and parent.recurrence is not None
    no_core = 'init_from must be one'
    if c.init_from:
        no_core = f'{c.init_from} has none: nanodepth cut {c.init_from} 2-4-2 makes one'
    for wrong, why in (
            (c.warmup_steps + c.decay_steps > c.steps, f'warmup_steps={c.warmup_steps} and '
             f'decay_steps={c.decay_steps} do not fit into steps={c.steps}'),
            (c.decay_steps == 0 and (c.cooldown_loop or c.cooldown_data),
             'cooldown_loop and cooldown_data begin with the decay, but decay_steps is 0'),
            (c.grow and c.loop, f'grow={c.grow!r} and loop={c.loop!r} exclude each other: a '
             'model that grows may loop in its cool-down'),
            (recurs and (c.loop or c.cooldown_loop), f'{c.init_from} has a recurrent core, '
             'which loops by itself: leave loop and cooldown_loop out'),
            (parent and c.grow and (recurs or parent.order), f'grow={c.grow!r}: '
             f'{c.init_from} loops its layers, and what grows runs each of its own once'),
            (not recurs and (c.recurrence or c.backprop_depth),
             f'recurrence={c.recurrence} and backprop_depth={c.backprop_depth} are for a model '
             f'with a recurrent core: {no_core}')):
        if wrong:
            raise Refused(why)


# What a resumed run may change, for it changes only speed, rounding, and what is measured or kept.
MAY_DIFFER = {'out_dir', 'device', 'compile', 'grad_accum', 'resume', 'eval_every', 'eval_batches',
              'log_every', 'save_every', 'keep_every', 'keep_stages', 'metric', 'recompute',
              'wandb'}
# What it may change too if the plan of every step taken stays the same.
MAY_DIFFER_AHEAD = {
    'steps', 'warmup_steps', 'decay_steps', 'lr_shape', 'n_layer', 'grow', 'grow_block',
    'grow_alpha', 'loop', 'cooldown_loop', 'cooldown_data', 'recurrence', 'backprop_depth',
    'curriculum', 'curriculum_shape', 'backprop_curriculum'}


MOVE = 'choose another --out_dir, or move that run out of the way by --resume=false'


def taken_folder(c):
    """A run's folder is new, or its own: one of the same settings that was stopped before its first
    checkpoint. (What resumes is looked at by another_run, and what --resume=false moves is not in
    the way.)"""
    out, is_run = Path(c.out_dir), checkpoint.is_run(c.out_dir)
    if checkpoint.exists(out) if c.resume else is_run:
        return
    names = ['config.json', 'run.json', 'log.jsonl', *TOKENIZER_FILES]
    there = [path.name for path in [*map(out.joinpath, names), *out.glob('ckpt-[0-9]*.pt')]
             if path.exists()]
    old = read_run(out).get('config', {})
    is_own = old and all(name in MAY_DIFFER or callable(value) or old.get(name) == value
                         for name, value in vars(c).items())
    if there and not is_own:
        raise Refused(f'{out} holds a {there[0]} that is not of a run with these settings: '
                      + (MOVE if is_run else 'choose another --out_dir'))


def another_run(plan, saved, data):
    """A resume under settings that would have made another run until here. What a parent decides
    may differ."""
    if not saved.get('optimizers') or 'start' not in saved:
        raise Refused(f'{plan.config.out_dir} holds weights without their optimizers, so it cannot '
                      'be resumed: start another --out_dir from it, with --init_from='
                      f'{plan.config.out_dir}')
    if not {'val', 'forms', 'shares'} <= saved.keys():
        raise Refused(f'{plan.config.out_dir} holds a run of an older form, which was last resumed '
                      'at a8c26fc: choose another --out_dir')
    c = plan.config
    old = type(c)(**only_fields(type(c), saved['config']))
    old_plan = type(plan)(old, plan.parent)
    step = saved['step']
    if step > old.steps:
        raise Refused(f'{c.out_dir} is damaged: it holds step {step} of {old.steps}')
    if step > c.steps:
        raise Refused(f'{c.out_dir} has taken {step} steps, more than steps={c.steps}: choose '
                      'another --out_dir')
    taken = range(max(1, step))     # what it began with counts as taken too
    free = MAY_DIFFER | (MODEL_SETTINGS if c.init_from else set())
    if all(plan.at(step) == old_plan.at(step) for step in taken):
        free |= MAY_DIFFER_AHEAD
    for name, value in settings_of(plan).items():
        if value != getattr(old, name) and name not in free:
            raise Refused(f'{c.out_dir} holds a run with {name}={getattr(old, name)!r}, but '
                          f'this config has {value!r}: {MOVE}')
    for name in {'data', 'val', *(plan.at(step).data for step in taken)}:
        if saved.get(name) != data[name].checksums():
            raise Refused(f'the data has changed since the run in {c.out_dir} began (other '
                          f'checksums): {MOVE}')
        was = saved['forms'].get(name)                  # of 'val', which is of the data: None
        if was and was != data[name].forms():
            raise Refused(f'the data is read in another way than when the run in {c.out_dir} '
                          f'began: dtype and kinds were {was}, not {data[name].forms()}: '
                          f'{MOVE}')
        was = saved['shares'].get(name)
        if was and was != data[name].shares():
            raise Refused(f'the shares of the data have changed since the run in {c.out_dir} '
                          f'began, from {was} to {data[name].shares()}: {MOVE}')


def unfit_parent(c, model, data):
    "What init_from gives, if it does not read rows of this length, or of this tokenizer."
    if model.config.context < c.context:
        raise Refused(f'context={c.context}, the length of a training row, is more than '
                      f'{c.init_from} reads: {model.config.context} tokens')
    refuse_another_tokenizer(c.init_from, data['data'])


def what_does_not_fit():
    "A step that a GPU has too little memory for, in a line."
    return refusing(torch.OutOfMemoryError, why=lambda error: 'the GPU has too little memory for a '
                    'step: compute it in more pieces by a higher --grad_accum (the result is the '
                    'same), or in fewer rows by a lower --batch_size')


def weights_not_finite(c, model, step):
    "An update may break weights whose loss was still a number."
    if not all(p.isfinite().all() for p in model.parameters()):
        raise Refused(f'step {step} has left weights that are not finite, so they are not saved; '
                      f'{c.out_dir} holds the last checkpoint, if one was saved. Try a lower --lr '
                      'or a longer --warmup_steps, in another --out_dir')


def this_step(c, step, loss, norm):
    raise Refused(f'step {step + 1} has loss {loss} and gradient norm {norm}, so it was not taken; '
                  f'{c.out_dir} holds the last checkpoint, if one was saved. Try a lower --lr, a '
                  'longer --warmup_steps, or --dtype=float32, in another --out_dir')
