"The house: imports go down its floors and never in a circle; seven ideas stand at the top."
import ast
import os
import subprocess
import sys

from conftest import ROOT

ROOMS = ('common', 'report', 'data', 'variants', 'engine', 'commands', 'study')
IDEAS = ('model', 'grow', 'loop', 'retrofit', 'wrapper', 'probe', 'train')
FLOORS = [['common'], ['report'], ['data'], ['model'], ['variants'],
          ['grow', 'loop', 'retrofit', 'wrapper'], ['probe', 'engine'],
          ['train'], ['commands', 'study'], ['__main__']]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
PACKAGE = ROOT / 'nanodepth'
IDEA_FILES = {f'nanodepth.{path.stem}': path for path in sorted(ROOT.glob('*.py'))}
FILES = IDEA_FILES | {
    f'nanodepth.{str(path.relative_to(PACKAGE))[:-3].replace("/", ".")}': path
    for path in sorted(PACKAGE.rglob('*.py')) if path.name != '__init__.py'}


def floor(name):
    return FLOOR[name.split('.')[1]]


def imports(path):
    """Every module of ours that a file imports, inside functions too, but for the last two lines
    of a script."""
    tree, found = ast.parse(path.read_text()), set()
    tree.body = [node for node in tree.body
                 if not (isinstance(node, ast.If) and '__main__' in ast.unparse(node.test))]
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f'{node.module}.{alias.name}' for alias in node.names)]
        found |= {name for name in names if name in FILES}
    return found


def test_imports_go_down():
    scripts = {f'nanodepth.data.{path.parent.name}': path for path in ROOT.glob('data/*/*.py')}
    for name, path in (FILES | scripts).items():
        for other in imports(path):
            assert floor(other) <= floor(name), f'{name} imports {other}, which stands above it'


def test_no_circle():
    left = {name: imports(path) for name, path in FILES.items()}
    while left:
        free = [name for name, others in left.items() if not others & left.keys()]
        assert free, f'a circle among {sorted(left)}'
        for name in free:
            del left[name]


def test_the_seven_stand_at_the_top_and_the_rooms_in_the_package():
    assert {path.stem for path in IDEA_FILES.values()} == {*IDEAS}
    assert {path.parent.name for path in PACKAGE.glob('*/__init__.py')} == {*ROOMS}


def test_the_ideas_and_the_door_are_scripts_and_nothing_else_is():
    "A script puts its folder first, and files of a room would hide packages of the same names."
    for name, path in FILES.items():
        runs = "if __name__ == '__main__':" in path.read_text()
        assert runs == (path.stem in {*IDEAS, '__main__'} - {'model'}
                        and path.parent in (ROOT, PACKAGE)), name


# ------------------------------------------------------------------------------------ how it reads

CODE = [*FILES.values(), *ROOT.glob('config/*.py'), *ROOT.glob('data/*/*.py')]
MOST = dict.fromkeys(IDEAS, 270) | dict(model=327, retrofit=300, train=443, probe=310,
                                     wrapper=200)


def test_no_line_is_wider_than_a_page():
    for path in [*CODE, *ROOT.glob('tests/*.py')]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, f'{path.relative_to(ROOT)}:{number} has {len(line)} columns'


def test_files_and_functions_fit_into_a_head():
    lengths = {path.stem: path.read_text().count('\n') for path in IDEA_FILES.values()}
    for name, n in lengths.items():
        assert n <= MOST[name], f'{name} has {n} lines'
    assert sum(lengths.values()) <= 1776
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                n = node.end_lineno - node.lineno + 1
                most = 100 if (path.name, node.name) == ('train.py', 'train') else 60
                assert n <= most, f'{path.relative_to(ROOT)}: {node.name} has {n} lines'


# --------------------------------------------------------------------- one page of training

MEASURE = """
import collections, os, sys
os.chdir({root!r})
sys.path.insert(0, {root!r})
import nanodepth.__main__
from nanodepth import train
ours = [module.__file__ for module in sys.modules.values()
        if (getattr(module, '__file__', None) or '').startswith({root!r} + '/')
        and '/.venv/' not in module.__file__]
print(len(ours), sum(len(open(path).readlines()) for path in ours))

called, plan_at = set(), train.Plan.at

def at(plan, step):
    if sys._getframe(1).f_code.co_name == 'train':     # from one step's plan to the next one's
        sys.setprofile(note if step == 5 else None)
    return plan_at(plan, step)

def note(frame, event, argument):
    code = frame.f_code
    mine = code.co_filename.startswith({root!r} + '/') and '/.venv/' not in code.co_filename
    if event == 'call' and mine and not code.co_name.startswith('<'):
        called.add((code.co_filename, code.co_qualname))

train.Plan.at = at
train.main(sys.argv[1:])
print(*sorted(called), sep='\\n')
"""


def test_one_step_of_training_fits_on_a_page(data, tmp_path):
    "How many of our lines `python train.py` imports, and how many of our functions a step runs."
    run = subprocess.run(
        [sys.executable, '-c', MEASURE.format(root=str(ROOT)), 'config/lidas.py', '--grow=None',
         f'--data={data}', f'--out_dir={tmp_path / "run"}', '--context=16', '--n_embd=32',
         '--n_head=2', '--head_dim=None', '--steps=10', '--warmup_steps=2', '--decay_steps=2',
         '--eval_every=100', '--log_every=100', '--device=cpu'],
        capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS='1'))
    assert run.returncode == 0, run.stderr
    head, *lines = run.stdout.splitlines()
    modules, imported = map(int, head.split())
    functions = [line for line in lines if line.startswith("('")]
    assert modules <= 20 and imported <= 3100, f'{imported} lines in {modules} modules'
    assert 20 < len(functions) <= 28, '\n'.join(functions)
