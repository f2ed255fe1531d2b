import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ranks

from nanodepth.__main__ import main as nanodepth
from nanodepth import train as train_file
from nanodepth.common.errors import Refused
from nanodepth.common.files import claim
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.data.tokens import Loader, evaluate
from nanodepth.engine import checkpoint, world
from nanodepth.engine.plan import Plan
from nanodepth.engine.world import Stop, World
from nanodepth.model import LM, ModelConfig
from nanodepth.retrofit import surgery
from nanodepth.train import Config, read_config, train

ROOT = Path(__file__).resolve().parents[1]
SMALL = dict(n_layer=2, n_embd=32, n_head=2, head_dim=None, context=16, batch_size=4, steps=12,
             warmup_steps=2, decay_steps=4, eval_every=5,
             eval_batches=2, log_every=1, save_every=4, device='cpu', lr=3e-3)


@pytest.fixture
def config(data, tmp_path):
    "config(**fields) -> a small run on the test data."
    def make(out='run', **fields):
        return Config(**SMALL | dict(data=str(data), out_dir=str(tmp_path / out)) | fields)
    return make


def log_of(config):
    return [json.loads(line)
            for line in (Path(config.out_dir) / 'log.jsonl').read_text().splitlines()]


def weights_of(config):
    return checkpoint.load(config.out_dir)['model']


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def command(config, *more, ranks=1):
    "The command line of a run, for another process."
    values = {k: v for k, v in vars(config).items() if v != getattr(Config, k)}
    start = ([sys.executable] if ranks == 1 else [sys.executable, '-m', 'torch.distributed.run',
                                                  '--standalone', f'--nproc_per_node={ranks}'])
    return [*start, 'train.py', *(f'--{k}={v}' for k, v in values.items()), *more]


def shell(command, **kw):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | dict(OMP_NUM_THREADS='1'), timeout=120, **kw)


# ------------------------------------------------------------------ schedule

def test_learning_rate_by_hand():
    learning_rate = lambda c, step: Plan(c).at(step).lr_fraction
    "The paper's 2,000 up, constant to 170,000, 30,000 down by 1 - sqrt."
    c = Config(steps=200_000, warmup_steps=2_000, decay_steps=30_000)
    assert (learning_rate(c, 0) == 1 / 2000 and learning_rate(c, 999) == 0.5 and learning_rate(c,
            1999) == 1)
    assert learning_rate(c, 2000) == learning_rate(c, 170_000) == 1
    assert learning_rate(c, 177_500) == pytest.approx(0.5)
    assert learning_rate(c, 199_999) == pytest.approx(1 - math.sqrt(29_999 / 30_000))
    assert learning_rate(Config(warmup_steps=0, decay_steps=0), 0) == 1


# ------------------------------------------------------------------ a run, stopped and resumed

def test_a_run_learns_and_leaves_its_files(config):
    c = config(steps=60, decay_steps=10, lr=1e-2, eval_every=20)
    train(c)
    log = log_of(c)
    assert [line['step'] for line in log] == list(range(61))
    losses = [line['val_loss'] for line in log if 'val_loss' in line]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1
    assert abs(losses[0] - math.log(257)) < 0.1
    last = log[-1]
    model = checkpoint.load_model(c.out_dir)
    assert (last['tokens'] == 60 * 64 and last['flops'] == 60 * 64 * model.flops_per_token()
            and last['n_layer'] == 2)
    assert {'lr', 'loss', 'tokens_per_s', 'grad_norm', 'seconds'} <= set(last)
    assert 0 <= last['kinds']['fifth']['accuracy'] <= 1
    assert (Path(c.out_dir) / 'loss.png').stat().st_size > 10_000
    about = json.loads((Path(c.out_dir) / 'run.json').read_text())
    assert about['tokenizer'] == 'bytes' and about['config']['lr'] == 1e-2


def stop_and_resume(config, monkeypatch, stop_at):
    "Train until SIGTERM comes in the middle of a step, then to the end."
    update, calls = train_file.backward, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    monkeypatch.setattr(train_file, 'backward', interrupted)
    assert train(config) == signal.SIGTERM
    assert checkpoint.load(config.out_dir)['step'] == stop_at and len(calls) == stop_at
    assert train(config) == 0


def assert_equal_runs(a, b):
    assert same(weights_of(a), weights_of(b))
    clocks = ('tokens_per_s', 'seconds')
    a, b = ([{k: v for k, v in line.items() if k not in clocks} for line in log_of(c)]
            for c in (a, b))
    assert a == b


# 1, 2, 3, 4 layers from steps 0, 2, 7, 14
GROW = dict(grow='lidas', grow_block=1, n_layer=4, steps=30, decay_steps=5)
KINDS = dict(       # the settings of a run, and after how many updates it is stopped
    plain=(dict(optimizer='adamw'), 6), grown=(dict(optimizer='adamw_star', **GROW), 7),
    looped=(dict(n_layer=3, cooldown_loop='1-1x3-1'), 8),
    recurrent=(dict(curriculum=0.5, grad_accum=2), 5))


@pytest.fixture(params=KINDS)
def two_runs(request, config, tiny, tmp_path):
    "(a run to go through, the same to be stopped, after how many updates)"
    fields, stop_at = KINDS[request.param]
    if request.param == 'recurrent':
        core = surgery(tiny(vocab_size=257, n_layer=4, context=16), '1-2-1', mean=3)
        checkpoint.save(tmp_path / 'cut', **checkpoint.describe(core), step=0)
        (tmp_path / 'cut/run.json').write_text('{"tokenizer": "bytes"}')
        fields = fields | dict(init_from=str(tmp_path / 'cut'))
        for name in ('n_layer', 'n_embd', 'n_head', 'head_dim'):        # the parent says them
            fields[name] = getattr(Config, name)
    whole, parts = (config(name, **fields) for name in ('whole', 'parts'))
    train(whole)
    return whole, parts, stop_at


def test_stop_and_resume_is_bit_equal(two_runs, monkeypatch):
    whole, parts, stop_at = two_runs
    stop_and_resume(parts, monkeypatch, stop_at)
    assert_equal_runs(parts, whole)


KILLED = """
import os, signal, sys
from nanodepth import train
at, config, calls = int(sys.argv[1]), train.Config(**eval(sys.argv[2])), []
def killed(*args):
    calls.append(1)
    if len(calls) == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)
original, train.backward = train.backward, killed
train.train(config)
"""


def test_kill_9_and_resume_is_bit_equal(two_runs):
    whole, parts, stop_at = two_runs
    child = shell([sys.executable, '-c', KILLED, str(stop_at), repr(vars(parts))])
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert checkpoint.load(parts.out_dir)['step'] < stop_at
    train(parts)
    assert_equal_runs(parts, whole)


def test_kill_9_at_any_moment_leaves_a_whole_log(config, after=9):
    whole = config('whole', steps=40)
    train(whole)
    parts = config('parts', steps=40)
    child = subprocess.Popen(command(parts), cwd=ROOT, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL,
                             env=os.environ | dict(OMP_NUM_THREADS='1'))
    log = Path(parts.out_dir) / 'log.jsonl'
    while not log.exists() or log.read_text().count('\n') <= after:
        assert child.poll() is None
        time.sleep(0.002)
    child.kill()
    child.wait()
    assert 4 <= checkpoint.load(parts.out_dir)['step'] < 40
    with open(log, 'a') as file:
        file.write('{"step": 39, "los')                 # as if the disk had got half a line
    train(parts)
    assert same(weights_of(parts), weights_of(whole))
    assert [line['step'] for line in log_of(parts)] == list(range(41))


def test_a_finished_run_stays_as_it_is(config, capsys):
    c = config()
    train(c)
    before, log = weights_of(c), log_of(c)
    train(c)
    assert same(weights_of(c), before) and log_of(c) == log
    assert 'from step 12 on' in capsys.readouterr().out


def test_evaluating_and_logging_never_change_training(config):
    often, rarely = (config('often', eval_every=1),
                     config('rarely', eval_every=100, log_every=100, save_every=100))
    train(often)
    train(rarely)
    assert same(weights_of(often), weights_of(rarely))


def test_accumulation_is_the_whole_batch(config):
    one, four = config('one', optimizer='adamw'), config('four', optimizer='adamw', grad_accum=4)
    train(one)
    train(four)
    for a, b in zip(log_of(one), log_of(four)):
        assert a.get('loss', 0) == pytest.approx(b.get('loss', 0), rel=1e-5)


def test_masked_targets_count_globally(config, tmp_path):
    "Pieces with unequal numbers of targets: their tokens weigh the same, whatever the pieces."
    import numpy as np

    from nanodepth.data.tokens import write_dataset
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        mask = rng.random(64 * 17) < np.repeat(rng.random(64), 17)
        mask[:17] = 0
        write_dataset(tmp_path / 'sft', split, 'bytes', rng.integers(0, 99, 64 * 17), mask=mask,
                      row=17)
    runs = [config(f'a{n}', data=str(tmp_path / 'sft'), grad_accum=n, optimizer='adamw')
            for n in (1, 2, 4)]
    for c in runs:
        train(c)
    for a, *others in zip(*map(log_of, runs)):
        assert all(a.get('loss', 0) == pytest.approx(b.get('loss', 0), rel=1e-5) for b in others)


def test_start_from_a_checkpoint(config):
    first = config('first')
    train(first)
    second = config('second', init_from=first.out_dir, lr=0.0, weight_decay=0.0)
    train(second)
    # its own shape, its weights, and a rate of zero
    assert same(weights_of(second), weights_of(first))
    with pytest.raises(Refused, match='context=32, the length of a training row, is more than'):
        train(config('third', init_from=first.out_dir, context=32))
    train(config('shorter', init_from=first.out_dir, context=8))
    assert checkpoint.load_model(config('shorter').out_dir).config.context == 16


# ------------------------------------------------------------------ what goes wrong

def test_another_config_in_the_folder_is_refused_and_nothing_is_lost(config):
    c = config()
    train(c)
    before = weights_of(c)
    with pytest.raises(Refused, match='holds a run with lr=0.003, but this config has 0.001'):
        train(config(lr=1e-3))
    train(config(eval_every=3, save_every=7))                # this may differ
    assert same(weights_of(c), before)
    train(config(lr=1e-3, resume=False))
    assert (same(checkpoint.load(c.out_dir + '.1')['model'], before) and not same(weights_of(c),
            before))
    assert log_of(c)[-1]['step'] == 12 and (Path(c.out_dir + '.1') / 'log.jsonl').exists()


def test_data_that_changed_meanwhile_is_noticed(config, data):
    c = config()
    train(c)
    meta = json.loads((data / 'train.json').read_text())
    (data / 'train.json').write_text(json.dumps(meta).replace(meta['shards'][0]['sha256']['.bin'],
            'another'))
    with pytest.raises(Refused, match='the data has changed since the run in .* began'):
        train(c)


def test_a_stage_of_no_steps_is_refused():
    with pytest.raises(Refused, match='20 steps before the decay are too few for 8 stages'):
        Config(grow='lidas', grow_block=1, n_layer=8, steps=25, warmup_steps=0,
                     decay_steps=5)


def test_nan_stops_with_the_step_and_a_good_checkpoint(config, monkeypatch):
    c, good = config(steps=12), config('good', steps=12)
    train(good)
    forward, calls = LM.forward, []

    def poisoned(self, tokens, targets=None, **kw):
        out = forward(self, tokens, targets, **kw)
        calls.append(self.training)
        return out * math.nan if sum(calls) == 7 and self.training else out

    monkeypatch.setattr(LM, 'forward', poisoned)
    with pytest.raises(Refused, match='step 7 has loss nan.*holds the last checkpoint.*lower --lr'):
        train(c)
    assert checkpoint.load(c.out_dir)['step'] == 6
    monkeypatch.setattr(LM, 'forward', forward)
    train(c)
    assert same(weights_of(c), weights_of(good))


def test_a_step_that_is_not_finite_right_after_a_growth_leaves_the_model_before_it(config,
                                                                                   monkeypatch):
    "Else a resume would find the grown model at a step at which the plan has not grown it."
    settings = dict(grow='lidas', grow_block=1, n_layer=2, steps=12, save_every=1)
    c, good = config(**settings), config('good', **settings)
    train(good)
    growth = next(step for step in range(12) if Plan(c).at(step).n_layer == 2)
    backward = train_file.backward
    monkeypatch.setattr(train_file, 'backward', lambda *args: backward(*args) * (
        math.nan if args[4] == growth else 1))
    with pytest.raises(Refused, match=f'step {growth + 1} has loss nan'):
        train(c)
    state = checkpoint.load(c.out_dir)
    assert (state['step'], state['model_config']['n_layer']) == (growth, 1)
    monkeypatch.setattr(train_file, 'backward', backward)
    train(c)
    assert same(weights_of(c), weights_of(good))


def test_a_shorter_run_than_was_taken_is_refused(config):
    train(config(steps=8, lr_floor=1.0))
    with pytest.raises(Refused, match='has taken 8 steps, more than steps=6'):
        train(config(steps=6, lr_floor=1.0))


@pytest.mark.parametrize('number, at, status', [(signal.SIGTERM, 3, 143), (signal.SIGINT, 3, 130),
                                                (signal.SIGTERM, 12, None)])
def test_a_stopped_run_is_no_finished_one_for_whoever_started_it(config, monkeypatch, capsys,
        number, at, status):
    "But a signal that comes during the last step has stopped nothing."
    c, update, calls = config(), train_file.backward, []
    monkeypatch.setattr(train_file, 'backward',
                        lambda *args: (calls.append(1),
                                       len(calls) == at and os.kill(os.getpid(), number),
                                       update(*args))[2])
    argv = command(c)[2:]
    if status:
        with pytest.raises(SystemExit) as stop:
            nanodepth('train', argv)
        assert (stop.value.code == status
                and 'stopped at step 3 of 12, and saved' in capsys.readouterr().out)
        assert checkpoint.load(c.out_dir)['step'] == 3
    else:
        nanodepth('train', argv)
        assert 'training FLOPs' in capsys.readouterr().out


@pytest.mark.parametrize('args, message', [
    (['--stepz=5'], "there is no option --stepz; did you mean 'steps'?"),
    (['--optimizer=moun'],
     "optimizer=moun must be muon or adamw or adamw_star; did you mean 'muon'?"),
    (['--steps=many'], '--steps=many must be a whole number'),
    (['--steps=0'], 'steps=0 must be at least 1'),
    (['--steps=100'], 'warmup_steps=50 and a decay over 120 steps do not fit into steps=100'),
    (['config/basline.py'],
     "there is no config config/basline.py; did you mean 'config/baseline.py'?"),
    (['--n_head=3', '--head_dim=none'], 'n_embd=128 does not divide into n_head=3'),
    (['--batch_size=6', '--grad_accum=4'],
     'batch_size=6 on 1 processes does not divide into grad_accum=4 pieces'),
    (['--device=cudaa'], "device='cudaa' cannot be used"),
    (['--data=data/toi'], 'there is no dataset at data/toi'),
])
def test_mistakes_are_named_with_status_2(args, message, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        nanodepth('train', [f'--data={data}', f'--out_dir={tmp_path / "out"}', '--device=cpu',
                                 *args])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith('train: ') and error.count('\n') == 1


def test_config_files(tmp_path):
    path = tmp_path / 'c.py'
    path.write_text('"doc"\nimport math\n_half = 20\nsteps = 2 * _half\nlr = 1\ndata = ("a", '
                    '"b")\nn_kv_head = 2\n')
    c = read_config(['--steps=5e1', str(path), '--resume=false', '--n_kv_head=none',
                     '--out_dir=a=b', '--warmup_steps=5', '--decay_steps=5'])
    assert (c.steps, c.lr, c.data, c.n_kv_head, c.resume, c.out_dir) == (50, 1.0, ['a', 'b'], None,
            False, 'a=b')
    assert type(c.lr) is float and type(c.steps) is int
    path.write_text('step = 3\n')
    with pytest.raises(Refused, match="c.py: there is no setting step; did you mean 'steps'"):
        read_config([str(path)])


def test_bfloat16_autocast_trains(config):
    c = config(dtype='bfloat16', steps=30)
    train(c)
    log = [line['val_loss'] for line in log_of(c) if 'val_loss' in line]
    assert log[-1] < log[0] - 0.3 and all(p.dtype == torch.float32 for p in weights_of(c).values())


# ------------------------------------------------------------------ two processes

def stop_the_second(at=3):
    "SIGTERM for one process of two, in the middle of a step."
    update, calls = train_file.backward, []

    def stopped(*args):
        calls.append(1)
        if len(calls) == at and os.environ['RANK'] == '1':
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)
    train_file.backward = stopped


def test_one_process_of_two_is_told_to_stop_and_both_end_with_its_signal(config):
    c = config()
    run = ranks(command(c)[2:], before=stop_the_second)
    assert run.codes == [143, 143], run.stderr
    assert checkpoint.load(c.out_dir)['step'] == log_of(c)[-1]['step'] == 3
    assert ranks(command(c)[2:]).codes == [0, 0] and log_of(c)[-1]['step'] == 12


def test_world_alone():
    world = World('cpu')
    assert (world.size, world.rank, world.first) == (1, 0, True)
    assert world.sum_over_ranks(torch.tensor(3)) == 3.0
    with pytest.raises(Refused, match='cannot be used'):
        World('cuda:77')
    world.device = torch.device('meta')         # for any that is neither a CPU nor CUDA
    assert world.to_device(torch.zeros(2)).device.type == 'meta'


# ------------------------------------------------------------------ growing

def test_growth_happens_when_the_plan_says_and_is_logged(config):
    c = config(**GROW, keep_stages=True)
    assert Plan(c).stages == [(0, 1), (2, 2), (7, 3), (14, 4)]
    train(c)
    log = log_of(c)
    assert [line['n_layer'] for line in log] == [1] * 3 + [2] * 5 + [3] * 7 + [4] * 16
    assert [line['step'] for line in log if 'grown' in line] == [3, 8, 15]
    for line in log:
        if 'grown' in line:
            assert line['grown']['before'] != line['grown']['after']
    costs = [LM(ModelConfig(n_layer=n, n_embd=32, n_head=2, context=16)).flops_per_token()
             for n in (1, 2, 3, 4)]
    assert log[-1]['flops'] == 64 * (2 * costs[0] + 5 * costs[1] + 7 * costs[2] + 16 * costs[3])
    assert len(checkpoint.load_model(c.out_dir).layers) == 4
    # keep_stages: each model as it was before it grew
    grown = [line['grown']['before'] for line in log if 'grown' in line]
    val = Loader(c.data, c.batch_size, c.context, split='val', seed=c.seed)
    for n, before in zip((1, 2, 3), grown, strict=True):
        stage = checkpoint.load_model(f'{c.out_dir}/stage_{n}')
        assert get_tokenizer(f'{c.out_dir}/stage_{n}').n_vocab == 257
        assert len(stage.layers) == n
        assert evaluate(stage, val, c.eval_batches) == pytest.approx(before, abs=1e-6)


def test_an_error_of_the_first_process_is_said_once(config):
    c = config(optimizer='adamw')
    with claim(c.out_dir):
        run = ranks(command(c)[2:])
    assert run.codes == [2, 2] and run.stderr.count('another run is at work in') == 1


def test_two_processes_grow_like_one(config):
    alone, both = (config(name, **GROW | dict(steps=12, decay_steps=2)) for name in ('alone',
            'both'))
    train(alone)
    run = ranks(command(both)[2:])
    assert run.returncode == 0, run.stderr
    assert log_of(alone)[-1]['n_layer'] == 4
    for a, b in zip(log_of(alone), log_of(both), strict=True):
        assert a['n_layer'] == b['n_layer']
        for key in ('loss', 'grad_norm'):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=1e-4)


@pytest.mark.parametrize('fields, message', [
    (dict(grow='midas', grow_block=3, n_layer=8),
     'midas from 3 layers does not reach n_layer=8, but 3, 6, 9'),
    (dict(grow='lidas', grow_block=0), 'grow_block=0 must be at least 1'),
    (dict(grow='lidas', init_from='x'), "grow='lidas' begins with a new model")])
def test_plans_that_cannot_be(fields, message):
    with pytest.raises(Refused, match=message):
        Config(**fields)
