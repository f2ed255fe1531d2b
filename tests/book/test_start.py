"Test that a stopped or killed run ends as if nothing had happened, and that nothing is lost."
import dataclasses
import functools
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (at_step, bpe, by_layer, flags, left_by, log_of, ranks, refused, same,
                      state_of, stop_at, Times, weights_of)

from nanodepth.common import files
from nanodepth import train as train_file
from nanodepth.model import LM, ModelConfig, Refused, Span
from nanodepth.models.checkpoint import load_model
from nanodepth.scoring.rows import data_scores
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.text.tokens import write_dataset
from nanodepth.train import train
from nanodepth.training import machine
from nanodepth.training.loader import Loader
from nanodepth.training.plan import seed_for

pytestmark = pytest.mark.usefixtures('backward')


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
def test_resume_after_a_stop_to_the_last_bit(kind, config, placed):
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
def test_resume_after_a_kill_while_saving(kind, config):
    whole, killed = (config(name, **KINDS[kind][0]) for name in ('whole', 'killed'))
    train(whole)
    ended = ranks(killed, n=1, before=die_while_saving)
    assert ended.codes == [-signal.SIGKILL], ended.stderr
    assert state_of(killed)['step'] == dict(plain=3, grown=1)[kind]
    with open(Path(killed.out_dir) / 'log.jsonl', 'a') as file:
        file.write('{"step": 39, "los')                 # as if the disk had got half a line
    [left] = Path(killed.out_dir).glob('.*')    # another process may still write it
    train(killed)
    assert left_by(killed) == left_by(whole) and left.exists()
    os.utime(left, (0, 0))                      # nobody writes a file of 1970
    train(killed)
    assert not left.exists()
    # a copy over one does not change another
    assert {path.stat().st_nlink for path in Path(killed.out_dir).glob('*.pt')} == {1}


def test_resume_of_a_finished_run(config):
    "A signal in its last step ends no other run than a finished one."
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


def test_resume_notices_changed_data(config, data, placed, tmp_path):
    "Its tokens, or the shares of a mixture, but not that they are elsewhere."
    plain, mixed = config(), config('mixed', **placed(dict(data='{mixture}')))
    cooled = config('cooled', cooldown_data=str(data))
    for c in (plain, mixed, cooled):
        train(c)
    moved = str(shutil.copytree(data, tmp_path / 'moved'))
    assert train(config('cooled', data=moved, cooldown_data=moved)) == 0
    write_dataset(data, 'val', 'bytes', np.arange(800) % 97)
    other_shares = dataclasses.replace(mixed, data=mixed.data.replace('0.7', '0.6'))
    for c in (plain, other_shares):
        with pytest.raises(Refused, match='began with other data'):
            train(c)


GROWS = dict(grow='lidas', grow_block=1)
CUT = dict(cut='1-1-1', curriculum=0.0)
BRANCHES = dict(        # the settings of a trunk, those of its branch, where the trunk was stopped
    decays_earlier=({}, dict(decay_steps=16), 20),
    longer=({}, dict(steps=48), 30),
    other_data=(dict(optimizer='adamw'), dict(optimizer='adamw', cooldown_data='{data}'), 32),
    looped=(GROWS | dict(steps=32, decay_steps=0), GROWS | dict(cooldown_loop='1-1x2-1'), 31),
    core=(CUT, CUT | dict(steps=48), 10))


@pytest.mark.parametrize('name', BRANCHES)
def test_branch_equals_a_run_from_the_start(name, config, placed, capsys):
    "It is resumed like any run, needs the trunk no more, and may be a trunk itself."
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
    assert 'ffn_dim=None' not in said           # what the model decides is no difference
    shutil.rmtree(trunk.out_dir)
    train(branch)
    train(whole)
    found, wanted = left_by(branch), left_by(whole)
    for left in (found, wanted):
        left['run.json']['config'].pop('branch_from')
    assert found == wanted


def test_branch_refuses(config, placed):
    "Each is a line, and leaves no folder."
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
            ('trunk', dict(steps=20, init_from='nowhere'), 'began with init_from=None')):
        c = config('x', branch_from=str(Path(trunk.out_dir).with_name(origin)), **placed(fields))
        with pytest.raises(Refused, match=message):
            train(c)
        assert not Path(c.out_dir).exists()


def test_branch_has_the_shape_of_its_trunk(config, capsys):
    "Whatever was typed. A line says so, and says how many parameters begin with new states."
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
    # a resume need not repeat where it began, but may not say otherwise
    assert train(dataclasses.replace(c, branch_from=None)) == 0
    with pytest.raises(Refused, match="with branch_from=.* and not 'elsewhere'"):
        train(dataclasses.replace(c, branch_from='elsewhere'))


def test_train_ends_at_a_loss_of_nan(config, capsys):
    "Without one, too, the run goes on as if nothing had been. The status is no signal's."
    good, c = config('good'), config()
    train(good)
    at_step(6, lambda loss: loss * math.nan)
    line = refused(capsys, 'train', *flags(c))
    assert 'step 6 was not taken: loss nan' in line and f'--branch_from={c.out_dir}' in line
    assert state_of(c)['step'] == 4
    lower = config('lower', lr=1e-3, grad_clip=0.5, branch_from=c.out_dir)
    train(lower)
    lines = {line['step']: line for line in log_of(lower)}
    assert [lines[step]['lr'] for step in (4, 5)] == [3e-3, 1e-3] and len(lines) == 13
    train(c)
    assert left_by(c) == left_by(good)


class Drops(Span):
    "A Span of one's own that draws from torch, in training only."

    def __call__(self, run, x):
        return torch.nn.functional.dropout(run(x, self.items), 0.2, run.model.training)


class Shakes(torch.optim.SGD):
    def step(self):
        super().step()
        for p in self.param_groups[0]['params']:
            p.data += 1e-3 * torch.randn_like(p)


def shakes(model, c):
    return [Shakes(model.parameters(), c.lr)]


DRAWS = dict(order=[0, Drops([1])], optimizer=shakes)


def test_train_draws_follow_seed_and_step(config):
    "Neither a stop nor how often is measured changes them, and nothing is dropped in validation."
    whole, stopped, often = (config(name, **DRAWS) for name in ('whole', 'stopped', 'often'))
    train(whole)
    stop_at(5)
    train(stopped)
    train(stopped)
    assert left_by(stopped) == left_by(whole)
    train(dataclasses.replace(often, eval_every=1, log_every=100, save_every=100))
    assert same(weights_of(often), weights_of(whole))
    val = Loader(whole.data, 4, 16, 'val')
    loss = data_scores(load_model(whole.out_dir), val, whole.eval_batches)['loss'].mean
    assert log_of(whole)[-1]['val_loss'] == pytest.approx(loss, rel=1e-6)


def note_draws():
    real = train_file.backward

    def noted(run, now, batch):
        loss = real(run, now, batch)
        with open(Path(run.c.out_dir).with_name(f'draws-{machine.process()[0]}'), 'a') as file:
            file.write(f'{torch.rand(()).item()}\n')
        return loss
    train_file.backward = noted


def test_train_draws_of_two_processes(config, tmp_path):
    c = config(**DRAWS | dict(steps=3, warmup_steps=0, decay_steps=1))
    ended = ranks(c, before=note_draws)
    assert ended.codes == [0, 0], ended.stderr
    first, second = ((tmp_path / f'draws-{rank}').read_text().split() for rank in (0, 1))
    assert first == second and len({*first}) == 3


def test_init_from_decides_the_shape(config):
    parent = config('parent', n_layer=3, loop='1-2x2', context=32)
    train(parent)
    child = config('child', init_from=parent.out_dir, decay_steps=0, n_layer=5)
    train(child)
    shape = state_of(child)['model_config']
    assert (shape['n_layer'], shape['head_dim'], shape['ffn_dim']) == (3, 16, 96)
    assert state_of(child)['config']['n_layer'] == 5        # as it was typed
    model, last = load_model(child.out_dir), log_of(child)[-1]
    assert (model.order, model.config.context) == ([0, 1, 2, 1, 2], 32)
    assert last['flops'] == model.flops_per_token(context=16) * last['tokens']
    shutil.rmtree(parent.out_dir)       # a resume needs it no more
    assert train(child) == 0
    with pytest.raises(Refused, match='holds a run with n_layer=5 and not 8'):
        train(dataclasses.replace(child, n_layer=8))


def test_train_batch_without_a_target(config, tmp_path):
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'd', split, 'bytes', [1] * 340, mask=[0] * 340,
                      marks=[129] * 340, kinds=['copy'])
    c = config(data=str(tmp_path / 'd'), optimizer='adamw', weight_decay=0.0, grad_accum=2,
               eval_batches=1)
    assert ranks(c).codes == [0, 0]
    torch.manual_seed(seed_for(0, 'init'))
    start = LM(ModelConfig(**state_of(c)['model_config']))
    assert same(weights_of(c), start.state_dict())
    last = log_of(c)[-1]
    assert (last['step'], last['val_loss'], last['kinds']) == (c.steps, 0, {})


def test_write_dataset_killed_is_no_dataset(tmp_path, monkeypatch):
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


def test_train_keeps_its_tokenizer_file(config, tmp_path):
    "A dataset has its own, and so has a run: the folders that they are from may go."
    bpe(tmp_path / 'tok')
    made = (tmp_path / 'tok/tokenizer.json').rename(tmp_path / 'tok/mine.json')
    (made.parent / 'chat_template.jinja').write_text('of something else')
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'bpe', split, made, np.arange(3000) % 250)
    tokens = get_tokenizer(made).encode('ab')
    shutil.rmtree(tmp_path / 'tok')
    train(config(data=str(tmp_path / 'bpe')))
    shutil.rmtree(tmp_path / 'bpe')
    assert not [*tmp_path.rglob('*.jinja')]
    assert get_tokenizer(tmp_path / 'run').encode('ab') == tokens != [97, 98]
