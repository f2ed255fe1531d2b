"""One name, `nanodepth`, lives beside anyone's files: installed from a wheel, and from a clone.

The wheel is installed by pip into an environment of its own, which borrows the packages of this
one. A folder of somebody else has files of all the names that ours once hid or were hidden by.
"""
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from families import tiny as family

from nanodepth import BOOK, looped

THEIRS = ('model.py', 'train.py', 'loop.py', 'common.py', 'data/__init__.py', 'tools/__init__.py',
          'models/__init__.py', 'config/__init__.py')
SMALL = ['--context=16', '--n_embd=32', '--n_head=2', '--head_dim=none', '--steps=20',
         '--warmup_steps=2', '--decay_steps=4', '--eval_batches=1', '--batch_size=4',
         '--device=cpu']
BESIDE = """
import sys
import model, loop                  # before ours, and the others after it
import nanodepth
import train, common, data, tools, models, config
assert {each.mine for each in (model, train, loop, common, data, tools, models, config)} == {1}
assert sys.modules['model'] is model and nanodepth.wrapper.Step is nanodepth.model.Step
assert nanodepth.retrofit.untie is nanodepth.grow.untie
"""
USE = """
import torch
from transformers import AutoModelForCausalLM
from nanodepth import load_model, looped, patch, save_hf, unpatch
llama = AutoModelForCausalLM.from_pretrained('llama')
with torch.no_grad(), looped(llama, (1, 2), 'rk', 3):
    torch.save(llama(torch.arange(12)[None]).logits, 'logits.pt')
print(nanodepth.__file__)
"""


def python(folder, *argv, environment=None):
    "Python there: the environment's own, or this one, with the clone on its path."
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    env |= {} if environment else dict(PYTHONPATH=str(ROOT))
    return subprocess.run([environment / 'bin/python' if environment else sys.executable, *argv],
                          cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp('wheel')
    subprocess.run([sys.executable, '-m', 'hatchling', 'build', '-t', 'wheel', '-d', folder],
                   cwd=ROOT, check=True, capture_output=True)
    [path] = folder.glob('*.whl')
    return path


@pytest.fixture
def theirs(tmp_path):
    "A project of somebody else, with a tiny Llama in it."
    for name in THEIRS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('mine = 1\n')
    family('llama').save_pretrained(tmp_path / 'llama')
    return tmp_path


def install(home, wheel):
    "An environment with the wheel installed by pip: its folder of packages."
    venv.create(home)
    site = Path(sysconfig.get_path('purelib', vars=dict(base=str(home))))
    (site / 'borrowed.pth').write_text(sysconfig.get_path('purelib'))
    pip = python(home, '-m', 'pip', 'install', '-q', '--no-deps', '--no-build-isolation',
                 '--no-index', '--ignore-installed', wheel, environment=home)
    assert pip.returncode == 0, pip.stderr
    new = {path.name for path in site.iterdir()} - {'borrowed.pth', '__pycache__'}
    assert new <= {'nanodepth', 'nanodepth-0.2.0.dist-info'}, new
    return site


def used(home, folder, code):
    "The folder of the package that some code used there."
    done = python(folder, '-c', code, environment=home)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[-1]).parent


def test_a_wheel_works_beside_files_of_the_same_names(wheel, theirs, data, tmp_path):
    from transformers import AutoModelForCausalLM
    home = tmp_path / 'environment'
    site = install(home, wheel)
    assert used(home, theirs, BESIDE + USE) == site / 'nanodepth'
    llama = AutoModelForCausalLM.from_pretrained(theirs / 'llama')
    with torch.no_grad(), looped(llama, (1, 2), 'rk', 3):
        here = llama(torch.arange(12)[None]).logits
    assert torch.equal(torch.load(theirs / 'logits.pt'), here)
    done = python(theirs, '-m', 'nanodepth', 'train', 'config/lidas.py', f'--data={data}', *SMALL,
                  environment=home)
    assert done.returncode == 0 and 'FLOPs' in done.stdout, done.stderr
    assert (theirs / 'out/lidas/ckpt.pt').exists() and (theirs / 'out/lidas/loss.png').exists()


@pytest.mark.parametrize('first', ['import nanodepth', 'import retrofit'])
def test_in_a_clone_a_bare_name_is_the_same_module(first, tmp_path):
    code = first + """
import sys
import nanodepth, model, loop, grow, retrofit, wrapper, probe, train
for each in (model, loop, grow, retrofit, wrapper, probe, train):
    name = each.__name__.rpartition('.')[2]
    assert each is getattr(nanodepth, name) is sys.modules[name] is sys.modules['nanodepth.' + name]
print(nanodepth.__file__)"""
    assert used(None, tmp_path, code) == ROOT / 'nanodepth'


def test_a_wheel_is_complete_and_holds_no_data(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.partition('/')[0] for name in names} == {'nanodepth', 'nanodepth-0.2.0.dist-info'}
    assert {f'nanodepth/{idea}.py' for idea in BOOK} < {*names}
    for folder, kind in dict(config='*.py', data='*/prepare.py').items():
        for path in ROOT.glob(f'{folder}/{kind}'):
            assert f'nanodepth/{path.relative_to(ROOT)}' in names
    for path in (ROOT / 'nanodepth').rglob('*.*'):
        assert path.suffix == '.pyc' or str(path.relative_to(ROOT)) in names
    assert not [name for name in names if name.endswith(('.bin', '.mask', '.marks', 'train.json'))]
