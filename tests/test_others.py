"""Files of somebody else, in a folder that a command writes into: a line before the work, and they
stay as they were.

Each row is a command, and what stands in its way: any file in a model's folder; in that of a
dataset, a file that would be written over or read with it.
"""
import runpy

import pytest
from conftest import ROOT, save_run

from nanodepth.__main__ import main as nanodepth
from nanodepth.common.errors import refusals

COMMANDS = [
    ('export', ['{run}', '{out}'], ['README.md', 'model.safetensors', 'lock']),
    ('cut', ['{run}', '1-1-1', '--out={out}'], ['notes.txt', 'tokenizer.json']),
    ('prepare', ['{text}', '--out={out}'],
     ['train.json', 'val.json', 'val_000.bin', 'train_000.mask', 'ckpt.pt', 'mixture.json'])]
MINE = 'three weeks of notes'


def prepare(argv):
    with refusals('prepare'):
        runpy.run_path(str(ROOT / 'data/text/prepare.py'))['main'](argv)


@pytest.mark.parametrize('name, argv, file', [
    (name, argv, file) for name, argv, files in COMMANDS for file in files])
def test_no_command_writes_over_what_is_not_its_own(name, argv, file, data, tiny, tmp_path, capsys):
    run, out, text = tmp_path / 'run', tmp_path / 'out', tmp_path / 'notes.txt'
    save_run(run, tiny(vocab_size=257, n_layer=3, context=64))
    text.write_text('\n\n'.join(f'{i} ' * 900 for i in range(20)))
    out.mkdir()
    (out / file).write_text(MINE)
    argv = [word.format(run=run, out=out, data=data, text=text) for word in argv]
    with pytest.raises(SystemExit) as end:
        prepare(argv) if name == 'prepare' else nanodepth(name, argv)
    said = capsys.readouterr()
    assert end.value.code == 2 and said.err.startswith(f'{name}: ') and not said.out
    assert str(out) in said.err and [path.name for path in out.iterdir()] == [file]
    assert (out / file).read_text() == MINE
