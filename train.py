"""The one training loop: schedule, accumulation, many processes, evaluation, checkpoints, and a stop at any moment.

The idea: everything that happens at a step is a function of the step alone: the learning rate, the batch, what is
measured. So a run is its config and its seed, and a run that was stopped goes on as if nothing had happened.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A: linear warm-up, a constant plateau, and a
1-sqrt decay; AdamW, gradients clipped at 1.
Here: the defaults are the toy's, with Muon for the layers' matrices and AdamW for the rest (LOG.md).

Usage:
    python train.py config/baseline.py                              # a laptop, minutes; the picture is in out/baseline
    python train.py config/baseline.py --steps=600 --device=cpu     # any field by --name=value; --help lists them
    torchrun --standalone --nproc_per_node=8 train.py config/baseline.py
"""
import ast
import contextlib
import dataclasses
import inspect
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import plot
from grow import GROWTH, growth_plan, untie
from launch import ConfigError, Stop, World, check_choice, compile_blocks, mfu, open_folder, parallel, precision, read_config
from logs import Log
from loop import fit_loop
from model import LM, ModelConfig
from optimizers import OPTIMIZERS, make_optimizers
from retrofit import Recurrent, recurrence_curriculum, sample_recurrence
from tokenizer import DataError, get_tokenizer, reads_alike
from tokens import Loader, draw, measure


@dataclass
class Config:
    out_dir: str = 'out/run'
    seed: int = 0
    device: str = 'auto'                # auto: cuda, else mps, else cpu
    dtype: str = 'auto'                 # auto: bfloat16 on cuda, else float32
    compile: bool | str = 'auto'        # auto: on for cuda
    resume: bool = True                 # go on with the run in out_dir; false: move it out of the way and start anew
    # the model (init_from: a checkpoint to start from; then these are its own)
    init_from: str | None = None
    n_layer: int = 8
    n_embd: int = 128
    n_head: int = 4
    n_kv_head: int | None = None
    head_dim: int | None = 64           # None: n_embd / n_head
    ffn_dim: int | None = None
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False        # the papers' models are tied; at toy size untied learns three times as fast
    ln_scaling: bool = False
    # growing: n_layer is the depth at the end
    grow: str | None = None             # midas, lidas, stack or double; None: full depth from the first step on
    grow_block: int = 2                 # the layers to begin with, and those that each growth adds
    grow_alpha: float = 1.0             # PROP-alpha: stage i lasts i^alpha of the steps before the decay
    # looping: n_layer counts the unique layers
    loop: str | None = None             # the order in which they run, such as 2x4 or 2-2x2-2; None: each once
    cooldown_loop: str | None = None    # the order from the first step of the decay on
    cooldown_data: str | list | None = None     # what is read from there on in place of data, in equal shares
    # a recurrent core: init_from is what retrofit.py wrote
    recurrence: int | None = None       # the mean of the random number of recurrences; None: the model's own
    backprop_depth: int | None = None   # gradients go back through the last so many; None: the model's own
    curriculum: float = 0.25            # over this part of the steps the mean rises from 1
    curriculum_shape: str = 'linear'    # or 1-sqrt
    backprop_curriculum: float = 0.0    # and over this part backprop_depth does
    # the data
    data: str | list = 'data/toy'       # a folder, or a list of them
    data_weights: list | None = None    # their shares of the rows; None: equal
    context: int = 64                   # tokens of a sequence
    batch_size: int = 32                # sequences of a step, over all processes
    grad_accum: int = 1                 # pieces in which a process works off its part of them
    # the schedule: linear warm-up, constant, 1 - sqrt
    steps: int = 600
    warmup_steps: int = 50
    decay_steps: int = 120
    lr: float = 4e-3
    # the optimizer: 'adamw' or 'adamw_star' for everything, or 'muon' for the layers' matrices and AdamW for the rest
    optimizer: str = 'muon'
    adamw_lr: float | None = None       # with muon, the rate of the rest; None: lr
    weight_decay: float = 0.01
    beta2: float = 0.95
    grad_clip: float = 1.0
    # what is measured and kept
    eval_every: int = 25
    eval_batches: int = 12              # batches of validation data each time
    log_every: int = 10
    save_every: int = 200


# A run may be resumed under another value of these: they do not change what it computes, or only where.
MAY_DIFFER = {'out_dir', 'device', 'compile', 'resume', 'eval_every', 'eval_batches', 'log_every', 'save_every'}
AHEAD = {'steps', 'decay_steps', 'cooldown_loop', 'cooldown_data'}      # nor do these, as long as the decay has not begun


def check(config):
    "What no type can say."
    c = config
    check_choice('optimizer', c.optimizer, OPTIMIZERS)
    check_choice('grow', c.grow, (None, *GROWTH))
    check_choice('dtype', c.dtype, ('auto', 'float32', 'bfloat16'))
    check_choice('compile', c.compile, ('auto', True, False))
    for name in ('n_layer', 'n_embd', 'n_head', 'n_kv_head', 'ffn_dim', 'context', 'batch_size', 'grad_accum', 'steps',
                 'eval_every', 'eval_batches', 'log_every', 'save_every'):
        if getattr(c, name) is not None and getattr(c, name) < 1:
            raise ConfigError(f'{name}={getattr(c, name)} must be at least 1')
    for name in ('recurrence', 'backprop_depth'):
        if getattr(c, name) is not None and (getattr(c, name) < 1 or not c.init_from):
            raise ConfigError(f'{name}={getattr(c, name)} must be at least 1, for a model with a recurrent core: init_from must be one')
    check_choice('curriculum_shape', c.curriculum_shape, ('linear', '1-sqrt'))
    for name in ('curriculum', 'backprop_curriculum'):
        if not 0 <= getattr(c, name) <= 1:
            raise ConfigError(f'{name}={getattr(c, name)} is a part of the steps: from 0 to 1')
    for name in ('warmup_steps', 'decay_steps', 'lr', 'adamw_lr', 'weight_decay', 'grad_clip', 'grow_alpha'):
        if getattr(c, name) is not None and not 0 <= getattr(c, name) < 1e9:
            raise ConfigError(f'{name}={getattr(c, name)} must not be negative, nor without bounds')
    if not 0 <= c.beta2 < 1:
        raise ConfigError(f'beta2={c.beta2} must be at least 0 and less than 1')
    for name in ('data', 'cooldown_data'):
        folders = getattr(c, name)
        if isinstance(folders, list) and not (folders and all(isinstance(d, str) for d in folders)):
            raise ConfigError(f'{name}={folders} must be a folder or a list of folders')
    if c.data_weights is not None and not all(isinstance(w, (int, float)) for w in c.data_weights):
        raise ConfigError(f'data_weights={c.data_weights} must be numbers')
    if c.warmup_steps + c.decay_steps > c.steps:
        raise ConfigError(f'warmup_steps={c.warmup_steps} and decay_steps={c.decay_steps} do not fit into steps={c.steps}')
    if c.decay_steps == 0 and (c.cooldown_loop or c.cooldown_data):
        raise ConfigError('cooldown_loop and cooldown_data begin with the decay, but decay_steps is 0')
    if c.grow and c.loop:
        raise ConfigError(f'grow={c.grow!r} and loop={c.loop!r} exclude each other: a model that grows may loop in its cool-down')
    if not c.init_from:     # else setup asks the checkpoint how many layers it has
        orders(c, c.n_layer)
    if c.grow and c.init_from:
        raise ConfigError(f'grow={c.grow!r} begins with a new model of grow_block={c.grow_block} layers, not with init_from')
    try:
        plan(c)
    except (ValueError, OverflowError) as error:
        raise ConfigError(str(error)) from None
    return c


def orders(config, n_layer):
    "The orders of `loop` and `cooldown_loop` (None where there is none) for a model of n_layer unique layers."
    found = []
    for name in ('loop', 'cooldown_loop'):
        try:
            found.append(fit_loop(getattr(config, name), n_layer) if getattr(config, name) else None)
        except ValueError as error:
            raise ConfigError(f'{name}: {error}') from None
    return found


def plan(config):
    "[(first step, layers)]: growing is over when the decay begins."
    if config.grow is None:
        return [(0, config.n_layer)]
    return growth_plan(config.grow, config.n_layer, config.grow_block, config.steps - config.decay_steps, config.grow_alpha)


# ---------------------------------------------------------------------------------------------- schedule

def learning_rate(config, step):
    "As a fraction of the peak: linear up, constant, then 1 - sqrt, which would be zero one step after the last."
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    into_decay = step - (config.steps - config.decay_steps)
    return 1.0 if into_decay <= 0 else 1 - math.sqrt(into_decay / config.decay_steps)


def recurrences(config, model, step):
    "What a recurrent model's forward is told at a step: {} for any other."
    if not isinstance(model, Recurrent):
        return {}
    mean = recurrence_curriculum(step, config.steps, model.mean, config.curriculum, config.curriculum_shape)
    depth = recurrence_curriculum(step, config.steps, model.backprop_depth, config.backprop_curriculum)
    return dict(r=sample_recurrence(mean, step, config.seed), backprop_depth=depth)


# ---------------------------------------------------------------------------------------------- the loop

def train(config):
    world, out = World(config.device), Path(config.out_dir)
    lock = world.first_does(lambda: open_folder(config, out, world))    # held until the process ends
    def rows(data, weights=None, split='train', seed=config.seed):
        return Loader(data, config.batch_size, config.context, weights=weights, split=split, seed=seed, rank=world.rank,
                      world_size=world.size)

    loader = rows(config.data, config.data_weights)
    val = rows(config.data, config.data_weights, 'val', seed=0)         # all runs are measured on the same rows
    cool, decay = rows(config.cooldown_data) if config.cooldown_data else None, config.steps - config.decay_steps
    if cool and cool.tokenizer != loader.tokenizer:
        raise ConfigError(f'data was made with the tokenizer {loader.tokenizer!r}, but cooldown_data with {cool.tokenizer!r}')
    model, optimizers, state = setup(config, world, loader, cool)
    step, tokens, flops, seconds = (state[name] for name in ('step', 'tokens', 'flops', 'seconds'))
    run, stages, changed = parallel(model, world), dict(plan(config)) if config.grow else {}, {}
    autocast, tokens_a_step = precision(config, world.device), config.batch_size * config.context
    log = Log(out / 'log.jsonl', step if step else -1, silent=not world.first)
    bar = tqdm(total=config.steps, initial=step, disable=not world.first, unit='step', dynamic_ncols=True)
    shown = {}                      # what stands behind the bar

    def save():
        if world.first:
            checkpoint.save(out, **checkpoint.describe(model), optimizers=[o.state_dict() for o in optimizers],
                            config=dataclasses.asdict(config), tokenizer=loader.tokenizer, data=fingerprint(loader), cooldown_data=fingerprint(cool), step=step,
                            tokens=tokens, flops=flops, seconds=seconds, inherited_flops=state.get('inherited_flops', 0))
        world.wait()

    def look():
        with autocast():
            loss, kinds = measure(model, val, config.eval_batches, config.grad_accum)
        shown.update(val=f'{loss:.3f}', **{kind: f'{k["accuracy"]:.0%}' for kind, k in kinds.items() if kind != 'text'})
        return dict(val_loss=loss, kinds=kinds)

    with Stop() as stop:
        if step == 0:
            log.write(step=0, tokens=0, flops=0, seconds=0, n_layer=len(model.layers), depth=len(model.order), **look())
        ending = False
        while step < config.steps and not ending:
            grows, loops = len(model.layers) < stages.get(step, 0), step == decay and config.cooldown_loop
            before = look()['val_loss'] if grows or loops else None
            if loops:
                model.config.order = orders(config, len(model.layers))[1]
            if grows:
                model = untie(model, GROWTH[config.grow](len(model.layers), config.grow_block), optimizers)
                compile_blocks(config, world, model)            # deepcopy left the compiled calls behind; their graph is kept
                run = parallel(model, world)
            if grows or loops:
                changed = {'grown' if grows else 'looped': dict(before=before, after=look()['val_loss'])}
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group['lr'] = group['peak'] * learning_rate(config, step)
            began = time.perf_counter()
            batch = cool.batch(step - decay) if cool and step >= decay else loader.batch(step)
            recurs = recurrences(config, model, step)
            loss, norm = update(config, world, run, optimizers, batch, autocast, step, recurs)
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
            ending = world.sum(stop.asked) > 0      # one process is told to stop: all do, at the same step
            if step % config.save_every == 0 or step == config.steps or ending:
                save()
        bar.close()
    if step < config.steps:
        world.say(f'stopped at step {step} of {config.steps}, and saved: the same command goes on from here')
    elif world.first:
        report(config, flops, tokens * model.flops_per_token() if config.grow else flops)
    world.close()


def report(config, flops, full_depth):
    "What a run that is through leaves behind."
    saved = f', {1 - flops / full_depth:.1%} less than at its last depth all the way' if flops < full_depth else ''
    print(f'{flops:.3e} training FLOPs{saved}')
    plot.main([config.out_dir])
    print(f'checkpoint, log and picture are in {config.out_dir}; python sample.py {config.out_dir} writes text')


def setup(config, world, loader, cool):
    "The model, its optimizers, and where the run stands: at its beginning, or where the checkpoint in out_dir has it."
    if config.batch_size // world.size % config.grad_accum:
        raise ConfigError(f'batch_size={config.batch_size} on {world.size} processes does not divide into '
                          f'grad_accum={config.grad_accum} pieces')
    state = dict(step=0, tokens=0, flops=0, seconds=0.0, inherited_flops=0)
    if checkpoint.exists(config.out_dir):
        state = checkpoint.load(config.out_dir)
        refuse_another_run(config, loader, cool, state)
        if not state.get('optimizers'):
            raise ConfigError(f'{config.out_dir} holds weights without their optimizers, so it cannot be resumed: start another '
                              f'--out_dir from it, with --init_from={config.out_dir}')
    torch.manual_seed(draw(config.seed, 'init'))
    if 'model' in state:
        model = checkpoint.build_model(state, config.out_dir)       # as deep as it had grown by then
    elif config.init_from:
        parent = checkpoint.load(config.init_from)
        model = checkpoint.build_model(parent, config.init_from)
        state['inherited_flops'] = parent.get('flops', 0) + parent.get('inherited_flops', 0)
        theirs = get_tokenizer(config.init_from)
        if model.config.context < config.context or not reads_alike(theirs, get_tokenizer(loader.tokenizer)):
            raise ConfigError(f'{config.init_from} reads {model.config.context} tokens of the tokenizer {theirs.name!r}: it does not '
                              f'fit context={config.context} and data made with {loader.tokenizer!r}')
        model.config.context = config.context
        if isinstance(model, Recurrent):
            if config.loop or config.cooldown_loop:
                raise ConfigError(f'{config.init_from} has a recurrent core, which loops by itself: leave loop and cooldown_loop out')
            model.mean, model.backprop_depth = config.recurrence or model.mean, config.backprop_depth or model.backprop_depth
        elif config.recurrence or config.backprop_depth:
            raise ConfigError(f'recurrence={config.recurrence} and backprop_depth={config.backprop_depth} are for a model with a recurrent '
                              f'core, but {config.init_from} has none: python retrofit.py {config.init_from} 2-4-2 makes one')
        else:
            model.config.order = orders(config, len(model.layers))[0] or model.config.order
    else:
        shape = {f.name: getattr(config, f.name) for f in dataclasses.fields(ModelConfig) if hasattr(config, f.name)}
        shape['n_layer'] = plan(config)[0][1]
        shape['order'] = orders(config, config.n_layer)[0]
        try:
            model = LM(ModelConfig(vocab_size=loader.vocab_size, **shape))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if not config.grow:
        orders(config, len(model.layers))       # a loop that does not fit is refused now, not when the decay begins
    model.to(world.device, torch.float32).train()               # a Hugging Face checkpoint may come in bfloat16
    optimizers = make_optimizers(model, config)
    for optimizer, saved in zip(optimizers, state.get('optimizers', [])):
        optimizer.load_state_dict(saved)
    compiled = compile_blocks(config, world, model)
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
            raise ConfigError(f'{config.out_dir} holds a run with {name}={old[name]!r}, but this config has {new[name]!r}: '
                              'choose another --out_dir, or move that run out of the way by --resume=false')
    if state.get('data') != fingerprint(loader) or not ahead and state.get('cooldown_data', []) != fingerprint(cool):
        raise ConfigError(f'the data has changed since the run in {config.out_dir} began (other checksums): choose another '
                          '--out_dir, or move that run out of the way by --resume=false')


def fingerprint(loader):
    return [shard['sha256'] for dataset in loader.sets for shard in dataset.meta['shards']] if loader else []


def update(config, world, run, optimizers, batch, autocast, step=0, recurs={}):
    """One step of the optimizers: (loss, gradient norm). The loss is summed over the target tokens of all pieces and
    processes and divided by their global count: a mean for each piece would give tokens of short answers more weight."""
    tokens, targets = (t.to(world.device) for t in batch)
    total, loss = world.sum((targets != -1).sum()), 0.0
    pieces = list(zip(tokens.chunk(config.grad_accum), targets.chunk(config.grad_accum)))
    rows = iter(range(world.rank * len(tokens), (world.rank + 1) * len(tokens)))       # of the global batch
    for i, (x, y) in enumerate(pieces):
        if recurs:      # a row's first state is a function of its place in the batch, whoever works on it
            recurs = recurs | dict(generator=[torch.Generator(world.device).manual_seed(draw(config.seed, f'state of row {row}', step))
                                              for _, row in zip(x, rows)])
        alone = world.size == 1 or i == len(pieces) - 1
        with contextlib.nullcontext() if alone else run.no_sync():      # DDP adds the gradients up with the last piece
            with autocast():
                share = run(x, y, **recurs) * (y != -1).sum() / total
            (share * world.size).backward()         # DDP divides by the number of processes: this undoes it
        loss += share.detach()
    parameters = [p for o in optimizers for group in o.param_groups for p in group['params']]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf).item()
    loss = world.sum(loss)
    for optimizer in optimizers:
        if math.isfinite(loss + norm):
            optimizer.step()
        optimizer.zero_grad()
    return loss, norm


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {'-h', '--help'} & set(argv):
        print(__doc__ + '\n' + inspect.getsource(Config))
        return
    if not argv:
        print('usage: python train.py CONFIG [--name=value ...]      (--help lists the settings)\n\nconfigs:')
        for path in sorted(Path(__file__).parent.glob('config/*.py')):
            print(f'  {f"config/{path.name}":28}{(ast.get_docstring(ast.parse(path.read_text())) or "").split(chr(10))[0]}')
        raise SystemExit(2)
    try:
        train(check(read_config(Config, argv)))
    except (ConfigError, DataError, checkpoint.CheckpointError) as error:
        if os.environ.get('RANK', '0') == '0':      # all processes know it: one says it
            print(f'train.py: {error}', file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == '__main__':
    import train
    train.main()
