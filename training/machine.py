"Which process this is, its device, and how several processes train one model."
import contextlib
import functools
import os
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

RANK, SIZE, LOCAL_RANK = 0, 1, 0
if 'RANK' in os.environ:        # torchrun says which process this is
    RANK, SIZE = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    LOCAL_RANK = int(os.environ['LOCAL_RANK'])

# Dense bfloat16 FLOPs per second. The first name that a GPU has counts; 0: it is not known.
PEAKS = {'Laptop': 0, '4090 D': 0, 'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H200 NVL': 835e12,
         'H200': 989e12, 'H100': 989e12, 'B200': 2250e12, 'A100': 312e12, 'L40S': 362e12,
         'L40': 181e12, '4090': 165e12}


@dataclass
class Machine:
    device: torch.device
    cuda: bool
    peak: float                 # FLOPs a second of all of the GPUs; 0: it is not known
    compiles: bool
    autocast: Callable          # a context: bfloat16, or nothing


def machine_of(c):
    "The Machine of this process, as its settings say."
    kind = c.device
    if kind == 'auto':
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = accelerator.type if accelerator else 'cpu'
    cuda = kind == 'cuda'
    device = torch.device(f'cuda:{LOCAL_RANK}' if cuda else kind)
    bfloat16 = c.dtype == 'bfloat16'
    peak = 0
    if cuda:
        require(torch.cuda.is_available(), 'device=cuda: torch finds no GPU here')
        torch.cuda.set_device(device)
        # products of float32 numbers in TF32, unless float32 was asked for
        torch.set_float32_matmul_precision('highest' if c.dtype == 'float32' else 'high')
        bfloat16 |= c.dtype == 'auto' and torch.cuda.get_device_capability() >= (8, 0)
        peak = next((PEAKS[each] for each in PEAKS if each in torch.cuda.get_device_name()), 0)
    autocast = functools.partial(torch.autocast, kind, torch.bfloat16, enabled=bfloat16)
    return Machine(device, cuda, peak * SIZE, cuda if c.compile == 'auto' else c.compile, autocast)


@contextlib.contextmanager
def together(machine):
    "In here the processes of a run can talk to each other."
    if SIZE > 1:                # the others may wait long while the first one saves
        dist.init_process_group('nccl' if machine.cuda else 'gloo', timeout=timedelta(hours=1),
                                device_id=machine.device if machine.cuda else None)
    yield       # after an error the process just ends: NCCL would wait for the others first
    if SIZE > 1:
        time.sleep(0.2)         # gloo's threads must have let go of their last message
        dist.destroy_process_group()


@contextlib.contextmanager
def stopping():
    "In here Ctrl-C and SIGTERM go into the list. So a step, and its checkpoint, can end first."
    signals = []
    numbers = signal.SIGINT, signal.SIGTERM
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
    if SIZE == 1:
        return model
    # DDP has to search for unused weights if the order leaves a layer out, or if a Span or a loss
    # of your own might. On CPUs it always searches, and averages with a hook: without both, DDP's
    # first step would round differently from its later ones, and a resumed run has a first step
    # again.
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
    "x of each process: (SIZE, ..)."
    if SIZE == 1:
        return x[None]
    every = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(every, x)
    return torch.stack(every)


def gathered(machine, numbers):
    "Some numbers of each process: (SIZE, n)."
    own = torch.tensor(numbers, dtype=torch.float64)
    return from_all(own if SIZE == 1 else own.to(machine.device)).cpu()


def exchange(machine, loss, signals):
    "(the loss, added up over the processes, the highest signal of any, or 0)."
    numbers = gathered(machine, [float(loss), max(signals, default=0)])
    return numbers[:, 0].sum().item(), int(numbers[:, 1].max())


def say(text):
    "A line on the terminal, above the bar."
    if RANK == 0:
        tqdm.write(text)
        sys.stdout.flush()
