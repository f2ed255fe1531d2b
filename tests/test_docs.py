"What the texts say can be done: the usage examples run, the README's files and commands exist."
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

README = (ROOT / 'README.md').read_text()
SCRIPTS = sorted(path.name for path in ROOT.glob('*.py'))


@pytest.mark.parametrize('name', SCRIPTS)
def test_every_file_begins_with_its_idea_and_its_usage(name):
    source = (ROOT / name).read_text()
    doc = source.split('"""')[1]
    assert source.startswith('"""') and 'Usage:' in doc
    assert f'`{name}`' in README, f'{name} is not in the README'


def test_usage_examples_run(data, monkeypatch):
    for name, before in (('model.py', 'tokens = targets = torch.randint(257, (2, 8))\n'), ('tokens.py', '')):
        doc = (ROOT / name).read_text().split('"""')[1]
        code = re.sub('^    ', '', doc.split('Usage:\n')[1], flags=re.M).replace("'data/toy'", repr(str(data)))
        scope = dict(torch=torch)
        exec(f'from {name[:-3]} import *\n' + before + code, scope)
    assert scope['tokens'].shape == (16, 256)


@pytest.mark.parametrize('name', [n for n in SCRIPTS if 'def main(' in (ROOT / n).read_text()])
def test_every_script_has_help(name):
    run = subprocess.run([sys.executable, name, '--help'], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and len(run.stdout) > 100, run.stderr


def test_the_readmes_commands_and_files_exist():
    blocks = ''.join(re.findall(r'```(?:sh)?\n(.*?)```', README, flags=re.S))
    for script, config in re.findall(r'python (\S+\.py)(?: (config/\S+\.py))?', blocks):
        assert (ROOT / script).exists() and (not config or (ROOT / config).exists())
    targets = re.findall(r'^(\w+):', (ROOT / 'Makefile').read_text(), flags=re.M)
    for target in re.findall(r'^make (\w+)', blocks, flags=re.M):
        assert target in targets
    for path in re.findall(r'(?:src="|\]\()([\w/]+\.\w+)', README):
        assert (ROOT / path).exists(), path


def test_importing_touches_nothing():
    "On a bare CPU, in another folder, without an environment: no device, no file, no thread setting."
    names = ', '.join(name[:-3] for name in SCRIPTS)
    code = f'import sys; sys.path.insert(0, {str(ROOT)!r}); import {names}; import torch; print(torch.cuda.is_initialized())'
    run = subprocess.run([sys.executable, '-c', code], cwd='/', capture_output=True, text=True)
    assert run.stdout == 'False\n', run.stderr
