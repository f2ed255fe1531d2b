"A run that is stopped or killed ends as if it had not been; no run, log or dataset is lost."
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
from conftest import (at_step, bpe, by_layer, flags, left_by, log_of, ranks, refused, same,
                      save_run, state_of, stop_at, Times, weights_of)

from nanodepth.__main__ import main as nanodepth
from nanodepth.common import files
from nanodepth.model import LM, ModelConfig, Refused
from nanodepth.models.checkpoint import load_model
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.text.tokens import write_dataset
from nanodepth.train import train
from nanodepth.training.loader import Loader
from nanodepth.training.optimizers import load_states
from nanodepth.training.plan import seed_for


def shaken(new, old):
    for p in new.parameters():
        p.mul_(1 + 0.01 * torch.randn_like(p))


class Halves(torch.optim.SGD):
    "Its momentum is in bfloat16."
    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group['params'] if p.grad is not None):
            kept = self.state[p].setdefault('kept', torch.zeros_like(p, dtype=torch.bfloat16))
            p -= self.param_groups[0]['lr'] * kept.mul_(0.9).add_(p.grad)


def halves(model, c):
    "The first layer does not learn, but its copies do."
    model.layers[0].requires_grad_(False)
    return [Halves([p for p in model.parameters() if p.requires_grad], c.lr)]


# 1, 2, 3, 4 layers from steps 0, 1, 4, 8
GROW = dict(grow='lidas', grow_block=1, n_layer=4, steps=18, decay_steps=3)
KINDS = dict(       # the settings of a run, and after which steps it is stopped
    plain=(dict(optimizer='adamw', keep_every=3), [6]),
    grown=(GROW | dict(init=shaken, keep_stages=True, cooldown_loop='1-2x2-1'),
           [1, 4, 5, 15, 17]),
    groups_of_layers=(GROW | dict(optimizer=by_layer), [2, 9]),
    in_halves=(GROW | dict(optimizer=halves), [2, 9]),
    looped=(dict(n_layer=3, loop='1-1x2-1', cooldown_loop='1-1x3-1', cooldown_data='{data}'),
            [7, 8, 9]),
    core=(dict(curriculum=0.5, grad_accum=2, init_from='{cut}'), [5]),
    mixture=(dict(data='{mixture}', cooldown_data=['{data}', '{mixture}']), [5, 9]),
    own_step=(dict(order=[0, Times([1, Times([0])])]), [6]),
    three_processes=(dict(batch_size=6, cooldown_loop='1-1x2'), [3]))


def stop_the_second(step):
    if os.environ['RANK'] == '1':
        stop_at(step)


def run(kind, c, step=None):
    "The run from where it is, up to a signal in this step, if any: what it returned."
    if kind != 'three_processes':
        if step is not None:
            stop_at(step)
        return train(c)
    # three, because to divide by three is not to multiply by a third
    ended = ranks(c, 3, step and functools.partial(stop_the_second, step))
    assert len({*ended.codes}) == 1, ended.stderr
    return max(0, ended.codes[0] - 128)


@pytest.mark.parametrize('kind', KINDS)
def test_a_run_that_is_stopped_goes_on_to_the_last_bit(kind, config, placed):
    "Also before, at and behind a growth, and around the first step of a cool-down."
    whole, stopped = (config(name, **placed(KINDS[kind][0])) for name in ('whole', 'stopped'))
    assert run(kind, whole) == 0
    last = 0
    for step in KINDS[kind][1]:
        assert run(kind, stopped, step - last) == signal.SIGTERM
        assert state_of(stopped)['step'] == log_of(stopped)[-1]['step'] == step
        last = step
    assert run(kind, stopped) == 0
    assert left_by(stopped) == left_by(whole)


def die_while_saving():
    "In the middle of the third checkpoint, by a signal that no process can answer."
    real, calls = torch.save, []

    def save(state, path):
        real(state, path)
        calls.append(isinstance(path, Path))
        if sum(calls) == 3:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save = save


@pytest.mark.parametrize('kind', ['plain', 'grown'])
def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(kind, config):
    whole, killed = (config(name, **KINDS[kind][0]) for name in ('whole', 'killed'))
    train(whole)
    ended = ranks(killed, n=1, before=die_while_saving)
    assert ended.codes == [-signal.SIGKILL], ended.stderr
    assert state_of(killed)['step'] == dict(plain=3, grown=1)[kind]
    with open(Path(killed.out_dir) / 'log.jsonl', 'a') as file:
        file.write('{"step": 39, "los')                 # as if the disk had got half a line
    train(killed)
    assert left_by(killed) == left_by(whole)
    assert not [*Path(killed.out_dir).glob('.*')]
    # a copy over one does not change another
    assert {path.stat().st_nlink for path in Path(killed.out_dir).glob('*.pt')} == {1}


def test_a_signal_in_the_last_step_ends_a_finished_run(config):
    stop_at(12)
    assert train(config()) == 0 and state_of(config())['step'] == 12


def test_what_a_resume_may_change_changes_no_finished_run(config):
    c = config()
    train(c)
    weights, log = weights_of(c), log_of(c)
    free = dict(eval_every=3, save_every=7, keep_every=4, grad_accum=2, keep_stages=True)
    assert train(config(**free)) == 0
    assert same(weights_of(c), weights) and log_of(c) == log
    assert state_of(c)['config']['keep_every'] == 4
    with pytest.raises(Refused, match='steps=12 and not 6'):
        train(config(steps=6, decay_steps=0))


def test_data_that_changed_meanwhile_is_noticed(config, data, placed, tmp_path):
    "Its tokens, or the shares of a mixture."
    plain, mixed = config(), config('mixed', **placed(dict(data='{mixture}')))
    train(plain)
    train(mixed)
    (tmp_path / 'mixture/mixture.json').write_text('{"a": 0.3, "b": 0.7}')
    write_dataset(data, 'val', 'bytes', np.arange(800) % 97)
    for c in (plain, mixed):
        with pytest.raises(Refused, match='the data of this run has changed since it began'):
            train(c)


@pytest.mark.parametrize('old, new, at, message', [
    (dict(), dict(decay_steps=4), 32, None),
    (dict(), dict(decay_steps=4), 34, 'decay_steps=8 and not 4'),
    (dict(), dict(cooldown_data='{data}'), 32, None),
    (dict(), dict(cooldown_data='{data}'), 33, 'cooldown_data=None and not '),
    # a trunk without a decay, and a branch with one that loops
    (dict(grow='lidas', steps=32, decay_steps=0), dict(grow='lidas', cooldown_loop='1-1x2-1'), 31,
     None),
    (dict(warmup_steps=0.5), dict(warmup_steps=0), 3, 'warmup_steps=20 and not 0'),
    # a share of the steps that there are now
    (dict(warmup_steps=0.25), dict(warmup_steps=0.25, steps=48), 3, '.*warmup_steps=10 and not 12'),
    (dict(warmup_steps=0.25), dict(warmup_steps=10, steps=48), 30, None),
    (dict(grow='midas'), dict(grow='lidas'), 1, 'grow=.midas. and not .lidas.'),
    (dict(), dict(lr=1e-3), 1, 'lr=0.003 and not 0.001'),
    (dict(), dict(seed=1, n_embd=64), 1, 'n_embd=32 and not 64; seed=0 and not 1: choose another')])
def test_a_run_goes_on_where_both_plans_agree_on_every_step_taken(config, placed, old, new, at,
                                                                  message):
    "Stopped at a step, and gone on with under other settings: as if they had been there all along."
    base = dict(n_layer=3, grow_block=1, steps=40, decay_steps=8, eval_every=100)
    before = config('before', **base | old)
    stop_at(at)
    train(before)
    branch, whole = (config(name, **placed(base | new)) for name in ('branch', 'whole'))
    shutil.copytree(before.out_dir, branch.out_dir)
    if message:
        with pytest.raises(Refused, match=f'holds a run with {message}'):
            train(branch)
    else:
        train(branch)
        train(whole)
        assert left_by(branch) == left_by(whole)


PEAK = dict(steps=20)


def rises_to_the_peak(c, step):
    return min(1, (step + 1) / PEAK['steps'])


def test_what_a_function_of_the_config_reads_may_not_change_the_steps_taken(config, monkeypatch):
    c = config(lr_shape=rises_to_the_peak)
    stop_at(5)
    train(c)
    monkeypatch.setitem(PEAK, 'steps', 40)
    with pytest.raises(Refused, match='the functions of the config now give another plan'):
        train(c)
    monkeypatch.setitem(PEAK, 'steps', 20)
    assert train(c) == 0


def test_a_step_that_is_not_finite_is_not_taken_and_a_lower_rate_goes_on(config):
    "Only then may the rate change. Without it, too, the run goes on as if nothing had been."
    good, c = config('good'), config()
    train(good)
    at_step(6, lambda loss: loss * math.nan)
    with pytest.raises(Refused, match='step 6 was not taken: loss nan.*lower --lr'):
        train(c)
    assert (state_of(c)['step'], log_of(c)[-1]) == (4, dict(step=6, finite=False))
    lower = config('lower', lr=1e-3, grad_clip=0.5)
    shutil.copytree(c.out_dir, lower.out_dir)
    train(c)
    assert left_by(c) == left_by(good)
    train(lower)
    lines = {line['step']: line for line in log_of(lower)}
    assert [lines[step]['lr'] for step in (4, 5)] == [3e-3, 1e-3] and len(lines) == 13
    with pytest.raises(Refused, match='holds a run with lr=0.001 and not 0.002'):
        train(dataclasses.replace(lower, lr=2e-3))


def test_the_states_of_a_checkpoint_belong_to_as_many_optimizers_and_groups():
    p, q = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    one, two = (torch.optim.SGD([dict(params=[p], peak=1.0) for p in params])
                for params in ([p], [p, q]))
    for optimizers, saved in (([one], [one.state_dict()] * 2), ([two], [one.state_dict()])):
        with pytest.raises(ValueError, match='zip'):
            load_states(optimizers, saved)


def test_a_start_is_kept_and_what_it_decides_may_differ(config, capsys):
    parent = config('parent', n_layer=3, loop='1-2x2', context=32)
    train(parent)
    child = config('child', init_from=parent.out_dir, decay_steps=0, n_layer=5)
    capsys.readouterr()
    train(child)
    assert ('from the model: vocab_size=257, n_layer=3, n_kv_head=2, head_dim=16, ffn_dim=96, '
            'grow_from=3\n') in capsys.readouterr().out
    for settings in (json.loads((Path(child.out_dir) / 'run.json').read_text())['config'],
                     state_of(child)['config']):
        assert (settings['n_layer'], settings['head_dim'], settings['ffn_dim']) == (3, 16, 96)
    model, last = load_model(child.out_dir), log_of(child)[-1]
    assert (model.order, model.config.context) == ([0, 1, 2, 1, 2], 32)
    assert last['flops'] == model.flops_per_token(context=16) * last['tokens']
    shutil.rmtree(parent.out_dir)       # a resume needs it no more
    train(dataclasses.replace(child, n_layer=8, steps=child.steps + 2))
    assert log_of(child)[-1]['step'] == child.steps + 2


def test_a_batch_without_a_target_changes_nothing_and_ends_nothing(config, tmp_path):
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'd', split, 'bytes', [1] * 340, mask=[0] * 340)
    c = config(data=str(tmp_path / 'd'), optimizer='adamw', weight_decay=0.0, grad_accum=2,
               eval_batches=1)
    assert ranks(c).codes == [0, 0]
    torch.manual_seed(seed_for(0, 'init'))
    start = LM(ModelConfig(**state_of(c)['model_config']))
    assert same(weights_of(c), start.state_dict())
    assert (log_of(c)[-1]['step'], log_of(c)[-1]['val_loss']) == (c.steps, 0)


def test_one_run_in_a_folder_of_its_own(config, tiny, tmp_path, capsys):
    parent = save_run(tmp_path / 'other', tiny(vocab_size=257, n_layer=2))
    (tmp_path / 'run').mkdir()
    with open(tmp_path / 'run/lock', 'a') as lock:      # as another process would hold it
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert 'another run is at work in' in refused(capsys, 'train', *flags(config()))
        assert 'is there already' in refused(capsys, 'export', parent, tmp_path / 'run')
    nanodepth('train', flags(config()))


def test_data_that_is_made_again_and_killed_is_no_dataset(tmp_path, monkeypatch):
    write_dataset(tmp_path, 'train', 'bytes', [1] * 40)
    real = files.replace

    def killed(path, raw):
        real(path, raw)
        raise KeyboardInterrupt
    monkeypatch.setattr('nanodepth.text.tokens.replace', killed)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path, 'train', 'bytes', [2] * 40)
    with pytest.raises(Refused, match='there is no data in'):
        Loader(tmp_path, 1, 8)


def test_a_run_keeps_its_tokenizers_file_and_no_other(config, tmp_path):
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
