"""Test training/start.py: a run that was stopped or killed ends as if nothing had happened, a
branch equals a run from the start, and nothing is lost."""
import dataclasses
import functools
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (Times, by_layer, flags, left_by, log_of, ranks, same, state_of, stop_at,
                     weights_of, write_dataset)

from model import Refused
from train import train
from training.plan import Config
from training.settings import read

pytestmark = pytest.mark.usefixtures('backward')


def shaken(new, old):
    "Change the weights of new layers, as a growth may do."
    for p in new.parameters():
        p.mul_(1 + 0.01 * torch.randn_like(p))


class Halves(torch.optim.SGD):
    "An SGD whose momentum is in bfloat16."

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group['params'] if p.grad is not None):
            kept = self.state[p].setdefault('kept', torch.zeros_like(p, dtype=torch.bfloat16))
            p -= self.param_groups[0]['lr'] * kept.mul_(0.9).add_(p.grad)


def halves(model, c):
    "Return an optimizer with which the first layer does not learn, but its copies do."
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
    "Send the second process a signal in a step."
    if os.environ['RANK'] == '1':
        stop_at(step)


def run(kind, c, step=None):
    "Train until a signal in this step, or to the end. Return the number of the signal, or 0."
    if kind != 'three_processes':
        if step is not None:
            stop_at(step)
        return train(c)
    # three processes, because dividing by 3 is not the same as multiplying by a third
    ended = ranks(c, 3, step and functools.partial(stop_the_second, step))
    assert len({*ended.codes}) == 1, ended.stderr
    return max(0, ended.codes[0] - 128)


@pytest.mark.parametrize('kind', KINDS)
def test_a_stopped_run_ends_equal_to_the_last_bit(kind, config, placed):
    "Stops come before, at and after a growth, and around the first step of a cool-down."
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
    "From now on, kill this process in the middle of writing its third checkpoint."
    real, calls = torch.save, []

    def save(state, path):
        real(state, path)
        calls.append(isinstance(path, Path))
        if sum(calls) == 3:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save = save


@pytest.mark.parametrize('kind', ['plain', 'grown'])
def test_a_run_that_was_killed_while_saving_ends_equal_to_the_last_bit(kind, config):
    "What the killed process has left is removed after a day."
    whole, killed = (config(name, **KINDS[kind][0]) for name in ('whole', 'killed'))
    train(whole)
    ended = ranks(killed, n=1, before=die_while_saving)
    assert ended.codes == [-signal.SIGKILL], ended.stderr
    assert state_of(killed)['step'] == dict(plain=3, grown=1)[kind]
    with open(Path(killed.out_dir) / 'log.jsonl', 'a') as file:
        file.write('{"step": 39, "los')                 # as if half a line was written
    [left] = Path(killed.out_dir).glob('.*')    # another process may still write it
    train(killed)
    assert left_by(killed) == left_by(whole) and left.exists()
    os.utime(left, (0, 0))                      # no process still writes a file of 1970
    train(killed)
    assert not left.exists()
    # no two checkpoints are one file, so writing over one does not change another
    assert {path.stat().st_nlink for path in Path(killed.out_dir).glob('*.pt')} == {1}


def test_a_finished_run_does_nothing_more(config):
    "A signal in the last step changes nothing. Settings that do not change the model may differ."
    c = config()
    stop_at(12)
    assert train(c) == 0 and state_of(c)['step'] == 12
    weights, log = weights_of(c), log_of(c)
    free = dict(eval_every=3, save_every=7, keep_every=4, grad_accum=2, keep_stages=True)
    assert train(config(**free)) == 0
    assert same(weights_of(c), weights) and log_of(c) == log
    with pytest.raises(Refused, match='holds a run with decay_steps=4 and not 0; steps=12 and not '
                       '6: choose another out_dir$'):
        train(config(steps=6, decay_steps=0))
    with pytest.raises(Refused, match='choose another out_dir, with --branch_from='):
        train(config(steps=20, lr=1e-3))
    with pytest.raises(Refused, match='is not a multiple of 1 processes x grad_accum=3'):
        train(config(grad_accum=3))


def test_a_run_without_its_last_checkpoint_is_not_written_over(config):
    c = config(keep_every=6)
    train(c)
    (Path(c.out_dir) / 'ckpt.pt').unlink()
    log = log_of(c)
    with pytest.raises(Refused, match='has ckpt-.*.pt, but no ckpt.pt'):
        train(config(keep_every=6, seed=5))
    assert log_of(c) == log


@pytest.mark.skipif(not hasattr(signal, 'SIGHUP'), reason='this system has no such signal')
def test_a_closed_terminal_stops_a_run_unless_nohup_ignores_it(config, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)           # these tests may run in nohup
    try:
        stop_at(5, signal.SIGHUP)
        assert train(config()) == signal.SIGHUP and state_of(config())['step'] == 5
        signal.signal(signal.SIGHUP, signal.SIG_IGN)                # as nohup does
        stop_at(2, signal.SIGHUP)
        assert train(config()) == 0 and state_of(config())['step'] == 12
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_resume_with_other_data_is_refused(config, data, placed, tmp_path):
    """Other tokens or other shares of a mixture are refused. The same data in another folder are
    not."""
    plain, mixed = config(), config('mixed', **placed(dict(data='{mixture}')))
    cooled = config('cooled', cooldown_data=str(data))
    for c in (plain, mixed, cooled):
        train(c)
    moved = str(shutil.copytree(data, tmp_path / 'moved'))
    assert train(config('cooled', data=moved, cooldown_data=moved)) == 0
    write_dataset(data, 'val', np.arange(800) % 97)
    other_shares = dataclasses.replace(mixed, data=mixed.data.replace('0.7', '0.6'))
    for c in (plain, other_shares):
        with pytest.raises(Refused, match='began with other data'):
            train(c)


GROWS = dict(grow='lidas', grow_block=1)
CUT = dict(cut='1-1-1', curriculum=0.0)
# {name: (settings of a trunk, settings of its branch, the step after which the trunk was stopped)}
BRANCHES = dict(
    decays_earlier=({}, dict(decay_steps=16), 20),
    longer=({}, dict(steps=48), 30),
    other_data=(dict(optimizer='adamw'), dict(optimizer='adamw', cooldown_data='{data}'), 32),
    looped=(GROWS | dict(steps=32, decay_steps=0), GROWS | dict(cooldown_loop='1-1x2-1'), 31),
    core=(CUT, CUT | dict(steps=48), 10))


@pytest.mark.parametrize('name', BRANCHES)
def test_branch_equals_a_run_from_the_start(name, config, placed, capsys):
    "It is resumed like any run, and does not need the trunk after its start."
    old, new, at = BRANCHES[name]
    base = dict(n_layer=3, steps=40, decay_steps=8, eval_every=100)
    trunk = config('trunk', **placed(base | old))
    stop_at(at)
    train(trunk)
    whole, branch = (config(each, **placed(base | new)) for each in ('whole', 'branch'))
    branch = dataclasses.replace(branch, branch_from=trunk.out_dir)
    stop_at(2)
    capsys.readouterr()
    train(branch)
    said = capsys.readouterr().out
    assert f'a branch of {trunk.out_dir} after step {at}, with ' in said
    assert 'ffn_dim=None' not in said           # settings that the model decides are not listed
    shutil.rmtree(trunk.out_dir)
    train(branch)
    train(whole)
    found, wanted = left_by(branch), left_by(whole)
    for left in (found, wanted):
        left['run.json']['config'].pop('branch_from')
    assert found == wanted


def test_a_branch_that_does_not_fit_is_refused(config, placed):
    "No folder is left."
    trunk, loop = config('trunk'), config('loop', loop='2x2')
    grown = config('grown', grow='lidas', grow_block=1, n_layer=3)
    for c in (trunk, loop, grown):
        train(c)
    for origin, fields, message in (
            ('trunk', dict(), 'has taken 12 steps, and steps=12'),
            ('grown', dict(steps=99, grow='lidas', grow_block=1, n_layer=3),
             'after step 12 these settings need n_layer=1, and the model has 3 layers'),
            ('loop', dict(steps=20), r'runs the order \[0, 1, 0, 1\]: give its loop or order'),
            ('trunk', dict(steps=20, data='{other}'), 'a model has one tokenizer'),
            ('trunk', dict(steps=20, cut='1-1-0', recurrence=2), 'began with cut=None'),
            ('trunk', dict(steps=20, init_from='nowhere'), 'began with init_from=None')):
        c = config('x', branch_from=str(Path(trunk.out_dir).with_name(origin)), **placed(fields))
        with pytest.raises(Refused, match=message):
            train(c)
        assert not Path(c.out_dir).exists()


def test_a_branch_has_the_shape_of_its_trunk(config, capsys):
    "A line says which settings differ, and how many parameters begin with new optimizer states."
    trunk = config('trunk')
    train(trunk)
    c = config('x', branch_from=trunk.out_dir, steps=20, n_layer=4, n_embd=64, optimizer='adamw')
    capsys.readouterr()
    train(c)
    said = capsys.readouterr().out
    assert 'n_layer=2, n_embd=32, ' in said and 'n_embd=64' not in said
    assert ("with optimizer='adamw' and not 'muon'; steps=20 and not 12; 14 parameters begin with "
            'new optimizer states') in said
    assert log_of(c)[-1]['n_layer'] == 2
    # a resume need not name the trunk again, but may not name another one
    assert train(dataclasses.replace(c, branch_from=None)) == 0
    with pytest.raises(Refused, match="with branch_from=.* and not 'elsewhere'"):
        train(dataclasses.replace(c, branch_from='elsewhere'))


OWN_SPAN = """
from model import Span

_SHARE = 0.5


def _share():
    return _SHARE       # a comment


class Shares(Span):
    def forward(self, run, x):
        "Moves the stream by a share."
        return x + _share() * (run(x, self.items) - x)


n_layer = 3
order = [0, Shares([1]), 2]
"""


def test_an_edited_span_is_noticed_and_an_edited_comment_is_not(config, tmp_path):
    "An edited function or constant that the Span uses is noticed, too."
    file = tmp_path / 'own.py'

    def own(text):
        file.write_text(text)
        return read(Config, [str(file), *flags(config(n_layer=3))])
    train(own(OWN_SPAN))
    for before, after in (('# a comment', ''), ('"Moves the stream by a share."', '"Other words."'),
                          ('def forward', 'def  forward')):
        assert train(own(OWN_SPAN.replace(before, after))) == 0
    for before, after in (('x + _share', 'x - _share'), ('= 0.5', '= 0.6'),
                          ('return _SHARE', 'return 2 * _SHARE')):
        with pytest.raises(Refused, match='holds a run with class Shares='):
            train(own(OWN_SPAN.replace(before, after)))
