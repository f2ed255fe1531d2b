"Test that the book works alone in an empty folder, and how settings are read."
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from helpers import ROOT, same, save_run, state_of, weights_of

from nanodepth.model import Refused
from nanodepth.common.options import read
from nanodepth.training.plan import Config

TINY = ('--n_embd=32 --n_head=2 --head_dim=16 --n_layer=8 --steps=16 --batch_size=4 --context=8 '
        '--eval_every=4 --eval_batches=1 --log_every=1 --device=cpu')
STOP = '''
import os, signal
_calls = []
def metric(model, loader):
    _calls.append(1)
    if len(_calls) == 3 and not os.path.exists('out/whole'):
        os.kill(os.getpid(), signal.SIGTERM)
    return {}
'''
# one line after the other, as if each were typed; a new Python for each would take seconds
TYPED = '''
import runpy, sys, torch
for sys.argv in LINES:
    try:
        runpy.run_path(sys.argv[0], run_name='__main__')
    except SystemExit as end:
        print('status', end.code, 'at step', torch.load('out/parts/ckpt.pt')['step'])
files = [getattr(module, '__file__', None) or '' for module in sys.modules.values()]
assert not [file for file in files if file.startswith(ROOT) and 'site-packages' not in file]
assert 'nanodepth' not in sys.modules
'''


def test_book_stands_alone_in_an_empty_folder(tmp_path):
    "The seven and two folders, and one script: data, a run, a stop, a picture, a cut that trains."
    for path in ROOT.glob('*.py'):
        shutil.copy(path, tmp_path)
    for name in ('training', 'config'):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / 'data/toy').mkdir(parents=True)
    shutil.copy(ROOT / 'data/toy/prepare.py', tmp_path / 'data/toy')
    (tmp_path / 'stop.py').write_text(STOP)
    run = f'train.py config/lidas.py stop.py {TINY}'
    lines = ['data/toy/prepare.py --documents=300 --text=0', f'{run} --out_dir=out/parts',
             f'{run} --out_dir=out/parts', f'{run} --out_dir=out/whole',
             f'train.py {TINY} --steps=3 --init_from=out/parts --cut=2-2-2 --recurrence=2 '
             '--out_dir=out/core',
             'grow.py lidas 8 2', 'loop.py 4-4x4-4', 'retrofit.py 2-2-2 8', 'wrapper.py',
             'model.py', 'probe.py out/whole out/core']
    typed = f'ROOT, LINES = {str(ROOT)!r}, {[line.split() for line in lines]}\n{TYPED}'
    done = subprocess.run(
        [sys.executable, '-c', typed], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | dict(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS='1'))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('status') == 1
    assert f'status {128 + signal.SIGTERM} at step 9\n' in done.stdout
    for words in ('8 layers, 8 deep: the validation loss was', 'functions of the config: metric',
                  'Everything is in out/parts. Next: python probe.py out/parts',
                  'Run a frozen model', 'The model every other file shares',
                  'core     layers 4 5', 'out/whole: depth score', 'out/core: depth score'):
        assert words in done.stdout
    assert (tmp_path / 'out/parts/loss.png').stat().st_size > 10_000
    assert 'Core' in str(state_of(tmp_path / 'out/core')['order'])
    assert same(weights_of(tmp_path / 'out/whole'), weights_of(tmp_path / 'out/parts'))


def test_probe_refuses_other_data_in_one_line(tiny, data, tmp_path, monkeypatch):
    run = save_run(tmp_path / 'run', tiny(vocab_size=257), data)
    torch.save(state_of(run) | dict(data=dict(val=['as it was'])), f'{run}/ckpt.pt')
    monkeypatch.setattr(sys, 'argv', ['probe.py', run])
    with pytest.raises(SystemExit, match='^probe: .* has changed since .*run was trained'):
        runpy.run_path(str(ROOT / 'probe.py'), run_name='__main__')


@pytest.mark.parametrize('text, message', [
    ('--optimizer=adam', "optimizer=adam must be Union[Literal['muon', 'adamw'],"),
    ('--stepz=3', 'stepz is not a setting; did you mean steps?'),
    ('--steps=1.5', 'steps=1.5 must be int'), ('--metric=f', 'metric=f must be'),
    ('config/lida.py', 'there is no config config/lida.py'),
    ('def optimiser(model, c):\n    pass', 'did you mean optimizer? (a config may use _optimiser')])
def test_settings_say_a_mistake_in_one_line(text, message, tmp_path):
    "On a command line, and in a config."
    if ' ' in text:
        (tmp_path / 'c.py').write_text(text)
        text = str(tmp_path / 'c.py')
    with pytest.raises(Refused, match=re.escape(message)) as error:
        read(Config, [text])
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('line, settings', [
    ('--tie_embeddings=True --compile=false --wandb --n_kv_head=none',
     dict(tie_embeddings=True, compile=False, wandb=True, n_kv_head=None)),
    ('--data=a,b --out_dir=a=b --order=0,1,1,0 --lr 1 --steps=1e3',
     dict(data='a,b', out_dir='a=b', order=[0, 1, 1, 0], lr=1.0, steps=1000)),
    *((f'--steps=60 --decay_steps={text}', dict(decay_steps=n, warmup_steps=5)) for text, n in (
        ('0', 0), ('1', 1), ('7', 7), ('1e1', 10), ('0.5', 30), ('1.0', 60))),
    ('--steps=50 c.py --n_kv_head=none',
     dict(steps=50, lr=1.0, data=['a', 'b'], n_kv_head=None))])
def test_settings_are_read_as_their_kinds(line, settings, tmp_path, monkeypatch):
    "A command line is above a config, wherever that stands."
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'c.py').write_text('steps = 2 * 20\nlr = 1\ndata = ("a", "b")\nn_kv_head = 2\n')
    c = read(Config, line.split())
    assert repr({name: getattr(c, name) for name in settings}) == repr(settings)


@dataclass
class Options:
    run: str
    others: list[str] = field(default_factory=list)
    K: tuple[int, ...] = (1,)           # how often
    out: Path | None = None
    x: Literal['K', 'T'] | None = None


def test_every_command_reads_its_options_so(capsys):
    options = read(Options, ['a', '--K=2,3', 'b', '--out', 'x.png', 'c'], ['run', 'others'])
    assert options == Options('a', ['b', 'c'], (2, 3), Path('x.png'))
    assert read(Options, ['a', '--K=2', '--x=T'], ['run']) == Options('a', [], (2,), None, 'T')
    for argv, message in (([], 'run must be given .--help lists'),
                          (['a', 'b'], 'b is one word too many'),
                          (['a', '--K=2,x'], 'K=2,x must be')):
        with pytest.raises(Refused, match=message):
            read(Options, argv, ['run'])
    with pytest.raises(SystemExit):
        read(Options, ['--help'], ['run'])
    said = capsys.readouterr().out
    assert re.search(r'--K: tuple.int, ....  *= .1,.  *# how often\n', said) and 'def ' not in said


def test_a_config_finds_its_neighbours_and_the_book(tmp_path, monkeypatch):
    "Also where the book's names are those of somebody else's files, as they may be beside a wheel."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'loop', os)
    (tmp_path / 'own').mkdir()
    (tmp_path / 'own/parent.py').write_text('import torch\nsteps = 7\n')
    (tmp_path / 'own/helper.py').write_text('size = 3\n')
    (tmp_path / 'own/loop.py').write_text('raise SystemExit("somebody else\'s")\n')
    (tmp_path / 'helper.py').write_text('size = 9\n')      # another one, which stands first
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / 'own/c.py'
    config.write_text('from parent import *\nimport helper\n'
                      'from loop import repeat_block\n'
                      'from training.plan import Config\n_half = 20\nn_layer = helper.size\n'
                      'def init(new, old):\n    pass\ndef another():\n    pass\n'
                      'def _optimiser():\n    pass\n')
    path = sys.path[:]
    c = read(Config, ['own/c.py', '--decay_steps=0'])
    assert (c.steps, c.n_layer, c.init.__globals__['Config']) == (7, 3, Config)
    assert c.init.__globals__['repeat_block'] is sys.modules['nanodepth.loop'].repeat_block
    assert sys.modules['loop'] is os and sys.path == path and 'helper' not in sys.modules


def test_a_config_is_text_and_no_archive_is_run(tmp_path):
    "A checkpoint is a zip, and Python would run the __main__.py in one."
    for name in ('ckpt.pt', 'ckpt.py'):
        with zipfile.ZipFile(tmp_path / name, 'w') as archive:
            archive.writestr('__main__.py', f'open({str(tmp_path / "ran")!r}, "w")')
        with pytest.raises((SyntaxError, ValueError)):
            read(Config, [str(tmp_path / name)])
    assert not (tmp_path / 'ran').exists()
