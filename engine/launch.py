"""A running process: its device, its precision, the other processes, and a clean stop.

The idea: what surrounds a training loop teaches nothing about depth, so it is kept here.

Usage:
    world = World(config.device)                # world.device, world.rank, world.size
    with Stop() as stop: ...                    # stop.asked: Ctrl-C or SIGTERM came
"""
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common import losses
from common.errors import Refused, which_process
from common.files import aside, claim, find, new_model
from engine import checkpoint
from engine.watch import Watch, leave_with_parent


def pick_device(name='auto', local_rank=0):
    "cuda, else mps, else cpu; or the one that is named, if it is there."
    if name == 'auto':
        name = ('cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available()
                else 'cpu')
    try:
        device = torch.device(f'cuda:{local_rank}' if name == 'cuda' else name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0][:150]
        raise Refused(f'device={name!r} cannot be used: {why}') from None
    if device.type == 'cuda':
        # cuDNN plans every new shape for 30 ms: each token of a text. World turns it on again.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def precision(config, device):
    "A function that makes the context in which the model runs."
    # older GPUs only emulate it
    able = device.type == 'cuda' and torch.cuda.get_device_capability(device) >= (8, 0)
    if config.dtype == 'bfloat16' or config.dtype == 'auto' and able:
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext


def has_compiler():
    return any(map(shutil.which, ('c++', 'g++', 'clang++', 'cl')))


def compile_blocks(config, world, model):
    """Compile each Block separately, so that no order or growth recompiles one. Returns whether
    it did."""
    wanted = config.compile is True or config.compile == 'auto' and world.device.type == 'cuda'
    if wanted and not has_compiler():
        world.say('compile stays off: torch.compile needs a C++ compiler, and there is none here')
        wanted = False
    if wanted:
        # else each Block under DDP is cut at every 25 MB of weights, and keeps what crosses a cut
        torch._dynamo.config.optimize_ddp = False
        if world.device.type == 'cuda':
            losses.compile_piece('cuda')
    for block in model.layers if wanted else ():
        block.compile()
    return wanted


def send(batch, device):
    """(tokens, targets, how many targets count), on their way to the device, without
    waiting."""
    count = (batch[1] != -1).sum().item()
    if device.type == 'cuda':
        return *(t.pin_memory().to(device, non_blocking=True) for t in batch), count
    return *(t.to(device) for t in batch), count


def parallel(model, world):
    """Wrap in DDP. Without find_unused_parameters it re-sorts its buckets after a process's first
    step: on three ranks or more a resumed run would add gradients in another order."""
    if world.size == 1:
        return model
    # as a view, the gradients are there once; the buffers, rotary tables, are the same everywhere
    return DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False,
                                   gradient_as_bucket_view=True)


# Dense bfloat16 FLOPs per second of some GPUs.
PEAK_FLOPS = {'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H200': 989e12, 'H100': 989e12,
              'B200': 2250e12, 'A100': 312e12, 'L40S': 362e12, 'L40': 181e12, '4090': 165e12}


def peak_flops(device):
    "A GPU's FLOPs per second, or None if it is not in the table."
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else ''
    return next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)


def mfu(flops_per_s, world):
    """The share of a known GPU's peak FLOPs that the run uses, by our count, for the progress
    bar."""
    peak = peak_flops(world.device)
    return dict(mfu=f'{flops_per_s / peak / world.size:.0%}') if peak else {}


class World:
    """Which process this is, on which device, and how many there are: torchrun says so, else it is
    alone."""

    watch = None

    def __init__(self, device='auto', patience=600):
        self.rank, self.size, here = which_process()
        together, gpus = int(os.environ.get('LOCAL_WORLD_SIZE', 1)), torch.cuda.device_count()
        # every process checks this, so rank 0 reports it
        if gpus and together > gpus and device in ('auto', 'cuda'):
            raise Refused(f'{together} processes on this machine need a GPU each, but there are '
                          f'{gpus}')
        self.device = pick_device(device, here)
        cuda = self.device.type == 'cuda'
        if cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision('high')
            torch.backends.cuda.enable_cudnn_sdp(True)      # its shapes stay the same
        if self.size > 1:
            leave_with_parent()
            dist.init_process_group('nccl' if cuda else 'gloo', device_id=self.device if cuda
                                    else None, timeout=timedelta(seconds=2 * patience + 60))
            self.watch = Watch(self.rank, self.size, patience)

    @property
    def first(self):
        return self.rank == 0

    def say(self, text):
        if self.first:
            try:
                print(text, flush=True)
            except OSError:         # train.py ... | head, or a full disk: the run goes on
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def sum(self, number):
        "The sum of every process's number, as a float."
        if self.size == 1:
            return float(number)
        total = torch.tensor(float(number), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def most(self, number):
        "The largest of every process's numbers."
        if self.size == 1:
            return number
        found = torch.tensor(number, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()

    def at(self, place):
        "Note where this process is: if it hangs, the others report it (watch.py)."
        if self.watch:
            self.watch.at(place)

    def first_does(self, work):
        """Rank 0 does something that all depend on; if it fails, all fail, each with its
        message."""
        result, failed = None, [None]
        if self.first:
            try:
                result = work()
            except (ValueError, OSError, subprocess.CalledProcessError) as error:
                failed = [str(error)]
        if self.size > 1:
            dist.broadcast_object_list(failed)
        if failed[0] is not None:
            raise Refused(failed[0])
        return result

    def wait(self):
        if self.size > 1:
            dist.barrier()

    def tidy(self):
        "A compiled Block is in a circle with itself: without this the old weights would stay."
        gc.collect()
        if self.device.type == 'cuda':
            torch.cuda.empty_cache()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        # After an error on one rank the others are inside a collective: NCCL would wait for them
        # here, and the error would never be printed. The process ends without a farewell.
        self.close(kind in (None, SystemExit) or self.device.type != 'cuda')

    def close(self, in_order=True):
        if self.watch:
            self.watch.stop()
            self.watch = None
            if not in_order:
                return
            # Gloo's threads need the interpreter's lock to let go of the last message. The group is
            # torn down under that lock, and waits for them.
            time.sleep(0.2)
            dist.destroy_process_group()


class Stop:
    """Ctrl-C, SIGTERM and a closed terminal ask for a stop after the current step; a second Ctrl-C
    does not wait. `asked` is the signal's number, 0 without one."""

    def __enter__(self):
        self.asked = 0
        hangup = [signal.SIGHUP] if hasattr(signal, 'SIGHUP') else []       # not on Windows
        asking = signal.SIGINT, signal.SIGTERM, *hangup
        self.before = {s: signal.signal(s, self._ask) for s in asking}
        return self

    def _ask(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def hold_folder(out):
    "Hold out_dir until the run ends."
    return claim(out) if checkpoint.exists(out) else new_model(out, 'choose another --out_dir')


def make_toy_data(config, world):
    "Toy data takes seconds to make, so it is made. Other data is the user's own decision."
    for data in (config.data, config.cooldown_data or []):
        for folder in map(find, [data] if isinstance(data, str) else data):
            script = folder / 'prepare.py'
            if folder.name == 'toy' and script.exists() and not (folder / 'train.json').exists():
                world.say(f'{folder} has no data yet: running {script}')
                subprocess.run([sys.executable, str(script)], check=True)


def move_aside(out, resumes, world):
    "A new run begins: what an older one has left in the folder is kept beside it."
    if not resumes and checkpoint.exists(out):
        moved = aside(out)
        shutil.copytree(out, moved)
        for name in (checkpoint.FILE, 'log.jsonl'):
            (out / name).unlink(missing_ok=True)
        world.say(f'--resume=false: the run that was in {out} is now in {moved}')
    log = out / 'log.jsonl'
    if not checkpoint.exists(out) and log.is_file() and log.stat().st_size:
        kept = aside(log)
        log.rename(kept)
        world.say(f'{out} has a log and no checkpoint: a new run begins, and the log that was '
                  f'there is kept as {kept}')
