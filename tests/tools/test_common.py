"""Test nanodepth/common and nanodepth/__main__.py: options of commands, your own files, and folders
that are complete or missing."""
import contextlib
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from nanodepth.__main__ import COMMANDS, main
from nanodepth.common.files import new_folder
from nanodepth.common.options import read
from nanodepth.model import Refused
from nanodepth.training.plan import Config


@dataclass
class Options:
    run: str
    others: list[str] = field(default_factory=list)
    K: tuple[int, ...] = (1,)           # how often
    out: Path | None = None
    x: Literal['K', 'T'] | None = None


def test_options_and_words_fill_the_fields_of_a_command(capsys):
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


def test_a_config_may_import_the_files_next_to_it_and_the_book(tmp_path, monkeypatch):
    "This holds even if a file of yours has the name of a file of the book, such as loop.py."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'loop', os)
    (tmp_path / 'own').mkdir()
    (tmp_path / 'own/parent.py').write_text('import torch\nsteps = 7\n')
    (tmp_path / 'own/helper.py').write_text('size = 3\n')
    (tmp_path / 'own/loop.py').write_text('raise SystemExit("somebody else\'s")\n')
    # another file of this name, which comes first in sys.path
    (tmp_path / 'helper.py').write_text('size = 9\n')
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


def test_a_folder_of_a_model_is_complete_or_missing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / 'new') as folder:
        (folder / 'half').touch()
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]


def test_nanodepth_lists_its_commands_and_each_has_help(capsys):
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
