"Nothing silently wrong, nothing lost, nothing let in; and an honest mistake is one line."
import json
import math
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, write_noise

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import Refused, refusals
from nanodepth.data.tokenizer import get_tokenizer
from nanodepth.engine import checkpoint
from nanodepth.engine.measure import parse_tasks, score
from nanodepth.report.logs import Log, read_lines
from nanodepth.train import read_config

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
        nanodepth(name, [str(a) for a in argv])
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
    assert 'so that both answer the same' in refused(capsys, 'evaluate', *both)
    error = refused(capsys, 'sweep', *both, '--window=1-2', '--method=rk', '--K=2',
                    '--score=kind a')
    assert "b: --score='kind a' is not one of loss, kind b; did you mean 'kind b'?" in error


# ------------------------------------------------------------------------------ 1: not finite

@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_refused_by_whoever_reads_it(run, tmp_path, capsys, value):
    path, model = run
    model.layers[1].mlp.up.weight.data[3, 2] = value
    checkpoint.save(path, **checkpoint.describe(model), step=3, optimizers=[])
    for name, more in dict(evaluate=['--tasks=toy_copy', '--n=2', '--device=cpu'], sample=[],
                           export=[tmp_path / 'hf'], cut=['0-1-1'], sweep=['--tasks=toy_copy'],
                           probe=['--only=norms']).items():
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
    (['sweep', 'x', '--windows=mid4'], "no option --windows; did you mean 'window'?"),
    (['export', 'x', 'y', 'z'], 'z: one argument too many'),
    (['cut', 'x', '--untie=yes'], '--untie=yes must be true or false'),
    (['train', '--steps=1.5'], '--steps=1.5 must be a whole number'),
    (['train', '--lr=nan'], '--lr=nan must be at least 0'),
    (['train', '--data_weights=1,inf'], '--data_weights=inf must be finite'),
    (['train', '--grow_block=3'], '--grow_block has no effect without grow'),
    (['train', '--optimizer=adamw', '--adamw_lr=1'], '--adamw_lr has no effect without optimizer'),
    (['train', '--optimizer=adamw_star', '--weight_decay=1'], 'without another optimizer'),
    (['train', '--curriculum=0.5'], '--curriculum has no effect without init_from')])
def test_an_option_that_is_not_there_and_a_flag_with_a_value(argv, message, capsys):
    short = ['--steps=1', '--warmup_steps=0', '--decay_steps=0']        # if it is not refused
    assert message in refused(capsys, *argv, *(short if argv[0] == 'train' else []))


def test_a_config_may_hold_what_a_flag_beside_it_makes_void_and_a_comma_is_a_list(tmp_path):
    (tmp_path / 'c.py').write_text('grow_block = 3\noptimizer = "muon"\nadamw_lr = 0.1\n')
    config = read_config([str(tmp_path / 'c.py'), '--optimizer=adamw', '--data=a,b'])
    assert (config.grow_block, config.optimizer, config.data) == (3, 'adamw', ['a', 'b'])
    assert read_config(['--data=a']).data == 'a'


# ------------------------------------------------------------------------- 8: signals and pipes

def training(data, out, steps, **kwargs):
    return subprocess.Popen([sys.executable, str(ROOT / 'train.py'), *TINY, f'--data={data}',
                             f'--out_dir={out}', f'--steps={steps}', '--save_every=1000'],
                            text=True, **kwargs)


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


# ------------------------------------------------------------------- 9: files in the way, 12: hosts

def test_nothing_is_written_into_a_trained_runs_folder(run, data, capsys, tmp_path):
    from nanodepth.data.tokens import write_dataset
    assert 'holds a checkpoint already' in refused(capsys, 'export', run[0], run[0])
    with pytest.raises(Refused, match='holds a run: choose another folder'):
        write_dataset(run[0], 'train', 'bytes', [1, 2, 3])
    (tmp_path / 'y/log.jsonl').mkdir(parents=True)
    assert 'log.jsonl' in refused(capsys, 'train', *TINY, f'--data={data}', '--steps=2',
                                  f'--out_dir={tmp_path / "y"}')


def test_a_log_without_its_checkpoint_is_kept(run, data, tmp_path, capsys):
    out = tmp_path / 'new'
    argv = [*TINY, f'--data={data}', '--steps=2', f'--out_dir={out}']
    nanodepth('train', argv)
    before = (out / 'log.jsonl').read_bytes()
    (out / 'ckpt.pt').unlink()
    nanodepth('train', argv)
    assert (out / 'log.jsonl.1').read_bytes() == before and len(read_lines(out / 'log.jsonl'))
    assert 'the log that was there is kept' in capsys.readouterr().out
    nanodepth('train', argv)               # a run that resumes keeps nothing aside
    assert not (out / 'log.jsonl.2').exists()


def test_a_hugging_face_folder_is_not_written_over(run, data, tmp_path, capsys):
    pytest.importorskip('safetensors')
    theirs = tmp_path / 'hf'
    nanodepth('export', [str(run[0]), str(theirs)])
    there = sorted(theirs.iterdir())
    for name, *more in (('cut', run[0], '0-1-1', f'--out={theirs}'),
                        ('cut', run[0], '--untie', f'--out={theirs}'),
                        ('train', *TINY, f'--data={data}', f'--out_dir={theirs}')):
        assert 'holds a' in refused(capsys, name, *more)
    assert sorted(theirs.iterdir()) == there


def test_a_dataset_is_overwritten_only_by_what_made_it(tmp_path):
    from nanodepth.data.tokens import write_dataset
    for maker in ('a.py', 'a.py', None):
        write_dataset(tmp_path, 'val', 'bytes', [1, 2, 3], origin=maker and dict(made_by=maker))
        write_dataset(tmp_path / 'b', 'val', 'bytes', [1, 2], origin=dict(made_by='a.py'))
    with pytest.raises(Refused, match='holds a dataset that a.py made: choose another folder'):
        write_dataset(tmp_path / 'b', 'val', 'bytes', [1, 2], origin=dict(made_by='b.py'))
    (tmp_path / 'b/val.json').write_text('{')           # what cannot be read may be made again
    write_dataset(tmp_path / 'b', 'val', 'bytes', [1, 2], origin=dict(made_by='b.py'))


def test_what_is_in_the_way_of_a_result(run, data, tmp_path, capsys):
    path, _ = run
    (tmp_path / 'page').mkdir()
    (tmp_path / 'page/index.html').write_text('there')
    assert 'no checkpoint' in refused(capsys, 'probe', tmp_path / 'none', '--only=similarity',
                                      f'--out={tmp_path / "page"}')
    assert (tmp_path / 'page/index.html').read_text() == 'there'
    assert 'give one' in refused(capsys, 'cut', path, '0-1-1', '--layers=/0/1',
                                 '--select=influence', f'--data={data}',
                                 f'--out={tmp_path / "cut"}')


def test_numbers_are_there_before_a_name_of_the_picture_is_refused(run, data, tmp_path, capsys):
    assert "'loss'" in refused(capsys, 'evaluate', run[0], f'--data={data}', '--batches=1',
                               '--show=los', f'--out={tmp_path / "l.png"}')
    assert 'loss' in (tmp_path / 'l.csv').read_text()


def test_an_untied_file_keeps_its_tokenizer(run, tmp_path, capsys):
    nanodepth('cut', [str(run[0] / 'ckpt.pt'), '--untie', f'--out={tmp_path / "free"}'])
    assert get_tokenizer(tmp_path / 'free').n_vocab == 257


def test_encoders_and_shared_layers_are_no_decoders():
    transformers = pytest.importorskip('transformers')
    from nanodepth.wrapper import patch
    small = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=4,
                 num_attention_heads=2)
    bert = transformers.BertModel(transformers.BertConfig(**small))
    with pytest.raises(Refused, match='reads in both directions|no list of layers'):
        patch(bert, (1, 2))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=2))
    llama.model.layers[2] = llama.model.layers[1]
    with pytest.raises(Refused, match='one layer in several places'):
        patch(llama, (1, 2))
