"A run that is stopped or killed ends as if it had not been; no run, log or dataset is lost."
import dataclasses
import fcntl
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (assert_equal_runs, at_step, bpe, flags, log_of, ranks, refused, same,
                      save_run, state_of, stop_at, weights_of, write_noise)

from nanodepth.__main__ import main as nanodepth
from nanodepth.common import files
from nanodepth.model import LM, ModelConfig, Refused
from nanodepth.models.checkpoint import load_model, stages_of
from nanodepth.models.hf import save_hf
from nanodepth.retrofit import seed_for
from nanodepth.text.loader import Rows
from nanodepth.text.tokens import write_dataset
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.train import train

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
    for step, last in zip(stops, [0, *stops]):
        stop_at(step - last)
        assert train(stopped) == signal.SIGTERM and state_of(stopped)['step'] == step
    assert train(stopped) == 0
    assert_equal_runs(stopped, whole)
    ended = ranks(flags(killed), n=1, before=die_while_saving)
    assert ended.codes == [-signal.SIGKILL], ended.stderr
    assert state_of(killed)['step'] == 4
    with open(Path(killed.out_dir) / 'log.jsonl', 'a') as file:
        file.write('{"step": 39, "los')                 # as if the disk had got half a line
    train(killed)
    assert_equal_runs(killed, whole)


@pytest.mark.parametrize('number, at, handler, stopped_by', [
    (signal.SIGTERM, 12, signal.SIG_DFL, 0), (signal.SIGHUP, 3, signal.SIG_DFL, signal.SIGHUP),
    (signal.SIGHUP, 3, signal.SIG_IGN, 0)])
def test_what_stops_nothing(config, number, at, handler, stopped_by):
    "A signal during the last step, and a closed terminal if nohup began the run."
    before = signal.signal(signal.SIGHUP, handler)
    stop_at(at, number)
    assert train(config()) == stopped_by
    signal.signal(signal.SIGHUP, before)
    assert state_of(config())['step'] == (at if stopped_by else 12)


def stop_the_second():
    if os.environ['RANK'] == '1':
        stop_at(3)


def test_one_process_of_three_is_told_to_stop_and_all_resume_to_the_last_bit(config):
    """With a loop that begins in the cool-down, and three processes, because to divide by three is
    not to multiply by a third. Two processes go on, too: there the sums are rounded otherwise."""
    whole, parts, two = (config(name, cooldown_loop='1-1x2', batch_size=6)
                         for name in ('whole', 'parts', 'two'))
    assert ranks(flags(whole), n=3).codes == [0, 0, 0]
    run = ranks(flags(parts), n=3, before=stop_the_second)
    assert run.codes == [143, 143, 143], run.stderr
    assert state_of(parts)['step'] == log_of(parts)[-1]['step'] == 3
    shutil.copytree(parts.out_dir, two.out_dir)
    assert ranks(flags(parts), n=3).codes == [0, 0, 0]
    assert_equal_runs(parts, whole)
    assert ranks(flags(two)).codes == [0, 0]
    for a, b in zip(log_of(two), log_of(whole), strict=True):
        assert a.get('loss', 0) == pytest.approx(b.get('loss', 0), rel=1e-4)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_finished_run_stays_as_it_is_and_one_anew_moves_it_aside(config, tmp_path, capsys):
    c, run = config(), tmp_path / 'run'
    train(c)
    (run / 'notes.txt').write_text('mine')
    before = contents(run)
    with pytest.raises(Refused, match='more than steps=6'):
        train(config(steps=6, decay_steps=0))
    with pytest.raises(FileNotFoundError):          # looked for before the run is moved
        train(config(resume=False, cooldown_data=str(tmp_path / 'nothing')))
    assert contents(run) == before
    # this may differ
    train(config(eval_every=3, save_every=7, keep_every=4, grad_accum=2))
    assert all(contents(run)[name] == before[name] for name in ('ckpt.pt', 'log.jsonl'))
    before = contents(run)

    def hold(loss):
        with open(tmp_path / 'run.1/lock', 'a') as lock:        # the run moved aside is free
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return loss
    at_step(1, hold)
    train(config(lr=1e-3, resume=False))
    assert contents(tmp_path / 'run.1') == before
    assert not same(weights_of(c), weights_of(tmp_path / 'run.1'))
    assert f'is now in {tmp_path / "run.1"}' in capsys.readouterr().out


def test_data_that_changed_meanwhile_is_noticed(config, data, tmp_path):
    "Its tokens, or the shares of a mixture."
    for name in 'ab':
        write_noise(tmp_path / 'mix' / name, [])
    mixture = tmp_path / 'mix/mixture.json'
    mixture.write_text(json.dumps(dict(a=0.9, b=0.1)))
    plain, mixed = config(), config('mixed', data=str(tmp_path / 'mix'))
    train(plain)
    train(mixed)
    mixture.write_text(json.dumps(dict(a=0.1, b=0.9)))
    with pytest.raises(Refused, match='the data has changed since the run in .* began'):
        train(mixed)
    for split in ('val', 'train'):
        said, raw = (data / f'{split}.json').read_text(), (data / f'{split}_000.bin').read_bytes()
        write_dataset(data, split, 'bytes', np.frombuffer(raw, 'uint16')[::-1])
        with pytest.raises(Refused, match='the data has changed'):
            train(plain)
        (data / f'{split}_000.bin').write_bytes(raw)
        (data / f'{split}.json').write_text(said)
    loader = Rows(str(data), 4, 16, split='train')
    write_noise(data, [])                   # before anything of it has been read
    with pytest.raises(AssertionError, match='has changed'):
        loader.batch(0)


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
    (dict(warmup_steps=0.5), dict(warmup_steps=0), 3, 'warmup_steps=20 and not 0'),
    (dict(warmup_steps=0.5), dict(warmup_steps=0.25), 3, 'warmup_steps=20 and not 10'),
    (dict(), dict(lr=1e-3), 1, 'lr=0.003 and not 0.001'),
    (dict(), dict(seed=1), 1, 'seed=0 and not 1')])
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


PEAK = dict(steps=20)


def rises_to_the_peak(c, step):
    return min(1, (step + 1) / PEAK['steps'])


def test_what_a_function_of_the_config_reads_may_not_change_the_steps_taken(config, monkeypatch):
    c = config(lr_shape=rises_to_the_peak)
    stop_at(5)
    train(c)
    monkeypatch.setitem(PEAK, 'steps', 40)
    with pytest.raises(Refused, match='now give another plan'):
        train(c)
    monkeypatch.setitem(PEAK, 'steps', 20)
    assert train(c) == 0


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
    kept = {path.name: state_of(path)['step'] for path in (tmp_path / 'run').glob('ckpt-*.pt')}
    assert kept == {'ckpt-2.pt': 2, 'ckpt-4.pt': 4, 'ckpt-6.pt': 6}
    # a run that goes on from there takes the same steps
    (tmp_path / 'again').mkdir()
    os.link(tmp_path / 'run/ckpt-2.pt', tmp_path / 'again/ckpt.pt')
    again = dataclasses.replace(c, out_dir=str(tmp_path / 'again'))
    train(again)
    assert same(weights_of(c), weights_of(again))
    # another run's file beside them is no stage of this one
    train(dataclasses.replace(c, seed=3, resume=False))
    shutil.copy(tmp_path / 'run.1/ckpt-6.pt', tmp_path / 'run/ckpt-9.pt')
    assert stages_of(tmp_path / 'run') == {2: tmp_path / 'run/ckpt-6.pt'}


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


def test_a_log_without_its_checkpoint_is_kept(config, tmp_path):
    c, other, run = config(), config(seed=3), tmp_path / 'run'
    train(other)
    (run / 'ckpt.pt').unlink()
    before = log_of(other)
    with pytest.raises(Refused, match='holds the log of another run'):
        train(c)
    assert log_of(other) == before
    (run / 'chat_template.jinja').write_text("an older tokenizer's")
    (run / '.log.jsonl.7.unfinished').write_text('half of one')
    (run / 'thesis.2024.new').write_text('mine')
    train(other)            # its own, as if it had been killed before its first checkpoint
    assert len(log_of(other)) == len(before) and not [*run.glob('*.jinja'), *run.glob('.*')]
    assert log_of(dataclasses.replace(c, out_dir=str(tmp_path / 'run.1'))) == before
    assert (tmp_path / 'run.1/thesis.2024.new').read_text() == 'mine'
    (run / 'ckpt.pt').rename(run / 'ckpt-12.pt')
    with pytest.raises(Refused, match='holds ckpt-12.pt, but no ckpt.pt'):
        train(other)
    train(dataclasses.replace(c, resume=False))
    assert (tmp_path / 'run.2/ckpt-12.pt').exists() and state_of(run)['config']['seed'] == 0


def test_one_run_in_a_folder_of_its_own(config, tiny, tmp_path, capsys):
    (tmp_path / 'run').mkdir()
    with open(tmp_path / 'run/lock', 'a') as lock:      # as another process would hold it
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Refused, match='another run is at work in'):
            train(config())
        parent = save_run(tmp_path / 'other', tiny(vocab_size=257, n_layer=2))
        assert 'another run is at work in' in refused(capsys, 'export', parent, tmp_path / 'run')
        with pytest.raises(Refused, match='another run is at work in'):
            write_dataset(tmp_path / 'run', 'train', 'bytes', [1] * 40)
    assert train(config()) == 0


def test_a_run_that_was_moved_while_at_work_saves_nothing_where_it_was(config, tmp_path):
    def move(loss):
        (tmp_path / 'run').rename(tmp_path / 'moved')
        (tmp_path / 'run').mkdir()
        (tmp_path / 'run/lock').touch()         # another run's
        return loss
    at_step(2, move)
    with pytest.raises(Refused, match='was moved or removed while this run was at work'):
        train(config())
    assert contents(tmp_path / 'run') == {'lock': b''}


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


def test_training_keeps_the_parents_context(config, tiny, tmp_path):
    "The parent is a Hugging Face folder in bfloat16."
    save_hf(tiny(vocab_size=257, context=32).bfloat16(), tmp_path / 'hf', tokenizer='bytes')
    c = config(init_from=str(tmp_path / 'hf'))
    nanodepth('train', flags(c))
    model = load_model(c.out_dir)
    assert model.config.context == 32
    assert log_of(c)[-1]['flops'] == model.flops_per_token(context=16) * log_of(c)[-1]['tokens']


def test_a_run_keeps_its_tokenizers_file_and_no_older_one(config, tmp_path):
    bpe(tmp_path / 'tok')
    made = (tmp_path / 'tok/tokenizer.json').rename(tmp_path / 'tok/mine.json')
    (made.parent / 'chat_template.jinja').write_text('of something else')
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'bpe', split, made, np.arange(3000) % 250)
    train(config(data=str(tmp_path / 'bpe')))
    tokens = get_tokenizer(made).encode('ab')
    assert not [*tmp_path.glob('*/*.jinja')][1:]
    shutil.rmtree(tmp_path / 'tok')
    shutil.rmtree(tmp_path / 'bpe')
    assert get_tokenizer(tmp_path / 'run').encode('ab') == tokens != [97, 98]
    train(config(resume=False))
    assert get_tokenizer(tmp_path / 'run').encode('ab') == [97, 98]


def test_data_fits_the_model(config, data, tmp_path):
    with pytest.raises(Refused, match='vocabulary of 257 tokens, and the model one of 100'):
        train(config(vocab_size=100))
    train(config('parent'))
    other = tmp_path / 'other'
    shutil.copytree(data, other)
    for path in other.glob('*.json'):
        path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "other'))
    for more in (dict(cooldown_data=str(other)),
                 dict(data=str(other), init_from=str(tmp_path / 'parent'))):
        with pytest.raises(Refused, match='a model has one tokenizer'):
            train(config(**more))
