"Test what HOUSE, README and COURSE promise about files, names and imports."
import ast
import contextlib
import io
import re
import runpy
import subprocess
import sys
import textwrap
from graphlib import TopologicalSorter

import pytest
import torch
from helpers import ROOT

from nanodepth import BOOK, file_of
from nanodepth.__main__ import COMMANDS, main
from nanodepth.grow import untie
from nanodepth.model import LM, ModelConfig, Pass
from nanodepth.retrofit import Core, core_of
from nanodepth.wrapper import Window

SEVEN = ['model', 'loop', 'grow', 'retrofit', 'wrapper', 'probe', 'train']
FLOORS = [[*SEVEN, 'training'], ['common'], ['report'], ['text'], ['models', 'wrapping'],
          ['scoring'], ['commands'], ['extras'], ['__main__']]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
PACKAGE = ROOT / 'nanodepth'
FILES = {f'nanodepth.{name}': file_of(name) for name in BOOK} | {
    f'nanodepth.{str(path.relative_to(PACKAGE))[:-3].replace("/", ".")}': path
    for path in sorted(PACKAGE.rglob('*.py')) if path.name != '__init__.py'}


def imports(path):
    "The modules of ours that a file imports, but for the last two lines of a script."
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


def test_imports_go_down_and_never_in_a_circle():
    scripts = {f'nanodepth.text.{path.parent.name}': path for path in ROOT.glob('data/*/*.py')}
    for name, path in (FILES | scripts).items():
        for other in imports(path):
            up, own = (FLOOR[each.split('.')[1]] for each in (other, name))
            assert up <= own, f'{name} imports {other}, which stands above it'
    TopologicalSorter({name: imports(path) for name, path in FILES.items()}).prepare()


def test_book_imports_four_packages():
    allowed = {*BOOK, 'torch', 'numpy', 'tqdm', 'matplotlib', 'wandb', *sys.stdlib_module_names}
    for name in BOOK:
        for node in ast.walk(ast.parse(file_of(name).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {each.partition('.')[0] for each in names} <= allowed, f'{name}: {names}'


ONE = runpy.run_path(str(ROOT / 'docs/depth.py'))


def test_depth_py_computes_as_ours():
    "With its layers and streams, the six compute what its own loop, Window, Core and untie do."
    torch.manual_seed(0)
    model, (tokens, _) = ONE['LM'](4, 32), ONE['puzzles'](2, 3)
    T = tokens.shape[1]

    class Zero(Core):
        def first_state(self, run, e):
            return torch.zeros_like(e)

        def mix(self, s, e):
            return s + e
    # its layers in a model of ours, of which they are called with a rope and three settings more
    ours = LM(ModelConfig(vocab_size=2, n_layer=4, n_embd=32, n_head=1, context=T))
    ours.layers = torch.nn.ModuleList(Adapted(layer) for layer in model.layers)
    ours.norm, ours.head = model.norm, model.head
    for theirs, order in (
            ([0, 1, 1, 2], [0, 1, 1, 2]),
            ([0, ONE['Window']([1, 2], K=3, beta=0.3), 3], [0, Window([1, 2], K=3, beta=0.3), 3]),
            ([0, ONE['Core']([1, 2], r=3), 3], [0, Zero([1, 2], r=3), 3])):
        x = Pass(ours, T)(model.embed(tokens), order)
        assert torch.allclose(model(tokens, theirs), ours.head(ours.norm(x))[:, T // 2:], atol=1e-6)
    grown = untie(ours, [0, 1, 1, 2])
    x = Pass(grown, T)(model.embed(tokens), grown.order)
    scores = ONE['untie'](model, [0, 1, 1, 2])(tokens, [0, 1, 2, 3])
    assert torch.equal(scores, grown.head(grown.norm(x))[:, T // 2:])


class Adapted(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *_):
        return self.layer(x)


def test_depth_py_trains_each_idea(capsys):
    "In a tenth of its steps: no alias is followed yet, and every training names more values."
    ONE['main'](steps=60)
    said = capsys.readouterr().out
    assert said.count(': True') == 2 and 'False' not in said
    shares = re.findall(r'^.*? +(\d+)%(?: +\d+%){8}$', said, re.M)
    first, *trained = map(int, shares)
    assert len(trained) == 12 and first > 50
    assert min(trained[:3]) > first + 5 and min(trained[7:11]) > 80


README = (ROOT / 'README.md').read_text()
PAGES = README + (ROOT / 'docs/COURSE.md').read_text()


def test_model_usage_runs():
    doc = (ROOT / 'model.py').read_text().split('"""')[1].split('Usage:\n')[1]
    tokens = targets = torch.randint(257, (2, 8))
    scope = dict(LM=LM, ModelConfig=ModelConfig, tokens=tokens, targets=targets)
    exec(textwrap.dedent(doc), scope)
    assert scope['model'].order == [0, 1, 2, 3, 2, 3] and scope['loss'].isfinite()


def test_main_lists_commands_and_each_has_help(capsys):
    main(argv=[])
    said = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf'^  {name} ', said, flags=re.M)
        with contextlib.suppress(SystemExit):
            main(argv=[name, '--help'])
        assert len(capsys.readouterr().out) > 100, name
    with pytest.raises(SystemExit, match='2'):
        main(argv=['sampel'])
    assert "did you mean 'sample'?" in capsys.readouterr().err


def test_pages_name_what_exists():
    blocks = ''.join(re.findall(r'```(?:sh)?\n(.*?)```', PAGES, flags=re.S))
    for script, config in re.findall(r'python (\S+\.py)(?: (config/\S+\.py))?', blocks):
        assert (ROOT / script).exists() and (not config or (ROOT / config).exists())
    for command in re.findall(r'(?:^|`|python -m )nanodepth (?:\S+\.py )*(\w+)', PAGES, flags=re.M):
        assert command in COMMANDS
    targets = re.findall(r'^(\w+):', (ROOT / 'Makefile').read_text(), flags=re.M)
    for target in re.findall(r'^make (\w+)', blocks, flags=re.M):
        assert target in targets


EXCERPTS = [block for block in re.findall(r'```python\n(.*?)```', PAGES, flags=re.S)
            if block.startswith('# ')]


@pytest.mark.parametrize('block', EXCERPTS, ids=lambda block: block.splitlines()[0])
def test_course_quotes_the_files(block):
    where, *lines_of = block.strip().splitlines()
    file = re.match(r'# ([\w/]+\.py), ', where)[1]
    bare = lambda line: line.partition('  # ')[0].strip()
    stripped = list(map(bare, (ROOT / file).read_text().splitlines()))
    quoted = list(map(bare, lines_of))
    assert any(stripped[i:i + len(quoted)] == quoted for i in range(len(stripped))), where


def test_pages_say_true_or_false():
    blocks = [block for block in re.findall(r'```python\n(.*?)```', PAGES, flags=re.S)
              if 'torch.equal' in block]
    assert blocks
    for block in blocks:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(block, {})
        promised = re.findall(r'^print\(.*# (True|False)', block, flags=re.M)
        assert said.getvalue().split() == promised and len(promised) == block.count('print(')


def test_readme_block_runs():
    "The copies compute what the loop does, and the retrofit's middle runs eight times."
    [block] = [block for block in re.findall(r'```python\n(.*?)```', README, flags=re.S)
               if 'model.order' in block]
    scope = {}
    exec(block, scope)
    model, tokens, grown = (scope[name] for name in ('model', 'tokens', 'grown'))
    assert torch.equal(grown(tokens), model(tokens, order=[0, 1, 2, 1, 2, 3]))
    core = core_of(scope['recurrent'])
    assert (core.items, core.r) == ([1, 2], 8)


def test_links_resolve():
    for path in (ROOT / 'README.md', *ROOT.glob('docs/*.md')):
        text = re.sub(r'```.*?```', '', path.read_text(), flags=re.S)   # layers[i](x) is no link
        text = re.sub(r'<img src="([^"]+)"[^>]*alt="([^"]+)">', r'![\2](\1)', text)
        for alt, target in re.findall(r'(!?\[[^]]*\])\(([^)#\s]+)\)', text):
            assert '://' in target or (path.parent / target).exists(), f'{path.name}: {target}'
            assert not alt.startswith('!') or len(alt) > 40, f'{path.name}: {target} has no text'
