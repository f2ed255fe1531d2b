"Test what README and docs/ promise: names that exist, code that runs, links that resolve."
import contextlib
import io
import re

import pytest
import torch
from helpers import ROOT

from nanodepth.__main__ import COMMANDS
from nanodepth.retrofit import core_of


README = (ROOT / 'README.md').read_text()
PAGES = README + (ROOT / 'docs/COURSE.md').read_text()


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
def test_quoted_code_is_in_its_file(block):
    where, *lines_of = block.strip().splitlines()
    file = re.match(r'# ([\w/]+\.py), ', where)[1]
    bare = lambda line: line.partition('  # ')[0].strip()
    stripped = list(map(bare, (ROOT / file).read_text().splitlines()))
    quoted = list(map(bare, lines_of))
    assert any(stripped[i:i + len(quoted)] == quoted for i in range(len(stripped))), where


def test_code_on_the_pages_prints_what_they_say():
    blocks = [block for block in re.findall(r'```python\n(.*?)```', PAGES, flags=re.S)
              if 'torch.equal' in block]
    assert blocks
    for block in blocks:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(block, {})
        promised = re.findall(r'^print\(.*# (True|False)', block, flags=re.M)
        assert said.getvalue().split() == promised and len(promised) == block.count('print(')


def test_the_code_in_readme_runs():
    "The grown model computes what the loop does, and the core of the retrofit runs eight times."
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
