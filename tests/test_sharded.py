"""sharded.py and watch.py, with two processes on a CPU: the numbers of one, checkpoints for any
number, a process that hangs is named."""
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import ranks
from test_train import ROOT, command, config, log_of, same, weights_of  # noqa: F401

import nanodepth
from common.errors import Refused
from engine import checkpoint
from engine.settings import Config, check
from model import LM, ModelConfig
from retrofit import surgery
from train import train

GROWN = dict(optimizer='adamw', grow='lidas', grow_block=1, n_layer=3, eval_every=4)


def close(a, b):
    for one, two in zip(a, b, strict=True):
        for what in ('loss', 'val_loss', 'grad_norm'):
            assert one.get(what, 0) == pytest.approx(two.get(what, 0), rel=1e-5), (what,
                    one['step'])
        assert one['n_layer'] == two['n_layer'] and one['depth'] == two['depth']


def test_growing_in_parts_is_growing_saved_by_two_and_gone_on_by_one(config):      # noqa: F811
    "And the loop of the cool-down, on one process and on two, from what two have saved."
    whole, trunk = config('whole', cooldown_loop='1-1x2-1', **GROWN), config('trunk', shard=True,
            **GROWN | dict(steps=8, decay_steps=0))
    train(whole)
    run = ranks(command(trunk)[2:])
    assert run.returncode == 0, run.stderr
    close(log_of(trunk),
          [{k: v for k, v in line.items() if k != 'kinds'} for line in log_of(whole)[:9]])
    parts = [p.name for p in Path(trunk.out_dir).glob('parts_*')]
    # the older ones are gone
    assert len(parts) == 1 and 'model' not in checkpoint.load(trunk.out_dir, whole=False)
    assert len(checkpoint.load_model(trunk.out_dir).layers) == 3        # any script opens it
    branch, more = (config(name, cooldown_loop='1-1x2-1', shard=True, **GROWN)
                    for name in ('branch', 'more'))
    shutil.copytree(trunk.out_dir, branch.out_dir)
    train(branch)        # alone: there is nothing to cut
    close(log_of(branch), log_of(whole))
    shutil.copytree(trunk.out_dir, more.out_dir)
    run = ranks(command(more)[2:])
    assert run.returncode == 0, run.stderr
    close(log_of(more), log_of(whole))
    for name, tensor in weights_of(whole).items():
        torch.testing.assert_close(weights_of(more)[name], tensor, rtol=1e-3, atol=1e-5)


def test_truncated_recurrences_in_parts_and_a_resume(config, tmp_path):      # noqa: F811
    torch.manual_seed(0)
    model = surgery(LM(ModelConfig(vocab_size=257, n_layer=4, n_embd=32, n_head=2, context=16)),
                    '1-2-1', mean=4, backprop_depth=2, inject='linear')
    checkpoint.save(tmp_path / 'cut', **checkpoint.describe(model), optimizers=[], step=0, flops=0)
    (tmp_path / 'cut/run.json').write_text('{"tokenizer": "bytes"}')
    fields = dict(optimizer='adamw', init_from=str(tmp_path / 'cut'), steps=6, decay_steps=2,
                  warmup_steps=0, curriculum=0.0, grad_accum=2, eval_every=2)
    alone, both = config('alone', **fields), config('both', shard=True, save_every=3, **fields)
    train(alone)
    # one process begins, and two go on with their parts of it
    train(config('both', shard=True, **fields | dict(steps=4, decay_steps=0)))
    assert not list(Path(both.out_dir).glob('parts_*'))
    run = ranks(command(both)[2:])
    assert run.returncode == 0, run.stderr
    close(log_of(both), log_of(alone))
    assert max(line.get('r', 0) for line in log_of(alone)) > 2
    assert (checkpoint.load(both.out_dir)['kind'] == 'recurrent' and not same(weights_of(both),
            torch.load(tmp_path / 'cut/ckpt.pt')['model']))


def test_parts_that_are_missing_are_said(config, tmp_path):      # noqa: F811
    state = checkpoint.describe(LM(ModelConfig(n_layer=1, n_embd=32, n_head=2)))
    state.pop('model')
    checkpoint.save(tmp_path / 'x', **state, parts='parts_3_0', optimizers=[], step=3)
    with pytest.raises(Refused, match='points to parts_3_0, which cannot be read'):
        checkpoint.load_model(tmp_path / 'x')
    with pytest.raises(Refused, match="shard=True needs optimizer='adamw', not 'muon'"):
        check(Config(shard=True))


HANGS = """
import os, sys, time, signal
sys.path.insert(0, os.getcwd())
import train
update, calls = train.take_step, []
def hanging(*args):
    calls.append(1)
    if len(calls) == 3 and os.environ['RANK'] == '1':
        {what}
    return update(*args)
train.take_step = hanging
train.main(sys.argv[1:])
"""


@pytest.mark.parametrize('what, words', [
    ('time.sleep(600)', r'Held up by rank 1 \(.*process \d+\) at the batch of step 3'),
    pytest.param('os.kill(os.getpid(), signal.SIGSTOP)',
                 r'Held up by rank 1 \(.*process \d+\), which says nothing any more',
                 marks=pytest.mark.skipif(not os.environ.get('TORTURE'),
                                          reason='torchrun waits half a minute for it: make '
                                          'families')),
    ('os.kill(os.getpid(), signal.SIGKILL)', r'rank *: 1 \(local_rank: 1\)')],
    ids=['hangs', 'stopped', 'dies'])
def test_a_process_that_hangs_or_dies_ends_the_run_by_its_name(config, tmp_path, what, words):
    c = config(optimizer='adamw', save_every=2, patience=4)
    (tmp_path / 'hangs.py').write_text(HANGS.format(what=what))
    began = time.monotonic()
    line = [part if part != 'train.py' else str(tmp_path / 'hangs.py') for part in command(c,
            ranks=2)]
    run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | dict(OMP_NUM_THREADS='1'), timeout=100)
    assert run.returncode != 0 and re.search(words, run.stderr), run.stderr
    assert time.monotonic() - began < 70
    subprocess.run(['pkill', '-KILL', '-f', str(tmp_path / 'hangs.py')], check=False)
    assert checkpoint.load(c.out_dir)['step'] == 2
    if what.startswith('os.kill(os.getpid(), signal.SIGKILL'):
        nanodepth.main('train', [*command(c)[2:]])                 # on another number of processes
        assert log_of(c)[-1]['step'] == 12


