"""Where a run runs: its device, the other processes, and the request to stop. torchrun starts the
processes of a run and says which of them each one is. Without torchrun a run is one process.
Usage: with World('auto') as world: ...         # world.device, world.rank, world.size
"""
import gc
import os
import shutil
import signal
import subprocess
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nanodepth.common.errors import Refused, which_process
from nanodepth.models.checkpoint import fast_in_bfloat16

PATIENCE = timedelta(minutes=10)        # so long a process waits for the others
# Dense bfloat16 FLOPs per second of some GPUs.
PEAK_FLOPS = {'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H200 NVL': 835e12, 'H200': 989e12,
              'H100': 989e12,
              'B200': 2250e12, 'A100': 312e12, 'L40S': 362e12, 'L40': 181e12, '4090': 165e12}


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


def peak_flops(device):
    "A GPU's FLOPs per second, or None if it is not in the table."
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else ''
    if 'Laptop' in name or name.endswith(' D'):         # slower cards of the same names
        return None
    return next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)


class World:
    "Which process this is, of how many, and on which device."

    def __init__(self, device='auto', compile=False):
        self.rank, self.size, here = which_process()
        self.first = self.rank == 0
        together = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
        gpus = torch.cuda.device_count()
        # every process checks this, so rank 0 reports it
        if gpus and together > gpus and device in ('auto', 'cuda'):
            raise Refused(f'{together} processes on this machine need a GPU each, but there are '
                          f'{gpus}')
        self.device = pick_device(device, here)
        self.cuda = self.device.type == 'cuda'
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision('high')
            torch.backends.cuda.enable_cudnn_sdp(True)          # a training step has one shape
        self.signal, self.handlers = 0, {}
        self.has_bfloat16 = self.cuda and fast_in_bfloat16(self.device)
        wanted = compile is True or (compile == 'auto' and self.cuda)
        self.compiles = wanted and has_compiler()
        if wanted and not self.compiles:
            self.say('compile stays off: torch.compile needs a C++ compiler, and there is none '
                     'here')
        if self.compiles:
            # else each Block under DDP is cut at every 25 MB of weights, and keeps what crosses
            torch._dynamo.config.optimize_ddp = False
        # of all GPUs together, by the table; None where they are not in it
        peak = peak_flops(self.device)
        self.peak_flops = peak and peak * self.size
        if self.size > 1:
            dist.init_process_group('nccl' if self.cuda else 'gloo', timeout=PATIENCE,
                                    device_id=self.device if self.cuda else None)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.size == 1:
            return
        if self.cuda and kind not in (None, SystemExit):
            return      # NCCL would wait for the others here, and the error would stay unsaid
        # Gloo's threads need the interpreter's lock to let go of the last message. The group is
        # torn down under that lock, and waits for them.
        time.sleep(0.2)
        dist.destroy_process_group()

    # ------------------------------------------------------------------------- with the others

    def say(self, text):
        if self.first:
            print(text, flush=True)

    def sum_over_ranks(self, number):
        "The sum of every process's number, as a float."
        if self.size == 1:
            return float(number)
        total = torch.tensor(float(number), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def first_does(self, work):
        """Rank 0 does something that all depend on; if it fails, all fail, each with its
        message."""
        failed = [None]
        if self.first:
            try:
                work()
            except (ValueError, OSError, subprocess.CalledProcessError) as error:
                failed = [str(error)]
        if self.size > 1:
            dist.broadcast_object_list(failed)
        if failed[0] is not None:
            raise Refused(failed[0])

    def listen(self):
        """From now on Ctrl-C, SIGTERM and a closed terminal ask for a stop after the current step.
        A second Ctrl-C does not wait."""
        def ask(number, frame):
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number
        asking = [signal.SIGINT, signal.SIGTERM]
        # Windows has no SIGHUP, and nohup wants it to be ignored
        if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            asking.append(signal.SIGHUP)
        self.handlers = {number: signal.signal(number, ask) for number in asking}

    def share(self, loss, count):
        """A step's one message, and its one wait for the GPU: (the sum of the processes' losses, of
        their counts, the number of a signal that one of them got, or 0: all stop together)."""
        if self.size == 1:
            return float(loss), count, self.signal
        # full_like and not tensor: a copy to the GPU would wait for it
        mine = torch.stack([loss.double(), *(torch.full_like(loss, number, dtype=torch.float64)
                                             for number in (count, self.signal))])
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        losses, counts, signals = torch.stack(every).cpu().unbind(1)
        return losses.sum().item(), counts.sum().item(), int(signals.max())

    def wait(self):
        if self.size > 1:
            dist.barrier()

    # ------------------------------------------------------------------------- on its device

    def usage(self, flops, seconds):
        """{'mfu': the share of the GPUs' FLOPs that a step used, 'memory_gb': the most so far};
        None where that is not known."""
        memory = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.cuda else None
        return dict(mfu=self.peak_flops and round(flops / seconds / self.peak_flops, 4),
                    memory_gb=memory and round(memory, 2))


    def let_go(self):
        "Free an old model: a compiled Block is in a circle with itself, and would stay."
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def ddp(self, model):
        # Without find_unused_parameters DDP sorts its buckets anew after a process's first step: on
        # three ranks or more a resumed run would add gradients in another order. As views of the
        # buckets, gradients are there once; the buffers, rotary tables, are the same everywhere.
        with warnings.catch_warnings(action='ignore', category=FutureWarning):  # another name soon
            return DistributedDataParallel(model, find_unused_parameters=True,
                                           broadcast_buffers=False, gradient_as_bucket_view=True)


def has_compiler():
    return any(map(shutil.which, ('c++', 'g++', 'clang++', 'cl')))
