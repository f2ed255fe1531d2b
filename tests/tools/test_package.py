"Test that nanodepth works next to anyone's files, installed from a wheel and from a clone."
import os
import subprocess
import sys
import zipfile

import torch
from families import tiny as family
from helpers import ROOT

from nanodepth import BOOK, file_of, wrapped


# a user's own files, with names that files of ours have, too
THEIRS = ('model.py', 'train.py', 'loop.py', 'common.py', 'data/__init__.py', 'tools/__init__.py',
          'models/__init__.py', 'config/__init__.py', 'training/__init__.py')


SMALL = ('--context=16 --n_embd=32 --n_head=2 --head_dim=none --steps=20 --warmup_steps=2 '
         '--decay_steps=4 --eval_batches=1 --batch_size=4 --device=cpu').split()


BESIDE = """
import model, loop                  # before ours, and the others after it
import nanodepth
import train, training, common, data, tools, models, config
for each in (model, train, training, loop, common, data, tools, models, config):
    assert each.mine == 1
assert nanodepth.wrapper.Span is nanodepth.model.Span
import runpy, sys, torch
from transformers import AutoModelForCausalLM
llama = AutoModelForCausalLM.from_pretrained('llama')
with torch.no_grad(), nanodepth.wrapped(llama, (1, 2), 'rk', 3):
    torch.save(llama(torch.arange(12)[None]).logits, 'logits.pt')
print(nanodepth.__file__)
runpy.run_module('nanodepth', run_name='__main__')          # python -m nanodepth train ...
"""


CLONE = """
import os, sys, torch
if os.fork():                       # both at once, because torch takes seconds
    assert os.wait()[1] == 0
else:
    import retrofit
import nanodepth, model, loop, grow, retrofit, wrapper, probe, train, training.plan
for name in nanodepth.BOOK:
    assert sys.modules[name] is sys.modules['nanodepth.' + name]
for each in (model, loop, grow, retrofit, wrapper, probe, train, training):
    assert each is getattr(nanodepth, each.__name__.rpartition('.')[2])
assert training.plan is nanodepth.training.plan
"""


def python(folder, packages, *argv):
    "Return what Python prints in a folder, with the packages in another one."
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=folder, capture_output=True,
                          env=os.environ | dict(PYTHONPATH=str(packages)), text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_is_complete_and_works_next_to_other_files(data, tmp_path):
    python(ROOT, ROOT, '-m', 'hatchling', 'build', '-t', 'wheel', '-d', tmp_path)
    [wheel] = tmp_path.glob('*.whl')
    site, theirs, llama = tmp_path / 'site', tmp_path / 'theirs', family('llama')
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        file.extractall(site)               # as pip does
    assert {name.partition('/')[0] for name in names} == {'nanodepth', 'nanodepth-0.2.0.dist-info'}
    needed = [*map(file_of, BOOK), *ROOT.glob('config/**/*.py'), *ROOT.glob('data/*/prepare.py')]
    assert {f'nanodepth/{path.relative_to(ROOT)}' for path in needed} < {*names}
    for path in (ROOT / 'nanodepth').rglob('*.*'):
        assert path.suffix == '.pyc' or str(path.relative_to(ROOT)) in names
    assert not [name for name in names if name.endswith(('.bin', '.mask', '.marks', 'train.json'))]
    for name in THEIRS:
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_text('mine = 1\n')
    llama.save_pretrained(theirs / 'llama')
    said = python(theirs, site, '-c', BESIDE, 'train', 'config/lidas.py', f'--data={data}', *SMALL)
    assert said.startswith(str(site / 'nanodepth/__init__.py'))
    with torch.no_grad(), wrapped(llama, (1, 2), 'rk', 3):
        here = llama(torch.arange(12)[None]).logits
    assert torch.equal(torch.load(theirs / 'logits.pt'), here)
    assert (theirs / 'out/lidas/ckpt.pt').exists() and (theirs / 'out/lidas/loss.png').exists()
    # a config may import the book by its bare names if no other file has them
    (tmp_path / 'empty').mkdir()
    python(tmp_path / 'empty', site, '-m', 'nanodepth', 'train', 'config/ideas/gates.py',
           f'--data={data}', *SMALL)


def test_a_clone_loads_each_module_once(tmp_path):
    "`import loop` and `nanodepth.loop` are the same module, whichever comes first."
    python(tmp_path, ROOT, '-c', CLONE)


def test_the_check_for_a_gpu_runs_in_its_tiny_form():
    said = python(ROOT, ROOT, ROOT / 'tests/by_hand/gpu.py', '--tiny')
    assert said.count('\n# ') == 8 and 'FAILED' not in said
