"""Several processes on a CPU: one that hangs or dies ends the run by its name."""
import os
import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT, ranks
from test_train import command, config, log_of  # noqa: F401

from nanodepth.__main__ import main as nanodepth
from nanodepth.engine import checkpoint

HANGS = """
import os, sys, time, signal
sys.path.insert(0, os.getcwd())
from nanodepth import train
update, calls = train.backward, []
def hanging(*args):
    calls.append(1)
    if len(calls) == 3 and os.environ['RANK'] == '1':
        {what}
    return update(*args)
train.backward = hanging
import nanodepth.engine.world
nanodepth.engine.world.PATIENCE = nanodepth.engine.world.timedelta(seconds=4)
train.main(sys.argv[1:])
"""


@pytest.mark.parametrize('what, words', [
    ('time.sleep(600)', r'rank0\]: .*Timed out waiting 4000ms'),
    ('os.kill(os.getpid(), signal.SIGKILL)', r'rank *: 1 \(local_rank: 1\)')],
    ids=['hangs', 'dies'])
def test_a_process_that_hangs_or_dies_ends_the_run_by_its_name(config, tmp_path, what, words):
    c = config(optimizer='adamw', save_every=2)
    (tmp_path / 'hangs.py').write_text(HANGS.format(what=what))
    began = time.monotonic()
    line = [part if part != 'train.py' else str(tmp_path / 'hangs.py') for part in command(c,
            ranks=2)]
    run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | dict(OMP_NUM_THREADS='1'), timeout=100)
    assert run.returncode != 0 and re.search(words, run.stderr), run.stderr
    if what.startswith('time'):     # and where rank 0 stood, which waited
        assert re.search(r'rank0\]:.*world.sum_over_ranks\(count\)', run.stderr), run.stderr
    assert time.monotonic() - began < 70
    subprocess.run(['pkill', '-KILL', '-f', str(tmp_path / 'hangs.py')], check=False)
    assert checkpoint.load(c.out_dir)['step'] == 2
    if what.startswith('os.kill'):
        nanodepth('train', [*command(c)[2:]])                 # on another number of processes
        assert log_of(c)[-1]['step'] == 12


def count_graphs():
    "Before a run: Blocks are compiled by a backend that says how many graphs it was given."
    import sys

    import torch

    import nanodepth.engine.world
    compile_block, graphs = torch.nn.Module.compile, []

    def backend(graph, inputs):
        graphs.append(len(inputs))
        return graph
    torch.nn.Module.compile = lambda self, **kw: compile_block(self, backend=backend)
    leave = nanodepth.engine.world.World.__exit__

    def leaving(self, *args):
        print(f'{len(graphs)} graphs', file=sys.stderr)
        leave(self, *args)
    nanodepth.engine.world.World.__exit__ = leaving


def test_ddp_does_not_cut_a_compiled_block_into_pieces(config):      # noqa: F811
    c = config(compile=True, n_embd=256, n_layer=2, steps=2, warmup_steps=0, decay_steps=0)
    run = ranks(command(c)[2:], before=count_graphs)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count('1 graphs') == 2, run.stderr[-2000:]
