"""Where a run begins and ends: its folder, its data, the checkpoint it starts from, its log.

The idea: none of this is about depth, and train.py reads as one page without it.
"""
import contextlib
import tempfile
from pathlib import Path

import torch

from nanodepth.common.errors import Refused, say
from nanodepth.common.files import claim, write_json
from nanodepth.models import checkpoint
from nanodepth.report.logs import Log, read_log
from nanodepth.text.loader import Loader, make_toy_data, refuse_mixed
from nanodepth.text.tokenizer import (behind, copy_tokenizer, fingerprint, get_tokenizer,
                                      refuse_changed_tokenizer)
from nanodepth.training import refuse


@contextlib.contextmanager
def locked(c, world):
    "In here nobody else writes into out_dir. Rank 0 holds it; if it cannot, all refuse."
    def hold():
        refuse.taken_folder(c)
        held.enter_context(claim(c.out_dir))
    with contextlib.ExitStack() as held:
        world.first_does(hold)
        yield


def open_data(c, world):
    "({setting: Loader} of what is trained on, the validation rows: the same ones for all runs)."
    world.first_does(lambda: make_toy_data([c.data, c.cooldown_data], world.say))
    if c.batch_size // world.size % c.grad_accum:
        raise Refused(f'batch_size={c.batch_size} on {world.size} processes does not divide into '
                      f'grad_accum={c.grad_accum} pieces')
    shared = dict(batch_size=c.batch_size, context=c.context, rank=world.rank,
                  world_size=world.size, vocab_size=c.vocab_size)
    data = dict(data=Loader(c.data, seed=c.seed, **shared))
    world.first_does(lambda: check_before(c, data['data'].sets[0]))
    if c.cooldown_data:
        data['cooldown_data'] = Loader(c.cooldown_data, seed=c.seed, **shared)
    refuse_mixed([loader.sets[0] for loader in data.values()])
    val = Loader(c.data, split='val', seed=0, **shared)
    if c.eval_batches > len(val):
        world.say(f'eval_batches={c.eval_batches}, but the validation data has only {len(val)} '
                  'batches: all of them are used')
    return data, val


def check_before(c, dataset):
    "What must be so before anything of an older run is moved."
    if c.resume and (Path(c.out_dir) / 'tokenizer.json').exists():
        if not reads(c.out_dir, dataset):
            raise Refused(f'{c.out_dir} holds another tokenizer than that of {dataset.folder}: '
                          f'{refuse.MOVE}')
        if checkpoint.exists(c.out_dir):
            return
    try:
        tokenizer = get_tokenizer(dataset.tokenizer)
    except Refused:         # there may be no network now: take_tokenizer says so
        return
    refuse_changed_tokenizer(dataset, tokenizer)


def reads(folder, dataset):
    "Does a run have the tokenizer of some data in its own folder?"
    file = Path(folder) / 'tokenizer.json'
    return file.exists() and fingerprint(get_tokenizer(file)) == dataset.fingerprint


def read_checkpoint(folder, world):
    "What a checkpoint's file says. Rank 0 alone reads the whole file for its checksums."
    if not checkpoint.is_hugging_face(folder):
        world.first_does(lambda: checkpoint.check(folder))
    return checkpoint.load(folder, checked=True)


def marks_of(data, val):
    "By what a checkpoint knows its data again: if it has changed, a resume is refused."
    return dict(tokenizer=data['data'].tokenizer,
                shares={name: loader.shares() for name, loader in data.items()},
                forms={name: loader.forms() for name, loader in data.items()},
                **{name: loader.checksums() for name, loader in data.items()},
                val=val.checksums())


def open_log(c, settings, world, loader, model, step, resumes):
    "Move an older run aside, if that is asked for, write run.json, say a few words, open the log."
    world.wait()        # now that no process can refuse any more
    if world.first:
        tokenizer = take_tokenizer(loader.sets[0], c, resumes)
        write_json(Path(c.out_dir) / 'run.json', dict(
            tokenizer=tokenizer, fingerprint=loader.sets[0].fingerprint, config=settings,
            torch=torch.__version__, data=[each.origin for each in loader.sets]))
        kept = Path(c.out_dir) / f'ckpt-{step}.pt'      # it may have been killed before it kept
        if step and c.keep_every and step % c.keep_every == 0 and not kept.exists():
            checkpoint.keep(c.out_dir, step)
    layers = sum(p.numel() for p in model.layers.parameters())
    many = f' x {world.size}' if world.size > 1 else ''
    world.say(f'device {world.device}{many}, compile {"on" if world.compiles else "off"}; '
              f'{model.num_params():,} parameters ({layers:,} in {len(model.layers)} layers), '
              f'depth {len(model.unrolled())}, {model.flops_per_token(context=c.context):,} FLOPs '
              f'per token\n{c.steps:,} steps of {c.batch_size} x {c.context} = '
              f'{c.batch_size * c.context:,} tokens' + (f', from step {step:,} on' if step else ''))
    if loader.passes(c.steps) > 1:
        world.say(f'the data has fewer tokens, so it is read {loader.passes(c.steps):.1f} times')
    return Log(Path(c.out_dir) / 'log.jsonl', step or -1, c.steps, silent=not world.first,
               online=settings if c.wandb else None)


def take_tokenizer(dataset, c, resumes):
    """Move an older run in out_dir aside, and put the tokenizer's files there. Returns the name by
    which run.json calls it, which is not that of the folder itself."""
    name, out = dataset.tokenizer, Path(c.out_dir)
    if resumes and reads(out, dataset):
        return name
    with tempfile.TemporaryDirectory() as kept:     # it may be that of the older run in out
        try:
            has_files = copy_tokenizer(name, kept)
            name = name if has_files else behind(name)
        except Refused as error:                    # there may be no network now
            say(f'the tokenizer is not at hand: {error}')
            has_files = False
        if not c.resume and checkpoint.is_run(out):
            checkpoint.move_aside(out)
        if has_files:
            copy_tokenizer(kept, out)
    return name


def report(c, world, plan, model, totals):
    "Say that a run was stopped, or draw and print what a finished one leaves."
    step, flops, out = totals['step'], totals['flops'], Path(c.out_dir)
    if step < c.steps:
        world.say(f'stopped at step {step} of {c.steps}, and saved: the same command resumes it'
                  + ('' if c.resume else ', without --resume=false'))
    if step < c.steps or not world.first:
        return
    saving = ''
    if c.grow and not c.init_from:      # what growing is compared with: all layers from step 0 on
        every = [*range(len(model.layers))]
        full = sum(steps * model.flops_per_token(order, context=c.context) for steps, order in (
            (plan.cooldown_start, every), (c.decay_steps, plan.cooldown_order or every)))
        saving = (f', {1 - flops / (full * c.batch_size * c.context):.1%} less than at full depth '
                  'throughout')
    print(f'{flops:.3e} training FLOPs{saving}')
    from nanodepth.report.plot import draw_runs, show
    show(out / 'loss.png', draw_runs, {out.name: [read_log(out)]})
    print(f'numbers: {out}/log.jsonl\nnext: nanodepth play {out} opens a page on which you move '
          f'its layers, and nanodepth sample {out} writes text')
