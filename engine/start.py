"""What a run begins with: a new model, the model of init_from, or the run that out_dir
holds.

The idea: a run is resumed when its plan and the new config's agree on every step that it has taken,
every setting that the plan does not answer for is equal, and so is the data that has been read.
What lies ahead may change: a copy of a run may branch off.

Usage:
    model, plan, state = begin(config, data['data'])        # or resume(config, data, out)
    optimizers = fill(model, config, state, out)
"""
import dataclasses
from pathlib import Path

import torch

from common.errors import Refused, refusing
from common.files import write_json
from data.tokenizer import get_tokenizer, reads_alike
from data.tokens import Loader, draw
from engine import checkpoint
from engine.optimizers import make_optimizers
from engine.plan import ANSWERED, Plan, Start
from engine.settings import MAY_DIFFER, Config, shape
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
    theirs, context = get_tokenizer(path), model.config.context
    if context < config.context or not reads_alike(theirs, get_tokenizer(loader.tokenizer)):
        raise Refused(f'{path} reads {context} tokens of the tokenizer {theirs.name!r}: it does '
                      f'not fit context={config.context} and data made with {loader.tokenizer!r}')
    model.config.context = config.context
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
    checkpoint.check_state(state, out)
    plan = Plan(config, Start.kept(state))
    refuse_another_run(config, plan, data, state)
    if not state.get('optimizers'):
        raise Refused(f'{out} holds weights without their optimizers, so it cannot be resumed: '
                      f'start another --out_dir from it, with --init_from={out}')
    torch.manual_seed(draw(config.seed, 'init'))
    # as deep as it had grown by then
    return checkpoint.build_model(state, out), plan, dict(inherited_flops=0) | state


def refuse_another_run(config, plan, data, state):
    new, old = dataclasses.asdict(config), dataclasses.asdict(Config()) | state.get('config', {})
    before = Plan(Config(**{name: old[name] for name in new}), plan.start)
    taken = [plan.at(step) for step in range(max(1, state['step']))]
    agree = taken == [before.at(step) for step in range(len(taken))]
    move = 'choose another --out_dir, or move that run out of the way by --resume=false'
    for name in new:
        if name not in MAY_DIFFER and new[name] != old[name] and not (agree and name in ANSWERED):
            raise Refused(f'{config.out_dir} holds a run with {name}={old[name]!r}, but this '
                          f'config has {new[name]!r}: {move}')
    read = {'data', *(now.data for now in taken)}
    if any(state.get(name) != data[name].checksums() for name in read):
        raise Refused(f'the data has changed since the run in {config.out_dir} began (other '
                      f'checksums): {move}')


def fill(model, config, state, out):
    "The optimizers with their saved state."
    optimizers = make_optimizers(model, config)
    why = lambda error: (f'{out}: its optimizers cannot be loaded ({type(error).__name__}: '
                         f'{error}): start another --out_dir from it, with --init_from={out}')
    with refusing(LookupError, ValueError, TypeError, RuntimeError, AttributeError, why=why):
        for optimizer, saved in zip(optimizers, state.get('optimizers', [])):
            optimizer.load_state_dict(saved)
    return optimizers


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
    return found, rows(config.data, config.data_weights, 'val', seed=0)


def introduce(config, world, loader, model, step, compiled):
    "Write run.json, print a few words."
    if world.first:
        about = dict(tokenizer=loader.tokenizer, config=dataclasses.asdict(config),
                     torch=torch.__version__, data=[s.meta['origin'] for s in loader.sets])
        write_json(Path(config.out_dir) / 'run.json', about)
    layers = sum(p.numel() for p in model.layers.parameters())
    many = f' x {world.size}' if world.size > 1 else ''
    world.say(f'device {world.device}{many}, compile {"on" if compiled else "off"}; '
              f'{model.num_params():,} parameters ({layers:,} in {len(model.layers)} layers), '
              f'depth {len(model.order)}, {model.flops_per_token():,} FLOPs a token\n'
              f'{config.steps:,} steps of {config.batch_size} x {config.context} = '
              f'{config.batch_size * config.context:,} tokens'
              + (f', from step {step:,} on' if step else ''))
