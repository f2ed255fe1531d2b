"Which process this is, its device, and how several processes train one model."
import contextlib
import functools
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from model import LM, require, unrolled
from training.plan import has_own_parts

# Dense bfloat16 FLOPs per second. The first name that a GPU has counts; 0: it is not known.
PEAKS = {'Laptop': 0, '4090 D': 0, 'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H200 NVL': 835e12,
         'H200': 989e12, 'H100': 989e12, 'B200': 2250e12, 'A100': 312e12, 'L40S': 362e12,
         'L40': 181e12, '4090': 165e12}


@dataclass
class Machine:
    rank: int                   # the number of this process ...
    size: int                   # ... among so many
    device: torch.device
    cuda: bool
    peak: float                 # FLOPs a second of all of the GPUs; 0: it is not known
    compiles: bool
    autocast: Callable          # a context: bfloat16, or nothing


def machine_of(c):
    "Return the Machine of this process. torchrun tells each process its number in the environment."
    rank, size, local = (int(os.environ.get(name, default)) for name, default in
                         (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    kind = c.device
    if kind == 'auto':
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = accelerator.type if accelerator else 'cpu'
    cuda = kind == 'cuda'
    device = torch.device(f'cuda:{local}' if cuda else kind)
    bfloat16 = c.dtype == 'bfloat16'
    peak = 0
    if cuda:
        require(torch.cuda.is_available(), 'device=cuda: torch finds no GPU here')
        torch.cuda.set_device(device)
        # products of float32 numbers in TF32, unless float32 was asked for
        torch.set_float32_matmul_precision('highest' if c.dtype == 'float32' else 'high')
        bfloat16 |= c.dtype == 'auto' and torch.cuda.get_device_capability() >= (8, 0)
        gpu = torch.cuda.get_device_name()
        peak = next((PEAKS[name] for name in PEAKS if re.search(rf'\b{name}\b', gpu)), 0)
    autocast = functools.partial(torch.autocast, kind, torch.bfloat16, enabled=bfloat16)
    compiles = cuda if c.compile == 'auto' else c.compile
    return Machine(rank, size, device, cuda, peak * size, compiles, autocast)


def join_processes(machine):
    """Let the processes of a run talk to each other. A second run in the same processes uses the
    same group, because a group that was destroyed leaves keys behind that confuse the next one."""
    if machine.size > 1 and not dist.is_initialized():
        dist.init_process_group('nccl' if machine.cuda else 'gloo', timeout=timedelta(hours=1),
                                device_id=machine.device if machine.cuda else None)


def leave_processes():
    "End what join_processes began. After an error a process just ends, and waits for no other."
    if dist.is_initialized():
        time.sleep(0.2)         # gloo's threads must have let go of their last message
        dist.destroy_process_group()


def process():
    "Return the number of this process, and how many there are."
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextlib.contextmanager
def stopping():
    """Inside this `with`, Ctrl-C, SIGTERM and a closed terminal put their number into the list. So
    a step can end first, and a checkpoint be saved."""
    signals = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)           # under nohup it is ignored, and the run goes on
    old = [signal.signal(number, lambda number, _: signals.append(number)) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, old):
            signal.signal(number, handler)


def compile_and_distribute(machine, model, c):
    """Compile each Block by itself, so that a growth compiles nothing, and wrap the model in DDP if
    there are several processes. Returns what computes the loss in a training step."""
    if machine.compiles:
        torch._dynamo.config.optimize_ddp = False       # it would cut each Block at every 25 MB
        for block in model.layers:
            block.compile()
        if machine.cuda:
            model.cross_entropy = torch.compile(LM.cross_entropy, dynamic=False)
    if machine.size == 1:
        return model
    # On a GPU, DDP searches for unused weights only if there may be some: the order leaves a layer
    # out, or a Span or a loss of your own might. On a CPU it always searches and averages with a
    # hook, because otherwise its first step rounds differently from later ones, and a resumed run
    # has a first step again.
    runs_all = {*unrolled(model.order)} == {*range(len(model.layers))}
    runs_all &= not has_own_parts(model, c)
    with warnings.catch_warnings(action='ignore', category=FutureWarning):      # DDP's own
        wrapped = DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True,
            find_unused_parameters=not machine.cuda or not runs_all)
    if not machine.cuda:
        wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def from_all(x):
    "Return x of each process: (size, ...)."
    rank, size = process()
    if size == 1:
        return x[None]
    every = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(every, x)
    return torch.stack(every)


def gathered(machine, numbers):
    "Return some numbers of each process: (size, n)."
    own = torch.tensor(numbers, dtype=torch.float64)
    return from_all(own if machine.size == 1 else own.to(machine.device)).cpu()


def exchange(machine, loss, signals):
    "Return the loss, added up over the processes, and the highest signal that any got, or 0."
    numbers = gathered(machine, [float(loss), max(signals, default=0)])
    return numbers[:, 0].sum().item(), int(numbers[:, 1].max())


def say(text):
    "Print a line on the terminal of the first process, above the bar."
    if process()[0] == 0:
        tqdm.write(text)
        sys.stdout.flush()
