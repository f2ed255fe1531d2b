"""The one training loop: schedule, accumulation, many processes, evaluation, checkpoints, and a stop at any moment.

The idea: everything that happens at a step is a function of the step alone: the learning rate, the batch, what is
measured. So a run is its config and its seed, and a run that was stopped goes on as if nothing had happened.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A: linear warm-up, a constant plateau, and a
1-sqrt decay; AdamW, gradients clipped at 1.
Here: the defaults are the toy's, with Muon for the layers' matrices and AdamW for the rest (LOG.md).

Usage:
    python train.py config/baseline.py                              # a laptop, minutes; the picture is in out/baseline
    python train.py config/baseline.py --steps=600 --device=cpu     # any field by --name=value; --help lists them
    python train.py config/smollm_360m_lidas.py --dry_run           # what it will cost: FLOPs, memory, hours
    torchrun --standalone --nproc_per_node=8 train.py config/smollm_360m_lidas.py
"""
import ast
import contextlib
import dataclasses
import inspect
import json
import math
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common.errors import Refused
from data.tokenizer import get_tokenizer, reads_alike
from data.tokens import Loader, draw, measure
from engine import checkpoint, cost
from engine.launch import (Stop, World, compile_blocks, mfu, open_folder, parallel, precision,
                           read_config, send)
from engine.optimizers import make_optimizers
from engine.settings import (AHEAD, MAY_DIFFER, Config, check, learning_rate, orders, plan,
                             recurrences, shape)
from grow import GROWTH, untie
from model import LM
from report.logs import Log, read_log
from report.plot import draw_runs, show
from retrofit import Recurrent, recurrence_curriculum

# ---------------------------------------------------------------------------------------------- the loop

def train(config):
    "Train to the end (0) or until a signal asks for a stop (its number): then the same call goes on from there."
    with contextlib.closing(World(config.device, config.patience)) as world:
        return train_in(world, config)


def train_in(world, config):
    out = Path(config.out_dir)
    lock = world.first_does(lambda: open_folder(config, out, world))    # held until the process ends
    def rows(data, weights=None, split='train', seed=config.seed):
        return Loader(data, config.batch_size, config.context, weights=weights, split=split, seed=seed, rank=world.rank,
                      world_size=world.size, vocab_size=config.vocab_size)

    loader = rows(config.data, config.data_weights)
    val = rows(config.data, config.data_weights, 'val', seed=0)         # all runs are measured on the same rows
    cool, decay = rows(config.cooldown_data) if config.cooldown_data else None, config.steps - config.decay_steps
    if cool and cool.tokenizer != loader.tokenizer:
        raise Refused(f'data was made with the tokenizer {loader.tokenizer!r}, but cooldown_data with {cool.tokenizer!r}')
    model, optimizers, state = setup(config, world, loader, cool)
    step, tokens, flops, seconds = (state[name] for name in ('step', 'tokens', 'flops', 'seconds'))
    in_parts = config.shard and world.size > 1
    if in_parts:
        from engine import sharded  # which takes a second, and one process does without
    run, stages, changed = parallel(model, world, in_parts), dict(plan(config)) if config.grow else {}, {}
    autocast, tokens_a_step = precision(config, world.device), config.batch_size * config.context
    log = Log(out / 'log.jsonl', step if step else -1, silent=not world.first)
    bar = tqdm(total=config.steps, initial=step, disable=not world.first, unit='step', dynamic_ncols=True)
    shown = {}                      # what stands behind the bar

    def save():
        about = dict(config=dataclasses.asdict(config), tokenizer=loader.tokenizer, data=fingerprint(loader), cooldown_data=fingerprint(cool), step=step,
                     tokens=tokens, flops=flops, seconds=seconds, inherited_flops=state.get('inherited_flops', 0))
        world.at(f'the checkpoint of step {step}')
        if in_parts:
            checkpoint.save_parts(out, world, model, optimizers, step, about)
        elif world.first:
            checkpoint.save(out, **checkpoint.describe(model), optimizers=[o.state_dict() for o in optimizers], **about)
        world.wait()

    def fetch(step):
        "The batch of a step, on its way to the GPU, and how many targets it has."
        if step < config.steps:
            return send(cool.batch(step - decay) if cool and step >= decay else loader.batch(step), world.device)

    def look():
        world.at(f'an evaluation at step {step}')
        with autocast():
            loss, kinds = measure(model, val, config.eval_batches, config.grad_accum)
        shown.update(val=f'{loss:.3f}', **{kind: f'{k["accuracy"]:.0%}' for kind, k in kinds.items() if kind != 'text'})
        return dict(val_loss=loss, kinds=kinds)

    with Stop() as stop:
        if step == 0:
            log.write(step=0, tokens=0, flops=0, seconds=0, n_layer=len(model.layers), depth=len(model.order), **look())
        ending, batch = 0, None
        while step < config.steps and not ending:
            grows, loops = len(model.layers) < stages.get(step, 0), step == decay and config.cooldown_loop
            before = look()['val_loss'] if grows or loops else None
            if loops:
                model.config.order = orders(config, len(model.layers))[1]
            if grows:
                world.at(f'growing at step {step}')
                deeper = GROWTH[config.grow](len(model.layers), config.grow_block)
                model = (sharded.untie if in_parts else untie)(model, deeper, optimizers)
                compile_blocks(config, world, model)            # deepcopy left the compiled calls behind; their graph is kept
                run = parallel(model, world, in_parts)
            if grows or loops:
                changed = {'grown' if grows else 'looped': dict(before=before, after=look()['val_loss'])}
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group['lr'] = group['peak'] * learning_rate(config, step)
            began = time.perf_counter()
            world.at(f'the batch of step {step + 1}')
            batch = batch or fetch(step)
            recurs = recurrences(config, model, step)
            loss, norm, batch = update(config, world, run, optimizers, batch, autocast, step, recurs, lambda: fetch(step + 1))
            took = time.perf_counter() - began
            if not math.isfinite(loss + norm):
                save()      # the step was not taken: these are still the weights before it
                raise SystemExit(f'\ntrain.py: step {step + 1} has loss {loss} and gradient norm {norm}, so it was not taken. '
                                 f'{out} holds the checkpoint of step {step}.\nTry a lower --lr, a longer --warmup_steps, '
                                 'or --dtype=float32, in another --out_dir.')
            step, tokens, seconds = step + 1, tokens + tokens_a_step, seconds + took
            flops += tokens_a_step * model.flops_per_token(**recurs)
            evaluates = step % config.eval_every == 0 or step == config.steps
            if evaluates or step % config.log_every == 0 or changed:
                speed = tokens_a_step / took
                shown.update(loss=f'{loss:.3f}', layers=len(model.order), tok_s=f'{speed:,.0f}', **mfu(model.flops_per_token(**recurs) * speed, world))
                log.write(step=step, tokens=tokens, flops=flops, seconds=round(seconds, 1), n_layer=len(model.layers),
                          depth=len(model.order), lr=config.lr * learning_rate(config, step - 1), loss=loss, grad_norm=norm,
                          tokens_per_s=round(speed), **recurs, **changed, **(look() if evaluates else {}))
                bar.set_postfix(shown)
                changed = {}
            bar.update()
            ending = world.most(stop.asked)         # one process is told to stop: all do, at the same step
            if step % config.save_every == 0 or step == config.steps or ending:
                save()
        bar.close()
    ending = ending if step < config.steps else 0       # a signal during the last step has nothing to stop
    if ending:
        world.say(f'stopped at step {step} of {config.steps}, and saved: the same command goes on from here')
    elif world.first:
        report(config, flops, tokens * model.flops_per_token() if config.grow else flops)
    world.close()
    return ending


def report(config, flops, full_depth):
    "What a run that is through leaves behind."
    saved = f', {1 - flops / full_depth:.1%} less than at its last depth all the way' if flops < full_depth else ''
    print(f'{flops:.3e} training FLOPs{saved}')
    show(draw_runs, {Path(config.out_dir).name: [read_log(config.out_dir)]}, Path(config.out_dir) / 'loss.png')
    print(f'numbers: {config.out_dir}/log.jsonl')
    print(f'checkpoint, log and picture are in {config.out_dir}; python nanodepth.py sample {config.out_dir} writes text')


def setup(config, world, loader, cool):
    "The model, its optimizers, and where the run stands: at its beginning, or where the checkpoint in out_dir has it."
    if config.batch_size // world.size % config.grad_accum:
        raise Refused(f'batch_size={config.batch_size} on {world.size} processes does not divide into '
                          f'grad_accum={config.grad_accum} pieces')
    state = dict(step=0, tokens=0, flops=0, seconds=0.0, inherited_flops=0)
    if checkpoint.exists(config.out_dir):
        state = checkpoint.load(config.out_dir, whole=not (config.shard and world.size > 1))
        refuse_another_run(config, loader, cool, state)
        if not state.get('optimizers'):
            raise Refused(f'{config.out_dir} holds weights without their optimizers, so it cannot be resumed: start another '
                              f'--out_dir from it, with --init_from={config.out_dir}')
    torch.manual_seed(draw(config.seed, 'init'))
    if 'kind' in state:
        model = checkpoint.build_model(state, config.out_dir)       # as deep as it had grown by then
    elif config.init_from:
        parent = checkpoint.load(config.init_from)
        model = checkpoint.build_model(parent, config.init_from)
        state['inherited_flops'] = parent.get('flops', 0) + parent.get('inherited_flops', 0)
        theirs = get_tokenizer(config.init_from)
        if model.config.context < config.context or not reads_alike(theirs, get_tokenizer(loader.tokenizer)):
            raise Refused(f'{config.init_from} reads {model.config.context} tokens of the tokenizer {theirs.name!r}: it does not '
                              f'fit context={config.context} and data made with {loader.tokenizer!r}')
        model.config.context = config.context
        if isinstance(model, Recurrent):
            if config.loop or config.cooldown_loop:
                raise Refused(f'{config.init_from} has a recurrent core, which loops by itself: leave loop and cooldown_loop out')
            model.mean, model.backprop_depth = config.recurrence or model.mean, config.backprop_depth or model.backprop_depth
        elif config.recurrence or config.backprop_depth:
            raise Refused(f'recurrence={config.recurrence} and backprop_depth={config.backprop_depth} are for a model with a recurrent '
                              f'core, but {config.init_from} has none: python retrofit.py {config.init_from} 2-4-2 makes one')
        else:
            model.config.order = orders(config, len(model.layers))[0] or model.config.order
    else:
        model = LM(shape(config, vocab_size=config.vocab_size or loader.vocab_size, n_layer=plan(config)[0][1], order=orders(config, config.n_layer)[0]))
    if not config.grow:
        orders(config, len(model.layers))       # a loop that does not fit is refused now, not when the decay begins
    model.to(world.device, torch.float32).train()               # a Hugging Face checkpoint may come in bfloat16
    compiled = compile_blocks(config, world, model)
    if config.shard and world.size > 1:
        from engine import sharded
        optimizers = sharded.begin(model, lambda: make_optimizers(model, config), state, config.out_dir)
    else:
        optimizers = make_optimizers(model, config)
        for optimizer, saved in zip(optimizers, state.get('optimizers', [])):
            optimizer.load_state_dict(saved)
    if world.first:
        about = dict(tokenizer=loader.tokenizer, config=dataclasses.asdict(config), torch=torch.__version__,
                     data=[dataset.meta['origin'] for dataset in loader.sets])
        (Path(config.out_dir) / 'run.json').write_text(json.dumps(about, indent=1))
    layers = sum(p.numel() for p in model.layers.parameters())
    world.say(f'device {world.device}{f" x {world.size}" if world.size > 1 else ""}, compile {"on" if compiled else "off"}; '
              f'{model.num_params():,} parameters ({layers:,} in {len(model.layers)} layers), depth {len(model.order)}, '
              f'{model.flops_per_token():,} FLOPs a token\n{config.steps:,} steps of {config.batch_size} x {config.context} '
              f'= {config.batch_size * config.context:,} tokens' + (f', from step {state["step"]:,} on' if state['step'] else ''))
    return model, optimizers, state


def refuse_another_run(config, loader, cool, state):
    """A run is resumed under the very config and data that it had, but for what cannot change its result, and for what
    lies ahead: before the decay, a copy of the folder may branch off with a decay, a loop or data of its own."""
    new, old = dataclasses.asdict(config), {**dataclasses.asdict(Config()), **state.get('config', {})}
    step, before = state['step'], Config(**{name: old[name] for name in new})
    stages_so_far = [[stage for stage in plan(c) if stage[0] < step] for c in (before, config)]
    if state.get('kind') == 'recurrent':        # so is the mean that it has had at each step
        for rise, most in (('curriculum', 'mean'), ('backprop_curriculum', 'backprop_depth')):
            for c, past in zip((before, config), stages_so_far):
                past += [recurrence_curriculum(t, c.steps, state['recurrent'][most], getattr(c, rise), c.curriculum_shape) for t in range(step)]
    ahead = all(step <= c.steps - c.decay_steps for c in (before, config)) and stages_so_far[0] == stages_so_far[1]
    for name in new:
        if name not in MAY_DIFFER and new[name] != old[name] and not (ahead and name in AHEAD):
            raise Refused(f'{config.out_dir} holds a run with {name}={old[name]!r}, but this config has {new[name]!r}: '
                              'choose another --out_dir, or move that run out of the way by --resume=false')
    if state.get('data') != fingerprint(loader) or not ahead and state.get('cooldown_data', []) != fingerprint(cool):
        raise Refused(f'the data has changed since the run in {config.out_dir} began (other checksums): choose another '
                          '--out_dir, or move that run out of the way by --resume=false')


def fingerprint(loader):
    return [shard['sha256'] for dataset in loader.sets for shard in dataset.meta['shards']] if loader else []


def update(config, world, run, optimizers, batch, autocast, step=0, recurs={}, meanwhile=lambda: None):
    """One step of the optimizers: (loss, gradient norm, what `meanwhile` returns: it is called while the GPU is at work). The loss is
    summed over the target tokens of all pieces and processes and divided by their global count: a mean for each piece would give
    tokens of short answers more weight."""
    world.at(f'the pass of step {step + 1}')
    tokens, targets, count = batch
    total, loss = world.sum(count), 0.0
    pieces = list(zip(tokens.chunk(config.grad_accum), targets.chunk(config.grad_accum)))
    rows = iter(range(world.rank * len(tokens), (world.rank + 1) * len(tokens)))       # of the global batch
    for i, (x, y) in enumerate(pieces):
        if recurs:      # a row's first state is a function of its place in the batch, whoever works on it
            recurs = recurs | dict(generator=[torch.Generator(world.device).manual_seed(draw(config.seed, f'state of row {row}', step))
                                              for _, row in zip(x, rows)])
        alone = i == len(pieces) - 1 or not hasattr(run, 'no_sync')
        with contextlib.nullcontext() if alone else run.no_sync():      # DDP adds the gradients up with the last piece
            with autocast():
                share = run(x, y, **recurs) * (y != -1).sum() / total
            (share * world.size).backward()         # DDP divides by the number of processes: this undoes it
        loss += share.detach()
    parameters = [p for o in optimizers for group in o.param_groups for p in group['params']]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf)
    norm = norm.full_tensor() if hasattr(norm, 'full_tensor') else norm
    after = meanwhile()
    world.at(f'the end of step {step + 1}')
    loss, norm = world.sum(loss), norm.item()        # the one place of a step that waits for the GPU
    for optimizer in optimizers:
        if math.isfinite(loss + norm):
            optimizer.step()
        optimizer.zero_grad()
    return loss, norm, after


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {'-h', '--help'} & set(argv):
        print(__doc__ + '\n' + inspect.getsource(Config))
        return
    if not argv:
        print('usage: python train.py CONFIG [--name=value ...]      (--help lists the settings)\n\nconfigs:')
        for path in sorted(Path(__file__).parent.glob('config/[!_]*.py')):
            print(f'  {f"config/{path.name}":28}{(ast.get_docstring(ast.parse(path.read_text())) or "").split(chr(10))[0]}')
        raise SystemExit(2)
    if any(arg.startswith('--dry_run') for arg in argv):
        said, rest = cost.options(argv)
        return cost.show(check(read_config(Config, rest)), **said)
    stopped = train(check(read_config(Config, argv)))
    if stopped:         # what waits for the run, make or a scheduler, must not take it for finished
        raise SystemExit(128 + stopped)


if __name__ == '__main__':
    from nanodepth import main; main('train')        # noqa: E702
