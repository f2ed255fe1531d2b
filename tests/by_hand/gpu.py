"""What no CPU can say of training on a GPU, in two minutes: compiled against eager, a growth, a
stop and a resume, a core that runs r times, and the memory that a growth leaves. Each question
fails by itself, and a line says what was measured.

Usage:
    python tests/by_hand/gpu.py             # make gpu_test: needs a GPU, and toy data
    python tests/by_hand/gpu.py --tiny      # on a CPU, to try the file itself
"""
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanodepth import train as train_file  # noqa: E402
from nanodepth.commands import cut  # noqa: E402
from nanodepth.grow import lidas, untie  # noqa: E402
from nanodepth.model import LM, ModelConfig  # noqa: E402
from nanodepth.report.logs import log_of  # noqa: E402
from nanodepth.common.options import read  # noqa: E402
from nanodepth.train import train  # noqa: E402
from nanodepth.training.optimizers import make_optimizers  # noqa: E402
from nanodepth.training.plan import Config  # noqa: E402

TINY = '--tiny' in sys.argv
OUT = Path(tempfile.mkdtemp(prefix='gpu-test-'))
SHAPE = (dict(n_layer=4, n_embd=32, n_head=2, vocab_size=300) if TINY else
         dict(n_layer=8, n_embd=512, n_head=8, vocab_size=49_152))
RUN = dict(optimizer='adamw', lr=1e-3, steps=20, warmup_steps=4, decay_steps=4,
           batch_size=8 if TINY else 32, context=32 if TINY else 512, log_every=1, eval_every=20,
           eval_batches=2)


def run(name, **settings):
    "Train in OUT/name: the log's losses, and its lines."
    shape = {} if 'init_from' in settings else SHAPE        # the checkpoint decides it
    given = RUN | dict(out_dir=OUT / name) | shape | settings
    train(read(Config, [f'--{key}={value}' for key, value in given.items()]))
    log = log_of(OUT / name)
    return [line['loss'] for line in log if 'loss' in line], log


def alike(a, b, most):
    "How far apart the losses of two runs are at most, step by step."
    apart = max(abs(x - y) for x, y in zip(a, b, strict=True))
    assert apart < most
    return f'losses differ by at most {apart:.1e}, and end at {a[-1]:.3f}'


def compiled_against_eager():
    (eager, _), (compiled, log) = (run(f'compiled-{how}', compile=how) for how in (False, True))
    assert compiled[-1] < compiled[0]
    shares = [line['mfu'] for line in log if line.get('mfu')]
    return f'{alike(eager, compiled, 0.05)}; at most {max(shares, default=0):.1%} of the peak'


def a_growth():
    _, log = run('grown', compile=True, grow='lidas', grow_block=2)
    grown = [line['grown'] for line in log if 'grown' in line]
    assert grown and all(abs(g['after'] - g['before']) < 0.5 for g in grown)
    return 'validation loss ' + ', then '.join(f'{g["before"]:.3f} to {g["after"]:.3f}'
                                              for g in grown)


def a_stop_and_a_resume():
    "In bfloat16, where the GPU is fast at it."
    backward, calls = train_file.backward, []

    def stop(*args):            # a signal in the seventh step
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(*args)
    train_file.backward = stop
    stopped, _ = run('stopped', compile=True)
    resumed, _ = run('stopped', compile=True)
    assert len(stopped) == 7
    return alike(run('whole', compile=True)[0], resumed, 0.02)


def a_core_that_runs_r_times():
    cut.main([str(OUT / 'whole'), '1-2-1', f'--out={OUT / "cut"}'])
    settings = dict(init_from=OUT / 'cut', recurrence=4, backprop_depth=2)
    eager, _ = run('core_eager', compile=False, **settings)
    compiled, log = run('core', compile=True, **settings)
    drawn = [line['r'] for line in log if 'r' in line]
    assert len({*drawn}) > 1
    return f'r was {drawn}; {alike(eager, compiled, 0.05)}'


def memory_after_a_growth():
    "Beside that of a model whose layers are all there from the beginning."
    if TINY:
        return 'needs a GPU'
    held = []
    for first in (8, 4):
        model = LM(ModelConfig(**SHAPE | dict(n_layer=first), context=RUN['context'])).cuda()
        optimizers = make_optimizers(model, Config(optimizer='adamw'))
        for _ in range(2):
            for block in model.layers:
                block.compile()
            x = torch.randint(1000, (8, RUN['context']), device='cuda')
            with torch.autocast('cuda', torch.bfloat16):
                loss = model(x, x)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if len(model.layers) < 8:
                model = untie(model, lidas(4, 4), optimizers)
        loss = block = None
        gc.collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
        model = optimizers = optimizer = None
        gc.collect()
    fresh, grown = held
    assert grown < fresh * 1.05
    return f'{grown / 1e6:.0f} MB, and {fresh / 1e6:.0f} MB where all layers are there from step 0'


if __name__ == '__main__':
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'a CPU',
          torch.__version__, flush=True)
    failed = 0
    for question in (compiled_against_eager, a_growth, a_stop_and_a_resume,
                     a_core_that_runs_r_times, memory_after_a_growth):
        began = time.monotonic()
        try:
            answer = question()
        except Exception:
            failed += 1
            answer = traceback.format_exc(limit=4)
        name = question.__name__.replace('_', ' ')
        print(f'\n# {name}: {answer} ({time.monotonic() - began:.0f} s)', flush=True)
    sys.exit(failed)
