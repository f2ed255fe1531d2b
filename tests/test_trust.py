"Nothing lost, nothing let in, no surprise: each thing that an attack found, and how it ends now."
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from conftest import ROOT, write_noise

import nanodepth
from common.errors import Refused, refusals
from common.files import read_fields
from common.options import read
from data.tokenizer import RunFile, get_tokenizer
from data.tokenizer_json import Foreign, to_tokenizer_json
from engine import checkpoint
from engine.measure import parse_tasks, score
from report.logs import Log, read_lines
from train import Config, read_config

TINY = ['--n_layer=2', '--n_embd=16', '--n_head=2', '--head_dim=8', '--context=16',
        '--batch_size=4', '--warmup_steps=0', '--decay_steps=0', '--eval_batches=1', '--device=cpu']


@pytest.fixture
def run(tiny, tmp_path):
    "A folder with a model of bytes, and the model."
    model = tiny(vocab_size=257, n_layer=2)
    checkpoint.save(tmp_path / 'run', **checkpoint.describe(model), step=3, optimizers=[])
    (tmp_path / 'run/run.json').write_text('{"tokenizer": "bytes"}')
    return tmp_path / 'run', model


def refused(capsys, name, *argv):
    with pytest.raises(SystemExit) as end:
        nanodepth.main(name, [str(a) for a in argv])
    said = [line for line in capsys.readouterr().err.replace('\r', '\n').splitlines()
            if line.startswith(f'{name}: ') and '%|' not in line]
    assert end.value.code == 2 and len(said) == 1
    return said[0]


def test_runs_that_were_asked_other_things_are_not_compared(tiny, tmp_path, capsys):
    model = tiny(vocab_size=257, n_layer=4)
    for name in 'ab':
        model.norm.weight.data += 0.1           # two models
        write_noise(tmp_path / f'data_{name}', ['text', f'kind {name}'])
        config = dict(data=[f'{tmp_path}/data_{name}'], batch_size=4, context=16)
        checkpoint.save(tmp_path / name, **checkpoint.describe(model), config=config, flops=0,
                        tokenizer='bytes')
        (tmp_path / name / 'run.json').write_text('{"tokenizer": "bytes"}')
    both = [tmp_path / 'a', tmp_path / 'b', '--batches=1', '--device=cpu',
            f'--out={tmp_path}/x.png']
    for name, *more in (('retrofit', '--eval'), ('loop', '--times=1')):
        assert 'with other kinds of answers' in refused(capsys, name, *both, *more)
    error = refused(capsys, 'sweep', *both, '--windows=1-2', '--methods=rk', '--K=2',
                    '--score=kind a')
    assert "b: --score='kind a' is not one of loss, kind b; did you mean 'kind b'?" in error


# ------------------------------------------------------------------------------ 1: not finite

@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_refused_by_whoever_reads_it(run, tmp_path, capsys, value):
    path, model = run
    model.layers[1].mlp.up.weight.data[3, 2] = value
    checkpoint.save(path, **checkpoint.describe(model), step=3, optimizers=[])
    for name, more in dict(primitives=['--tasks=toy_copy', '--n=2', '--device=cpu'], sample=[],
                           export=[tmp_path / 'hf'], retrofit=['0-1-1'], lens=['--device=cpu'],
                           evaluate=['--limit=2'], probe=['--only=norms']).items():
        assert 'holds numbers that are not finite' in refused(capsys, name, path, *more), name


def test_scores_of_what_is_not_finite_are_no_scores(run):
    _, model = run
    examples = parse_tasks('toy_assign/0', 4)['toy_assign/0']
    assert 0 <= score(model, get_tokenizer('bytes'), examples)[0] <= 1
    broken = lambda tokens: model(tokens) * math.nan
    assert math.isnan(score(broken, get_tokenizer('bytes'), examples)[0])


# ----------------------------------------------------------------------------------- 2: the log

def test_a_log_that_cannot_be_read_is_kept_and_said(tmp_path):
    path, said = tmp_path / 'log.jsonl', []
    lines = [json.dumps(dict(step=n, flops=n, loss=1.0)) for n in range(1, 7)]
    raw = '\n'.join([*lines[:2], lines[2][:9] + '\x00', '[1]', *lines[3:]]) + '\n'
    path.write_text(raw)
    Log(path, 5, say=said.append)
    assert [line['step'] for line in read_lines(path)] == [1, 2, 4, 5]
    assert '2 lines that cannot be read, the first at line 3' in said[0]
    assert (tmp_path / 'log.jsonl.unreadable1').read_text() == raw
    path.write_text('\n'.join(lines) + '\n{"step": 7, "lo')       # only cut off: nothing to say
    Log(path, 4, say=said.append)
    assert len(said) == 1 and [line['step'] for line in read_lines(path)] == [1, 2, 3, 4]
    path.unlink()
    Log(path, 4, say=said.append)
    assert 'has no line up to step 4' in said[1]


# --------------------------------------------------------------------- 3: settings, 5: checkpoints

@pytest.mark.parametrize('argv, message', [
    (['--out_dir='], "out_dir='' must name a folder"), (['--head_dim=0'], 'head_dim=0 must be'),
    (['--rope_theta=0'], 'rope_theta=0.0 must be at least 1'),
    (['--context=1'], 'context=1 must be at least 2'),
    (['--batch_size=1000000000000'], 'batch_size=1000000000000 must be at most 4,194,304'),
    (['--loop=2x99999999999'], 'runs more than 10,000 layers'),
    (['--data_weights=[1e999]'], 'data_weights=[inf]')])
def test_nonsense_is_one_line(argv, message, capsys, data, tmp_path):
    where = [] if 'out_dir' in argv[0] else [f'--out_dir={tmp_path / "x"}']
    assert message in refused(capsys, 'train', *TINY, f'--data={data}', '--steps=2', *where, *argv)


@pytest.mark.parametrize('argv, message', [
    (['sweep', 'x', '--window=mid4'], "no option --window; did you mean 'windows'?"),
    (['export', 'x', 'y', 'z'], 'z: one argument too many'),
    (['export', 'x', '--target=y'], '--target=y: the target is given as a word'),
    (['loop', 'x', '--times=1,999999999999'], 'must be 1 to 10,000'),
    (['grow', '4', '--operators='],
     '--operators is empty: give at least one, such as --operators=midas,lidas'),
    (['loop', 'x', '--untie=yes'], "--untie must be true or false, not 'yes'"),
    (['loop', 'x', '--untie=True'], '--untie takes two folders'),
    (['loop', 'x', '--untie=false', '--block=0'], 'block=0')])
def test_an_option_that_is_not_there_and_a_flag_with_a_value(argv, message, capsys):
    assert message in refused(capsys, *argv)


def test_a_config_that_ends_python_is_refused(tmp_path):
    (tmp_path / 'c.py').write_text('import sys\nsys.exit(0)\n')
    with pytest.raises(Refused, match='does not run: SystemExit'):
        read_config([str(tmp_path / 'c.py')])


@pytest.mark.parametrize('argv, message', [
    (['--steps=0'], '--steps=0 must be at least 1'), (['--lr=1e30'], '--lr=1e+30 must be at most'),
    (['--steps=2', '--lr=nan'], "--lr must be a number, not 'nan'")])
def test_a_lens_that_cannot_learn_is_not_saved(run, data, capsys, argv, message):
    assert message in refused(capsys, 'lens', run[0], *argv, '--device=cpu', f'--data={data}')
    assert not (run[0] / 'lens.pt').exists()


@pytest.mark.parametrize('change, message', [
    (lambda s: [1, 2], 'holds a list, not names with values'),
    (lambda s: s | dict(kind='gpt'), "kind='gpt' is not one of lm, recurrent"),
    (lambda s: s | dict(model_config=None), 'model_config must be names with values, not None'),
    (lambda s: s | dict(step=-5), 'step=-5 must be at least 0'),
    (lambda s: s | dict(model=[]), 'model must be names with values'),
    (lambda s: {k: v for k, v in s.items() if k != 'model'}, "it does not say 'model'"),
    (lambda s: s | dict(parts='parts_3_0'), 'keeps its tensors in parts, in other files'),
    (lambda s: s | dict(optimizers='x'), 'optimizers must be a list'),
    (lambda s: s | dict(model_config=s['model_config'] | dict(n_layer=9999)),
     'weights of 2 layers, but n_layer=9999'),
    (lambda s: s | dict(model_config=s['model_config'] | dict(n_embd=2 ** 19, n_head=4,
                                                              head_dim=None)), 'shapes'),
    (lambda s: s | dict(model_config=s['model_config'] | dict(color='red')), "'color'")])
def test_what_is_no_state_of_ours_is_one_line_and_takes_no_memory(run, change, message):
    path, _ = run
    state = change(torch.load(path / 'ckpt.pt', weights_only=True))
    torch.save(state, path / 'ckpt.pt')
    began = time.monotonic()
    with pytest.raises(Refused, match=message):
        checkpoint.load_model(path)
    assert time.monotonic() - began < 5


def test_a_compressed_archive_is_not_unpacked(run):
    path = run[0] / 'ckpt.pt'
    with zipfile.ZipFile(path) as old:
        parts = {part.filename: old.read(part) for part in old.infolist()}
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as new:
        for name, raw in parts.items():
            new.writestr(name, raw)
    with pytest.raises(Refused, match='it is compressed, which torch.save never does'):
        checkpoint.load(path)


@pytest.mark.parametrize('text', ['[' * 100_000, '[1, 2]', '"x"', '{"a": 1', '1' * 5000])
def test_json_that_parses_oddly(tmp_path, text):
    (tmp_path / 'x.json').write_text(text)
    with pytest.raises(Refused, match='not what it should be|holds a|does not say'):
        read_fields(RunFile, tmp_path / 'x.json')


def stranger(folder, pattern):
    "A tokenizer.json of bytes that cuts text by this expression."
    spec = to_tokenizer_json(get_tokenizer('bytes'))
    spec['pre_tokenizer']['pretokenizers'][0]['pattern']['Regex'] = pattern
    spec['model']['merges'].append(['a', 'a'])
    spec['model']['vocab']['aa'] = 257
    (folder / 'tokenizer.json').write_text(json.dumps(spec))
    return get_tokenizer(folder)


def test_a_strangers_expression_is_a_line_and_loses_no_text(tmp_path):
    pytest.importorskip('tokenizers')
    ours = stranger(tmp_path, r'((a|aa)+)\2c|[\s\S]')         # it tries every way to cut
    (tmp_path / 'b').mkdir()
    stranger(tmp_path / 'b', r'(a+)+$')
    for tokenizer in (ours, Foreign(tmp_path / 'b/tokenizer.json', 'x')):
        assert tokenizer.decode(tokenizer.encode('ab')) == 'ab'
        with pytest.raises(Refused, match='backtracking|retry-limit'):
            tokenizer.encode('a' * 60 + '!')
    assert isinstance(stranger(tmp_path, '[a-z]+'), Foreign)    # tiktoken drops what lies between
    spec = json.loads((tmp_path / 'tokenizer.json').read_text())
    (tmp_path / 'tokenizer.json').write_text(json.dumps(spec | dict(model=dict(
        type='WordLevel', vocab=dict(a=0), unk_token='x'))))
    with pytest.raises(Refused, match='tokenizer .*'):          # the package has no word for it
        get_tokenizer(tmp_path).encode('nothing that it knows')


# ------------------------------------------------------------------------- 8: signals and pipes

@pytest.mark.parametrize('error, code, said', [
    (KeyboardInterrupt(), 130, 'x: stopped'),
    (OSError(28, 'No space left on device', '/a/b'), 2, 'x: No space left on device (/a/b)')])
def test_the_door_turns_signals_and_files_into_a_status(error, code, said, capsys):
    with pytest.raises(SystemExit) as end, refusals('x'):
        raise error
    assert end.value.code == code and said in capsys.readouterr().err


def test_a_command_whose_reader_has_gone_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    child = subprocess.run([sys.executable, '-u', str(ROOT / 'nanodepth.py'), 'grow', '8',
                            '--block=2', '--out=/dev/null/x.png'], stdout=write,
                           stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert child.returncode == 141 and 'Traceback' not in child.stderr, child.stderr


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), refusals('x'):
        1 / 0


def training(data, out, steps, **kwargs):
    return subprocess.Popen([sys.executable, str(ROOT / 'train.py'), *TINY, f'--data={data}',
                             f'--out_dir={out}', f'--steps={steps}', '--save_every=1000'],
                            text=True, **kwargs)


def test_a_closed_pipe_does_not_end_a_run(data, tmp_path):
    read, write = os.pipe()
    child = training(data, tmp_path / 'x', 8, stdout=write, stderr=subprocess.PIPE)
    os.close(write), os.close(read)
    _, said = child.communicate(timeout=100)
    assert child.returncode == 0, said
    assert checkpoint.load(tmp_path / 'x')['step'] == 8


def test_a_closed_window_saves(data, tmp_path):
    child = training(data, tmp_path / 'x', 100_000, stdout=subprocess.DEVNULL,
                     stderr=subprocess.PIPE)
    log, began = tmp_path / 'x/log.jsonl', time.monotonic()
    while time.monotonic() - began < 60 and not (log.exists() and log.stat().st_size > 500):
        time.sleep(0.05)
    child.send_signal(signal.SIGHUP)
    child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGHUP
    assert checkpoint.load(tmp_path / 'x')['step'] >= 10


def test_ranks_whose_torchrun_died_before_they_met_end():
    "They wait for a store that nobody holds any more."
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    rank = (f'import sys; sys.path.insert(0, {str(ROOT)!r}); from engine.world import World; '
            'print("here", flush=True); World("cpu")')
    torchrun = subprocess.Popen(
        [sys.executable, '-c', 'import subprocess, sys; '
         f'subprocess.run([sys.executable, "-c", {rank!r}])'], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env=os.environ | dict(
            RANK='1', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=port))
    assert torchrun.stdout.readline() == 'here\n'
    time.sleep(1)
    torchrun.kill()
    torchrun.communicate(timeout=60)        # the pipe is closed when the rank has ended too


# ------------------------------------------------------------------- 9: files in the way, 12: hosts

def test_nothing_is_written_into_a_trained_runs_folder(run, data, capsys, tmp_path):
    from data.tokens import write_dataset
    assert 'holds a checkpoint already' in refused(capsys, 'export', run[0], run[0])
    with pytest.raises(Refused, match='holds a run: choose another folder'):
        write_dataset(run[0], 'train', 'bytes', [1, 2, 3])
    (tmp_path / 'y/log.jsonl').mkdir(parents=True)
    assert 'log.jsonl' in refused(capsys, 'train', *TINY, f'--data={data}', '--steps=2',
                                  f'--out_dir={tmp_path / "y"}')


def test_a_log_without_its_checkpoint_is_kept(run, data, tmp_path, capsys):
    out = tmp_path / 'new'
    argv = [*TINY, f'--data={data}', '--steps=2', f'--out_dir={out}']
    nanodepth.main('train', argv)
    before = (out / 'log.jsonl').read_bytes()
    (out / 'ckpt.pt').unlink()
    nanodepth.main('train', argv)
    assert (out / 'log.jsonl.1').read_bytes() == before and len(read_lines(out / 'log.jsonl'))
    assert 'the log that was there is kept' in capsys.readouterr().out
    nanodepth.main('train', argv)               # a run that resumes keeps nothing aside
    assert not (out / 'log.jsonl.2').exists()


def test_a_hugging_face_folder_is_not_written_over(run, data, tmp_path, capsys):
    pytest.importorskip('safetensors')
    theirs = tmp_path / 'hf'
    nanodepth.main('export', [str(run[0]), str(theirs)])
    there = sorted(theirs.iterdir())
    for name, *more in (('retrofit', run[0], '0-1-1', f'--out={theirs}'),
                        ('loop', '--untie', run[0], theirs),
                        ('train', *TINY, f'--data={data}', f'--out_dir={theirs}')):
        assert 'holds a' in refused(capsys, name, *more)
    assert sorted(theirs.iterdir()) == there


def test_a_dataset_is_overwritten_only_by_what_made_it(tmp_path):
    from data.tokens import write_dataset
    for maker in ('a.py', 'a.py', None):
        write_dataset(tmp_path, 'val', 'bytes', [1, 2, 3], origin=maker and dict(made_by=maker))
        write_dataset(tmp_path / 'b', 'val', 'bytes', [1, 2], origin=dict(made_by='a.py'))
    with pytest.raises(Refused, match='holds a dataset that a.py made: choose another folder'):
        write_dataset(tmp_path / 'b', 'val', 'bytes', [1, 2], origin=dict(made_by='b.py'))
    (tmp_path / 'b/val.json').write_text('{')           # what cannot be read may be made again
    write_dataset(tmp_path / 'b', 'val', 'bytes', [1, 2], origin=dict(made_by='b.py'))


def test_what_is_in_the_way_of_a_result(run, data, tmp_path, capsys):
    path, _ = run
    for out, what in ((path / 'ckpt.pt', 'a checkpoint'), (tmp_path, 'a folder')):
        assert f'is {what}: the lens' in refused(capsys, 'lens', path, f'--out={out}')
    (tmp_path / 'log.jsonl').write_text('{"step": 1}\n')
    assert 'no file of notes' in refused(capsys, 'sweep', path, f'--data={data}',
                                         f'--out={tmp_path / "log.png"}')
    (tmp_path / 'page').mkdir()
    (tmp_path / 'page/index.html').write_text('there')
    assert 'no checkpoint' in refused(capsys, 'probe', tmp_path / 'none', '--only=similarity',
                                      f'--out={tmp_path / "page"}')
    assert (tmp_path / 'page/index.html').read_text() == 'there'
    assert '--port=70000 must be at most' in refused(capsys, 'play', path, '--port=70000')
    assert '--jobs=0 must be at least 1' in refused(capsys, 'study', '3', '--jobs=0')
    assert 'give one' in refused(capsys, 'retrofit', path, '0-1-1', '--layers=/0/1',
                                 '--select=influence', f'--data={data}',
                                 f'--out={tmp_path / "cut"}')


def test_numbers_are_there_before_a_name_of_the_picture_is_refused(run, data, tmp_path, capsys):
    assert "'loss'" in refused(capsys, 'loop', run[0], f'--data={data}', '--block=1', '--times=1',
                               '--batches=1', '--show=los', f'--out={tmp_path / "l.png"}')
    assert 'loss' in (tmp_path / 'l.csv').read_text()


def test_names_with_a_dot_are_two_pictures():
    from tools.loop import Options
    names = ('T1.5', 'T1.0', 'loop', 'a.png', 'b.pdf')
    assert [read(Options, ['run', f'--out=out/{name}']).out.name for name in names] == [
        'T1.5.png', 'T1.0.png', 'loop.png', 'a.png', 'b.pdf']


def test_a_file_that_holds_no_scores_is_refused_before_an_hour_of_them(run, tmp_path, capsys):
    (tmp_path / 'e.json').write_text('{"rows": [1]}')
    said = refused(capsys, 'evaluate', run[0], '--limit=2', f'--out={tmp_path / "e.json"}')
    assert 'e.json: rows must be names with values, not 1: choose another --out' in said


def test_an_unknown_option_is_named_before_a_missing_one():
    from tools.loop import Options
    with pytest.raises(Refused, match="there is no option --outt; did you mean 'out'"):
        read(Options, ['--outt=x'])
    with pytest.raises(Refused, match='runs: give at least 1'):
        read(Options, [])


def test_an_untied_file_keeps_its_tokenizer(run, tmp_path, capsys):
    nanodepth.main('loop', ['--untie', str(run[0] / 'ckpt.pt'), str(tmp_path / 'free')])
    assert get_tokenizer(tmp_path / 'free').n_vocab == 257


def test_the_disk_is_not_taken_for_the_network():
    from tools.evaluate import explain
    gone = OSError(28, 'No space left on device', 'x.json')
    assert explain(gone, 'arc') == 'x.json: No space left on device'
    assert 'need a network' in explain(OSError('cannot reach the hub'), 'arc')


def test_encoders_and_shared_layers_are_no_decoders():
    transformers = pytest.importorskip('transformers')
    from wrapper import patch
    small = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=4,
                 num_attention_heads=2)
    bert = transformers.BertModel(transformers.BertConfig(**small))
    with pytest.raises(Refused, match='reads in both directions|no list of layers'):
        patch(bert, (1, 2), cache='frozen')
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=2))
    llama.model.layers[2] = llama.model.layers[1]
    with pytest.raises(Refused, match='one layer in several places'):
        patch(llama, (1, 2))
