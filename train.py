"""The training loop of every run: plain, growing, looped or recurrent.

The idea: everything that happens at a step is a function of the step alone (engine/plan.py): the
learning rate, the batch, what grows, what is measured. So a run is its config and its seed, and a
run that was stopped goes on as if nothing had happened.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A: linear warm-up, a constant
plateau, and a 1-sqrt decay; AdamW, gradients clipped at 1.
Differs: the defaults are the toy's, with Muon for the layers' matrices and AdamW for the rest.

Usage:
    python train.py config/baseline.py --steps=600      # minutes; any setting by --name=value
    python train.py config/smollm_360m_lidas.py --dry_run       # FLOPs, hours
    torchrun --standalone --nproc_per_node=8 train.py config/smollm_360m_lidas.py
"""
import contextlib
import math
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

from nanodepth import ROOT
from nanodepth.common.errors import Refused, refusals
from nanodepth.common.files import claim, new_model, write_json
from nanodepth.common.options import check_bounds, docstring_of, given, only_fields, read
from nanodepth.engine import checkpoint, cost
from nanodepth.engine.optimizers import OPTIMIZERS, load_optimizers, make_optimizers
from nanodepth.engine.plan import Plan, Start, model_config, refuse_void
from nanodepth.engine.processes import Stop, World
from nanodepth.engine.scoring import measure
from nanodepth.grow import GROWTH, untie
from nanodepth.model import LM, ModelConfig
from nanodepth.report.logs import Log, read_log
from nanodepth.report.plot import draw_runs, show
from nanodepth.text.loader import Loader, draw, make_toy_data
from nanodepth.text.tokenizer import copy_tokenizer, keep_tokenizer, refuse_another_tokenizer


@dataclass
class Config:
    # what is trained, on what, and where it is kept
    out_dir: str = 'out/run'            # where the run is kept
    seed: int = 0                       # of every random draw
    init_from: str | None = None        # a checkpoint, which decides n_layer to vocab_size
    data: str | list[str] = 'data/toy'          # a folder, or a list of them
    context: int = 64                   # tokens of a training row
    batch_size: int = 32                # rows of a step, over all processes
    # the model
    n_layer: int = 8
    n_embd: int = 128
    n_head: int = 4
    n_kv_head: int | None = None
    head_dim: int | None = 64           # None: n_embd / n_head
    ffn_dim: int | None = None
    tie_embeddings: bool = False        # the papers tie; a toy learns three times as fast untied
    # the schedule: linear warm-up, constant, decay
    steps: int = 600
    warmup_steps: int = 50
    decay_steps: int = 120              # the last steps: growing is over, the cool-down begins
    lr: float = 4e-3
    # the optimizer: 'muon' for the layers' matrices and AdamW for the rest, or one for everything
    optimizer: Literal[OPTIMIZERS] = 'muon'
    adamw_lr: float | None = None       # with muon, the peak rate of the rest; None: lr
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    # growing: n_layer is the depth at the end; what init_from gives grows once, by grow_block
    grow: Literal[tuple(GROWTH)] | None = None  # an operator of grow.py; None: full depth at once
    grow_block: int = 2                 # the layers to begin with, and those that a growth adds
    grow_alpha: float = 1.0             # PROP-alpha: stage i gets a share i^alpha of the steps
    # looping: n_layer counts the unique layers
    loop: str | None = None             # their order, such as 2x4 or 2-2x2-2; None: each runs once
    cooldown_loop: str | None = None    # the order from the first step of the decay on
    cooldown_data: str | list[str] | None = None        # what is read from there on; None: data
    # a recurrent core, which retrofit.py made: None is the model's own
    recurrence: int | None = None       # it runs 1 + a random number of times, of this mean
    backprop_depth: int | None = None   # at most so many last runs get gradients, and <= the mean
    curriculum: float = 0.25            # over this part of the steps the mean rises from 1
    # what is measured and kept
    eval_every: int = 25
    eval_batches: int = 12              # batches of validation data per evaluation
    log_every: int = 10
    save_every: int = 200
    keep_stages: bool = False           # keep the model before each growth, as out_dir/stage_2 ...
    resume: bool = True                 # false: move the run in out_dir aside and start over
    # the machine
    device: str = 'auto'                # auto: cuda, else mps, else cpu
    # auto: bfloat16 on cuda, and for what was published in 16 bits where the CPU is fast at it
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'
    compile: bool | Literal['auto'] = 'auto'    # auto: on for cuda
    grad_accum: int = 1                 # a process computes its rows in this many pieces
    # rarely changed
    data_weights: list[float] | None = None     # their shares of the rows; None: equal
    vocab_size: int | None = None       # None: as many as the data's tokenizer has
    rope_theta: float = 10_000.0
    ln_scaling: bool = False
    lr_shape: Literal['1-sqrt', 'cosine'] = '1-sqrt'            # the form in which the rate falls
    lr_decay_steps: int | None = None   # it falls over this many last steps; None: decay_steps
    lr_floor: float = 0.0               # it ends at this share of lr
    # muon's steps are as large as AdamW's, or as the first Muon's
    muon_scaling: Literal['match_rms_adamw', 'original'] = 'match_rms_adamw'
    star_decay: float = 1e-4            # of adamw_star: a step's at the peak, not times lr
    beta2: float = 0.95
    curriculum_shape: Literal['linear', '1-sqrt'] = 'linear'
    backprop_curriculum: float = 0.0    # over this part of the steps backprop_depth rises from 1

    def __post_init__(self):
        check_bounds(vars(self))
        if not self.init_from:      # with it, the plan needs the checkpoint
            Plan(self)              # it refuses settings that exclude each other


MODEL_SETTINGS = {field.name for field in fields(ModelConfig)} - {'context'}


# --------------------------------------------------------------------------------------- the loop

def train(config):
    "Train to the end (returns 0) or until a signal (returns its number); a second call resumes."
    c, out = config, Path(config.out_dir)
    with contextlib.ExitStack() as at_the_end:
        world = at_the_end.enter_context(World(c.device, c.dtype, c.compile))
        world.first_does(lambda: at_the_end.enter_context(lock_folder(out)))
        data, val = open_data(c, world)
        resumes = c.resume and checkpoint.exists(out)
        model, plan, so_far, states = resume(c, world, data) if resumes else begin(c, world, data)
        world.suit(model, c.dtype)
        model.to(world.device, torch.float32).train()       # Hugging Face's may be bfloat16
        optimizers = make_optimizers(model, c)
        load_optimizers(optimizers, states, out)
        del states
        # each Block is compiled in place; with several processes, this is DDP around the model
        wrapped = world.wrap(model)
        step = so_far['step']
        tokens_a_step = c.batch_size * c.context

        log = open_log(c, world, data['data'], val, model, step, resumes)
        batch = fetch(c, world, plan, data, step)
        stop = at_the_end.enter_context(Stop())
        while step < c.steps:
            # what this step does: lr_fraction, n_layer, order, batch, r, ... (engine/plan.py: Step)
            now = plan.at(step)
            news = {}       # what the log will say of this step beside its loss

            # ---- does the model change? It grows, or begins to run its layers in another order.
            grows = now.n_layer > len(model.layers)
            if grows or now.order not in (None, model.order):
                before = validate(c, world, model, val)['val_loss']
                if grows:
                    keep_stage(c, world, model, so_far)
                    wrapped = None      # DDP and its gradients go with the old model
                    model = untie(model, now.origin, optimizers)    # the optimizers become its own
                    wrapped = world.wrap(model)
                else:
                    model.config.order = now.order
                after = validate(c, world, model, val)['val_loss']
                news['grown' if grows else 'looped'] = dict(before=before, after=after)

            # ---- forward, backward and update; the next batch comes while the GPU is at work
            began = time.perf_counter()
            loss = backward(c, world, wrapped, batch, step, now.how)
            norm = clip(optimizers, c.grad_clip)
            batch = fetch(c, world, plan, data, step + 1)
            loss, norm = world.sum_over_ranks(loss), norm.item()    # here it waits for the GPU
            if not math.isfinite(loss + norm):
                # the weights are those before this step, unless they have just changed
                if not news and all(p.isfinite().all() for p in model.parameters()):
                    save(c, world, model, optimizers, plan, data, so_far, log)
                refuse_step(c, step, loss, norm)
            update(optimizers, now.lr_fraction, world.size == 1)
            step += 1

            # the number of a signal that one of the processes got, or 0: all stop together
            asked = int(world.max_over_ranks(stop.asked))
            seconds_taken = time.perf_counter() - began
            step_flops = tokens_a_step * model.flops_per_token(**now.how, context=c.context)
            so_far.update(step=step, tokens=step * tokens_a_step)
            so_far['flops'] += step_flops
            so_far['seconds'] += seconds_taken

            # ---- what is noted
            if step % c.eval_every == 0 or step == c.steps:
                news |= validate(c, world, model, val)
            if news or step % c.log_every == 0:
                log.write(step=step, tokens=so_far['tokens'], flops=so_far['flops'],
                          seconds=round(so_far['seconds'], 1), n_layer=len(model.layers),
                          depth=len(model.order), lr=c.lr * now.lr_fraction, loss=loss,
                          grad_norm=norm, tokens_per_s=round(tokens_a_step / seconds_taken),
                          **now.how, **news)
            mfu = world.peak_flops and step_flops / seconds_taken / world.peak_flops
            log.show_step(tokens_a_step / seconds_taken, mfu)

            # ---- what is kept; and are we asked to stop?
            if step % c.save_every == 0 or step == c.steps or asked:
                save(c, world, model, optimizers, plan, data, so_far, log)
            if asked:
                break
        log.close()
        if step < c.steps:
            world.say(f'stopped at step {step} of {c.steps}, and saved: the same command resumes it'
                      + ('' if c.resume else ', without --resume=false'))
            return asked
        if world.first:
            report(c, model, so_far['flops'])
        return 0


def report(c, model, flops):
    "Draw and print what a finished run leaves."
    out = Path(c.out_dir)
    saving = ''
    if c.grow and not c.init_from:
        full = cost.at_full_depth(replace(c, vocab_size=model.config.vocab_size))
        saving = f', {1 - flops / full:.1%} less than at full depth throughout'
    print(f'{flops:.3e} training FLOPs{saving}')
    show(out / 'loss.png', draw_runs, {out.name: [read_log(out)]})
    print(f'numbers: {out}/log.jsonl\ncheckpoint, log and picture are in {out}; nanodepth sample '
          f'{out} writes text')


def keep_stage(c, world, model, so_far):
    if c.keep_stages and world.first:
        folder = f'{c.out_dir}/stage_{len(model.layers)}'
        checkpoint.save(folder, **checkpoint.describe(model), config=asdict(c), **so_far)
        keep_tokenizer(c.out_dir, folder)


def fetch(c, world, plan, data, step):
    "This process's part of a step's batch, and how many of its targets count; at the end None."
    if step == c.steps:
        return None
    now = plan.at(step)
    tokens, targets, _ = data[now.data].marked_batch(now.batch)
    count = (targets != -1).sum().item()        # here, where it does not wait for a GPU
    return world.to_device(tokens), world.to_device(targets), count


def backward(c, world, model, batch, step, how):
    """Forward and backward over this process's part of the batch, in pieces; the sum of its losses.
    A loss is divided by the targets of the whole batch, over all processes: a mean for each piece
    would give the tokens of short answers more weight."""
    tokens, targets, count = batch
    total = max(1.0, world.sum_over_ranks(count))          # where no target counts, the loss is 0
    loss = 0.0
    last = c.grad_accum - 1
    for i, (x, y) in enumerate(zip(tokens.chunk(c.grad_accum), targets.chunk(c.grad_accum))):
        if 'r' in how:      # a recurrent core: a row's first state does not depend on the process
            first = world.rank * len(tokens) + i * len(x)       # of this piece's rows
            seeds = [draw(c.seed, f'state of row {first + j}', step) for j in range(len(x))]
            generators = [torch.Generator(world.device).manual_seed(seed) for seed in seeds]
            how = how | dict(generator=generators)
        # DDP adds the gradients up with the last piece, and divides by the number of processes.
        with model.no_sync() if world.size > 1 and i < last else contextlib.nullcontext():
            # the model's loss is a mean; times the number of its targets it is a sum
            with world.autocast:
                share = model(x, y, **how) * (y != -1).sum() / total
            (share * world.size).backward()
        loss += share.detach()
    return loss


def clip(optimizers, most):
    """Scale the gradients down to a norm of `most`, and return what it was. In the optimizers'
    order: a sum in another one has another last bit."""
    params = [p for o in optimizers for group in o.param_groups for p in group['params']]
    return torch.nn.utils.clip_grad_norm_(params, most or math.inf)


def update(optimizers, lr_fraction, alone):
    "A step of each optimizer. DDP keeps gradients in buckets of its own: there they become 0."
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['lr'] = group['peak'] * lr_fraction
        optimizer.step()
        optimizer.zero_grad(set_to_none=alone)


def refuse_step(c, step, loss, norm):
    raise Refused(f'step {step + 1} has loss {loss} and gradient norm {norm}, so it was not taken; '
                  f'{c.out_dir} holds the last checkpoint, if one was saved. Try a lower --lr, a '
                  'longer --warmup_steps, or --dtype=float32, in another --out_dir')


def validate(c, world, model, val):
    "The loss on validation data, and the loss and accuracy on each kind of answer."
    with world.autocast:
        loss, kinds = measure(model, val, c.eval_batches, c.grad_accum)
    return dict(val_loss=loss, kinds=kinds)


# ------------------------------------------------------------------- where a run begins and ends

def lock_folder(out):
    "A context in which nobody else writes into out_dir."
    return claim(out) if checkpoint.exists(out) else new_model(out, 'choose another --out_dir')


def open_data(c, world):
    "({setting: Loader} of what is trained on, the validation rows: the same ones for all runs)."
    world.first_does(lambda: make_toy_data([c.data, c.cooldown_data], world.say))
    if c.batch_size // world.size % c.grad_accum:
        raise Refused(f'batch_size={c.batch_size} on {world.size} processes does not divide into '
                      f'grad_accum={c.grad_accum} pieces')
    shared = dict(batch_size=c.batch_size, context=c.context, rank=world.rank,
                  world_size=world.size, vocab_size=c.vocab_size)
    data = dict(data=Loader(c.data, weights=c.data_weights, seed=c.seed, **shared))
    if c.cooldown_data:
        data['cooldown_data'] = Loader(c.cooldown_data, seed=c.seed, **shared)
    first, *others = (loader.tokenizer for loader in data.values())
    if others and others[0] != first:
        raise Refused(f'data was made with the tokenizer {first!r}, but cooldown_data with '
                      f'{others[0]!r}')
    val = Loader(c.data, weights=c.data_weights, split='val', seed=0, **shared)
    if c.eval_batches > len(val):
        world.say(f'eval_batches={c.eval_batches}, but the validation data has only {len(val)} '
                  'batches: all of them are used')
    return data, val


def begin(c, world, data):
    """(model, plan, what it has taken so far, the optimizers' states) of a new run, of a new model
    or of what init_from gives."""
    torch.manual_seed(draw(c.seed, 'init'))
    so_far = dict(step=0, tokens=0, flops=0, seconds=0.0, inherited_flops=0)
    if not c.init_from:
        plan = Plan(c)
        model = LM(model_config(c, vocab_size=c.vocab_size or data['data'].vocab_size,
                                n_layer=plan.at(0).n_layer))
        plan.set_up(model)
        return model, plan, so_far, []
    if not checkpoint.is_hugging_face(c.init_from):
        world.first_does(lambda: checkpoint.check(c.init_from))
    parent = checkpoint.load(c.init_from, checked=True)
    model = checkpoint.build_model(parent, c.init_from)
    plan = Plan(c, Start.of(model))
    plan.set_up(model)
    if model.config.context < c.context:
        raise Refused(f'context={c.context}, the length of a training row, is more than '
                      f'{c.init_from} reads: {model.config.context} tokens')
    refuse_another_tokenizer(c.init_from, data['data'])
    so_far['inherited_flops'] = parent.get('flops', 0) + parent.get('inherited_flops', 0)
    return model, plan, so_far, []


def resume(c, world, data):
    """(model, plan, what it has taken so far, the optimizers' states) of the run in out_dir, if
    this config goes on with it."""
    out = Path(c.out_dir)
    world.first_does(lambda: checkpoint.check(out))
    state = checkpoint.load(out, checked=True)
    if not state.get('optimizers') or 'start' not in state:
        raise Refused(f'{out} holds weights without their optimizers, so it cannot be resumed: '
                      f'start another --out_dir from it, with --init_from={out}')
    old = Config(**only_fields(Config, state['config']))
    plan = Plan(c, Start(**only_fields(Start, state['start'])))
    plan.refuse_other_run(old, state, data, MODEL_SETTINGS if c.init_from else set())
    so_far = {name: state.get(name, 0) for name in ('step', 'tokens', 'flops', 'seconds',
                                                    'inherited_flops')}
    model = checkpoint.build_model(state, out)
    if model.recurs:        # of an ordinary model the loop sets the order
        plan.set_up(model)
    return model, plan, so_far, state['optimizers']


def save(c, world, model, optimizers, plan, data, so_far, log):
    log.sync()
    if world.first:
        checksums = {name: loader.checksums() for name, loader in data.items()}
        shares = {name: loader.shares() for name, loader in data.items()}
        checkpoint.save(c.out_dir, **checkpoint.describe(model), **so_far, **checksums,
                        shares=shares,
                        optimizers=[optimizer.state_dict() for optimizer in optimizers],
                        config=asdict(c), start=asdict(plan.start),
                        tokenizer=data['data'].tokenizer)
    world.wait()


def open_log(c, world, loader, val, model, step, resumes):
    """Move what must not stay in out_dir aside, write run.json, print a few words, open the log.
    The first line of a new run measures the untrained model."""
    world.wait()        # now that no process can refuse any more
    world.first_does(lambda: checkpoint.move_aside(Path(c.out_dir), resumes, world.say))
    if world.first:
        if loader.tokenizer != 'bytes':
            try:
                copy_tokenizer(loader.tokenizer, c.out_dir)
            except Refused as error:        # there may be no network now
                world.say(f'the tokenizer is not at hand: {error}')
        write_json(Path(c.out_dir) / 'run.json', dict(
            tokenizer=loader.tokenizer, config=asdict(c), torch=torch.__version__,
            data=[each.origin for each in loader.sets]))
    layers = sum(p.numel() for p in model.layers.parameters())
    many = f' x {world.size}' if world.size > 1 else ''
    world.say(f'device {world.device}{many}{world.precision_in_words}, compile '
              f'{"on" if world.compiles else "off"}; '
              f'{model.num_params():,} parameters ({layers:,} in {len(model.layers)} layers), '
              f'depth {len(model.order)}, {model.flops_per_token(context=c.context):,} FLOPs per '
              f'token\n{c.steps:,} steps of {c.batch_size} x {c.context} = '
              f'{c.batch_size * c.context:,} tokens' + (f', from step {step:,} on' if step else ''))
    log = Log(Path(c.out_dir) / 'log.jsonl', step or -1, c.steps, silent=not world.first)
    if step == 0:
        log.write(step=0, tokens=0, flops=0, seconds=0, n_layer=len(model.layers),
                  depth=len(model.order), **validate(c, world, model, val))
    return log


USAGE = 'usage: python train.py CONFIG [--name=value ...] [--dry_run [--gpus=8] [--mfu=0.4]]'


def read_config(argv):
    "A config file and the settings after it. What init_from decides may not be set beside it."
    values = given(Config, argv)
    decided = MODEL_SETTINGS & values.keys() if values.get('init_from') else ()
    for name in sorted(decided):
        raise Refused(f'{name}={values[name]} has no effect beside init_from='
                      f'{values["init_from"]}: that checkpoint decides the shape of the model, so '
                      f'leave {name} out')
    config = Config(**values)
    refuse_void(config, [arg.removeprefix('--').partition('=')[0] for arg in argv])
    return config


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(USAGE + '      (--help lists the settings)')
        for path in sorted((ROOT / 'config').glob('[!_]*.py')):
            print(f'  {f"config/{path.name}":44}{docstring_of(path).partition(chr(10))[0]}')
        raise SystemExit(2)
    if {'-h', '--help'} & set(argv):
        read(Config, argv, f'{USAGE}\n\n{__doc__ or ""}')
    if any(arg.partition('=')[0] == '--dry_run' for arg in argv):
        return cost.main(argv, read_config)
    stopped = train(read_config(argv))
    if stopped:         # make or a scheduler must not take the run for finished
        raise SystemExit(128 + stopped)


if __name__ == '__main__':
    with refusals('train'):
        main()
