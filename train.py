"""The one training loop: schedule, accumulation, many processes, evaluation, checkpoints, and a
stop at any moment.

The idea: everything that happens at a step is a function of the step alone (engine/plan.py): the
learning rate, the batch, what grows, what is measured. So a run is its config and its seed, and a
run that was stopped goes on as if nothing had happened.

Paper: "Do Depth-Grown Models Overcome the Curse of Depth?", appendix A: linear warm-up, a constant
plateau, and a 1-sqrt decay; AdamW, gradients clipped at 1.
Here: the defaults are the toy's, with Muon for the layers' matrices and AdamW for the rest
(docs/LOG.md).

Usage:
    python train.py config/baseline.py  # a laptop, minutes; the picture is in out/baseline
    # any field by --name=value; --help lists them
    python train.py config/baseline.py --steps=600 --device=cpu
    python train.py config/smollm_360m_lidas.py --dry_run  # what it will cost: FLOPs, memory, hours
    torchrun --standalone --nproc_per_node=8 train.py config/smollm_360m_lidas.py
"""
import common  # noqa: F401 (from here on Ctrl-C ends in a line)

# isort: split
import ast
import contextlib
import dataclasses
import inspect
import math
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from data.tokens import draw, measure
from engine import checkpoint, cost
from engine.launch import (
    Stop,
    World,
    compile_blocks,
    hold_folder,
    make_toy_data,
    mfu,
    move_aside,
    parallel,
    precision,
    send,
)
from engine.settings import Config, check, read_config
from engine.start import begin, fill, introduce, loaders, resume
from grow import untie
from report.logs import Log, read_log
from report.plot import draw_runs, show


def train(config):
    "Train to the end (returns 0) or until a signal (returns its number); a second call resumes."
    with World(config.device, config.patience) as world, contextlib.ExitStack() as held:
        world.first_does(lambda: held.enter_context(hold_folder(Path(config.out_dir))))
        run = Run(world, config)
        with Stop() as stop:
            ending, batch = 0, None
            if run.step == 0:
                run.log.write(step=0, tokens=0, flops=0, seconds=0, **run.depth(), **run.look())
            while run.step < config.steps and not ending:
                now, began = run.plan.at(run.step), time.perf_counter()
                if now.n_layer > len(run.model.layers):
                    began += run.change('grown', run.grow, now)
                if now.order and list(now.order) != run.model.order:
                    began += run.change('looped', run.cool_down, now)
                for group in run.groups():
                    group['lr'] = group['peak'] * now.lr
                world.at(f'the batch of step {run.step + 1}')
                batch = batch or run.fetch(run.step)
                told = run.plan.told(run.step)
                loss, norm, batch = take_step(config, world, run.wrapped, run.optimizers, batch,
                                              run.autocast, run.step, told,
                                              lambda: run.fetch(run.step + 1))
                run.refuse_nan(loss, norm)
                run.record(now, told, loss, norm, time.perf_counter() - began)
                ending = world.most(stop.asked)     # if one is told to stop, all stop together
                if run.step % config.save_every == 0 or run.step == config.steps or ending:
                    run.save()
            run.bar.close()
        ending = ending if run.step < config.steps else 0       # it is finished
        if ending:
            world.say(f'stopped at step {run.step} of {config.steps}, and saved: the same command '
                      'resumes it')
        elif world.first:
            run.report()
        return ending


class Run:
    "A run under way: its plan, its model, where it stands."

    def __init__(self, world, config):
        self.world, self.config, self.out = world, config, Path(config.out_dir)
        world.first_does(lambda: make_toy_data(config, world))
        self.data, self.val = loaders(config, world)
        resumes = config.resume and checkpoint.exists(self.out)
        self.model, self.plan, state = (
            resume(config, self.data, self.out)
            if resumes else begin(config, self.data['data']))
        counted = ('tokens', 'flops', 'seconds', 'inherited_flops')
        self.counts = {name: state[name] for name in counted}
        self.step = state['step']
        self.model.to(world.device, torch.float32).train()      # Hugging Face's may be bfloat16
        compiled = compile_blocks(config, world, self.model)
        self.optimizers = fill(self.model, config, state, self.out)
        self.wrapped = parallel(self.model, world)
        self.autocast = precision(config, world.device)
        world.first_does(lambda: move_aside(self.out, resumes, world))
        self.log = Log(self.out / 'log.jsonl', self.step or -1, silent=not world.first,
                       say=world.say)
        self.bar = tqdm(total=config.steps, initial=self.step, disable=not world.first, unit='step',
                        dynamic_ncols=True)
        self.shown, self.changed = {}, {}       # shown beside the bar; for the next log line
        introduce(config, world, self.data['data'], self.model, self.step, compiled)

    def groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def depth(self):
        return dict(n_layer=len(self.model.layers), depth=len(self.model.order))

    # ------------------------------------------------------------------ what happens on the way

    def fetch(self, step):
        "The batch of a step, on its way to the GPU, and how many targets it has."
        if step < self.config.steps:
            now = self.plan.at(step)
            return send(self.data[now.data].batch(now.batch), self.world.device)

    def look(self):
        self.world.at(f'an evaluation at step {self.step}')
        c = self.config
        with self.autocast():
            loss, kinds = measure(self.model, self.val, c.eval_batches, c.grad_accum)
        skills = {kind: f'{k["accuracy"]:.0%}' for kind, k in kinds.items() if kind != 'text'}
        self.shown.update(val=f'{loss:.3f}', **skills)
        return dict(val_loss=loss, kinds=kinds)

    def change(self, what, make, now):
        "Grow or loop, with the loss before and after in the log. Returns the seconds it took."
        began, before = time.perf_counter(), self.look()['val_loss']
        make(now)
        self.changed = {what: dict(before=before, after=self.look()['val_loss'])}
        return time.perf_counter() - began

    def grow(self, now):
        self.world.at(f'growing at step {self.step}')
        self.model = untie(self.model, now.origin, self.optimizers)
        compile_blocks(self.config, self.world, self.model)     # a copy is not compiled
        self.wrapped = parallel(self.model, self.world)
        self.world.tidy()

    def cool_down(self, now):
        self.model.config.order = list(now.order)

    def refuse_nan(self, loss, norm):
        if not math.isfinite(loss + norm):
            self.save()         # the step was not taken: these are still the weights before it
            raise SystemExit(not self.world.first or
                             f'\ntrain.py: step {self.step + 1} has loss {loss} and gradient norm '
                             f'{norm}, so it was not taken. {self.out} holds the checkpoint of '
                             f'step {self.step}.\nTry a lower --lr, a longer --warmup_steps, or '
                             '--dtype=float32, in another --out_dir.')

    def record(self, now, told, loss, norm, took):
        c, counts, tokens = self.config, self.counts, self.config.batch_size * self.config.context
        flops = self.model.flops_per_token(**told, context=c.context)
        counts.update(tokens=counts['tokens'] + tokens, flops=counts['flops'] + tokens * flops,
                      seconds=counts['seconds'] + took)
        self.step += 1
        evaluates = self.step % c.eval_every == 0 or self.step == c.steps
        if evaluates or self.step % c.log_every == 0 or self.changed:
            speed = tokens / took
            self.shown.update(loss=f'{loss:.3f}', layers=len(self.model.order),
                              tok_s=f'{speed:,.0f}', **mfu(flops * speed, self.world))
            self.log.write(step=self.step, tokens=counts['tokens'], flops=counts['flops'],
                           seconds=round(counts['seconds'], 1), **self.depth(), lr=c.lr * now.lr,
                           loss=loss, grad_norm=norm, tokens_per_s=round(speed), **told,
                           **self.changed, **(self.look() if evaluates else {}))
            self.bar.set_postfix(self.shown)
            self.changed = {}
        self.bar.update()

    def save(self):
        about = dict(config=dataclasses.asdict(self.config),
                     start=dataclasses.asdict(self.plan.start),
                     tokenizer=self.data['data'].tokenizer, step=self.step, **self.counts)
        about |= {name: loader.checksums() for name, loader in self.data.items()}
        self.world.at(f'the checkpoint of step {self.step}')
        self.log.sync()
        if self.world.first:
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            checkpoint.save(self.out, **checkpoint.describe(self.model), optimizers=states, **about)
        self.world.wait()

    def report(self):
        "Print what a finished run leaves."
        each = self.model.flops_per_token(context=self.config.context)
        flops, full = self.counts['flops'], self.counts['tokens'] * each
        less = f', {1 - flops / full:.1%} less than at full depth throughout'
        say = self.world.say
        say(f'{flops:.3e} training FLOPs' + (less if self.config.grow and flops < full else ''))
        show(self.out / 'loss.png', draw_runs, {self.out.name: [read_log(self.out)]})
        say(f'numbers: {self.out}/log.jsonl')
        say(f'checkpoint, log and picture are in {self.out}; '
              f'python nanodepth.py sample {self.out} writes text')


def take_step(config, world, run, optimizers, batch, autocast, step=0, told={},
              meanwhile=lambda: None):
    """One step of the optimizers: (loss, gradient norm, what `meanwhile` returns: it is called
    while the GPU is at work). The loss is summed over the target tokens of all pieces and processes
    and divided by their global count: a mean for each piece would give tokens of short answers more
    weight."""
    world.at(f'the pass of step {step + 1}')
    tokens, targets, count = batch
    total, loss = max(1.0, world.sum(count)), 0.0       # where no target counts, the loss is 0
    pieces = list(zip(tokens.chunk(config.grad_accum), targets.chunk(config.grad_accum)))
    rows = iter(range(world.rank * len(tokens), (world.rank + 1) * len(tokens)))    # of the batch
    for i, (x, y) in enumerate(pieces):
        if told:        # a row's first state depends on its place, not on the process
            seeds = [draw(config.seed, f'state of row {row}', step) for _, row in zip(x, rows)]
            told = told | dict(generator=[torch.Generator(world.device).manual_seed(s)
                                          for s in seeds])
        alone = i == len(pieces) - 1 or not hasattr(run, 'no_sync')
        # DDP adds the gradients up with the last piece.
        with contextlib.nullcontext() if alone else run.no_sync():
            with autocast():
                share = run(x, y, **told) * (y != -1).sum() / total
            (share * world.size).backward()         # DDP divides by the number of processes
        loss += share.detach()
    parameters = [p for o in optimizers for group in o.param_groups for p in group['params']]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf)
    after = meanwhile()
    world.at(f'the end of step {step + 1}')
    loss, norm = world.sum(loss), norm.item()       # the one place of a step that waits for the GPU
    for optimizer in optimizers:
        if math.isfinite(loss + norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=not hasattr(run, 'no_sync'))    # DDP's are views of buckets
    return loss, norm, after


USAGE = 'usage: python train.py CONFIG [--name=value ...] [--dry_run [--gpus=8] [--mfu=0.4]]'


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if {'-h', '--help'} & set(argv):
        return print(USAGE, __doc__, inspect.getsource(Config), sep='\n\n')
    if not argv:
        print(USAGE + '      (--help lists the settings)\n\nconfigs:')
        for path in sorted(Path(__file__).parent.glob('config/[!_]*.py')):
            about = ast.get_docstring(ast.parse(path.read_text())) or ''
            print(f'  {f"config/{path.name}":44}{about.partition(chr(10))[0]}')
        raise SystemExit(2)
    if any(arg.startswith('--dry_run') for arg in argv):
        said, rest = cost.options(argv)
        return cost.show(check(read_config(Config, rest)), **said)
    stopped = train(check(read_config(Config, argv)))
    if stopped:         # make or a scheduler must not take the run for finished
        raise SystemExit(128 + stopped)


if __name__ == '__main__':
    from nanodepth import main; main('train')        # noqa: E702, I001
