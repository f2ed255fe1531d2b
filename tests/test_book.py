"The book stands alone, in an empty folder; and its reader of settings, which every command uses."
import importlib
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
from types import ModuleType, SimpleNamespace
from typing import Literal

import pytest
import torch
from conftest import ROOT, log_of, same, save_run, state_of, weights_of

from nanodepth.__main__ import main as nanodepth
from nanodepth.model import Refused
from nanodepth.common.options import read
from nanodepth.training.plan import Config

TINY = ('--n_embd=32 --n_head=2 --head_dim=16 --n_layer=8 --steps=16 --batch_size=4 --context=32 '
        '--eval_every=4 --eval_batches=1 --log_every=1 --device=cpu').split()
STOP = '''
import os
import signal
_calls = []


def metric(model, loader):
    _calls.append(1)
    if os.environ.get('STOP') and len(_calls) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return {}
'''
ALONE = '''
import sys
from pathlib import Path
HERE = Path(__file__).resolve().parent
# neither the repo's root, nor an installed copy of it
sys.path[:] = [each for each in sys.path if Path(each or '.').resolve() == HERE
               or not (Path(each or '.') / 'model.py').exists()]


class Alone:
    def find_spec(self, name, *_):
        if name.partition('.')[0] == 'nanodepth':
            raise ImportError('the book stands alone')


sys.meta_path.insert(0, Alone())
'''


def test_alone_in_an_empty_folder(tmp_path):
    "The seven and two folders, and one script: data, a run, a stop, a picture, a cut that trains."
    for path in ROOT.glob('*.py'):
        shutil.copy(path, tmp_path)
    for name in ('training', 'config'):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / 'data/toy').mkdir(parents=True)
    shutil.copy(ROOT / 'data/toy/prepare.py', tmp_path / 'data/toy')
    (tmp_path / 'sitecustomize.py').write_text(ALONE)
    (tmp_path / 'stop.py').write_text(STOP)

    def python(*argv, status=0, **env):
        done = subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | dict(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS='1') | env)
        assert done.returncode == status, done.stderr
        return done.stdout
    python('data/toy/prepare.py', '--documents=300', '--text=0')
    line = ['train.py', 'config/lidas.py', 'stop.py', *TINY]
    said = python(*line, '--out_dir=out/parts', status=128 + signal.SIGTERM, STOP='1')
    assert torch.load(tmp_path / 'out/parts/ckpt.pt', weights_only=True)['step'] == 9
    said += python(*line, '--out_dir=out/parts')
    for words in ('8 layers, 8 deep: the validation loss was', 'functions of the config: metric',
                  'All is in out/parts. Next: python probe.py out/parts'):
        assert words in said
    assert (tmp_path / 'out/parts/loss.png').stat().st_size > 10_000
    lines = [                               # one after the other, as if each were typed
        ['train.py', *TINY, '--steps=3', '--init_from=out/parts', '--cut=2-2-2',
         '--out_dir=out/core'],
        [*line, '--out_dir=out/whole'], ['grow.py', 'lidas', '8', '2'], ['loop.py', '4-4x4-4'],
        ['retrofit.py', '2-2-2', '8'], ['wrapper.py'], ['probe.py', 'out/whole', 'out/core']]
    said = python('-c', f'''if True:
        import runpy, sys
        for sys.argv in {lines}:
            runpy.run_path(sys.argv[0], run_name='__main__')''')
    assert said.count('depth score') == 2
    assert 'core     layers 4 5' in said
    assert 'Core' in str(torch.load(tmp_path / 'out/core/ckpt.pt', weights_only=True)['order'])
    assert same(weights_of(tmp_path / 'out/whole'), weights_of(tmp_path / 'out/parts'))


@pytest.mark.parametrize('words, line', [
    ('probe.py nowhere', 'probe: there is no run in nowhere'),
    ('probe.py run', 'probe: there is no data in gone: see its config or prepare.py'),
    ('retrofit.py 6-2-2 8', 'retrofit: the shape 6-2-2 has more layers than the 8 of the model')])
def test_a_mistake_is_a_line_of_a_script_too(words, line, tiny, tmp_path, monkeypatch):
    save_run(tmp_path / 'run', tiny(vocab_size=257), data='gone')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', words.split())
    with pytest.raises(SystemExit, match=line):
        runpy.run_path(str(ROOT / sys.argv[0]), run_name='__main__')
    assert [path.name for path in tmp_path.iterdir()] == ['run']


def test_probe_looks_at_no_other_data_than_a_models_own(tiny, data, tmp_path, monkeypatch):
    run = save_run(tmp_path / 'run', tiny(vocab_size=257), data)
    state = torch.load(tmp_path / 'run/ckpt.pt')
    torch.save(state | dict(data=dict(val=['as it was'])), tmp_path / 'run/ckpt.pt')
    monkeypatch.setattr(sys, 'argv', ['probe.py', run])
    with pytest.raises(SystemExit, match='is not what .* was trained on'):
        runpy.run_path(str(ROOT / 'probe.py'), run_name='__main__')


@pytest.mark.parametrize('text, message', [
    ('--optimizer=adam', "optimizer=adam must be Union[Literal['muon', 'adamw'],"),
    ('--stepz=3', 'stepz is no setting; did you mean steps?'),
    ('--steps=1.5', 'steps=1.5 must be int'), ('--steps', '--steps has no value'),
    ('--dry_run', 'dry_run is no setting'),
    ('--warmup_steps=few', 'warmup_steps=few must be int | float'),
    ('--tie_embeddings=2', 'tie_embeddings=2 must be bool'), ('--metric=f', 'metric=f must be'),
    ('config/lida.py', 'there is no config config/lida.py'),
    ('step = 3', 'step is no setting; did you mean steps?'),
    ('def optimiser(model, c):\n    pass', 'did you mean optimizer? (a config writes _optimiser'),
    ('def grwo(n_layer, block):\n    pass', 'grwo is no setting; did you mean grow?')])
def test_a_mistake_is_a_line(text, message, tmp_path):
    "On a command line, and in a config."
    if ' ' in text:
        (tmp_path / 'c.py').write_text(text)
        text = str(tmp_path / 'c.py')
    with pytest.raises(Refused, match=re.escape(message)) as error:
        read(Config, [text])
    assert '\n' not in str(error.value)


def test_what_is_written_in_several_ways(tmp_path):
    c = read(Config, ['--tie_embeddings=True', '--steps=1e3', '--data=a,b', '--lr', '1',
                      '--n_kv_head=none', '--out_dir=a=b', '--compile=false', '--wandb'])
    assert (c.tie_embeddings, c.steps, c.lr, c.n_kv_head, c.out_dir, c.compile, c.wandb) == (
        True, 1000, 1.0, None, 'a=b', False, True)
    assert c.data == 'a,b' and type(c.lr) is float
    assert read(Config, ['--order=0,1,1,0']).order == [0, 1, 1, 0]
    path = tmp_path / 'c.py'
    path.write_text('steps = 2 * 20\nlr = 1\ndata = ("a", "b")\nn_kv_head = 2\n')
    c = read(Config, ['--steps=50', str(path), '--n_kv_head=none'])     # a line is above a file
    assert (c.steps, c.lr, c.data, c.n_kv_head) == (50, 1.0, ['a', 'b'], None)
    assert type(c.lr) is float and type(c.steps) is int
    lengths = [read(Config, ['--steps=60', f'--decay_steps={text}']).decay_steps
               for text in ('0', '1', '7', '1e1', '0.5', '1.0')]
    assert lengths == [0, 1, 7, 10, 30, 60] and Config(steps=60).warmup_steps == 5


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
    for argv, message in (([], "'run' .--help says more"), (['a', 'b'], 'b is one word too many'),
                          (['a', '--K=2,x'], 'K=2,x must be')):
        with pytest.raises(Refused, match=message):
            read(Options, argv, ['run'])
    with pytest.raises(SystemExit):
        read(Options, ['--help'], ['run'])
    said = capsys.readouterr().out
    assert re.search(r'--K=N,... +how often \[1\]\n', said) and 'def ' not in said


def test_a_config_finds_its_neighbours_and_the_book(tmp_path, monkeypatch):
    "Also where the book's names are those of somebody else's files, as they may be beside a wheel."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'loop', os)
    lazy = ModuleType('lazy')               # as some of transformers' are
    lazy.__getattr__ = lambda name: importlib.import_module('what.is.missing')
    monkeypatch.setitem(sys.modules, 'lazy', lazy)
    (tmp_path / 'own').mkdir()
    (tmp_path / 'own/parent.py').write_text('import torch\nsteps = 7\n')
    (tmp_path / 'own/helper.py').write_text('size = 3\n')
    (tmp_path / 'own/loop.py').write_text('raise SystemExit("somebody else\'s")\n')
    (tmp_path / 'helper.py').write_text('size = 9\n')      # another one, which stands first
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop('colorsys', None)       # Python's own: it stays when it has been imported
    config, files = tmp_path / 'own/c.py', set()
    config.write_text('from parent import *\nimport helper, colorsys as _colours\n'
                      'from loop import repeat_block\n'
                      'from training.plan import Config\n_half = 20\nn_layer = helper.size\n'
                      'def init(new, old):\n    pass\ndef another():\n    pass\n'
                      'def _optimiser():\n    pass\n')
    path = sys.path[:]
    c = read(Config, ['own/c.py', '--decay_steps=0'], files=files)
    assert {file.name for file in files} == {'c.py', 'parent.py', 'helper.py'}
    assert 'colorsys' in sys.modules
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


def test_a_config_with_the_authors_core_by_plain_train_py(data, tiny, tmp_path):
    "Its checkpoint holds an AuthorsCore. Made tiny, it begins, and is resumed to the bit."
    model = tiny(vocab_size=257, n_layer=4, context=16)
    parent = save_run(tmp_path / 'parent', model, data)
    nanodepth('cut', [parent, '1-2-1', '--authors', f'--out={tmp_path / "cut"}'])
    out = tmp_path / 'run'
    line = [sys.executable, ROOT / 'train.py', 'config/retrofit_llama32_curriculum.py',
            f'--init_from={tmp_path}/cut',
            f'--data={data}', f'--out_dir={out}', '--recurrence=3', '--backprop_depth=2',
            '--context=16', '--batch_size=4', '--grad_accum=1', '--steps=4', '--warmup_steps=1',
            '--decay_steps=2', '--keep_every=2', '--eval_every=2', '--device=cpu']
    wholes = []
    for resumes in (False, True):
        if resumes:
            (out / 'ckpt-2.pt').replace(out / 'ckpt.pt')
        done = subprocess.run([*map(str, line)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        state = state_of(out)
        wholes.append((state['model'], log_of(SimpleNamespace(out_dir=out))[-1]['val_loss']))
    assert state['order'][1]['step'] == 'AuthorsCore'
    assert same(wholes[0][0], wholes[1][0]) and wholes[0][1] == wholes[1][1]
