"Test the rules of docs/HOUSE.md: which file may import which, and the style that ruff checks."
import ast
import subprocess
import sys
from graphlib import TopologicalSorter

from helpers import ROOT

from nanodepth import BOOK, file_of


SEVEN = ['model', 'loop', 'grow', 'retrofit', 'wrapper', 'probe', 'train']
FLOORS = [[*SEVEN, 'training'], ['common'], ['report'], ['text'], ['models', 'wrapping'],
          ['scoring'], ['commands'], ['extras'], ['__main__']]


FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
PACKAGE = ROOT / 'nanodepth'
FILES = {f'nanodepth.{name}': file_of(name) for name in BOOK} | {
    f'nanodepth.{str(path.relative_to(PACKAGE))[:-3].replace("/", ".")}': path
    for path in sorted(PACKAGE.rglob('*.py')) if path.name != '__init__.py'}


def imports(path):
    "Return which of our modules a file imports. What it imports as a script does not count."
    tree, found = ast.parse(path.read_text()), set()
    tree.body = [node for node in tree.body
                 if not (isinstance(node, ast.If) and '__main__' in ast.unparse(node.test))]
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f'{node.module}.{alias.name}' for alias in node.names)]
        if PACKAGE not in path.parents:     # the book's files call each other by bare names
            names += [f'nanodepth.{name}' for name in names if name in BOOK]
        found |= {name for name in names if name in FILES}
    return found


def test_ruff():
    done = subprocess.run([sys.executable, '-m', 'ruff', 'check', '--no-cache', '.'], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_file_imports_only_lower_rooms_and_never_in_a_circle():
    scripts = {f'nanodepth.text.{path.parent.name}': path for path in ROOT.glob('data/*/*.py')}
    for name, path in (FILES | scripts).items():
        for other in imports(path):
            imported, floor = (FLOOR[module.split('.')[1]] for module in (other, name))
            assert imported <= floor, f'{name} imports {other}, which is in a room above'
    TopologicalSorter({name: imports(path) for name, path in FILES.items()}).prepare()


def test_the_book_imports_four_packages_alone():
    allowed = {*BOOK, 'torch', 'numpy', 'tqdm', 'matplotlib', 'wandb', *sys.stdlib_module_names}
    for name in BOOK:
        for node in ast.walk(ast.parse(file_of(name).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition('.')[0] for name in names} <= allowed, names
