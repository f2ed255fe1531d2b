"""Check on a GPU what no CPU can show: compiled against eager, a growth, a stop and a resume, a
core, a loss of your own, several processes, the memory after a growth, and the time of a step. It
takes about four minutes. Each question fails by itself, and a line prints what was measured.

Usage:
    python tests/by_hand/gpu.py             # or make gpu_test: needs one GPU, and asks more of two
    python tests/by_hand/gpu.py --tiny      # on a CPU, small: this runs in the test suite

Nothing has run on a GPU since commit a8c26fc. The last question compares a step with that commit.
"""
import gc
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path[:0] = map(str, (Path(__file__).resolve().parents[2], Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from helpers import ROOT, log_of, stop_at, write_dataset  # noqa: E402

from grow import lidas, states_of_copies, untie  # noqa: E402
from model import LM, ModelConfig  # noqa: E402
from train import train  # noqa: E402
from training.checkpoint import read_log  # noqa: E402
from training.optimizers import load_states, make_optimizers, states_of  # noqa: E402
from training.plan import Config  # noqa: E402
from training.settings import read  # noqa: E402

TINY = '--tiny' in sys.argv
OLD = 'a8c26fc'
OUT = Path(tempfile.mkdtemp(prefix='gpu-test-'))
SHAPE = (dict(n_layer=4, n_embd=32, n_head=2, head_dim=16, vocab_size=300) if TINY else
         dict(n_layer=8, n_embd=512, n_head=8, head_dim=64, vocab_size=49_152))
RUN = dict(optimizer='adamw', lr=1e-3, steps=8 if TINY else 20, warmup_steps=2, decay_steps=2,
           batch_size=8 if TINY else 32, context=32 if TINY else 512, log_every=1, eval_every=20,
           eval_batches=2, data=OUT / 'data', device='cpu' if TINY else 'cuda')
NEAR = 1e-4 if TINY else 0.02       # the largest difference of two losses that should be equal


def words(name, **settings):
    "Return the command line of a small run in OUT/name."
    shape = {} if 'init_from' in settings else SHAPE        # a checkpoint decides the shape
    settings = RUN | shape | dict(out_dir=OUT / name) | settings
    return [f'--{key}={value}' for key, value in settings.items()]


def run(name, *files, **settings):
    "Train in this process. Return the losses and all lines of the log."
    c = read(Config, [*files, *words(name, **settings)])
    train(c)
    log = log_of(c)
    return [line['loss'] for line in log if 'loss' in line], log


def difference(a, b, most):
    "Return in words by how much the losses of two runs differ. More than `most` is a failure."
    largest = max(abs(x - y) for x, y in zip(a, b, strict=True))
    assert largest < most, f'losses differ by {largest:.1e}'
    return f'losses differ by at most {largest:.1e}, and end at {a[-1]:.3f}'


def compiled_and_eager_training():
    compiles = not TINY         # on a CPU a compiler may be missing
    (eager, _), (compiled, log) = (run(f'compiled-{how}', compile=how)
                                   for how in (False, compiles))
    assert compiled[-1] < compiled[0]
    shares = [line['mfu'] for line in log if line.get('mfu')]
    return f'{difference(eager, compiled, 0.05)}; at most {max(shares, default=0):.1%} of the peak'


def a_growth():
    _, log = run('grown', grow='lidas', grow_block=2)
    grown = [line['grown'] for line in log if 'grown' in line]
    assert grown and all(abs(event['after'] - event['before']) < 0.5 for event in grown)
    return 'validation loss ' + ', then '.join(f'{event["before"]:.3f} to {event["after"]:.3f}'
                                              for event in grown)


def a_stop_and_a_resume():
    "In bfloat16 on a GPU, and with a growth behind it."
    settings = dict(grow='lidas', grow_block=2)
    stop_at(5)
    stopped, _ = run('stopped', **settings)
    resumed, _ = run('stopped', **settings)
    assert len(stopped) == 5
    return difference(run('whole', **settings)[0], resumed, NEAR)


def a_core_that_runs_r_times():
    settings = dict(init_from=OUT / 'grown', cut='1-2-1', recurrence=4, backprop_depth=2,
                    curriculum=0.0)
    eager, _ = run('core-eager', compile=False, **settings)
    losses, log = run('core', **settings)
    drawn = [line['r'] for line in log if 'r' in line]
    assert len({*drawn}) > 1
    return f'r was {drawn}; {difference(eager, losses, 0.05)}'


def a_span_and_a_loss_of_your_own():
    eager, _ = run('ouro-eager', 'config/ideas/ouro.py', compile=False, n_layer=2)
    losses, _ = run('ouro', 'config/ideas/ouro.py', n_layer=2)
    return difference(eager, losses, 0.05)


def processes():
    "With one process and with two, DDP computes what a single process does. Two need two GPUs."
    n_gpus, found = 2 if TINY else torch.cuda.device_count(), []
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    for name, files, settings in (('plain', [], {}),
                                  ('ouro', ['config/ideas/ouro.py'], dict(n_layer=2))):
        alone, _ = run(f'{name}-alone', *files, **settings)
        for n in range(2 if TINY else 1, min(n_gpus, 2) + 1):
            line = [*files, *words(f'{name}-{n}', **settings)]
            subprocess.run([*torchrun, f'--nproc_per_node={n}', 'train.py', *line], cwd=ROOT,
                           check=True, capture_output=True)
            log = read_log(OUT / f'{name}-{n}' / 'log.jsonl')
            losses = [row['loss'] for row in log if 'loss' in row]
            found.append(f'{name} with {n}: {difference(alone, losses, NEAR)}')
    return '; '.join(found) + ('' if n_gpus > 1 else '; two processes need a second GPU')


def memory_after_a_growth():
    "Compare it with a model that has all layers from the beginning."
    device, held = RUN['device'], []
    for n_layer in (SHAPE['n_layer'], SHAPE['n_layer'] // 2):
        shape = SHAPE | dict(n_layer=n_layer, context=RUN['context'])
        model = LM(ModelConfig(**shape)).to(device)
        optimizers = make_optimizers(model, Config(optimizer='adamw'))
        for _ in range(2):
            x = torch.randint(256, (2, RUN['context']), device=device)
            with torch.autocast(device, torch.bfloat16):
                loss = model(x, x)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if len(model.layers) < SHAPE['n_layer']:
                order, states = lidas(n_layer, n_layer), states_of(optimizers, model)
                model = untie(model, order)
                optimizers = make_optimizers(model, Config(optimizer='adamw'))
                load_states(optimizers, model, {name: states_of_copies(of_optimizer, order)
                                                for name, of_optimizer in states.items()})
                states = None
        loss = None
        gc.collect()
        if TINY:
            held.append(sum(tensor.nbytes for optimizer in optimizers
                            for state in optimizer.state.values() for tensor in state.values()))
        else:
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_allocated())
        model = optimizers = optimizer = None
        gc.collect()
    all_layers, grown = held
    assert grown < 1.05 * all_layers
    return f'{grown / 1e6:.1f} MB, and {all_layers / 1e6:.1f} MB with all layers from step 0'


def a_step_compared_with_an_older_commit():
    "Train with both versions of train.py in turn, each in its own process."
    if subprocess.run(['git', 'cat-file', '-e', OLD], cwd=ROOT, capture_output=True).returncode:
        return f'not compared: commit {OLD} is not in this clone'
    tree = OUT / 'old'
    subprocess.run(['git', 'archive', f'--output={OUT}/old.tar', OLD], cwd=ROOT, check=True)
    shutil.unpack_archive(OUT / 'old.tar', tree)
    numbers = {tree: [], ROOT: []}
    for turn in range(1 if TINY else 3):
        for folder in numbers:
            name = f'step-{folder.name}-{turn}'
            subprocess.run([sys.executable, 'train.py', *words(name)], cwd=folder, check=True,
                           capture_output=True, env=os.environ | dict(PYTHONPATH=str(folder)))
            lines = read_log(OUT / name / 'log.jsonl')[3:]
            numbers[folder].append((
                statistics.median(1 / line['tokens_per_s'] for line in lines),
                max(line.get('memory_gb') or 0 for line in lines)))
    (old, old_memory), (new, new_memory) = (map(statistics.median, zip(*numbers[folder]))
                                            for folder in (tree, ROOT))
    memory = f'{new_memory:.2f} GB and {old_memory:.2f} GB' if old_memory else 'no memory logged'
    return f'a step takes {new / old:.3f} times as long as at {OLD}; {memory}'


QUESTIONS = (compiled_and_eager_training, a_growth, a_stop_and_a_resume, a_core_that_runs_r_times,
             a_span_and_a_loss_of_your_own, processes, memory_after_a_growth,
             a_step_compared_with_an_older_commit)


def main():
    "Ask all questions. Return how many failed."
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'a CPU',
          torch.__version__, flush=True)
    tokens = np.cumsum(np.random.default_rng(0).integers(1, 4, 400_000)) % 97
    for split, n in (('train', 400_000), ('val', 40_000)):
        write_dataset(OUT / 'data', split, tokens[:n])
    failed = 0
    for question in QUESTIONS:
        began = time.monotonic()
        try:
            answer = question()
        except Exception:
            failed += 1
            answer = f'FAILED {traceback.format_exc(limit=4)}'
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        name = question.__name__.replace('_', ' ')
        print(f'\n# {name}: {answer} ({time.monotonic() - began:.0f} s)', flush=True)
    return failed


if __name__ == '__main__':
    sys.exit(main())
