"A run that is stopped or killed ends as if it had not been; no run, log or dataset is lost."
import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (assert_equal_runs, flags, log_of, ranks, refused, same, save_run, weights_of,
                      write_noise)

from nanodepth import train as train_file
from nanodepth.__main__ import main as nanodepth
from nanodepth.common import files
from nanodepth.common.errors import Refused
from nanodepth.common.seeds import seed_for
from nanodepth.model import LM, ModelConfig
from nanodepth.models import checkpoint
from nanodepth.models.checkpoint import load, load_model
from nanodepth.retrofit import surgery
from nanodepth.text.loader import Dataset, Loader, begin_dataset, write_dataset
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.train import Config, train
from nanodepth.training import processes as world
from nanodepth.training.plan import Parent

# ------------------------------------------------------------------------------ stopped and killed

# 1, 2, 3, 4 layers from steps 0, 1, 4, 8
GROW = dict(grow='lidas', grow_block=1, n_layer=4, steps=18, decay_steps=3)
KINDS = dict(       # the settings of a run, and after how many updates it is stopped
    plain=(dict(optimizer='adamw'), 6), grown=(dict(optimizer='adamw_star', **GROW), 7),
    looped=(dict(n_layer=3, cooldown_loop='1-1x3-1', cooldown_data='other'), 8),
    recurrent=(dict(curriculum=0.5, grad_accum=2), 5))


def interrupt(step, number):
    "A signal for this process in the middle of a step."
    backward, calls = train_file.backward, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), number)
        return backward(*args)
    train_file.backward = interrupted


@pytest.mark.parametrize('kind', KINDS)
def test_stopped_or_killed_and_resumed_is_bit_equal(kind, config, tiny, tmp_path, data,
                                                    monkeypatch):
    fields, at = KINDS[kind]
    if kind == 'looped':
        shutil.copytree(data, tmp_path / 'other')
        fields = fields | dict(cooldown_data=str(tmp_path / 'other'))
    if kind == 'recurrent':
        core = surgery(tiny(vocab_size=257, n_layer=4, context=16), '1-2-1', r=3)
        fields = fields | dict(init_from=save_run(tmp_path / 'cut', core))
        for name in ('n_layer', 'n_embd', 'n_head', 'head_dim'):        # the parent says them
            fields[name] = getattr(Config, name)
    whole, stopped, killed = (config(name, **fields) for name in ('whole', 'stopped', 'killed'))
    train(whole)
    monkeypatch.setattr(train_file, 'backward', train_file.backward)
    interrupt(at, signal.SIGTERM)
    assert train(stopped) == signal.SIGTERM
    assert checkpoint.load(stopped.out_dir)['step'] == at
    assert train(stopped) == 0
    assert_equal_runs(stopped, whole)
    ended = ranks(flags(killed), n=1, before=functools.partial(interrupt, at, signal.SIGKILL))
    assert ended.codes == [-signal.SIGKILL], ended.stderr
    assert checkpoint.load(killed.out_dir)['step'] < at
    with open(Path(killed.out_dir) / 'log.jsonl', 'a') as file:
        file.write('{"step": 39, "los')                 # as if the disk had got half a line
    train(killed)
    assert_equal_runs(killed, whole)


def test_a_resumed_run_reads_on_where_it_stopped(config, monkeypatch):
    read, batch = [], Loader.batch
    monkeypatch.setattr(Loader, 'batch', lambda self, step: read.append(step) or batch(self, step))
    monkeypatch.setattr(train_file, 'backward', train_file.backward)
    interrupt(3, signal.SIGTERM)
    train(config())
    train(config())
    assert read == [*range(4), *range(3, 13)]       # a step makes the batch of the next one ready


@pytest.mark.parametrize('number, at, status', [
    (signal.SIGTERM, 3, 143), (signal.SIGINT, 3, 130), (signal.SIGHUP, 3, 129),
    (signal.SIGTERM, 12, None)])
def test_a_stopped_run_is_no_finished_one_for_whoever_started_it(config, monkeypatch, number, at,
                                                                status):
    "But a signal that comes during the last step has stopped nothing."
    c = config()
    monkeypatch.setattr(train_file, 'backward', train_file.backward)
    if number == signal.SIGHUP:             # nohup has switched it off for the tests themselves
        signal.signal(number, signal.SIG_DFL)
    interrupt(at, number)
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as stop:
        nanodepth('train', flags(c))
    assert not status or stop.value.code == status
    assert checkpoint.load(c.out_dir)['step'] == at


# -------------------------------------------------------------------------------- several processes

def stop_the_second():
    if os.environ['RANK'] == '1':
        interrupt(3, signal.SIGTERM)


def test_one_process_of_two_is_told_to_stop_and_both_resume_to_the_last_bit(config):
    "With a loop that begins in the cool-down."
    whole, parts = (config(name, n_layer=2, cooldown_loop='1-1x2') for name in ('whole', 'parts'))
    assert ranks(flags(whole)).codes == [0, 0]
    run = ranks(flags(parts), before=stop_the_second)
    assert run.codes == [143, 143], run.stderr
    assert checkpoint.load(parts.out_dir)['step'] == log_of(parts)[-1]['step'] == 3
    assert ranks(flags(parts)).codes == [0, 0]
    assert_equal_runs(parts, whole)


def hang_the_second(folder):
    "Until the first is gone, which holds a lock."
    world.PATIENCE = world.timedelta(seconds=3)
    lock = open(folder / 'lock', 'w')
    if os.environ['RANK'] == '0':
        fcntl.flock(lock, fcntl.LOCK_EX)
    backward, calls = train_file.backward, []

    def hanging(*args):
        calls.append(1)
        if len(calls) == 3 and os.environ['RANK'] == '1':
            fcntl.flock(lock, fcntl.LOCK_EX)
            os._exit(7)
        return backward(*args)
    train_file.backward = hanging


def test_a_process_that_hangs_ends_the_run_after_some_patience(config, tmp_path):
    c = config(optimizer='adamw', save_every=2)
    run = ranks(flags(c), before=functools.partial(hang_the_second, tmp_path))
    assert run.codes[0] not in (0, None) and 'time' in run.stderr.lower()
    assert 'loss = backward(' in run.stderr          # where rank 0 stood, which waited
    assert checkpoint.load(c.out_dir)['step'] == 2
    nanodepth('train', flags(c))                                # one process goes on alone
    assert log_of(c)[-1]['step'] == 12


# ----------------------------------------------------------------------------------- other settings


def test_another_config_in_the_folder_is_refused_and_nothing_is_lost(config, tmp_path):
    c = config()
    train(c)
    before = {path.name: path.read_bytes() for path in (tmp_path / 'run').iterdir()}
    for change, message in ((dict(lr=1e-3), 'holds a run with lr=0.003, but this config has 0.001'),
                            (dict(steps=6, decay_steps=0), 'more than steps=6')):
        with pytest.raises(Refused, match=message):
            train(config(**change))
    with pytest.raises(Refused, match='there is no dataset at'):        # checked before it is moved
        train(config(resume=False, cooldown_data=str(tmp_path / 'nothing')))
    train(config(eval_every=3, save_every=7))       # this may differ; a finished run stays as it is
    assert all((tmp_path / 'run' / name).read_bytes() == before[name]
               for name in ('ckpt.pt', 'log.jsonl'))
    (tmp_path / 'run/notes.txt').write_text('mine')
    before = {path.name: path.read_bytes() for path in (tmp_path / 'run').iterdir()}
    train(config(lr=1e-3, resume=False))
    assert before == {path.name: path.read_bytes() for path in (tmp_path / 'run.1').iterdir()} | {
        'lock': b''}
    assert not same(weights_of(c), checkpoint.load(tmp_path / 'run.1')['model'])


def test_data_that_changed_meanwhile_is_noticed(config, data):
    c = config()
    train(c)
    path = data / 'train.json'              # its checksums are those of its bytes alone
    said = path.read_text()
    path.write_text(json.dumps(json.loads(said) | dict(kinds=['x'])))
    with pytest.raises(Refused, match='dtype and kinds'):
        train(c)
    path.write_text(said)
    for split in ('val', 'train'):
        raw = (data / f'{split}_000.bin').read_bytes()
        (data / f'{split}_000.bin').write_bytes(bytes(len(raw)))        # as a bad copy leaves it
        with pytest.raises(Refused, match=f'{split}_000.bin is not what was written'):
            train(c)
        write_dataset(data, split, 'bytes', np.frombuffer(raw, 'uint16')[::-1])
        with pytest.raises(Refused, match='the data has changed since the run in .* began'):
            train(c)
        write_dataset(data, split, 'bytes', np.frombuffer(raw, 'uint16'))


GROWN = dict(grow_block=1, steps=40, decay_steps=8, eval_every=100, save_every=1)


@pytest.mark.parametrize('old, new, at, message', [
    # 1, 2, 3, 4, 5 layers from steps 0, 2, 6, 12, 21 on. To 3 layers MIDAS and LIDAS grow alike.
    (dict(grow='midas', n_layer=5), dict(grow='lidas', n_layer=5), 5, None),
    (dict(grow='midas', n_layer=5), dict(grow='lidas', n_layer=5), 8, "with grow='midas', but"),
    (dict(n_layer=3), dict(n_layer=3, decay_steps=4), 32, None),
    # a trunk without a decay, and a branch with one that loops
    (dict(grow='lidas', n_layer=3, steps=32, decay_steps=0),
     dict(grow='lidas', n_layer=3, cooldown_loop='1-1x2-1'), 31, None),
    (dict(n_layer=3), dict(n_layer=3, decay_steps=4), 34, 'with decay_steps=8, but'),
    (dict(n_layer=3), dict(n_layer=2), 1, 'with n_layer=3, but')])
def test_a_run_goes_on_where_both_plans_agree_on_every_step_taken(config, monkeypatch, old, new, at,
                                                                 message):
    "Stopped at a step, and gone on with under other settings: as if they had been there all along."
    before = config('before', **GROWN | old)
    with monkeypatch.context() as patched:
        patched.setattr(train_file, 'backward', train_file.backward)
        interrupt(at, signal.SIGTERM)
        train(before)
    assert checkpoint.load(before.out_dir)['step'] == at
    other, whole = (config(name, **GROWN | new) for name in ('other', 'whole'))
    shutil.copytree(before.out_dir, other.out_dir)
    if message:
        with pytest.raises(Refused, match=f'holds a run {message}'):
            train(other)
    else:
        train(other)
        train(whole)
        assert_equal_runs(other, whole)


def test_a_start_is_kept_and_what_it_decides_may_differ(config):
    parent = config('parent', n_layer=3, loop='1-2x2')
    train(parent)
    child = config('child', init_from=parent.out_dir, decay_steps=0, n_layer=5)
    train(child)
    assert [Parent.of_saved(checkpoint.load(c.out_dir)) for c in (parent, child)] == [
        None, Parent(3, [0, 1, 2, 1, 2])]
    train(dataclasses.replace(child, n_layer=8, steps=child.steps + 2))
    assert log_of(child)[-1]['step'] == child.steps + 2


# --------------------------------------------------------------------------------- nothing is lost

def test_a_batch_without_a_target_changes_nothing_and_ends_nothing(config, tmp_path):
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'd', split, 'bytes', [1] * 340, mask=[0] * 340)
    one, two = (config(name, data=str(tmp_path / 'd'), optimizer='adamw', weight_decay=0.0,
                       grad_accum=2, eval_batches=1) for name in ('one', 'two'))
    train(one)
    state = checkpoint.load(one.out_dir)
    torch.manual_seed(seed_for(0, 'init'))
    start = LM(ModelConfig(**state['model_config']))
    assert same(state['model'], start.state_dict())
    assert (log_of(one)[-1]['step'], log_of(one)[-1]['val_loss']) == (one.steps, 0)
    ended = ranks(flags(two))
    assert ended.codes == [0, 0], ended.stderr


def test_a_log_without_its_checkpoint_is_kept(config, tmp_path):
    c, out = config(keep_every=8), tmp_path / 'run'
    other = dataclasses.replace(c, seed=3)
    train(other)
    (out / 'ckpt.pt').unlink()
    before = (out / 'log.jsonl').read_bytes()
    with pytest.raises(Refused, match='holds a run.json that is not of a run with these settings'):
        train(c)
    assert (out / 'log.jsonl').read_bytes() == before
    train(other)            # its own, as if it had been killed before its first checkpoint
    assert len(log_of(c)) == len(before.splitlines())
    (out / 'ckpt.pt').unlink()
    train(dataclasses.replace(c, resume=False))
    assert (tmp_path / 'run.1/log.jsonl').exists() and load(out)['config']['seed'] == 0
    (out / 'ckpt.pt').write_bytes((out / 'ckpt-8.pt').read_bytes())
    (out / 'ckpt-8.pt').unlink()            # as if it had been killed between save and keep
    train(c)
    assert checkpoint.load(out / 'ckpt-8.pt')['step'] == 8
    (out / 'ckpt-best.pt').touch()          # a name of the user's
    (out / 'ckpt-9.pt').write_bytes((tmp_path / 'run.1/ckpt-8.pt').read_bytes())
    assert checkpoint.stages_of(out) == {2: out / 'ckpt-8.pt'}          # not of seed 3


def test_nothing_is_written_over(config, tiny, tmp_path, capsys):
    "A run, a Hugging Face folder, a run at work, and data of another maker stay as they are."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, n_layer=2))
    nanodepth('export', [run, str(tmp_path / 'hf')])
    there = {path: path.read_bytes() for folder in ('run', 'hf')
             for path in (tmp_path / folder).iterdir()}
    for name, *argv in (('export', run, run), ('cut', run, '0-1-1', f'--out={tmp_path / "hf"}'),
                        ('train', *flags(config('hf')))):
        assert 'holds ' in refused(capsys, name, *argv)
    with pytest.raises(Refused, match='holds a run: choose another folder'):
        begin_dataset(run, {})
    assert all(path.read_bytes() == raw for path, raw in there.items())
    (tmp_path / 'busy').mkdir()
    with open(tmp_path / 'busy/lock', 'a') as lock:     # as another process would hold it
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert 'another run is at work in' in refused(capsys, 'export', run, tmp_path / 'busy')
        with pytest.raises(Refused, match='another run is at work in'):
            write_dataset(tmp_path / 'busy', 'train', 'bytes', [1] * 40)
    write_dataset(tmp_path / 'data_a', 'val', 'bytes', [1, 2], origin=dict(made_by='a.py'))
    with pytest.raises(Refused, match='holds val.json of another dataset: choose another folder'):
        begin_dataset(tmp_path / 'data_a', dict(made_by='b.py'))


def test_data_that_is_made_again_and_killed_is_no_dataset(tmp_path, monkeypatch):
    write_dataset(tmp_path, 'train', 'bytes', [1] * 40)
    real = files.replace

    def killed(path, raw):
        real(path, raw)
        raise KeyboardInterrupt
    monkeypatch.setattr('nanodepth.text.loader.replace', killed)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path, 'train', 'bytes', [2] * 40)
    with pytest.raises(Refused, match='there is no dataset'):
        Dataset(tmp_path, 'train', 8)


# ------------------------------------------------------------------- a checkpoint and its tokenizer

@pytest.fixture
def parent(tmp_path, tiny):
    "A Hugging Face folder in bfloat16, with a context of 32."
    from nanodepth.models.hf import save_hf
    save_hf(tiny(vocab_size=257, context=32).bfloat16(), tmp_path / 'hf', tokenizer='bytes')
    return tmp_path / 'hf'


def test_training_keeps_the_parents_context(parent, config):
    c = config(init_from=str(parent), context=16)
    train(c)
    assert load_model(c.out_dir).config.context == 32
    flops = load_model(c.out_dir).flops_per_token(context=16)
    assert log_of(c)[-1]['flops'] == flops * log_of(c)[-1]['tokens']
    with pytest.raises(Refused, match='context=64, the length of a training row, is more than'):
        train(config('more', init_from=str(parent), context=64))


def test_a_run_keeps_its_tokenizers_file(parent, config, tmp_path, data):
    nanodepth('cut', [str(parent), '1-1-1', f'--out={tmp_path / "cut"}'])
    for split in ('train', 'val'):
        path = data / f'{split}.json'
        path.write_text(path.read_text().replace('"bytes"', json.dumps(str(parent))))
    c = config(init_from=str(tmp_path / 'cut'), context=16, steps=6)
    train(c)
    parent.rename(tmp_path / 'moved')
    for folder in (tmp_path / 'cut', c.out_dir):
        assert get_tokenizer(folder).encode('ab') == [97, 98]


def test_an_update_that_breaks_the_weights_leaves_the_last_checkpoint(config, monkeypatch):
    c = config(steps=4, warmup_steps=0, decay_steps=1, save_every=2)
    good = []

    def break_weights(optimizer, closure=None, step=torch.optim.AdamW.step):
        good.append(1)
        step(optimizer)
        if len(good) == 4:
            optimizer.param_groups[0]['params'][0].data[0] = math.nan
    monkeypatch.setattr(torch.optim.AdamW, 'step', break_weights)
    with pytest.raises(Refused, match='step 4 has left weights that are not finite'):
        train(dataclasses.replace(c, optimizer='adamw'))
    saved = load(c.out_dir)
    assert saved['step'] == 2 and all(t.isfinite().all() for t in saved['model'].values())


def test_changed_shares_of_a_mixture_are_another_run(config, tmp_path):
    for name in 'ab':
        write_noise(tmp_path / 'mix' / name, [])
    (tmp_path / 'mix/mixture.json').write_text(json.dumps(dict(a=0.9, b=0.1)))
    c = config(data=str(tmp_path / 'mix'), steps=8, context=16)
    train(c)
    (tmp_path / 'mix/mixture.json').write_text(json.dumps(dict(a=0.1, b=0.9)))
    with pytest.raises(ValueError, match='shares of the data have changed'):
        train(c)
