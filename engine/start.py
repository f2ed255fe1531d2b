"""What a run begins with: a new model, the model of init_from, or the run that out_dir
holds.

The idea: a run is resumed when its plan and the new config's agree on every step that it has taken,
every setting that the plan does not answer for is equal, and so is the data that has been read.
What lies ahead may change: a copy of a run may branch off.

Usage:
    model, plan, state = begin(config, data['data'])        # or resume(config, data, out)
    optimizers = fill(model, config, state, out)
"""
import contextlib
import dataclasses
from pathlib import Path

import torch

from common import fields
from common.errors import Refused
from common.files import reading, write_json
from data.tokenizer import copy_tokenizer, refuse_unknown
from data.tokens import Loader, draw
from engine import checkpoint
from engine.measure import refuse_another_tokenizer
from engine.optimizers import make_optimizers
from engine.plan import ANSWERED, Plan, Start
from engine.settings import MAY_DIFFER, SHAPE, Config, shape
from model import LM


def begin(config, loader):
    "(model, plan, state) of a new model, or of what init_from gives."
    torch.manual_seed(draw(config.seed, 'init'))
    state = dict(step=0, tokens=0, flops=0, seconds=0.0, inherited_flops=0)
    if not config.init_from:
        plan, vocab_size = Plan(config), config.vocab_size or loader.vocab_size
        order = list(plan.loop) if plan.loop else None
        n_layer = plan.at(0).n_layer
        return LM(shape(config, vocab_size=vocab_size, n_layer=n_layer, order=order)), plan, state
    parent, path = checkpoint.load(config.init_from), config.init_from
    model = checkpoint.build_model(parent, path)
    plan = set_up(model, config)
    if model.config.context < config.context:
        raise Refused(f'context={config.context}, the length of a training row, is more than '
                      f'{path} reads: {model.config.context} tokens')
    refuse_another_tokenizer(path, loader)
    state['inherited_flops'] = parent.get('flops', 0) + parent.get('inherited_flops', 0)
    return model, plan, state


def set_up(model, config):
    "The plan of a run that begins with this model; the model takes its settings from it."
    plan = Plan(config, Start.of(model))
    if plan.mean:
        model.mean, model.backprop_depth = plan.mean, plan.backprop_depth
    elif plan.loop:
        model.config.order = list(plan.loop)
    return plan


def resume(config, data, out):
    """(model, plan, state) of the run that out_dir holds, if this config goes on with it. data:
    {setting: Loader}."""
    state = checkpoint.load(out)
    if not state.get('optimizers') or 'start' not in state:
        raise Refused(f'{out} holds weights without their optimizers, so it cannot be resumed: '
                      f'start another --out_dir from it, with --init_from={out}')
    # settings that there are no more are left out
    before = Config(**fields.fit_fields(Config, state.get('config') or {}, out, others=True))
    plan = Plan(config, fields.fill(Start, state['start'], out))
    refuse_another_run(config, plan, before, data, state)
    torch.manual_seed(draw(config.seed, 'init'))
    # as deep as it had grown by then
    return checkpoint.build_model(state, out), plan, state


def refuse_another_run(config, plan, before, data, state):
    "Refuse to go on with a run that another config began: `before` is the one it had."
    steps = range(max(1, state['step']))
    if state['step'] > before.steps:
        raise Refused(f'{config.out_dir} is damaged: it holds step {state["step"]} of '
                      f'{before.steps}')
    planned = Plan(before, plan.start)
    agree = all(plan.at(step) == planned.at(step) for step in steps)
    move = 'choose another --out_dir, or move that run out of the way by --resume=false'
    for name, new in dataclasses.asdict(config).items():
        old = getattr(before, name)
        decided = (agree and name in ANSWERED) or (config.init_from and name in SHAPE)
        if name not in MAY_DIFFER and new != old and not decided:
            raise Refused(f'{config.out_dir} holds a run with {name}={old!r}, but this config has '
                          f'{new!r}: {move}')
    read = {'data', *(plan.at(step).data for step in steps)}
    if any(state.get(name) != data[name].checksums() for name in read):
        raise Refused(f'the data has changed since the run in {config.out_dir} began (other '
                      f'checksums): {move}')


def fill(model, config, state, out):
    "The optimizers with their saved state."
    optimizers = make_optimizers(model, config)
    with reading(out, then=f': its optimizers cannot be loaded, so start another --out_dir from '
                           f'it, with --init_from={out}'):
        for optimizer, saved in zip(optimizers, state.get('optimizers', [])):
            check_optimizer(optimizer, saved, out)
            optimizer.load_state_dict(saved)
    return optimizers


def check_optimizer(optimizer, saved, out):
    "Each parameter's state has numbers, and tensors of its own shape."
    params = [p for group in optimizer.param_groups for p in group['params']]
    for i, values in saved['state'].items():
        for name, value in values.items():
            if torch.is_tensor(value):
                checkpoint.check_tensor(name, value, out)
            if getattr(value, 'shape', ()) not in ((), params[i].shape):
                raise Refused(f'{out}: {name} of parameter {i} has the shape {tuple(value.shape)}')


def loaders(config, world):
    "({setting: Loader} of what is trained on, the validation rows: the same ones for all runs)."
    if config.batch_size // world.size % config.grad_accum:
        raise Refused(f'batch_size={config.batch_size} on {world.size} processes does not divide '
                      f'into grad_accum={config.grad_accum} pieces')

    def rows(data, weights=None, split='train', seed=config.seed):
        return Loader(data, config.batch_size, config.context, weights=weights, split=split,
                      seed=seed, rank=world.rank, world_size=world.size,
                      vocab_size=config.vocab_size)
    found = dict(data=rows(config.data, config.data_weights))
    if config.cooldown_data:
        found['cooldown_data'] = rows(config.cooldown_data)
    first, *others = (loader.tokenizer for loader in found.values())
    if others and others[0] != first:
        raise Refused(f'data was made with the tokenizer {first!r}, but cooldown_data with '
                      f'{others[0]!r}')
    refuse_unknown(first, world.say)
    val = rows(config.data, config.data_weights, 'val', seed=0)
    if config.eval_batches > len(val):
        world.say(f'eval_batches={config.eval_batches}, but the validation data has only '
                  f'{len(val)} batches: all of them are used')
    return found, val


def introduce(config, world, loader, model, step, compiled):
    "Write run.json, print a few words."
    if world.first:
        with contextlib.suppress(Refused):      # on the hub, and no network: refuse_unknown said so
            copy_tokenizer(loader.tokenizer, config.out_dir)
        about = dict(tokenizer=loader.tokenizer, config=dataclasses.asdict(config),
                     torch=torch.__version__, data=[each.about.origin for each in loader.sets])
        write_json(Path(config.out_dir) / 'run.json', about)
    layers = sum(p.numel() for p in model.layers.parameters())
    flops = model.flops_per_token(context=config.context)
    many = f' x {world.size}' if world.size > 1 else ''
    world.say(f'device {world.device}{many}, compile {"on" if compiled else "off"}; '
              f'{model.num_params():,} parameters ({layers:,} in {len(model.layers)} layers), '
              f'depth {len(model.order)}, {flops:,} FLOPs a token\n'
              f'{config.steps:,} steps of {config.batch_size} x {config.context} = '
              f'{config.batch_size * config.context:,} tokens'
              + (f', from step {step:,} on' if step else ''))
