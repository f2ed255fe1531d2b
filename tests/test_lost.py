"""What once went wrong without a word: a stranger's code that ran, a run, a dataset or a tokenizer
that was taken for another, a file that was half of two. Each test failed before it was mended."""
import builtins
import json
import os
import runpy
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, byte_level_bpe, refused, save_run, weights_of

from nanodepth import __main__ as entry
from nanodepth.__main__ import main as nanodepth
from nanodepth.scoring.scores import Asked, Subject, open_data
from nanodepth.common import files
from nanodepth.common.errors import Refused
from nanodepth.common.files import claim, fresh, replace
from nanodepth.models import checkpoint
from nanodepth.models.checkpoint import load_model
from nanodepth.models.hf import save_hf
from nanodepth.training.processes import World
from nanodepth.text.loader import Loader, write_dataset
from nanodepth.text.tokenizer import get_tokenizer
from nanodepth.train import train


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def bpe(folder, swapped=''):
    "A tokenizer with as many tokens as there are bytes and a mark; some letters change places."
    folder.mkdir(exist_ok=True)
    made = json.loads(byte_level_bpe(['abc'] * 3, 257, ['<|endoftext|>']).to_str())
    vocab = made['model']['vocab']
    for a, b in zip(swapped[::2], swapped[1::2]):
        vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / 'tokenizer.json').write_text(json.dumps(made))
    return str(folder)


# ------------------------------------------------------------------------------- a stranger's code

def test_no_stranger_is_asked_in(tmp_path, monkeypatch, tiny, capsys):
    "Whoever answers y to transformers' question would run it."
    monkeypatch.setattr(builtins, 'input', lambda *_: 'y')
    code = f'open({str(tmp_path / "RAN")!r}, "w")\nclass X: pass\n'
    new = tmp_path / 'new'
    new.mkdir()
    (new / 'evil.py').write_text(code)
    (new / 'config.json').write_text(json.dumps(dict(
        model_type='my_new_family', auto_map=dict(AutoConfig='evil.X'))))
    assert 'transformers does not open it' in refused(capsys, 'evaluate', new, '--tasks=toy_copy')
    save_hf(tiny(vocab_size=257), tmp_path / 'chat', tokenizer='bytes')
    (tmp_path / 'chat/evil.py').write_text(code)
    edit(tmp_path / 'chat/tokenizer_config.json', tokenizer_class='X',
         auto_map=dict(AutoTokenizer=['evil.X', None]))
    refused(capsys, 'evaluate', tmp_path / 'chat', '--tasks=primitive_toy_copy', '--chat',
            '--limit=2', '--device=cpu')
    assert not (tmp_path / 'RAN').exists()


# ------------------------------------------------------------------------------- folders and files

def test_a_folder_that_was_moved_away_gets_nothing_more(config, tmp_path):
    c = config()
    with claim(c.out_dir):
        shutil.rmtree(c.out_dir)
        held = files.held.copy()
        files.held.clear()                          # the second run is another process
        train(c)
        files.held.update(held)
        with pytest.raises(Refused, match='was removed or moved while this command was at work'):
            checkpoint.save(c.out_dir, step=1)
    assert checkpoint.load(c.out_dir)['step'] == c.steps


def test_two_writers_of_one_file_leave_one_of_two_whole_files(tmp_path):
    path = tmp_path / 'table.csv'
    with fresh(path) as slow:
        slow.write(b'b' * 1000)
        slow.flush()
        pid, os.getpid = os.getpid, lambda: 1
        try:
            replace(path, b'a' * 500)               # another process, from beginning to end
        finally:
            os.getpid = pid
        slow.write(b'b' * 1000)
    assert path.read_bytes() == b'b' * 2000


def test_a_closed_terminal_does_not_stop_what_nohup_began():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with World('cpu') as world:
            world.listen()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# -------------------------------------------------------------------------------------- tokenizers

def test_a_new_run_in_an_old_folder_has_its_own_tokenizer(config, data, tmp_path):
    name = bpe(tmp_path / 'tok')
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'bpe', split, name, np.arange(3000) % 250)
    train(config(data=str(tmp_path / 'bpe')))
    assert get_tokenizer(str(tmp_path / 'run')).name == 'run'
    train(config(resume=False))
    assert get_tokenizer(str(tmp_path / 'run')).name == 'bytes'
    # data that was made with the tokenizer of a run, and then trained into that run's folder
    for split in ('train', 'val'):
        write_dataset(tmp_path / 'own', split, str(tmp_path / 'run'), np.arange(3000) % 250)
    train(config(data=str(tmp_path / 'own'), resume=False))
    assert get_tokenizer(str(tmp_path / 'run')).name == 'bytes'
    train(config(data=str(tmp_path / 'own')))


def test_tokenizers_of_one_name_are_told_apart(config, tmp_path, tiny):
    name = bpe(tmp_path / 'tok')
    for folder in ('one', 'two'):
        for split in ('train', 'val'):
            write_dataset(tmp_path / folder, split, name, np.arange(3000) % 250)
        name = bpe(tmp_path / 'tok', swapped='abcd')        # the same folder, and another one in it
    bpe(tmp_path / 'tok')
    train(config(data=str(tmp_path / 'one')))
    run = str(tmp_path / 'run')
    with pytest.raises(Refused, match='two was made with the tokenizer .* is not that of'):
        open_data(run, checkpoint.load(run), load_model(run), str(tmp_path / 'two'))
    with pytest.raises(Refused, match='which cuts text otherwise: one model reads one tokenizer'):
        Loader([tmp_path / 'one', tmp_path / 'two'], 4, 8)
    with pytest.raises(Refused, match='is not that of'):
        train(config('next', init_from=run, data=str(tmp_path / 'two')))


def test_notes_of_a_checkpoint_by_its_file_go_with_its_tokenizer(tmp_path, tiny):
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, context=64))
    marks = []
    for swapped in ('', 'abcd'):
        bpe(tmp_path / 'run', swapped)
        marks.append(Subject(f'{run}/ckpt.pt', Asked(tasks='toy_copy', measures=(), n=3)).mark())
    assert marks[0] != marks[1]


# -------------------------------------------------------------------------------------------- data

def test_two_commands_never_write_one_dataset_together(tmp_path, monkeypatch):
    prepare = runpy.run_path(str(ROOT / 'data/text/prepare.py'))
    for name in ('a', 'b'):
        (tmp_path / name).mkdir()
        for i in range(20):
            (tmp_path / name / f'{i}.txt').write_text(f'{i:03d}' + name * 100)
    line = [f'--out={tmp_path / "out"}']
    real = prepare['main'].__globals__['write_dataset']

    def paused(folder, split, *args, **kwargs):
        real(folder, split, *args, **kwargs)
        if split == 'train':
            held = files.held.copy()
            files.held.clear()                      # the second command is another process
            with pytest.raises(Refused, match='another run is at work in'):
                prepare['main']([str(tmp_path / 'b'), *line])
            files.held.update(held)
    monkeypatch.setitem(prepare['main'].__globals__, 'write_dataset', paused)
    prepare['main']([str(tmp_path / 'a'), *line])
    assert b'b' not in (tmp_path / 'out/val_000.bin').read_bytes()


# ----------------------------------------------------------------------------------- checkpoints


def test_an_export_keeps_what_was_trained_and_says_how_near_it_came(config, tiny, tmp_path, capsys):
    save_hf(tiny(vocab_size=257).bfloat16(), tmp_path / 'hf', tokenizer='bytes')
    c = config(init_from=str(tmp_path / 'hf'))
    train(c)
    nanodepth('export', [c.out_dir, str(tmp_path / 'out')])
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith(
        f'{tmp_path / "out"} was opened again: the logits of 16 tokens differ by at most 0, and')
    back = load_model(tmp_path / 'out').state_dict()
    assert all(torch.equal(t, back[name]) for name, t in weights_of(c).items())
    nanodepth('export', [c.out_dir, str(tmp_path / 'small'), '--dtype=bfloat16'])
    said = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert 'in bfloat16: of 16 likeliest next tokens' in said and said.endswith('% are the same')


def test_two_questions_have_two_files(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny(vocab_size=257, context=64)
    for place, task in (('a', 'toy_copy'), ('a', 'toy_assign/1'), ('b', 'toy_copy')):
        run = save_run(tmp_path / place / 'run', model)     # and so have two runs of one name
        nanodepth('evaluate', [run, f'--tasks={task}', '--n=3', '--device=cpu'])
    assert len([*(tmp_path / 'out/evals').glob('a-run*.csv')]) == 2
    assert len([*(tmp_path / 'out/evals').glob('b-run*.csv')]) == 1


def test_a_config_is_text_and_no_archive_is_run(tmp_path, capsys):
    "A checkpoint is a zip, and Python runs the __main__.py in one."
    with zipfile.ZipFile(tmp_path / 'ckpt.pt', 'w') as archive:
        archive.writestr('__main__.py', f'open({str(tmp_path / "ran")!r}, "w")')
    shutil.copy(tmp_path / 'ckpt.pt', tmp_path / 'config.py')
    assert 'a file that ends in .py' in refused(capsys, 'train', tmp_path / 'ckpt.pt')
    with pytest.raises((SyntaxError, ValueError)):
        nanodepth('train', [str(tmp_path / 'config.py')])
    assert not (tmp_path / 'ran').exists()


def test_a_claimed_folder_keeps_what_its_owner_calls_tmp(tmp_path):
    for name in ('thesis.tmp', 'ckpt.pt.123.tmp'):
        (tmp_path / name).touch()
    (tmp_path / 'old.12.tmp').mkdir()
    with claim(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {'thesis.tmp', 'old.12.tmp', 'lock'}
    with pytest.raises(Refused, match='write its name'), claim(Path('')):
        pass
    with pytest.raises(SystemExit):
        nanodepth('evaluate', ['x', '--out='])


def test_words_of_another_model_are_put_aside_and_not_read(tmp_path, tiny):
    "A cut that was stopped has left them; a user's own tokenizer may lie there, too."
    run = save_run(tmp_path / 'run', tiny(vocab_size=257, n_layer=6))
    target = tmp_path / 'cut'
    target.mkdir()
    byte_level_bpe(['of another model'] * 9, 260, ['<|endoftext|>']).save(
        str(target / 'tokenizer.json'))
    nanodepth('cut', [run, '2-2-2', f'--out={target}'])
    assert get_tokenizer(target).name == 'bytes' and (target / 'tokenizer.json.1').exists()


def test_words_of_a_run_that_is_not_resumed_leave_with_its_log(config, tmp_path):
    c = config(n_layer=4, grow='lidas', grow_block=2, steps=6, decay_steps=1, warmup_steps=0)
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run/tokenizer.json').write_text('{}')
    train(c)
    left = {path.name for path in (tmp_path / 'run').iterdir()}
    assert 'tokenizer.json.1' in left and 'tokenizer.json' not in left
