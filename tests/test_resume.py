"A run that is stopped or killed ends as if it had not been; no run, log or dataset is lost."
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (assert_equal_runs, bpe, flags, log_of, ranks, refused, same, save_run,
                      state_of, stop_at, weights_of, write_noise)

from nanodepth.__main__ import main as nanodepth
from nanodepth.common import files
from nanodepth.model import LM, ModelConfig, Refused
from nanodepth.models.checkpoint import load_model, stages_of
from nanodepth.retrofit import seed_for
from nanodepth.text.loader import Rows
from nanodepth.text.tokens import write_dataset
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.train import train

# ------------------------------------------------------------------------------ stopped and killed

# 1, 2, 3, 4 layers from steps 0, 1, 4, 8: stopped before, at and after a growth
GROW = dict(grow='lidas', grow_block=1, n_layer=4, steps=18, decay_steps=3)
KINDS = dict(       # the settings of a run, and after which steps it is stopped
    plain=(dict(optimizer='adamw'), [6]),
    grown=(GROW | dict(cooldown_loop='1-2x2-1'), [1, 5, 8, 15, 17]),
    looped=(dict(n_layer=3, cooldown_loop='1-1x3-1', cooldown_data='other'), [8]),
    core=(dict(curriculum=0.5, grad_accum=2), [5]))


def die_while_saving():
    "In the middle of the second checkpoint, by a signal that no process can answer."
    real, calls = torch.save, []

    def save(state, path):
        real(state, path)
        calls.append(1)
        if len(calls) == 2:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save = save


@pytest.mark.parametrize('kind', KINDS)
def test_stopped_or_killed_and_resumed_is_bit_equal(kind, config, recurrent, tmp_path, data):
    fields, stops = KINDS[kind]
    if kind == 'looped':
        shutil.copytree(data, tmp_path / 'other')
        fields = fields | dict(cooldown_data=str(tmp_path / 'other'))
    if kind == 'core':
        fields = fields | recurrent
    whole, stopped, killed = (config(name, **fields) for name in ('whole', 'stopped', 'killed'))
    train(whole)
    before = signal.getsignal(signal.SIGTERM)
    for step, last in zip(stops, [0, *stops]):
        stop_at(step - last)
        assert train(stopped) == signal.SIGTERM and state_of(stopped)['step'] == step
    assert signal.getsignal(signal.SIGTERM) == before
    assert train(stopped) == 0
    assert_equal_runs(stopped, whole)
    ended = ranks(flags(killed), n=1, before=die_while_saving)
    assert ended.codes == [-signal.SIGKILL], ended.stderr
    assert state_of(killed)['step'] == 4
    with open(Path(killed.out_dir) / 'log.jsonl', 'a') as file:
        file.write('{"step": 39, "los')                 # as if the disk had got half a line
    train(killed)
    assert_equal_runs(killed, whole)


@pytest.mark.parametrize('number, at, status', [
    (signal.SIGTERM, 3, 143), (signal.SIGINT, 3, 130), (signal.SIGHUP, 3, 129),
    (signal.SIGTERM, 12, None), ('nohup', 3, None)])
def test_a_stopped_run_is_no_finished_one_for_whoever_started_it(config, number, at, status):
    """But a signal that comes during the last step has stopped nothing, and a closed terminal does
    not stop what nohup began."""
    c, before = config(), signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if number == 'nohup' else signal.SIG_DFL)
    stop_at(at, signal.SIGHUP if number == 'nohup' else number)
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as stop:
        nanodepth('train', flags(c))
    signal.signal(signal.SIGHUP, before)
    assert not status or stop.value.code == status
    assert state_of(c)['step'] == (at if status else 12)

# -------------------------------------------------------------------------------- several processes


def stop_the_second():
    if os.environ['RANK'] == '1':
        stop_at(3)


def test_one_process_of_two_is_told_to_stop_and_both_resume_to_the_last_bit(config, tmp_path):
    "With a loop that begins in the cool-down. Three processes go on, too: a sum is rounded there."
    whole, parts, three = (config(name, cooldown_loop='1-1x2', batch_size=6)
                           for name in ('whole', 'parts', 'three'))
    assert ranks(flags(whole)).codes == [0, 0]
    run = ranks(flags(parts), before=stop_the_second)
    assert run.codes == [143, 143], run.stderr
    assert state_of(parts)['step'] == log_of(parts)[-1]['step'] == 3
    shutil.copytree(parts.out_dir, three.out_dir)
    assert ranks(flags(parts)).codes == [0, 0]
    assert_equal_runs(parts, whole)
    assert ranks(flags(three), n=3).codes == [0, 0, 0]
    for a, b in zip(log_of(three), log_of(whole), strict=True):
        assert a.get('loss', 0) == pytest.approx(b.get('loss', 0), rel=1e-4)

# ----------------------------------------------------------------------------------- other settings


def test_another_config_in_the_folder_is_refused_and_nothing_is_lost(config, tmp_path, capsys):
    c = config()
    train(c)
    (tmp_path / 'run/notes.txt').write_text('mine')
    before = {path.name: path.read_bytes() for path in (tmp_path / 'run').iterdir()}
    with pytest.raises(Refused, match='more than steps=6'):
        train(config(steps=6, decay_steps=0))
    with pytest.raises(FileNotFoundError):          # looked for before the run is moved
        train(config(resume=False, cooldown_data=str(tmp_path / 'nothing')))
    # this may differ; a finished run stays as it is
    train(config(eval_every=3, save_every=7, keep_every=4, grad_accum=2))
    assert all((tmp_path / 'run' / name).read_bytes() == before[name]
               for name in ('ckpt.pt', 'log.jsonl'))
    before = {path.name: path.read_bytes() for path in (tmp_path / 'run').iterdir()}
    train(config(lr=1e-3, resume=False))
    assert before == {path.name: path.read_bytes() for path in (tmp_path / 'run.1').iterdir()}
    assert not same(weights_of(c), weights_of(tmp_path / 'run.1'))
    assert f'is now in {tmp_path / "run.1"}' in capsys.readouterr().out


def test_data_that_changed_meanwhile_is_noticed(config, data, tmp_path):
    "Its tokens, its kinds, or the shares of a mixture."
    c = config()
    train(c)
    for split in ('val', 'train'):
        path = data / f'{split}.json'
        said, raw = path.read_text(), (data / f'{split}_000.bin').read_bytes()
        path.write_text(json.dumps(json.loads(said) | dict(kinds=['x'])))
        with pytest.raises(Refused, match='the data has changed since the run in .* began'):
            train(c)
        write_dataset(data, split, 'bytes', np.frombuffer(raw, 'uint16')[::-1])
        with pytest.raises(Refused, match='the data has changed'):
            train(c)
        (data / f'{split}_000.bin').write_bytes(raw)
        path.write_text(said)
    train(c)
    for name in 'ab':
        write_noise(tmp_path / 'mix' / name, [])
    (tmp_path / 'mix/mixture.json').write_text(json.dumps(dict(a=0.9, b=0.1)))
    c = config('mixed', data=str(tmp_path / 'mix'))
    train(c)
    (tmp_path / 'mix/mixture.json').write_text(json.dumps(dict(a=0.1, b=0.9)))
    with pytest.raises(Refused, match='the data has changed'):
        train(c)


GROWN = dict(grow_block=1, steps=40, decay_steps=8, eval_every=100, save_every=1)


@pytest.mark.parametrize('old, new, at, message', [
    # 1, 2, 3, 4, 5 layers from steps 0, 2, 6, 12, 21 on. To 3 layers MIDAS and LIDAS grow alike.
    (dict(grow='midas', n_layer=5), dict(grow='lidas', n_layer=5), 5, None),
    (dict(grow='midas', n_layer=5), dict(grow='lidas', n_layer=5), 8, 'grow=midas and not lidas'),
    (dict(n_layer=3), dict(n_layer=3, decay_steps=4), 32, None),
    # a trunk without a decay, and a branch with one that loops
    (dict(grow='lidas', n_layer=3, steps=32, decay_steps=0),
     dict(grow='lidas', n_layer=3, cooldown_loop='1-1x2-1'), 31, None),
    (dict(n_layer=3), dict(n_layer=3, decay_steps=4), 34, 'decay_steps=8 and not 4'),
    (dict(n_layer=3), dict(n_layer=2), 1, 'n_layer=3 and not 2'),
    (dict(n_layer=2), dict(n_layer=2, lr=1e-3), 1, 'lr=0.003 and not 0.001'),
    (dict(n_layer=2), dict(n_layer=2, seed=1), 1, 'seed=0 and not 1')])
def test_a_run_goes_on_where_both_plans_agree_on_every_step_taken(config, old, new, at, message):
    "Stopped at a step, and gone on with under other settings: as if they had been there all along."
    before = config('before', **GROWN | old)
    stop_at(at)
    train(before)
    assert state_of(before)['step'] == at
    other, whole = (config(name, **GROWN | new) for name in ('other', 'whole'))
    shutil.copytree(before.out_dir, other.out_dir)
    if message:
        with pytest.raises(Refused, match=f'holds a run with {message}'):
            train(other)
    else:
        train(other)
        train(whole)
        assert_equal_runs(other, whole)


def test_a_warm_up_is_a_share_of_the_steps_that_a_run_began_with(config):
    short, long = (config(steps=steps, warmup_steps=0.25, decay_steps=0) for steps in (12, 16))
    train(short)
    train(long)
    assert [line['lr'] / long.lr for line in log_of(long)[1:4]] == pytest.approx([1 / 3, 2 / 3, 1])
    assert (log_of(long)[-1]['step'], state_of(long)['config']['warmup_steps']) == (16, 3)


def test_a_start_is_kept_and_what_it_decides_may_differ(config):
    parent = config('parent', n_layer=3, loop='1-2x2')
    train(parent)
    child = config('child', init_from=parent.out_dir, decay_steps=0, n_layer=5)
    train(child)
    assert load_model(child.out_dir).order == [0, 1, 2, 1, 2]
    shutil.rmtree(parent.out_dir)       # a resume needs it no more
    train(dataclasses.replace(child, n_layer=8, steps=child.steps + 2))
    assert log_of(child)[-1]['step'] == child.steps + 2


def test_kept_checkpoints_stay_and_a_branch_may_begin_there(config, tmp_path):
    c = config(steps=6, warmup_steps=0, decay_steps=1, save_every=100, keep_every=2)
    train(c)
    kept = sorted(path.name for path in (tmp_path / 'run').glob('ckpt-*.pt'))
    assert kept == ['ckpt-2.pt', 'ckpt-4.pt', 'ckpt-6.pt']
    assert [state_of(tmp_path / 'run' / name)['step'] for name in kept] == [2, 4, 6]
    nanodepth('sample', [str(tmp_path / 'run/ckpt-2.pt'), '--prompt=a', '--tokens=2',
                         '--device=cpu'])
    # a run that goes on from there takes the same steps
    (tmp_path / 'again').mkdir()
    os.link(tmp_path / 'run/ckpt-2.pt', tmp_path / 'again/ckpt.pt')
    again = dataclasses.replace(c, out_dir=str(tmp_path / 'again'))
    train(again)
    assert same(weights_of(c), weights_of(again))
    # with another's file beside them
    other = dataclasses.replace(c, seed=3, resume=False)
    train(other)
    (tmp_path / 'run/ckpt-9.pt').write_bytes((tmp_path / 'run.1/ckpt-6.pt').read_bytes())
    assert stages_of(tmp_path / 'run') == {2: tmp_path / 'run/ckpt-6.pt'}

# --------------------------------------------------------------------------------- nothing is lost


def test_a_batch_without_a_target_changes_nothing_and_ends_nothing(config, tmp_path):
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'd', split, 'bytes', [1] * 340, mask=[0] * 340)
    c = config(data=str(tmp_path / 'd'), optimizer='adamw', weight_decay=0.0, grad_accum=2,
               eval_batches=1)
    assert ranks(flags(c)).codes == [0, 0]
    torch.manual_seed(seed_for(0, 'init'))
    start = LM(ModelConfig(**state_of(c)['model_config']))
    assert same(weights_of(c), start.state_dict())
    assert (log_of(c)[-1]['step'], log_of(c)[-1]['val_loss']) == (c.steps, 0)


def test_an_update_that_breaks_the_weights_leaves_the_last_checkpoint(config, monkeypatch):
    good = []

    def break_weights(optimizer, closure=None, step=torch.optim.AdamW.step):
        good.append(1)
        step(optimizer)
        if len(good) == 4:
            optimizer.param_groups[0]['params'][0].data[0] = math.nan
    monkeypatch.setattr(torch.optim.AdamW, 'step', break_weights)
    c = config(steps=4, warmup_steps=0, decay_steps=1, save_every=2, optimizer='adamw')
    with pytest.raises(Refused, match='these weights are not finite, so they are not saved'):
        train(c)
    assert state_of(c)['step'] == 2 and all(t.isfinite().all() for t in weights_of(c).values())


def test_a_log_without_its_checkpoint_is_kept(config, tmp_path):
    c, out = config(), tmp_path / 'run'
    other = dataclasses.replace(c, seed=3)
    train(other)
    (out / 'ckpt.pt').unlink()
    before = (out / 'log.jsonl').read_bytes()
    with pytest.raises(Refused, match='holds the log of another run'):
        train(c)
    assert (out / 'log.jsonl').read_bytes() == before
    train(other)            # its own, as if it had been killed before its first checkpoint
    assert len(log_of(c)) == len(before.splitlines())
    (out / 'ckpt.pt').unlink()
    train(dataclasses.replace(c, resume=False))
    assert (tmp_path / 'run.1/log.jsonl').exists() and state_of(out)['config']['seed'] == 0


def test_one_run_in_a_folder_of_its_own(config, tiny, tmp_path, capsys):
    (tmp_path / 'run').mkdir()
    with open(tmp_path / 'run/lock', 'a') as lock:      # as another process would hold it
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Refused, match='another run is at work in'):
            train(config())
        hf = save_run(tmp_path / 'other', tiny(vocab_size=257, n_layer=2))
        assert 'another run is at work in' in refused(capsys, 'export', hf, tmp_path / 'run')
        with pytest.raises(Refused, match='another run is at work in'):
            write_dataset(tmp_path / 'run', 'train', 'bytes', [1] * 40)
    train(config())

    def metric(model, loader):
        with open(tmp_path / 'run.1/lock', 'a') as lock:        # the run moved aside is free
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return {}
    train(config(resume=False, metric=metric))


def test_data_that_is_made_again_and_killed_is_no_dataset(tmp_path, monkeypatch):
    write_dataset(tmp_path, 'train', 'bytes', [1] * 40)
    real = files.replace

    def killed(path, raw):
        real(path, raw)
        raise KeyboardInterrupt
    monkeypatch.setattr('nanodepth.text.tokens.replace', killed)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path, 'train', 'bytes', [2] * 40)
    with pytest.raises(FileNotFoundError):
        Rows(str(tmp_path), 1, 8, 'train')

# ------------------------------------------------------------------- a checkpoint and its tokenizer


def test_training_keeps_the_parents_context(config, tiny, tmp_path):
    "The parent is a Hugging Face folder in bfloat16."
    from nanodepth.models.hf import save_hf
    save_hf(tiny(vocab_size=257, context=32).bfloat16(), tmp_path / 'hf', tokenizer='bytes')
    c = config(init_from=str(tmp_path / 'hf'))
    nanodepth('train', flags(c))
    model = load_model(c.out_dir)
    assert model.config.context == 32
    assert log_of(c)[-1]['flops'] == model.flops_per_token(context=16) * log_of(c)[-1]['tokens']
    with pytest.raises(AssertionError, match='rows may have 32 tokens'):
        nanodepth('train', flags(config('more', init_from=str(tmp_path / 'hf'), context=64)))


def test_a_run_keeps_its_tokenizers_file_and_no_older_one(config, tmp_path):
    made, data = bpe(tmp_path / 'tok'), config(data=str(tmp_path / 'bpe'), resume=False)
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'bpe', split, made, np.arange(3000) % 250)
    train(data)
    tokens = get_tokenizer(made).encode('ab')
    (tmp_path / 'tok').rename(tmp_path / 'moved')
    (tmp_path / 'bpe').rename(tmp_path / 'moved/data')
    assert get_tokenizer(data.out_dir).name == 'tokenizer.json'
    train(config(resume=False))
    assert get_tokenizer(data.out_dir).name == 'bytes'
    assert get_tokenizer(tmp_path / 'run.1').encode('ab') == tokens != [97, 98]


def test_data_fits_the_model(config, data, tmp_path):
    with pytest.raises(Refused, match='vocabulary of 257 tokens, and the model one of 100'):
        train(config(vocab_size=100))
    shutil.copytree(data, tmp_path / 'other')
    for split in ('train', 'val'):
        path = tmp_path / f'other/{split}.json'
        path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "other'))
    train(config('parent'))
    for more in (dict(cooldown_data=str(tmp_path / 'other')), dict(
            data=str(tmp_path / 'other'), init_from=str(tmp_path / 'parent'))):
        with pytest.raises(Refused, match='a model has one tokenizer'):
            train(config(**more))


def test_a_run_that_was_moved_while_at_work_saves_nothing_where_it_was(config, tmp_path):
    calls = []

    def metric(model, loader):
        calls.append(1)
        if len(calls) == 2:
            (tmp_path / 'run').rename(tmp_path / 'moved')
            (tmp_path / 'run').mkdir()
            (tmp_path / 'run/lock').touch()         # another run's
        return {}
    with pytest.raises(Refused, match='was moved or removed while this run was at work'):
        train(config(eval_every=2, metric=metric))
    assert [path.name for path in (tmp_path / 'run').iterdir()] == ['lock']


def test_a_run_without_its_last_checkpoint_does_not_begin_anew_over_the_others(config):
    train(config(keep_every=2))
    (Path(config().out_dir) / 'ckpt.pt').unlink()
    with pytest.raises(Refused, match='holds ckpt-[0-9]+.pt, but no ckpt.pt'):
        train(config())


def test_no_warm_up_is_not_the_one_that_a_run_began_with(config):
    c = config(steps=8, warmup_steps=0.5, decay_steps=0)
    stop_at(3)
    train(c)
    with pytest.raises(Refused, match='warmup_steps=4 and not 0'):
        train(dataclasses.replace(c, warmup_steps=0))


def test_a_parent_in_another_order_does_not_grow(config, tiny, tmp_path):
    model = tiny(vocab_size=257, n_layer=3)
    model.order = [1, 0, 2]
    save_run(tmp_path / 'parent', model)
    with pytest.raises(AssertionError, match='only a model that runs each layer once grows'):
        train(config(init_from=str(tmp_path / 'parent'), grow='lidas', grow_block=1))
