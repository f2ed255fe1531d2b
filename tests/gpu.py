"""What no CPU can say of training on a GPU, in two minutes: compiled against eager, a growth, a
stop and a resume, a core that runs r times, and the memory that a growth leaves. Each question
fails by itself, and a line says what was measured.

Usage:
    python tests/gpu.py             # make gpu_test: needs a GPU, and toy data
    python tests/gpu.py --tiny      # on a CPU, to try the file itself
"""
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from nanodepth import train as train_file  # noqa: E402
from nanodepth.commands import cut  # noqa: E402
from nanodepth.grow import lidas, untie  # noqa: E402
from nanodepth.model import LM, ModelConfig  # noqa: E402
from nanodepth.report.logs import growths, log_of  # noqa: E402
from nanodepth.train import Config, machine, make_optimizers, read, train, wrap  # noqa: E402

TINY = '--tiny' in sys.argv
OUT = Path(tempfile.mkdtemp(prefix='gpu-test-'))
SHAPE = (dict(n_layer=4, n_embd=32, n_head=2, vocab_size=300) if TINY else
         dict(n_layer=8, n_embd=512, n_head=8, vocab_size=49_152))
RUN = dict(**SHAPE, head_dim=SHAPE['n_embd'] // SHAPE['n_head'], optimizer='adamw', lr=1e-3,
           steps=20, warmup_steps=4, decay_steps=4, batch_size=8 if TINY else 32,
           context=32 if TINY else 512, log_every=1, eval_every=20, eval_batches=2, save_every=100)


def run(name, **settings):
    "Train in OUT/name, and return the log."
    given = RUN | dict(out_dir=OUT / name) | settings
    if 'init_from' in given:        # the checkpoint decides the shape
        given = {key: value for key, value in given.items() if key not in (*SHAPE, 'head_dim')}
    train(read(Config, [f'--{key}={value}' for key, value in given.items()]))
    return log_of(OUT / name)


def losses(log):
    return [line['loss'] for line in log if 'loss' in line]


def apart(a, b):
    "The largest difference of two runs' losses, step by step."
    return max(abs(x - y) for x, y in zip(losses(a), losses(b), strict=True))


def compiled_against_eager():
    eager, compiled = run('eager', compile=False), run('compiled', compile=True)
    assert apart(eager, compiled) < 0.05
    first, last = losses(compiled)[0], losses(compiled)[-1]
    assert last < first
    return (f'losses differ by at most {apart(eager, compiled):.1e} over 20 steps '
            f'({first:.3f} to {last:.3f})')


def a_growth():
    log = run('grown', compile=True, grow='lidas', grow_block=2)
    grown = [line['grown'] for line in growths(log)]
    assert grown and all(abs(g['after'] - g['before']) < 0.5 for g in grown)
    return 'validation loss ' + ', then '.join(f'{g["before"]:.3f} to {g["after"]:.3f}'
                                              for g in grown)


def a_stop_and_a_resume():
    whole = run('whole', compile=True)

    backward, calls = train_file.backward, []

    def stop(*args):            # a signal in the seventh step
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(*args)
    train_file.backward = stop
    stopped = losses(run('stopped', compile=True))
    resumed = run('stopped', compile=True)
    assert len(stopped) == 7 and apart(whole, resumed) < 0.02
    return (f'stopped after {len(stopped)} steps; losses differ by at most '
            f'{apart(whole, resumed):.1e}')


def a_core_that_runs_r_times():
    cut.main([str(OUT / 'whole'), '1-2-1', f'--out={OUT / "cut"}'])
    settings = dict(init_from=OUT / 'cut', recurrence=4, backprop_depth=2)
    eager = run('core_eager', compile=False, **settings)
    compiled = run('core', compile=True, **settings)
    assert apart(eager, compiled) < 0.05
    drawn = [line['r'] for line in compiled if 'r' in line]
    assert len(set(drawn)) > 1
    return f'r was {drawn}; losses differ by at most {apart(eager, compiled):.1e}'


def memory_after_a_growth():
    if TINY:
        return 'needs a GPU'
    config = read(Config, [f'--{key}={value}' for key, value in RUN.items()] + [
        '--device=cuda', '--compile=true', f'--out_dir={OUT / "memory"}'])
    shape = {key: RUN[key] for key in (*SHAPE, 'context', 'head_dim')}
    held = []
    with machine(config) as here:
        for grows in (False, True):
            model = LM(ModelConfig(**shape | (dict(n_layer=4) if grows else {}))).to(here.device)
            optimizers = make_optimizers(model, config)
            for _ in range(1 + grows):
                wrapped = wrap(here, model)
                x = torch.randint(1000, (8, RUN['context']), device=here.device)
                with here.autocast():
                    wrapped(x, x).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                if grows and len(model.layers) == 4:
                    wrapped = None
                    model = untie(model, lidas(4, 4), optimizers)
            wrapped = None
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
                     a_core_that_runs_r_times,
                     memory_after_a_growth):
        began = time.monotonic()
        try:
            answer = question()
        except Exception:
            failed += 1
            answer = traceback.format_exc(limit=4)
        name = question.__name__.replace('_', ' ')
        print(f'\n# {name}: {answer} ({time.monotonic() - began:.0f} s)', flush=True)
    sys.exit(failed)
