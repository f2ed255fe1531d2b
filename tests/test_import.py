"nanodepth as an import from anywhere, as `pip install -e .` makes it."
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

# what pip's editable install does: this one module is found where it lies
EDITABLE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location('nanodepth', {str(ROOT / 'nanodepth.py')!r})
module = sys.modules['nanodepth'] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
USE = """
import torch
from nanodepth import load_model, looped, patch, save_hf, unpatch
import model
model = load_model('run')
with looped(model, (1, 2), 'naive', 2):
    print(model(torch.arange(5)[None]).shape)
"""


def python(code, folder):
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    return subprocess.run([sys.executable, '-c', code], cwd=folder, env=env, capture_output=True,
                          text=True, timeout=120)


def test_five_names_from_any_folder(tiny, tmp_path):
    from engine import checkpoint
    checkpoint.save(tmp_path / 'run', **checkpoint.describe(tiny(n_layer=4)), step=0)
    (tmp_path / 'data').mkdir()             # a folder of that name hides nothing
    done = python(EDITABLE + USE, tmp_path)
    assert done.stdout == 'torch.Size([1, 5, 50])\n', done.stderr
    done = python(EDITABLE + 'from nanodepth import loop_it', tmp_path)
    assert "cannot import name 'loop_it'" in done.stderr


@pytest.mark.parametrize('first', ['', 'import model\n'])
def test_a_users_file_of_the_same_name_is_named(tmp_path, first):
    (tmp_path / 'model.py').write_text('mine = 1\n')
    done = python(first + EDITABLE, tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last == (f'ImportError: nanodepth needs its own model, but {tmp_path / "model.py"} has '
                    'that name and is found first: rename it, or start Python in another folder')


def test_an_install_without_the_clone_says_how(tmp_path):
    shutil.copy(ROOT / 'nanodepth.py', tmp_path)
    done = python('import nanodepth', tmp_path)
    assert '`pip install -e .` in the clone' in done.stderr.strip().splitlines()[-1]
