"No run and no data are lost, and no number is silently wrong: files, folders, parents, tokenizers."
import dataclasses
import json
import os

import pytest
import torch
from conftest import ranks
from test_train import command, config, log_of, weights_of  # noqa: F401
from test_trust import TINY, refused, run  # noqa: F401

from nanodepth.__main__ import main as nanodepth
from nanodepth.common import files
from nanodepth.common.errors import Refused
from nanodepth.data.tokenizer import as_tokenizers, get_tokenizer
from nanodepth.data.tokens import Dataset, write_dataset
from nanodepth.engine import checkpoint
from nanodepth.engine.checkpoint import load_model
from nanodepth.model import LM, ModelConfig
from nanodepth.retrofit import surgery
from nanodepth.train import read_config, train

# ------------------------------------------------------------- what was wrong, lost or unbounded

def test_data_that_is_made_again_and_killed_is_no_dataset(tmp_path, monkeypatch):
    write_dataset(tmp_path, 'train', 'bytes', [1] * 40)
    real = files.replace

    def killed(path, raw):
        real(path, raw)
        raise KeyboardInterrupt
    monkeypatch.setattr('nanodepth.data.tokens.replace', killed)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(tmp_path, 'train', 'bytes', [2] * 40)
    with pytest.raises(Refused, match='there is no dataset'):
        Dataset(tmp_path, 'train', 8)


def test_a_batch_without_a_target_changes_nothing_and_ends_nothing(tmp_path):
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'd', split, 'bytes', [1] * 340, mask=[0] * 340, row=17)
    argv = [*TINY, f'--data={tmp_path / "d"}', '--steps=2', '--optimizer=adamw',
            '--weight_decay=0', '--grad_accum=2']
    nanodepth('train', [*argv, f'--out_dir={tmp_path / "one"}'])
    lines = [json.loads(line) for line in (tmp_path / 'one/log.jsonl').open()]
    assert lines[-1]['step'] == 2 and lines[-1]['val_loss'] == 0
    start = LM(ModelConfig(**checkpoint.load(tmp_path / 'one')['model_config']))
    assert checkpoint.load(tmp_path / 'one')['model'].keys() == start.state_dict().keys()
    two = ranks([*argv, f'--out_dir={tmp_path / "two"}'])
    assert two.returncode == 0, two.stderr


def test_nothing_is_cut_into_the_folder_of_a_run_at_work(run, tmp_path, capsys):      # noqa: F811
    with files.claim(tmp_path / 'busy'):
        for argv in (['cut', run[0], '0-1-1', f'--out={tmp_path / "busy"}'],
                     ['cut', run[0], '--untie', f'--out={tmp_path / "busy"}'],
                     ['export', run[0], tmp_path / 'busy']):
            assert 'another run is at work in' in refused(capsys, *argv)
        with pytest.raises(Refused, match='another run is at work in'):
            write_dataset(tmp_path / 'busy', 'train', 'bytes', [1] * 40)
    assert [path.name for path in (tmp_path / 'busy').iterdir()] == ['lock']


def test_a_run_is_moved_aside_after_everything_else_was_checked(config, tmp_path):  # noqa: F811
    c = config()
    train(c)
    before = {path.name: path.read_bytes() for path in (tmp_path / 'run').iterdir()}
    with pytest.raises(Refused, match='there is no dataset at'):
        train(dataclasses.replace(c, resume=False, cooldown_data=str(tmp_path / 'nothing')))
    assert before == {path.name: path.read_bytes() for path in (tmp_path / 'run').iterdir()}
    train(dataclasses.replace(c, resume=False, seed=3))
    assert (tmp_path / 'run.1/ckpt.pt').read_bytes() == before['ckpt.pt']


def test_a_token_past_the_vocabulary(tiny, tmp_path, capsys):
    spec = json.loads(as_tokenizers(get_tokenizer('bytes'), 'bytes').to_str())
    spec['model']['vocab']['?'] = 5000
    model = tiny(vocab_size=257)
    checkpoint.save(tmp_path, **checkpoint.describe(model), step=0)
    (tmp_path / 'tokenizer.json').write_text(json.dumps(spec))
    for name, more in dict(sample=['--prompt=a?b'],
                           evaluate=['--tasks=toy_assign', '--n=3']).items():
        assert 'a token 5000, but the model has a vocabulary of 257' in refused(
            capsys, name, tmp_path, *more, '--device=cpu')
    spec['model']['vocab']['?'] = 63
    spec['post_processor']['special_tokens']['<|endoftext|>']['ids'] = [99_999]
    (tmp_path / 'tokenizer.json').write_text(json.dumps(spec))
    assert 'a token 99999, but' in refused(capsys, 'sample', tmp_path, '--prompt=b')


def test_a_kind_that_has_the_name_of_a_column(tmp_path, data, kind='flops'):
    with pytest.raises(Refused, match=f'a kind of answer cannot be called {kind!r}'):
        write_dataset(tmp_path, 'val', 'bytes', [1] * 40, marks=[0] * 40, kinds=[kind])
    path = data / 'val.json'
    path.write_text(path.read_text().replace('"fifth"', f'"{kind}"'))
    with pytest.raises(Refused, match=f'a kind of answer cannot be called {kind!r}'):
        Dataset(data, 'val', 8)


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


# ----------------------------------------------------------------------- from a checkpoint's user

@pytest.fixture
def parent(tmp_path, tiny):
    "A Hugging Face folder in bfloat16, with a context of 32."
    pytest.importorskip('safetensors')
    from nanodepth.engine.hf import save_hf
    save_hf(tiny(vocab_size=257, context=32).bfloat16(), tmp_path / 'hf', tokenizer='bytes')
    return tmp_path / 'hf'


def test_training_keeps_the_context_and_the_type_of_the_parent(parent, config, tmp_path):  # noqa
    c = config(init_from=str(parent), context=16)
    train(c)
    assert load_model(c.out_dir).config.context == 32
    flops = load_model(c.out_dir).flops_per_token(context=16)
    assert log_of(c)[-1]['flops'] == flops * log_of(c)[-1]['tokens']
    nanodepth('export', [c.out_dir, str(tmp_path / 'again')])
    about = json.loads((tmp_path / 'again/config.json').read_text())
    assert (about['max_position_embeddings'], about['torch_dtype']) == (32, 'bfloat16')
    assert load_model(tmp_path / 'again').norm.weight.dtype == torch.bfloat16
    with pytest.raises(Refused, match='context=64, the length of a training row, is more than'):
        train(config('more', init_from=str(parent), context=64))


def test_a_run_keeps_its_tokenizers_file(parent, config, tmp_path, data):      # noqa: F811
    nanodepth('cut', [str(parent), '1-1-1', f'--out={tmp_path / "cut"}'])
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
    for argv in (['evaluate', parent, out, *more], ['sweep', parent, out, *more],
                 ['probe', parent, '--only=swap', f'--out={tmp_path / "p"}', *more],
                 ['cut', parent, '1-1-1', '--select=influence', f'--data={data}'],
                 ['cut', parent, '1-1-1', '--search', f'--data={data}']):
        assert "was made with the tokenizer 'bytes', which is not that of" in refused(
            capsys, *argv), argv


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
