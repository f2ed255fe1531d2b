"""What a second attack found: files, environments, streams and folders, and how each ends now."""
import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, ranks
from test_train import command, config, log_of, weights_of  # noqa: F401
from test_trust import TINY, refused, run  # noqa: F401

import nanodepth
import train as train_file
from common import errors, files
from common.errors import Refused
from common.files import on_hub
from data.tokenizer import get_tokenizer
from data.tokens import Dataset, measure, write_dataset
from engine import checkpoint
from engine.checkpoint import load_model
from engine.measure import open_data, parse_tasks, score
from model import LM, ModelConfig
from retrofit import surgery
from train import Config, read_config, train


def shell(*argv, env=None, **kwargs):
    return subprocess.run([sys.executable, *map(str, argv)], text=True, cwd=ROOT, timeout=120,
                          env=os.environ | (env or {}), **dict(capture_output=True) | kwargs)


# ------------------------------------------------------------- what was wrong, lost or unbounded

def test_data_that_is_made_again_and_killed_is_no_dataset(tmp_path, monkeypatch):
    write_dataset(tmp_path, 'train', 'bytes', [1] * 40)
    real = files.replace

    def killed(path, raw):
        real(path, raw)
        raise KeyboardInterrupt
    monkeypatch.setattr('data.tokens.replace', killed)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path, 'train', 'bytes', [2] * 40)
    with pytest.raises(Refused, match='there is no dataset'):
        Dataset(tmp_path, 'train', 8)


ENVIRONMENT = [
    (dict(RANK='1'), 'RANK=1 in the environment must be below WORLD_SIZE=1'),
    (dict(WORLD_SIZE='x'), "WORLD_SIZE='x' in the environment is no whole number"),
    (dict(WORLD_SIZE=''), "WORLD_SIZE='' in the environment is no whole number"),
    (dict(WORLD_SIZE='0'), 'RANK=0 in the environment must be below WORLD_SIZE=0'),
    (dict(WORLD_SIZE='2'), 'WORLD_SIZE=2 in the environment, but no RANK'),
    (dict(LOCAL_RANK='x'), "LOCAL_RANK='x'"), (dict(MASTER_PORT='abc'), "MASTER_PORT='abc'")]


@pytest.mark.parametrize('env, message', ENVIRONMENT)
def test_half_of_what_torchrun_says_is_refused(env, message, data, tmp_path, capsys, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    argv = [*TINY, '--steps=1', f'--data={data}', f'--out_dir={tmp_path / "x"}']
    assert message in refused(capsys, 'train', *argv)
    assert not (tmp_path / 'x').exists()
    assert 'there is no checkpoint' in refused(capsys, 'sample', tmp_path / 'no')     # no silence


def test_a_batch_without_a_target_changes_nothing_and_ends_nothing(tmp_path):
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'd', split, 'bytes', [1] * 340, mask=[0] * 340, row=17)
    argv = [*TINY, f'--data={tmp_path / "d"}', '--steps=2', '--optimizer=adamw',
            '--weight_decay=0', '--grad_accum=2']
    nanodepth.main('train', [*argv, f'--out_dir={tmp_path / "one"}'])
    lines = [json.loads(line) for line in (tmp_path / 'one/log.jsonl').open()]
    assert lines[-1]['step'] == 2 and lines[-1]['val_loss'] == 0
    start = LM(ModelConfig(**checkpoint.load(tmp_path / 'one')['model_config']))
    assert checkpoint.load(tmp_path / 'one')['model'].keys() == start.state_dict().keys()
    two = ranks([*argv, f'--out_dir={tmp_path / "two"}'])
    assert two.returncode == 0, two.stderr


def test_nothing_is_cut_into_the_folder_of_a_run_at_work(run, tmp_path, capsys):      # noqa: F811
    with files.claim(tmp_path / 'busy'):
        for argv in (['retrofit', run[0], '0-1-1', f'--out={tmp_path / "busy"}'],
                     ['loop', '--untie', run[0], tmp_path / 'busy'],
                     ['export', run[0], tmp_path / 'busy']):
            assert 'another run is at work in' in refused(capsys, *argv)
        with pytest.raises(Refused, match='another run is at work in'):
            write_dataset(tmp_path / 'busy', 'train', 'bytes', [1] * 40)
    assert not (tmp_path / 'busy').exists()     # nothing was written, so nothing is left


def test_small_files_take_no_more_memory_than_they_have(run):      # noqa: F811
    path, model = run
    state = torch.load(path / 'ckpt.pt', weights_only=True)
    huge = {name: torch.zeros(1).expand(t.shape) for name, t in state['model'].items()}
    deep = []
    for _ in range(40):
        deep = [deep, deep]
    for change, message in (
            (dict(model=huge), 'is a tensor that the file does not hold in full'),
            (dict(model_config=state['model_config'] | dict(context=2 ** 24, head_dim=64)),
             'is too long'),
            (dict(model_config=state['model_config'] | dict(order=[0] * 20_000)),
             'an order of 20,000 layers is too long'),
            (dict(kind='recurrent', recurrent=dict(
                prelude=[0], core=[1], coda=[], inject='add', start='zero', fresh=False,
                state_std=1.0, mean=10 ** 12, backprop_depth=8)), 'mean=1000000000000 must be at'),
            (dict(step=deep), 'step must be a whole number')):
        torch.save(state | change, path / 'ckpt.pt')
        with pytest.raises(Refused, match=message) as caught:
            load_model(path)
        assert len(str(caught.value)) < 500


def test_an_optimizer_of_other_shapes_is_refused(config):      # noqa: F811
    c = config(optimizer='adamw', decay_steps=0)
    train(c)
    state = torch.load(f'{c.out_dir}/ckpt.pt', weights_only=True)
    first = state['optimizers'][0]['state'][0]
    first['exp_avg'] = torch.zeros(1).expand(2 ** 20, 2 ** 20)
    torch.save(state, f'{c.out_dir}/ckpt.pt')
    with pytest.raises(Refused, match='does not hold in full: its optimizers cannot be loaded'):
        train(dataclasses.replace(c, steps=c.steps + 1))


def test_a_run_is_moved_aside_after_everything_else_was_checked(config, tmp_path):  # noqa: F811
    c = config()
    train(c)
    before = {path.name: path.read_bytes() for path in (tmp_path / 'run').iterdir()}
    with pytest.raises(Refused, match='there is no dataset at'):
        train(dataclasses.replace(c, resume=False, cooldown_data=str(tmp_path / 'nothing')))
    assert before == {path.name: path.read_bytes() for path in (tmp_path / 'run').iterdir()}
    train(dataclasses.replace(c, resume=False, seed=3))
    assert (tmp_path / 'run.1/ckpt.pt').read_bytes() == before['ckpt.pt']


def test_what_a_killed_process_left_goes_with_the_next_writer(tmp_path):
    gone = subprocess.Popen([sys.executable, '-c', ''])
    gone.wait()
    for name in (f'a.json.{gone.pid}.tmp', f'a.json.{os.getppid()}.tmp', f'b.json.{gone.pid}.tmp'):
        (tmp_path / name).write_text('half')
    files.write_json(tmp_path / 'a.json', {})
    assert {path.name for path in tmp_path.iterdir()} == {
        'a.json', f'a.json.{os.getppid()}.tmp', f'b.json.{gone.pid}.tmp'}


def test_a_lock_is_free_once_its_holder_is_gone(tmp_path):
    with files.claim(tmp_path / 'x'):
        other = os.open(tmp_path / 'x/lock', os.O_RDWR)
        with pytest.raises(Refused):
            files.claim(tmp_path / 'x').__enter__()
    with files.claim(tmp_path / 'x'):           # another file by now: the old one locks nothing
        assert not os.path.samestat(os.fstat(other), os.stat(tmp_path / 'x/lock'))
    os.close(other)


# ---------------------------------------------------------------------------- hangs and tracebacks

@pytest.mark.parametrize('name, argv', [('ckpt.pt', ['sample']), ('log.jsonl', ['plot'])])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(run, capsys, name, argv):      # noqa: F811
    (run[0] / name).unlink(missing_ok=True)
    os.mkfifo(run[0] / name)
    began = time.monotonic()
    assert f'{name} is no ordinary file' in refused(capsys, *argv, run[0])
    assert time.monotonic() - began < 10


def test_a_token_past_the_vocabulary(tiny, tmp_path, capsys):
    from data.tokenizer_json import to_tokenizer_json
    spec = to_tokenizer_json(get_tokenizer('bytes'))
    spec['model']['vocab']['?'] = 5000
    model = tiny(vocab_size=257)
    checkpoint.save(tmp_path, **checkpoint.describe(model), step=0)
    (tmp_path / 'tokenizer.json').write_text(json.dumps(spec))
    for name, more in dict(sample=['--prompt=a?b'], primitives=['--tasks=toy_assign', '--n=3'],
                           evaluate=['--limit=2', '--tasks=primitive_toy_assign_d0']).items():
        assert 'a token 5000, but the model has a vocabulary of 257' in refused(
            capsys, name, tmp_path, *more, '--device=cpu')
    spec['model']['vocab']['?'] = 63
    spec['post_processor']['special_tokens']['<|endoftext|>']['ids'] = [99_999]
    (tmp_path / 'tokenizer.json').write_text(json.dumps(spec))
    assert 'a token 99999, but' in refused(capsys, 'sample', tmp_path, '--prompt=b')


TRAIN = [ROOT / 'train.py', *TINY, '--steps=2']


def test_ctrl_c_during_the_imports_is_a_line():
    code = ('import sys, common; sys.__excepthook__ = None; '
            'sys.excepthook(KeyboardInterrupt, None, None)')
    (ROOT / 'tests/__interrupted.py').unlink(missing_ok=True)
    done = shell('-c', f'import sys; sys.modules["__main__"].__file__ = {str(ROOT / "x.py")!r}; '
                 + code)
    assert done.returncode == 0 and done.stderr == 'stopped\n'
    for script in ('train', 'grow', 'loop', 'retrofit', 'wrapper', 'probe'):
        lines = (ROOT / f'{script}.py').read_text().split('"""', 2)[2].strip().splitlines()
        assert lines[0].startswith('import common'), script


def test_streams_that_take_nothing_end_no_run(data, tmp_path):
    argv = ' '.join(map(str, [sys.executable, *TRAIN, f'--data={data}', f'--out_dir={tmp_path}']))
    done = subprocess.run(f'{argv} >/dev/full 2>&-', shell=True, cwd=ROOT, capture_output=True,
                          text=True)
    assert checkpoint.load(tmp_path)['step'] == 2, done.stderr
    assert 'Traceback' not in done.stderr


def test_a_model_too_large_for_memory(data, tmp_path, capsys):
    argv = [*TINY, '--steps=2', f'--data={data}', '--n_embd=1000000', '--ffn_dim=16000000']
    assert 'there is not enough memory' in refused(capsys, 'train', *argv,
                                                   f'--out_dir={tmp_path / "x"}')
    assert not (tmp_path / 'x').exists()


def test_a_temperature_near_zero_takes_the_likeliest(tiny):
    model, prompt = tiny(), torch.randint(50, (2, 5))
    assert torch.equal(model.generate(prompt, 8, temperature=1e-300),
                       model.generate(prompt, 8, temperature=0))


def test_a_kind_that_has_the_name_of_a_column(tmp_path, data, kind='flops'):
    with pytest.raises(Refused, match=f'a kind of answer cannot be called {kind!r}'):
        write_dataset(tmp_path, 'val', 'bytes', [1] * 40, marks=[0] * 40, kinds=[kind])
    path = data / 'val.json'
    path.write_text(path.read_text().replace('"fifth"', f'"{kind}"'))
    with pytest.raises(Refused, match=f'a kind of answer cannot be called {kind!r}'):
        Dataset(data, 'val', 8)


def test_a_full_disk_is_called_full(tmp_path):
    if not os.path.exists('/dev/full'):
        pytest.skip('Linux has a device that is always full')
    with pytest.raises(OSError, match='No space left on device'), open('/dev/full', 'wb') as full:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(checkpoint, 'fresh', lambda path: full)
            checkpoint.save(tmp_path, model=torch.zeros(2 ** 20))


def test_a_bug_in_the_reading_of_a_file_can_be_seen(run, capsys, monkeypatch):      # noqa: F811
    (run[0] / 'ckpt.pt').write_bytes(b'nonsense')
    assert 'Traceback' not in refused(capsys, 'sample', run[0])
    monkeypatch.setenv('NANODEPTH_DEBUG', '1')
    with pytest.raises(SystemExit):
        nanodepth.main('sample', [str(run[0])])
    assert 'zipfile.BadZipFile' in capsys.readouterr().err


WRONG = {       # a file, what is written into it, the command that reads it, what it says
    'run.json': ('{"tokenizer": 3}', 'sample', 'tokenizer must be text, not 3'),
    'tokenizer.json': ('{"model": {"vocab": 3}}', 'sample', 'tokenizer.json'),
    'log.jsonl': ('{"step": "a"}\n[]\n', 'plot', 'no measurement yet'),
    'lens.pt': ('nonsense', 'probe', 'lens.pt is damaged'),
}


@pytest.mark.parametrize('name', WRONG)
def test_a_field_of_the_wrong_kind_is_one_line(run, data, name, capsys):      # noqa: F811
    text, tool, message = WRONG[name]
    (run[0] / name).write_text(text)
    argv = [run[0]] if tool != 'plot' else [run[0], run[0]]
    more = ['--only=early_exit', f'--data={data}', '--device=cpu', '--count=2', '--batches=1',
            f'--out={run[0] / "p"}'] if tool == 'probe' else []
    assert message in refused(capsys, tool, *argv, *more)


@pytest.mark.parametrize('text, message', [
    ('{}', 'must name datasets, each with a share above 0'),
    ('{"a": "x"}', 'a share must be a number'), ('{"a": 0}', 'with a share above 0'),
    ('{"a": 1e999}', 'with a share above 0'), ('[]', 'holds a list, not a dict')])
def test_a_mixture_of_nothing(text, message, tmp_path, capsys):
    (tmp_path / 'mixture.json').write_text(text)
    assert message in refused(capsys, 'check_data', tmp_path)


def test_notes_of_a_sweep_and_claims_of_the_wrong_kind(run, data, tmp_path, capsys):  # noqa: F811
    (tmp_path / 'x.jsonl').write_text('{"of": 3, "found": {}}\n')
    assert 'of must be names with values, not 3' in refused(
        capsys, 'sweep', run[0], f'--data={data}', '--batches=1', '--windows=all1',
        f'--out={tmp_path / "x.png"}', '--device=cpu')
    for name in ('claims.toml', 'depth.csv'):
        (tmp_path / name).write_bytes((ROOT / 'docs/results' / name).read_bytes())
    good = (tmp_path / 'claims.toml').read_text()
    for text, message in ((good.replace("unit = 'text'", "unit = 'txt'", 1), "unit='txt'"),
                          ('[claim', 'TOMLDecodeError'), ('claim = 3', 'TypeError')):
        (tmp_path / 'claims.toml').write_text(text)
        assert message in refused(capsys, 'results', f'--rows={tmp_path}', '--check')
    (tmp_path / 'claims.toml').write_text(good)
    (tmp_path / 'depth.csv').write_text('run,seed\n1,2,3\n')
    assert 'more or fewer cells' in refused(capsys, 'results', f'--rows={tmp_path}', '--check')


# ------------------------------------------------------------------------------- surprises, decided

@pytest.mark.parametrize('name, value', [
    ('n_layer', 3), ('n_embd', 64), ('rope_theta', 5e5), ('tie_embeddings', True),
    ('ln_scaling', True)])
def test_a_shape_beside_init_from_is_refused(name, value, tmp_path):
    with pytest.raises(Refused, match=f'{name}={value} has no effect beside init_from=x'):
        read_config([f'--{name}={value}', '--init_from=x'])
    (tmp_path / 'c.py').write_text(f'{name} = {value}\ninit_from = "x"\n')
    with pytest.raises(Refused, match='that checkpoint decides the shape'):
        read_config([str(tmp_path / 'c.py')])
    with pytest.raises(Refused, match='n_embd=64 has no effect'):       # always the same one
        read_config(['--init_from=x', '--n_layer=2', '--n_embd=64', '--n_head=2'])


def test_a_run_with_such_a_setting_still_resumes(config, tmp_path):      # noqa: F811
    parent = config('parent')
    train(parent)
    # as an older version took it
    child = config('child', init_from=parent.out_dir, n_layer=5, decay_steps=0)
    train(child)
    train(dataclasses.replace(child, n_layer=8, steps=child.steps + 2))
    assert log_of(child)[-1]['step'] == child.steps + 2


def test_fewer_batches_of_validation_than_asked_for_are_said(config, capsys):      # noqa: F811
    train(config(eval_batches=10 ** 6))
    said = capsys.readouterr().out
    assert said.count('but the validation data has only') == 1


def test_data_of_a_tokenizer_that_nobody_has(config, data):      # noqa: F811
    for split in ('train', 'val'):
        path = data / f'{split}.json'
        path.write_text(path.read_text().replace('"bytes"', '"bites"'))
    with pytest.raises(Refused, match="tokenizer 'bites' is not known"):
        train(config())


# ----------------------------------------------------------------------- from a checkpoint's user

@pytest.fixture
def parent(tmp_path, tiny):
    "A Hugging Face folder in bfloat16, with a context of 32."
    pytest.importorskip('safetensors')
    from engine.hf import save_hf
    save_hf(tiny(vocab_size=257, context=32).bfloat16(), tmp_path / 'hf', tokenizer='bytes')
    return tmp_path / 'hf'


def test_training_keeps_the_context_and_the_type_of_the_parent(parent, config, tmp_path):  # noqa
    c = config(init_from=str(parent), context=16)
    train(c)
    assert load_model(c.out_dir).config.context == 32
    flops = load_model(c.out_dir).flops_per_token(context=16)
    assert log_of(c)[-1]['flops'] == flops * log_of(c)[-1]['tokens']
    nanodepth.main('export', [c.out_dir, str(tmp_path / 'again')])
    about = json.loads((tmp_path / 'again/config.json').read_text())
    assert (about['max_position_embeddings'], about['torch_dtype']) == (32, 'bfloat16')
    assert load_model(tmp_path / 'again').norm.weight.dtype == torch.bfloat16
    with pytest.raises(Refused, match='context=64, the length of a training row, is more than'):
        train(config('more', init_from=str(parent), context=64))


def test_a_run_keeps_its_tokenizers_file(parent, config, tmp_path, data):      # noqa: F811
    nanodepth.main('retrofit', [str(parent), '1-1-1', f'--out={tmp_path / "cut"}'])
    for split in ('train', 'val'):
        path = data / f'{split}.json'
        path.write_text(path.read_text().replace('"bytes"', json.dumps(str(parent))))
    c = config(init_from=str(tmp_path / 'cut'), context=16)
    train(c)
    parent.rename(tmp_path / 'moved')
    for folder in (tmp_path / 'cut', c.out_dir):
        assert get_tokenizer(folder).encode('ab') == [97, 98]
        assert str(tmp_path) not in (get_tokenizer(folder).name,)


def test_data_of_another_tokenizer_is_refused_by_whoever_reads_it(parent, data, tmp_path,
                                                                  capsys):
    spec = json.loads((parent / 'tokenizer.json').read_text())
    vocab = spec['model']['vocab']
    vocab['a'], vocab['b'] = vocab['b'], vocab['a']         # every id still fits
    (parent / 'tokenizer.json').write_text(json.dumps(spec))
    more = [f'--data={data}', '--device=cpu']
    out = f'--out={tmp_path / "x.png"}'
    for argv in (['loop', parent, out, *more], ['lens', parent, f'--out={tmp_path / "l"}', *more],
                 ['probe', parent, '--only=swap', f'--out={tmp_path / "p"}', *more],
                 ['retrofit', parent, '--eval', out, *more],
                 ['retrofit', parent, '1-1-1', '--select=influence', f'--data={data}'],
                 ['retrofit', parent, '1-1-1', '--search', f'--data={data}']):
        assert "was made with the tokenizer 'bytes', which is not that of" in refused(
            capsys, *argv), argv
    from tools.play import Opened
    with pytest.raises(Refused, match='which is not that of'):
        Opened(parent, 'cpu', str(data)).val


def test_a_folder_hides_no_name_on_the_hub(tmp_path, monkeypatch):
    from variants.lens import beside
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'Org').mkdir()
    assert on_hub('Org/Name') and str(beside('Org/Name')) == 'out/Name/lens.pt'
    assert str(beside('Org')) == 'Org/lens.pt'


def test_the_first_states_of_a_long_context_are_made_as_they_are_read(tiny):
    long, short = (surgery(tiny(context=n), '1-2-1') for n in (2 ** 20, 64))
    tokens = torch.randint(50, (1, 8))
    assert torch.equal(long(tokens), short(tokens)) and len(long.table) == 64
    before = long.table.clone()
    long.first_state(torch.zeros(1, 100, 32), 0, None)
    assert len(long.table) == 128 and torch.equal(long.table[:64], before)
    whole = surgery(tiny(context=128), '1-2-1')
    whole.table = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(long.table, whole.table)


def test_a_prompt_that_is_cut_is_said(tiny, tmp_path, capsys):
    pytest.importorskip('lm_eval')
    model = tiny(vocab_size=257, context=32)
    checkpoint.save(tmp_path, **checkpoint.describe(model), step=0)
    (tmp_path / 'run.json').write_text('{"tokenizer": "bytes"}')
    nanodepth.main('evaluate', [str(tmp_path), '--tasks=primitive_assign_math', '--limit=2',
                                '--device=cpu', f'--out={tmp_path / "e.json"}'])
    assert 'prompts do not fit into 32 tokens' in capsys.readouterr().out


def test_options_that_would_be_ignored_are_refused(tiny):
    from wrapper import patch
    with pytest.raises(Refused, match="the method 'naive' has no option 'beta'"):
        patch(tiny(), (1, 2), 'naive', K=2, beta=0.3)


def test_a_message_names_the_command_and_which_of_two_does_not_fit(config, tmp_path):  # noqa: F811
    with pytest.raises(Refused, match='python data/text/prepare.py FILES --out='):
        train(config(data=str(tmp_path / 'mine')))


def test_a_refused_run_leaves_no_lock(config, tmp_path):      # noqa: F811
    with pytest.raises(Refused):
        train(config('new', data=str(tmp_path / 'nothing')))
    assert not (tmp_path / 'new').exists()
    train(config())
    assert not (tmp_path / 'run/lock').exists()
